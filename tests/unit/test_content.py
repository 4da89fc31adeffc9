# SPDX-License-Identifier: BSD-3-Clause
"""The content of a recipe consists of the files that git tracks or does not ignore.

This holds inside and outside of a git repository.
"""

import subprocess
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject

from forge import bases
from forge.files import digest_tree
from forge.project import Project
from forge.recipes.recipe import Recipe

JUNK = [
    "recipe.yaml~",
    ".build.sh.swp",
    ".DS_Store",
    ".pixi/envs/x",
    ".pytest_cache/v/x",
    ".mypy_cache/x",
    ".ruff_cache/x",
    "__pycache__/x.pyc",
    "x.egg-info/PKG-INFO",
]


@pytest.fixture
def mini(tmp_path: Path) -> MiniProject:
    mini = MiniProject(tmp_path / "project")
    local = mini.root / "packages" / "local"
    local.mkdir(parents=True)
    (local / "text").write_text("one\n")
    (mini.root / "single.sh").write_text("exit\n")
    (mini.root / "a.patch").touch()
    local = "{path: ../../packages/local, patches: [../../a.patch]}"
    mini.recipe("alpha", source=f"[{local}, {{path: ../../single.sh}}]")
    return mini


def content(mini: MiniProject) -> str:
    """Return the digest of alpha's content."""
    path = mini.root / "recipes" / "alpha" / "recipe.yaml"
    base = bases.load(Project.at(mini.root), "conda-forge")
    return Recipe(path, base).content


@pytest.mark.parametrize("name", [*JUNK, "build/lib/x.py"])
def test_junk_is_no_content(mini: MiniProject, name: str) -> None:
    before = content(mini)
    for folder in ("packages/local", "recipes/alpha"):
        if name in JUNK or folder == "packages/local":
            path = mini.root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("junk")
    assert content(mini) == before


def test_a_report_beside_a_patch_is_no_content(mini: MiniProject) -> None:
    """A report (*.report.md) beside patches does not count as content. Any other file does.

    triton's source is a folder of patches, and editing a report must not rebuild PyTorch.
    """
    folder = mini.root / "patches/alpha"
    folder.mkdir(parents=True)
    mini.recipe("alpha", source="[{path: ../../patches/alpha}]")
    (folder / "0001-more.patch").write_text("one")
    (folder / "0001.report.md").write_text("one")
    before = content(mini)
    (folder / "0001.report.md").write_text("two")
    assert content(mini) == before
    (folder / "0001-more.patch").write_text("two")
    edited = content(mini)
    (folder / "0002-again.patch").write_text("one")
    added = content(mini)
    (folder / "text").write_text("one")
    with_text = content(mini)
    (folder / "text").write_text("two")
    assert len({before, edited, added, with_text, content(mini)}) == 5


@pytest.mark.parametrize("folder", ["packages/local", "recipes/alpha"])
def test_what_git_tracks_is_content_whatever_gitignore_says(mini: MiniProject, folder: str) -> None:
    path = mini.root / folder / "x.egg-info" / "PKG-INFO"
    path.parent.mkdir()
    path.write_text("one")
    ignored = content(mini)
    for command in (["init", "--quiet"], ["add", "--force", str(path)]):
        subprocess.run(["git", *command], cwd=mini.root, check=True)
    tracked = content(mini)
    path.write_text("two")
    assert len({ignored, tracked, content(mini)}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "packages/local/new",
        "recipes/alpha/build/x",
        "recipes/alpha/x~y",
        "packages/local/text",
        "recipes/alpha/build.sh",
        "recipes/alpha/recipe.yaml",
        "single.sh",
        "a.patch",
    ],
)
def test_what_is_new_or_edited_is_content(mini: MiniProject, name: str) -> None:
    before = content(mini)
    (mini.root / name).parent.mkdir(exist_ok=True)
    with (mini.root / name).open("a") as stream:
        stream.write("# a comment\n")
    assert content(mini) != before


def test_modes_and_links(mini: MiniProject, tmp_path: Path) -> None:
    """The executable bit of a file counts as content, and so do the targets of links."""
    digests = {content(mini)}
    (mini.root / "single.sh").chmod(0o755)
    digests.add(content(mini))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "text").write_text("one")
    (mini.root / "recipes" / "alpha" / "file").symlink_to(outside / "text")
    digests.add(content(mini))
    (outside / "text").write_text("two")
    digests.add(content(mini))
    (mini.root / "recipes" / "alpha" / "folder").symlink_to(outside)
    digests.add(content(mini))
    (outside / "more").write_text("three")
    digests.add(content(mini))
    assert len(digests) == 6
    (outside / "back").symlink_to(mini.root / "recipes" / "alpha")
    (mini.root / "recipes" / "alpha" / "self").symlink_to("self")
    (mini.root / "recipes" / "alpha" / "up").symlink_to("..")
    assert content(mini) not in digests


def test_git_tracks_nothing_that_is_no_content() -> None:
    """No tracked file is ignored, and no folder below the root has a .gitignore.

    git would read such a .gitignore, and the driver would not.
    """
    listing = ["git", "ls-files", "-z"]
    for option in (["-ci", "--exclude-standard"], [":*/.gitignore"]):
        names = subprocess.run([*listing, *option], cwd=CHECKOUT, capture_output=True, check=True)
        assert names.stdout == b""


def test_another_checkout_of_the_same_content(tmp_path: Path) -> None:
    """An unpacked archive has the same digest as a clone, even if the clone has ignored files."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "packages/strix-emulate"],
        cwd=CHECKOUT,
        text=True,
        capture_output=True,
        check=True,
    )
    names = [name for name in done.stdout.split("\0") if name]
    for name in [".gitignore", *names]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((CHECKOUT / name).read_bytes())
        (tmp_path / name).chmod((CHECKOUT / name).stat().st_mode)
    folder = "packages/strix-emulate"
    assert digest_tree(tmp_path / folder, tmp_path) == digest_tree(CHECKOUT / folder, CHECKOUT)
