# SPDX-License-Identifier: BSD-3-Clause
"""The local channel repairs its index, and names a package or an index that is damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.conda_packages import file, package
from support.static_channel import Source

from forge.conda.local import HOST_BOUND, LocalChannel
from forge.errors import ForgeError


@pytest.mark.parametrize("text", ["{", "[]", '{"packages.conda": {"x.conda": {}}}', "{}"])
def test_index_of_another_shape(tmp_path: Path, text: str) -> None:
    channel = LocalChannel(tmp_path)
    (tmp_path / "noarch").mkdir()
    (tmp_path / "noarch" / "repodata.json").write_text(text)
    with pytest.raises(ForgeError, match=r"repodata.json is damaged"):
        channel.records()


def test_what_is_added_can_be_served(tmp_path: Path) -> None:
    """A web server, which runs as another user, can read each package that is added.

    rattler-build makes files with mode 0600.
    """
    built = package(tmp_path / "noarch", [file("share/a")])
    built.chmod(0o600)
    LocalChannel(tmp_path / "channel").add({built: 1}, {})
    assert (tmp_path / "channel/noarch" / built.name).stat().st_mode & 0o777 == 0o644


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A channel with the noarch package alpha and the linux-64 package beta."""
    source = Source(tmp_path / "channel")
    source.make("alpha")
    source.make("beta", subdir="linux-64")
    return source


def list_names(source: Source) -> list[str]:
    """Return the names of the packages in the index."""
    return sorted(record.name for record in source.records())


def lose_entry(folder: Path) -> None:
    (folder / "noarch/repodata.json").write_text('{"packages.conda": {}}')


def damage_index(folder: Path) -> None:
    (folder / "noarch/repodata.json").write_text("{")


def lose_index(folder: Path) -> None:
    (folder / "linux-64/repodata.json").unlink()


def lose_package(folder: Path) -> None:
    next(folder.glob("noarch/alpha-*")).unlink()


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lose_entry, ["alpha", "beta"]),
        (damage_index, ["alpha", "beta"]),
        (lose_index, ["alpha", "beta"]),
        (lose_package, ["beta"]),
    ],
    ids=["lost entry", "damaged index", "lost index", "lost package"],
)
def test_a_killed_build_leaves_nothing_that_stays(
    damage: Callable[[Path], None], names: list[str], source: Source
) -> None:
    damage(source.folder)
    source.reconcile()
    assert list_names(source) == names
    assert source.is_indexed()


def test_a_folder_without_both_indexes_is_no_channel(source: Source) -> None:
    assert source.is_indexed()
    (source.folder / "linux-64/repodata.json").unlink()
    assert not source.is_indexed()
    assert not LocalChannel(source.folder / "none").is_indexed()


def test_a_channel_holds_packages_of_one_base(source: Source, tmp_path: Path) -> None:
    source.require_base("")
    # Of the prefixes that a build string may have, only HOST_BOUND stands for a base.
    source.require_base("rehearsal_")
    with pytest.raises(ForgeError, match="of the other base, such as (alpha|beta)-1.*--output"):
        source.require_base(HOST_BOUND)
    bound = Source(tmp_path / "bound")
    bound.make("alpha", build=f"{HOST_BOUND}h1234567_0")
    bound.require_base(HOST_BOUND)
    with pytest.raises(ForgeError, match="of the other base"):
        bound.require_base("")


def test_a_renamed_package_is_named(source: Source) -> None:
    """A package whose file was renamed is refused.

    A new name thus cannot hide the mark of the host base, which is in the metadata too.
    """
    dist = source.make("gamma", build=f"{HOST_BOUND}h1234567_0")
    file = source.folder / f"noarch/{dist}.conda"
    renamed = file.rename(file.with_name("gamma-1.0-h1234567_0.conda"))
    source.index()
    with pytest.raises(ForgeError, match=f"{renamed} calls itself {file.name}: it was renamed"):
        source.records()


def test_no_file_name_has_two_contents(source: Source, tmp_path: Path) -> None:
    """A file of the same name and other content is refused, even if its hash is the greater one.

    The same content may be added again.
    """
    existing = next(source.folder.glob("noarch/alpha-*"))
    content = existing.read_bytes()
    copy = tmp_path / "noarch" / existing.name
    copy.parent.mkdir()
    for bit in range(8):
        copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1 << bit]))
        with pytest.raises(ForgeError, match="exists with other content"):
            source.add({copy: 1}, {})
        assert existing.read_bytes() == content
    copy.write_bytes(content)
    source.add({copy: 1}, {})
    assert existing.read_bytes() == content
    assert list_names(source) == ["alpha", "beta"]


@pytest.mark.parametrize("end", [0, 10, -1, -200])
def test_a_package_that_is_cut_off_is_named(source: Source, end: int) -> None:
    """The error names the package that is cut off, although the bindings do not name it."""
    (path,) = source.folder.glob("noarch/alpha-*.conda")
    path.write_bytes(path.read_bytes()[:end])
    for index in source.folder.glob("*/repodata.json"):
        index.unlink()
    with pytest.raises(ForgeError, match=f"{path.name} is damaged, perhaps cut off: delete it"):
        source.reconcile()
