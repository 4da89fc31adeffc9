# SPDX-License-Identifier: BSD-3-Clause
"""A release from build to use: build on the conda-forge base, publish, serve, lock, install, run.

conda-forge is replaced by a stand-in on loopback (support/stand_in.py), whose pytorch is a text
file. In these tests, the driver locks and installs. In test_pixi_release.py, pixi locks and
installs.
"""

from pathlib import Path

import pytest
from support import stand_in
from support.project import CHECKOUT
from support.release import OUTPUTS, Release, copy_stack, host_bound, published_in, run
from support.static_channel import require_whole

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.conda.local import HOST_BOUND
from forge.conda.package import Package


class User:
    """A user without pixi, with an empty home folder and a copy of a stack."""

    def __init__(self, release: Release, folder: Path) -> None:
        self.home = folder / "home"
        stand_in.write_mirrors(self.home, release.mirrors)
        copy_stack("attention", self.home / "stacks")
        self.copy = self.home / "build" / "stacks" / "attention"
        (self.home / "recipes").mkdir()
        for name in ("recipes/bases", "variants.yaml"):
            (self.home / name).symlink_to(CHECKOUT / name)
        self.environment = release.environment | {
            # Use the cache of the build, in which most packages are already unpacked.
            "RATTLER_CACHE_DIR": str(release.cache),
            "HOME": str(self.home),
            "FORGE_ROOT": str(self.home),
            "FORGE_CHANNEL": PUBLISHED,
        }
        self.driver = release.driver

    def forge(self, *words: str) -> str:
        """Run the driver, require that it succeeds, and return what it printed."""
        done = run([*self.driver, *words], self.environment)
        return done.stdout + done.stderr


def test_what_was_published(release: Release) -> None:
    """Every published package is complete and tested, and no package is host-bound.

    No file name, record of the index or metadata has the mark of a host-bound package.
    """
    packages = release.packages()
    assert packages.keys() == {*OUTPUTS}
    release.forge("verify", *map(str, packages.values()))
    require_whole(release.published)
    assert host_bound(release.published) == []
    for file in packages.values():
        index = Package(file).index
        assert not index["build"].startswith(HOST_BOUND) and index["name"] in file.name
    # These requirements come from the run exports of the compilers, as with conda-forge's
    # compilers.
    requirements = Package(packages["strix-emulate-hip"]).index["depends"]
    assert {"libgcc >=14", "__glibc >=2.28,<3.0.a0"} <= {*requirements}
    assert "built  " not in release.build(), "the second run must build nothing"


@pytest.fixture(scope="module")
def user(release: Release, tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User(release, tmp_path_factory.mktemp("user"))
    user.forge("lock", "attention")
    return user


def test_lock_of_what_was_published(release: Release, user: User) -> None:
    """The lock has only public URLs, and has the packages that were published."""
    lock = (user.copy / "pixi.lock").read_text()
    assert host_bound(user.copy / "pixi.lock") == []
    assert "127.0.0.1" not in lock and "file:" not in lock and str(user.home) not in lock
    packages = release.packages()
    for file in map(packages.get, published_in("attention")):
        assert f"- conda: {PUBLISHED}/{file.parent.name}/{file.name}\n" in lock
    assert f"- conda: {CONDA_FORGE}/linux-64/pytorch-2.13.0-rocm_" in lock


def test_installed_and_run(user: User) -> None:
    """The stack installs, and its programs start.

    test_readme.py computes with the PyTorch of the host base.
    """
    user.forge("install", "attention", "-e", "emulated")
    prefix = user.copy / ".pixi" / "envs" / "emulated"
    installed = {file.name.rsplit("-", 2)[0] for file in prefix.glob("conda-meta/*.json")}
    assert {*OUTPUTS} - installed == {"liger-kernel"} and host_bound(prefix) == []
    for program in ("strix-validate", "strix-emulate"):
        printed = user.forge("run", "attention", "-e", "emulated", "--", program, "--version")
        assert printed.startswith(f"{program} 0.")


def test_what_is_host_bound_is_found(attention_stack: Path) -> None:
    """host_bound() finds host-bound packages in a channel, a lock and an environment.

    This shows that the tests above can fail.
    """
    copy = attention_stack / "build/stacks/attention"
    for path in (attention_stack / "channel", copy / "pixi.lock", copy / ".pixi/envs/default"):
        assert host_bound(path)
