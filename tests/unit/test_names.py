# SPDX-License-Identifier: BSD-3-Clause
"""A name in a lock, an index or a server's answer never leads outside of the folder it is for."""

import re
from pathlib import Path
from typing import Any

import pytest
from rattler import RepoDataRecord
from support.small_channel import read, workspace

from forge.conda import cache
from forge.conda.index import is_of, split_url
from forge.conda.location import Location
from forge.envs.workspace import Workspace
from forge.errors import ForgeError
from forge.sources.cache import Source

ALPHA = "alpha-1.0-h1234567_0.conda"
CHANNEL = "https://h.invalid/c"
URL = f"{CHANNEL}/noarch/{ALPHA}"
HASH = "0" * 64


@pytest.fixture
def app(channel: Path, tmp_path: Path) -> Workspace:
    """A locked workspace with the packages alpha and beta."""
    app = workspace(tmp_path / "local", channel.as_uri())
    app.lock()
    return app


def read_alpha(app: Workspace) -> RepoDataRecord:
    """Return the locked record of alpha."""
    return next(r for r in app.locked("default") if r.name.normalized == "alpha")


def list_files(folder: Path) -> set[Path]:
    """Return all paths below a folder, except those in the package cache."""
    return {path for path in folder.rglob("*") if "pkgs" not in path.parts}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file_name", "../../x-1-0.conda"),
        ("file_name", "/tmp/x-1-0.conda"),
        ("file_name", "beta-1.0-h1234567_0.conda"),
        ("file_name", "alpha-1.0-h1234567_0.tar.bz2"),
        ("build", "h7654321_0"),
        ("version", "'2.0'"),
        ("name", "beta2"),
        ("subdir", "linux-64"),
    ],
)
def test_a_lock_that_contradicts_its_url(
    app: Workspace, tmp_path: Path, field: str, value: str
) -> None:
    """A locked record with a field that contradicts its URL is refused, and nothing is written."""
    text = app.lock_file.read_text()
    entry = rf"(\n- conda: \S+/{re.escape(ALPHA)}\n)(  subdir: noarch\n)"
    old_subdir = r"" if field == "subdir" else r"\2"
    app.lock_file.write_text(re.sub(entry, rf"\1  {field}: {value}\n{old_subdir}", text))
    assert app.lock_file.read_text() != text
    before = list_files(tmp_path)
    with pytest.raises(ForgeError, match=rf"pixi\.lock: default: .*/{ALPHA} .*\. Lock again"):
        app.install("default", tmp_path / "pkgs")
    assert list_files(tmp_path) - {app.folder / ".pixi", app.folder / ".pixi/.lock"} == before
    assert not [*(tmp_path / "pkgs").rglob("*.lock")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file_name": "../../x-1-0.conda"}, "calls its file '../../x-1-0.conda'"),
        ({"url": f"{CHANNEL}//noarch/{ALPHA}"}, "an empty part"),
        ({"url": f"{CHANNEL}/linux-64/{ALPHA}"}, "names the folder 'noarch', which is not"),
        ({"url": URL.replace("alpha", "beta")}, "was renamed"),
        ({"sha256": None}, "no sha256"),
    ],
    ids=["name", "empty part", "subdir", "other file", "sha256"],
)
def test_the_cache_takes_no_such_record(
    app: Workspace, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """The cache itself refuses a contradictory record, and neither fetches nor unpacks it."""
    record = read_alpha(app)
    for name, value in change.items():
        setattr(record, name, value)
    with pytest.raises(ForgeError, match=message):
        cache.fill(tmp_path / "pkgs", [record])
    assert not [*(tmp_path / "pkgs").glob("[!.]*")]


@pytest.mark.parametrize(
    "url",
    [
        f"{CHANNEL}//noarch/{ALPHA}",
        f"{CHANNEL}/noarch//{ALPHA}",
        f"https://h.invalid//c/noarch/{ALPHA}",
        f"{CHANNEL}/./noarch/{ALPHA}",
        f"{CHANNEL}/x/../noarch/{ALPHA}",
        f"{CHANNEL}/x/%2e%2E/noarch/{ALPHA}",
        f"{CHANNEL}/noarch%2F{ALPHA}",
        f"{CHANNEL}/x%2f../noarch/{ALPHA}",
        f"{CHANNEL}/noarch\\{ALPHA}",
        f"{CHANNEL}/noarch%5c{ALPHA}",
        f"{CHANNEL}/noarch/{ALPHA}?x=1",
        f"{CHANNEL}/noarch/{ALPHA}?",
        f"{CHANNEL}/noarch/{ALPHA}#sha256",
        f"{CHANNEL}/noarch/{ALPHA}\n",
        f"{CHANNEL}/noarch/%00{ALPHA}",
        f"{CHANNEL}/noarch/",
        f"file:///srv//noarch/{ALPHA}",
        ALPHA,
    ],
)
def test_a_url_that_readers_could_take_for_another(url: str) -> None:
    with pytest.raises(ValueError, match="URL|path"):
        split_url(url)
    assert not any(is_of(url, channel) for channel in (CHANNEL, f"{CHANNEL}/x", f"{CHANNEL}/"))


def test_a_url_that_is_plain() -> None:
    assert split_url(URL) == ("https://h.invalid", ["c", "noarch", ALPHA])
    assert split_url("file:///srv/j%C3%BCrgen/x")[1] == ["srv", "jürgen", "x"]
    assert is_of(URL, CHANNEL) and is_of(URL, f"{CHANNEL}/")
    assert is_of(f"https://h.invalid/noarch/{ALPHA}", "https://h.invalid")
    assert not is_of(URL, "https://h.invalid") and not is_of(URL, "http://h.invalid/c")


@pytest.mark.parametrize("name", ["../secret", "noarch/../../secret", "/secret", "", "a//b", "a\0"])
def test_nothing_outside_a_channel_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "channel").mkdir()
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(ForgeError, match="is not the name of a file in"):
        read(Location(tmp_path / "channel"), name)


@pytest.mark.parametrize(
    ("url", "sha256", "message"),
    [
        ("https://h.invalid/a.tar.gz", "../../x", "is not a lower-case sha256"),
        ("https://h.invalid/a.tar.gz", f"{HASH}/../x", "is not a lower-case sha256"),
        ("https://h.invalid/a.tar.gz", "", "is not a lower-case sha256"),
        ("https://h.invalid/..", HASH, "does not accept as a file name"),
        ("https://h.invalid/.lock", HASH, "does not accept as a file name"),
        ("https://h.invalid/", HASH, "does not accept as a file name"),
        ("https://h.invalid/a\\b", HASH, "does not accept as a file name"),
        ("https://h.invalid/a\0b", HASH, "does not accept as a file name"),
        ("https://h.invalid/a" + "b" * 300, HASH, "does not accept as a file name"),
    ],
)
def test_a_source_that_would_lead_out_of_the_cache(url: str, sha256: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        Source(url, sha256)
