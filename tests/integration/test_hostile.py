# SPDX-License-Identifier: BSD-3-Clause
"""Malicious packages, indexes, locks and caches change nothing outside of the environment."""

import fcntl
import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import conda_packages
from support.small_channel import index, make, package, workspace

from forge.envs.workspace import INSTALLED_FROM, MARKS, Workspace
from forge.errors import Failed, ForgeError


def lock_special(folder: Path, add_packages: Callable[[Path], None]) -> Workspace:
    """Return a locked workspace whose channel has the packages that `add_packages` makes."""
    channel = folder / "www" / "channel"
    (channel / "noarch").mkdir(parents=True)
    add_packages(channel)
    index(channel)
    return lock_from(folder, channel)


def lock_plain(folder: Path) -> Workspace:
    """Return a locked workspace with two harmless packages."""
    return lock_from(folder, make(folder / "www" / "channel", "alpha", "beta"))


def lock_from(folder: Path, channel: Path) -> Workspace:
    locked = workspace(folder / "home", channel.as_uri())
    locked.lock()
    return locked


def list_outside(folder: Path) -> set[str]:
    """Return the paths outside of the prefix and the cache. Installations must not change them."""
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {path for path in paths if not path.startswith(("home/.pixi", "cache"))}


def remove_other_forms(folder: Path) -> None:
    """Remove the forms of a subdir's index other than repodata.json."""
    for file in folder.glob("repodata*[!n]"):
        file.unlink()


@pytest.mark.parametrize("path", ["../../../../X", "/tmp/strix-forge-test-x", "lib/../../x"])
def test_where_python_looks_is_inside_the_prefix(tmp_path: Path, path: str) -> None:
    """A site-packages folder outside of the prefix is refused, in an index and in a lock.

    The record of python names the site-packages folder, to which noarch packages are installed.
    """

    def add_packages(channel: Path) -> None:
        package(channel, "alpha", "1.0", depends=["python"])
        package(channel, "beta", "1.0")
        conda_packages.package(channel / "noarch", [], "python")

    stack = lock_special(tmp_path, add_packages)
    index_file = tmp_path / "www/channel/noarch/repodata.json"
    data = json.loads(index_file.read_text())
    data["packages.conda"]["python-1-0.conda"]["python_site_packages_path"] = path
    index_file.write_text(json.dumps(data))
    remove_other_forms(index_file.parent)
    text = stack.lock_file.read_text()
    before = list_outside(tmp_path)
    with pytest.raises(ForgeError, match="not a plain path inside a prefix"):
        stack.lock()
    at = text.index("sha256", text.index("python-1-0", text.index("packages:")))
    stack.lock_file.write_text(f"{text[:at]}python_site_packages_path: {path}\n  {text[at:]}")
    with pytest.raises(ForgeError, match="not a plain path inside a prefix"):
        stack.install("default", tmp_path / "cache")
    assert list_outside(tmp_path) == before and not Path("/tmp/strix-forge-test-x").exists()


def test_installers_that_share_a_cold_cache(tmp_path: Path) -> None:
    """No installer replaces an unpacked package while another one links from it."""
    first = lock_plain(tmp_path)
    for turn in range(6):
        stacks = [replace(first, folder=tmp_path / f"home{turn}-{i}") for i in range(2)]
        for stack in stacks:
            stack.folder.mkdir()
            for file in ("pixi.toml", "pixi.lock"):
                shutil.copy(first.folder / file, stack.folder)
        with ThreadPoolExecutor(2) as pool:
            cache = tmp_path / f"cache{turn}"
            counts = [pool.submit(stack.install, "default", cache) for stack in stacks]
        assert [count.result() for count in counts] == [2, 2]


@pytest.mark.parametrize("change", ["paths", "link", "more", "unmarked"])
def test_a_folder_in_the_cache_is_checked(tmp_path: Path, change: str) -> None:
    """A folder in the cache that was changed is unpacked again.

    Without the check, rattler would use the folder as it is, even without the file that has the
    package's sha256.
    """
    stack = lock_plain(tmp_path)
    stack.install("default", tmp_path / "cache")
    shutil.rmtree(stack.folder / ".pixi")
    cached = tmp_path / "cache" / "alpha-1.0-h1234567_0"
    if change == "paths":
        paths = json.loads((cached / "info/paths.json").read_text())
        paths["paths"][0]["_path"] = "../../x"
        (cached / "info/paths.json").unlink()
        (cached / "info/paths.json").write_text(json.dumps(paths))
    elif change == "link":
        (cached / "share/alpha").unlink()
        (cached / "share/alpha").symlink_to("/etc/passwd")
    elif change == "more":
        (cached / "conda_build.sh").touch()
    else:
        # Without our check, rattler would install the wrong file, because no sha256 is stored.
        (tmp_path / "cache" / "alpha-1.0-h1234567_0.lock").unlink()
        (cached / "share/alpha").unlink()
        (cached / "share/alpha").write_text("wrong")
    before = list_outside(tmp_path)
    stack.install("default", tmp_path / "cache")
    assert (stack.prefix("default") / "share/alpha").read_text().startswith("alpha 0")
    assert not (cached / "conda_build.sh").exists() and list_outside(tmp_path) == before


def test_what_the_lock_does_not_state_is_not_installed(tmp_path: Path) -> None:
    """A lock must have the sha256 and the size of each package.

    Each package must also be from a channel of the manifest, and for this platform.
    """
    stack = lock_plain(tmp_path)
    text = stack.lock_file.read_text()
    other_url = "https://other.invalid/noarch/alpha"
    file = next((tmp_path / "www/channel/noarch").glob("alpha-*.conda"))
    messages = {
        re.sub(r"\n +sha256: .*", "", text): "no sha256",
        re.sub(r"\n +size: .*", "", text): "no sha256 or no size",
        text.replace(str(file.parent / "alpha"), other_url): "is not in .*channel",
        text.replace(f"{file.parent}/alpha", f"{file.parent}/../../x/alpha"): "names the folder",
        text.replace("linux-64", "osx-64"): "locked for other platforms than linux-64",
    }
    for changed, message in messages.items():
        assert changed != text
        stack.lock_file.write_text(changed)
        with pytest.raises(ForgeError, match=message):
            stack.install("default", tmp_path / "cache")
        assert not stack.prefix("default").exists()
    size = file.stat().st_size
    stack.lock_file.write_text(text.replace(f"size: {size}", f"size: {size + 1}"))
    with pytest.raises(Failed, match="differs from its lock"):
        stack.install("default", tmp_path / "cache")


Index = dict[str, Any]


def remove_sha256(data: Index) -> None:
    for record in data["packages.conda"].values():
        del record["sha256"]


def remove_size(data: Index) -> None:
    for record in data["packages.conda"].values():
        del record["size"]


def name_another_host(data: Index) -> None:
    data["info"]["base_url"] = "https://other.invalid/noarch/"


def name_another_folder(data: Index) -> None:
    data["info"]["base_url"] = "../../elsewhere/"


def move_alpha_upwards(data: Index) -> None:
    records = data["packages.conda"]
    records["../../alpha-1.0-0.conda"] = records.pop("alpha-1.0-h1234567_0.conda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_sha256, "no sha256"),
        (remove_size, "no size"),
        (name_another_host, "is not in .*channel"),
        (name_another_folder, "names the folder"),
        (move_alpha_upwards, "has no alpha|No candidates were found for alpha"),
    ],
    ids=["sha256", "size", "host", "folder", "name"],
)
def test_an_index_that_cannot_be_believed_is_not_locked(
    tmp_path: Path, change: Callable[[Index], None], message: str
) -> None:
    stack = lock_plain(tmp_path)
    before = stack.lock_file.read_bytes()
    index_file = tmp_path / "www/channel/noarch/repodata.json"
    remove_other_forms(index_file.parent)
    data = json.loads(index_file.read_bytes())
    data["repodata_version"] = 2
    change(data)
    index_file.write_text(json.dumps(data))
    with pytest.raises(ForgeError, match=message) as error:
        stack.lock()
    assert "\n" not in str(error.value) and stack.lock_file.read_bytes() == before


def test_what_is_run_was_installed_from_this_lock(tmp_path: Path) -> None:
    stack = lock_plain(tmp_path)
    stack.install("default", tmp_path / "cache")
    text = stack.lock_file.read_text()
    stack.lock_file.write_text(text + "\n")
    with pytest.raises(ForgeError, match="does not match .* run ./forge install app"):
        stack.run("default", ["true"])
    stack.lock_file.write_text(text)
    for file in (tmp_path / "www/channel/noarch").glob("*.conda"):
        file.unlink()
    with pytest.raises(Failed, match="missing"):
        stack.install("default", tmp_path / "cache")
    assert (stack.prefix("default") / INSTALLED_FROM).exists(), (
        "the failed install must not remove this file"
    )
    for name in MARKS:
        (stack.prefix("default") / name).unlink(missing_ok=True)
    with pytest.raises(ForgeError, match="not installed completely"):
        stack.run("default", ["true"])


def test_a_second_installer_waits(tmp_path: Path) -> None:
    messages: list[str] = []
    stack = replace(lock_plain(tmp_path), say=messages.append)
    (stack.folder / ".pixi").mkdir()
    with (stack.folder / ".pixi/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=stack.install, args=("default", tmp_path / "cache"))
        thread.start()
        while not messages and thread.is_alive():
            time.sleep(0.01)
        assert "Waiting for it" in messages[0] and not stack.prefix("default").exists()
    thread.join()
    assert (stack.prefix("default") / "share/alpha").exists()


def test_a_machine_without_what_packages_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace is locked for the virtual packages of this machine.

    CONDA_OVERRIDE_GLIBC sets the version of glibc in place of the machine's version.
    """

    def add_packages(channel: Path) -> None:
        package(channel, "alpha", "1.0", constrains=["__glibc >=2.17"])
        package(channel, "beta", "1.0", depends=["__glibc >=2.17"])

    stack = lock_special(tmp_path, add_packages)
    assert stack.install("default", tmp_path / "cache") == 2
    monkeypatch.setenv("CONDA_OVERRIDE_GLIBC", "2.12")
    with pytest.raises(Failed, match=r"__glibc >=2\.17"):
        stack.lock()
