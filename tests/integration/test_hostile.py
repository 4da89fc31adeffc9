# SPDX-License-Identifier: BSD-3-Clause
"""Packages, indexes, locks and caches made to harm: one line, exit code, nothing written."""

import fcntl
import json
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import conda_packages
from support.small_channel import index, make, package, workspace

from forge.envs.workspace import INSTALLED_FROM, MARKS, Workspace
from forge.errors import Failed, ForgeError


def app(folder: Path, prepare: Any) -> Workspace:
    """The stack of test_served, with its packages as `prepare` makes them, locked."""
    channel = folder / "www" / "channel"
    (channel / "noarch").mkdir(parents=True)
    prepare(channel)
    index(channel)
    return locked(folder, channel)


def good(folder: Path) -> Workspace:
    """The same with packages that are fit."""
    return locked(folder, make(folder / "www" / "channel", "alpha", "beta"))


def locked(folder: Path, channel: Path) -> Workspace:
    chosen = workspace(folder / "home", channel.as_uri())
    chosen.lock()
    return chosen


def outside(folder: Path) -> set[str]:
    """What lies beside the prefix and the cache: it may never change."""
    kept = (path.relative_to(folder) for path in folder.rglob("*"))
    return {str(path) for path in kept if not str(path).startswith(("home/.pixi", "cache"))}


ALPHA, UPWARDS = "alpha-1.0-h1234567_0.conda", "../../alpha-1.0-0.conda"


@pytest.mark.parametrize("where", ["../../../../X", "/tmp/strix-forge-test-x", "lib/../../x"])
def test_where_python_looks_is_inside_the_prefix(tmp_path: Path, where: str) -> None:
    """By python's record, in an index and in a lock, which decides where noarch files go."""

    def prepare(channel: Path) -> None:
        package(channel, "alpha", "1.0", depends=["python"])
        package(channel, "beta", "1.0")
        conda_packages.package(channel / "noarch", [], "python")

    chosen = app(tmp_path, prepare)
    index_file = tmp_path / "www/channel/noarch/repodata.json"
    honest, text = index_file.read_text(), chosen.lock_file.read_text()
    data = json.loads(honest)
    data["packages.conda"]["python-1-0.conda"]["python_site_packages_path"] = where
    index_file.write_text(json.dumps(data))
    for other in index_file.parent.glob("repodata*[!n]"):
        other.unlink()
    before = outside(tmp_path)
    with pytest.raises(ForgeError, match="outside a prefix"):
        chosen.lock()
    at = text.index("sha256", text.index("python-1-0", text.index("packages:")))
    chosen.lock_file.write_text(f"{text[:at]}python_site_packages_path: {where}\n  {text[at:]}")
    with pytest.raises(ForgeError, match="outside a prefix"):
        chosen.install("default", tmp_path / "cache")
    assert outside(tmp_path) == before and not Path("/tmp/strix-forge-test-x").exists()


def test_installers_that_share_a_cold_cache(tmp_path: Path) -> None:
    """What one of them has unpacked is not replaced while another links from it."""
    first = good(tmp_path)
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


@pytest.mark.parametrize("how", ["paths", "link", "more", "unmarked"])
def test_a_folder_in_the_cache_is_checked(tmp_path: Path, how: str) -> None:
    """Unpacked anew: rattler takes it as it is, even without the hash of what it was made of."""
    chosen = good(tmp_path)
    chosen.install("default", tmp_path / "cache")
    shutil.rmtree(chosen.folder / ".pixi")
    cached = tmp_path / "cache" / "alpha-1.0-h1234567_0"
    if how == "paths":
        paths = json.loads((cached / "info/paths.json").read_text())
        paths["paths"][0]["_path"] = "../../x"
        (cached / "info/paths.json").unlink()
        (cached / "info/paths.json").write_text(json.dumps(paths))
    elif how == "link":
        (cached / "share/alpha").unlink()
        (cached / "share/alpha").symlink_to("/etc/passwd")
    elif how == "more":
        (cached / "conda_build.sh").touch()
    else:  # rattler would link the wrong file
        (tmp_path / "cache" / "alpha-1.0-h1234567_0.lock").unlink()
        (cached / "share/alpha").unlink()
        (cached / "share/alpha").write_text("wrong")
    before = outside(tmp_path)
    chosen.install("default", tmp_path / "cache")
    assert (chosen.prefix("default") / "share/alpha").read_text().startswith("alpha 0")
    assert not (cached / "conda_build.sh").exists() and outside(tmp_path) == before


def test_what_the_lock_does_not_state_is_not_installed(tmp_path: Path) -> None:
    """sha256 and size of each package, and that it lies in the manifest's channels."""
    chosen = good(tmp_path)
    text = chosen.lock_file.read_text()
    other = "https://other.invalid/noarch/alpha"
    file = next((tmp_path / "www/channel/noarch").glob("alpha-*.conda"))
    cases = {
        re.sub(r"\n +sha256: .*", "", text): "no sha256",
        re.sub(r"\n +size: .*", "", text): "no sha256 or no size",
        text.replace(str(file.parent / "alpha"), other): "is not in .*channel",
        text.replace(f"{file.parent}/alpha", f"{file.parent}/../../x/alpha"): "is not in|missing",
        text.replace("linux-64", "osx-64"): "locked for other platforms than linux-64",
    }
    for changed, message in cases.items():
        assert changed != text
        chosen.lock_file.write_text(changed)
        with pytest.raises(ForgeError, match=message):
            chosen.install("default", tmp_path / "cache")
        assert not chosen.prefix("default").exists()
    size = file.stat().st_size
    chosen.lock_file.write_text(text.replace(f"size: {size}", f"size: {size + 1}"))
    with pytest.raises(Failed, match="differs from its lock"):
        chosen.install("default", tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: [r.pop("sha256") for r in data["packages.conda"].values()], "no sha256"),
        (lambda data: [r.pop("size") for r in data["packages.conda"].values()], "no size"),
        (lambda data: data["info"].update(base_url="https://other.invalid/x/"), "is not in"),
        (lambda data: data["info"].update(base_url="../../elsewhere/"), "is not in"),
        (
            lambda data: data["packages.conda"].update(
                {UPWARDS: data["packages.conda"].pop(ALPHA)}
            ),
            "has no alpha|No candidates were found for alpha",
        ),
    ],
    ids=["sha256", "size", "host", "folder", "name"],
)
def test_an_index_that_cannot_be_believed_is_not_locked(
    tmp_path: Path, change: Any, message: str
) -> None:
    chosen = good(tmp_path)
    before = chosen.lock_file.read_bytes()
    for file in (tmp_path / "www/channel/noarch").glob("repodata*"):
        data = json.loads((tmp_path / "www/channel/noarch/repodata.json").read_bytes())
        if file.suffix != ".json":
            file.unlink()
    data["repodata_version"] = 2
    change(data)
    (tmp_path / "www/channel/noarch/repodata.json").write_text(json.dumps(data))
    with pytest.raises(ForgeError, match=message) as error:
        chosen.lock()
    assert "\n" not in str(error.value) and chosen.lock_file.read_bytes() == before


def test_what_is_run_was_installed_from_this_lock(tmp_path: Path) -> None:
    chosen = good(tmp_path)
    chosen.install("default", tmp_path / "cache")
    text = chosen.lock_file.read_text()
    chosen.lock_file.write_text(text + "\n")
    with pytest.raises(ForgeError, match="does not match .* run forge install app"):
        chosen.run("default", ["true"])
    chosen.lock_file.write_text(text)
    for file in (tmp_path / "www/channel/noarch").glob("*.conda"):
        file.unlink()
    with pytest.raises(Failed, match="missing"):
        chosen.install("default", tmp_path / "cache")
    assert (chosen.prefix("default") / INSTALLED_FROM).exists(), "nothing of it changed"
    for name in MARKS:
        (chosen.prefix("default") / name).unlink(missing_ok=True)
    with pytest.raises(ForgeError, match="not installed completely"):
        chosen.run("default", ["true"])


def test_a_second_installer_waits(tmp_path: Path) -> None:
    said: list[str] = []
    chosen = replace(good(tmp_path), say=said.append)
    (chosen.folder / ".pixi").mkdir()
    with (chosen.folder / ".pixi/.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        thread = threading.Thread(target=chosen.install, args=("default", tmp_path / "cache"))
        thread.start()
        while not said and thread.is_alive():
            time.sleep(0.01)
        assert "Waiting for it" in said[0] and not chosen.prefix("default").exists()
    thread.join()
    assert (chosen.prefix("default") / "share/alpha").exists()


def test_a_machine_without_what_packages_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is locked for this machine, which may pretend to be another."""

    def needy(channel: Path) -> None:
        package(channel, "alpha", "1.0", constrains=["__glibc >=2.17"])
        package(channel, "beta", "1.0", depends=["__glibc >=2.17"])

    chosen = app(tmp_path, needy)
    assert chosen.install("default", tmp_path / "cache") == 2
    monkeypatch.setenv("CONDA_OVERRIDE_GLIBC", "2.12")
    with pytest.raises(Failed, match=r"__glibc >=2\.17"):
        chosen.lock()
