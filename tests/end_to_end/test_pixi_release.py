# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi installs the published packages of test_release.py, in each way that users have."""

import re
import shlex
from pathlib import Path

import pytest
from support.pixi import Pixi, fit, require
from support.project import CHECKOUT
from support.release import Release, copy_stack, host_bound, published_in, run

from forge.bases import CONDA_FORGE, PUBLISHED

pytestmark = pytest.mark.pixi

CHANNELS = ("-c", PUBLISHED, "-c", "conda-forge")


class User(Pixi):
    """A user with an empty home folder and a copy of a stack."""

    def __init__(self, release: Release, folder: Path) -> None:
        super().__init__(folder / "home", release.mirrors)
        # Use the cache of the build, in which most packages are already unpacked.
        self.cache = str(release.cache)
        self.folder = copy_stack("attention", folder)
        fit(self.folder / "pixi.toml")

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"RATTLER_CACHE_DIR": self.cache}


@pytest.fixture(scope="module")
def user(release: Release, tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User(release, tmp_path_factory.mktemp("pixi-user"))
    user("install", cwd=user.folder)
    return user


def test_install_and_run(release: Release, user: User) -> None:
    """`pixi install` and `pixi run TASK` work, as in README, and no package is host-bound."""
    lock = user.folder / "pixi.lock"
    prefix = user.folder / ".pixi" / "envs" / "default"
    assert host_bound(lock) == [] and host_bound(prefix) == []
    packages = release.packages()
    for file in map(packages.get, published_in("attention")):
        assert f"- conda: {PUBLISHED}/{file.parent.name}/{file.name}\n" in lock.read_text()
    assert f"- conda: {CONDA_FORGE}/linux-64/pytorch-2.13.0-rocm_" in lock.read_text()
    words = ("run", "--locked", "doctor", "--only", "doctor/disk", "--json")
    (finding,) = user.data(*words, cwd=user.folder)["findings"]
    assert finding["id"] == "doctor/disk"


def test_exec(user: User, tmp_path: Path) -> None:
    """`pixi exec` runs the doctor without a workspace. The doctor may report problems."""
    words = ("exec", *CHANNELS, "--spec", "strix-validate", "strix-validate")
    version = user(*words, "--version", cwd=tmp_path)
    assert version.splitlines()[-1].startswith("strix-validate 0.")
    report = user(*words, "doctor", cwd=tmp_path, code=None)
    assert re.search(r"doctor/gpu +(passed|failed)", report)
    (records,) = Path(user.cache).glob("cached-envs-*/*/conda-meta")
    names = {file.stem.rsplit("-", 2)[0] for file in records.glob("*.json")}
    # The python of the stand-in includes the libraries that the python of conda-forge requires as
    # packages, so there are fewer packages than with conda-forge.
    assert "strix-validate" in names and "strix-emulate" not in names
    assert 10 < len(names - {"python"}) <= 25


def test_global_install(user: User, tmp_path: Path) -> None:
    user("global", "install", *CHANNELS, "strix-validate", cwd=tmp_path)
    program = user.home / ".pixi" / "bin" / "strix-validate"
    assert run([program, "--version"], user.environment).stdout.startswith("strix-validate 0.")


def test_pack_and_unpack(release: Release, tmp_path: Path) -> None:
    """pixi-pack packs a locked stack into one file, which installs without a network."""
    pack = require("pixi-pack")
    unpack = require("pixi-unpack")
    offline = [require("unshare"), "--net", "--map-root-user"]
    user = User(release, tmp_path)
    user("lock", cwd=user.folder)
    config = user.home / ".pixi" / "config.toml"  # pixi-pack needs its path
    words = [pack, "--config", config, user.folder, "-o", tmp_path / "stack.tar"]
    run(words, user.environment, cwd=tmp_path)
    # The machine that unpacks the file has another home folder and no cache.
    environment = user.environment | {"HOME": str(tmp_path / "other")}
    del environment["RATTLER_CACHE_DIR"]
    target = tmp_path / "there"
    run([*offline, unpack, tmp_path / "stack.tar", "-o", target], environment, cwd=tmp_path)
    line = '. ./activate.sh && strix-validate --version && test -n "$CONDA_PREFIX"'
    done = run([*offline, "bash", "-c", line], environment, cwd=target)
    assert done.stdout.startswith("strix-validate 0.")


def test_the_release_uploads_with_options_that_pixi_has(tmp_path: Path) -> None:
    """pixi accepts the options that release.yml passes to `pixi upload`.

    The test adds --help, so that pixi uploads nothing.
    """
    text = (CHECKOUT / ".github/workflows/release.yml").read_text()
    words = shlex.split(text.partition("\n          pixi upload ")[2].partition(" published/")[0])
    assert words[0] == "prefix"
    pixi = Pixi(tmp_path, {})
    assert "--channel" in pixi("upload", *words, "--help", cwd=tmp_path)
    pixi("upload", *words, "--no-such-option", "--help", cwd=tmp_path, code=2)
