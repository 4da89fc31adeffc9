# SPDX-License-Identifier: BSD-3-Clause
"""The names on PyPI in a published channel, and its headers for caching."""

import json
from pathlib import Path

import msgpack
import pytest
from support.static_channel import Source, require_whole, unzstd

from forge.channel import publish
from forge.channel.publish import PublishedChannel
from forge.conda import pypi
from forge.conda.index import is_of

NAMES: pypi.Names = {"alpha": "torch", "beta": None}
PURLS = ["pkg:pypi/torch@1.0"]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    recipe = tmp_path / "recipes/all/recipe.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(json.dumps({"extra": {"pypi": {"alpha": "torch"}}}))
    source = Source(tmp_path / "channel", tmp_path / "recipes")
    source.make("alpha")
    source.make("beta")
    return source


def read_forms(target: Path) -> list[dict[str, dict]]:
    """Return the records of noarch by file name, from each of the three forms of the index."""
    folder = target / "noarch"
    shards = msgpack.unpackb(unzstd((folder / publish.FORMS[0]).read_bytes()))["shards"]
    sharded: dict[str, dict] = {}
    for digest in shards.values():
        data = (folder / "shards" / f"{digest.hex()}.msgpack.zst").read_bytes()
        sharded |= msgpack.unpackb(unzstd(data))["packages.conda"]
    texts = [(folder / "repodata.json").read_bytes()]
    texts += [unzstd((folder / "repodata.json.zst").read_bytes())]
    return [sharded, *(json.loads(text)["packages.conda"] for text in texts)]


def read_purls(records: dict[str, dict]) -> dict[str, list[str]]:
    """Return the purls of each record, by the name of the package."""
    return {record["name"]: list(record.get("purls") or []) for record in records.values()}


def test_names_on_pypi(source: Source, target: Path) -> None:
    """Our packages' names on PyPI are in three places.

    These are the local index, each form of the published index, and the table for pixi.
    """
    local = json.loads((source.folder / "noarch/repodata.json").read_text())["packages.conda"]
    PublishedChannel(target).publish(source)
    for records in (local, *read_forms(target)):
        assert read_purls(records) == {"alpha": PURLS, "beta": []}
    assert json.loads((target / pypi.TABLE).read_text()) == NAMES
    # A withdrawal does not read the local channel, and yet must keep the names on PyPI in the
    # published index and in pixi's table.
    PublishedChannel(target).withdraw(["beta-1.0-h1234567_0"], "broken")
    assert json.loads((target / pypi.TABLE).read_text()) == NAMES
    assert all(read_purls(records) == {"alpha": PURLS} for records in read_forms(target))
    require_whole(target)


def test_older_local_channel_gets_names(source: Source) -> None:
    path = source.folder / "noarch/repodata.json"
    with_names = json.loads(path.read_text())
    path.write_text(path.read_text().replace(json.dumps(PURLS), "[]"))
    assert json.loads(path.read_text()) != with_names
    source.reconcile()
    assert json.loads(path.read_text()) == with_names


def test_older_channel_gets_all_of_it(source: Source, target: Path) -> None:
    """A channel may have been published without names on PyPI and without headers.

    When it is published again, it gets both.
    """
    PublishedChannel(target).publish(Source(source.folder))
    for name in (pypi.TABLE, publish.HEADERS):
        (target / name).unlink()
    assert PublishedChannel(target).publish(source) == []
    assert all(read_purls(records)["alpha"] == PURLS for records in read_forms(target))
    assert (target / publish.HEADERS).read_text() == publish.headers()


@pytest.mark.parametrize(
    ("url", "is_in_channel"),
    [
        ("https://h/c/noarch/x.conda", True),
        ("https://h/c/linux-64/x.conda", True),
        ("https://h/other/noarch/x.conda", False),
        ("https://evil/c/noarch/x.conda", False),
        ("https://h/c/../x.conda", False),
        ("https://h/c/%2e%2e/x.conda", False),
        # These URLs sort before and after that of the channel.
        ("https://a/c/noarch/x.conda", False),
        ("http://h/c/noarch/x.conda", False),
        ("https://h/c/noarch/../../x.conda", False),
        ("https://h/channel/noarch/x.conda", False),
    ],
)
def test_whose_file(url: str, is_in_channel: bool) -> None:
    for channel in ("https://h/c", "https://h/c/"):
        assert is_of(url, channel) is is_in_channel


def test_headers_name_each_path_once() -> None:
    text = publish.headers()
    assert "/noarch/repodata.json.zst\n  Cache-Control: no-cache\n" in text
    assert "/linux-64/shards/*\n  Cache-Control: public, max-age=31536000, imm" in text
    paths = [line for line in text.splitlines() if line.startswith("/")]
    assert len(paths) == len(set(paths)) and not any("*" in path[:-1] for path in paths)
