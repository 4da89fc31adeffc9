# SPDX-License-Identifier: BSD-3-Clause
"""The patches of this repository follow the rules. Wrong and hostile patches are refused."""

import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import recipe_checks
from support.mutants import Tally, texts
from support.patches import GOOD, TEXT, TRAILERS, lint, lint_file
from support.project import CHECKOUT, MiniProject, commit
from typer.testing import CliRunner

from forge.cli.main import app
from forge.cli.upkeep import apply_patches
from forge.errors import ForgeError
from forge.files import sha256_file
from forge.project import Project
from forge.recipes.plan import RecipeSet, load_all_sources
from forge.recipes.recipe import list_sources
from forge.sources import patching
from forge.sources.cache import SourceCache


class Patched:
    """A project whose recipe `alpha` has one good patch. The recipe's source is in the cache.

    Args:
        folder: The folder of the project and its files.
        wheel: Whether the source is a wheel. If it is, the folder of patches is a second source.

    Attributes:
        patch: The patch.
        recipe: The recipe.yaml.
        project: The project.
        source_cache: The cache.
    """

    def __init__(self, folder: Path, wheel: bool = False) -> None:
        mini = MiniProject(folder / "project")
        (mini.root / "build" / "sources").unlink()
        (folder / "demo").mkdir()
        (folder / "demo" / "text").write_text(TEXT)
        if wheel:
            # rattler-build does not unpack a wheel. The build script applies the patches after it
            # has installed the wheel.
            archive = folder / "demo-1.0-py3-none-any.whl"
            with zipfile.ZipFile(archive, "w") as opened:
                opened.write(folder / "demo" / "text", "text")
                opened.writestr("other", "")
            patches_key = "}, {path: ../../patches/alpha"
        else:
            archive = folder / "demo-1.0.tar.gz"
            with tarfile.open(archive, "w:gz") as tar:
                tar.add(folder / "demo", "demo")
            patches_key = ", patches: [../../patches/alpha/0001-word.patch]"
        source = (
            f"[{{url: 'file:///nowhere/{archive.name}', sha256: {sha256_file(archive)}"
            f"{patches_key}}}]"
        )
        self.patch = mini.root / "patches" / "alpha" / "0001-word.patch"
        self.patch.parent.mkdir(parents=True)
        self.patch.write_text(GOOD)
        self.recipe = mini.recipe("alpha", source=source) / "recipe.yaml"
        self.project = Project.at(mini.root)
        self.source_cache = SourceCache(self.project)
        self.source_cache.add(archive, list_sources(self.recipes().recipes["alpha"]))

    def recipes(self) -> RecipeSet:
        return load_all_sources(self.project)

    def lint(self) -> str:
        return "\n".join(lint(self.recipes()))

    def check(self) -> tuple[str, str]:
        (result,) = apply_patches(self.recipes(), lambda *_: None)
        return result.state, result.line


@pytest.fixture
def patched(tmp_path: Path) -> Patched:
    return Patched(tmp_path)


def test_ours_are_clean(recipes: RecipeSet) -> None:
    assert [*CHECKOUT.glob("patches/*/*.patch")] and lint(recipes) == []


def test_a_good_patch(patched: Patched) -> None:
    assert patched.lint() == ""
    assert patched.check() == ("applies", "alpha: 1 patches: applies")


def test_another_recipe_may_name_it(patched: Patched) -> None:
    other_recipe = patched.recipe.parent.with_name("beta") / "recipe.yaml"
    other_recipe.parent.mkdir()
    text = patched.recipe.read_text().replace("alpha", "beta").replace("1.0", "7.0")
    other_recipe.write_text(text.replace("patches/beta", "patches/alpha"))
    assert patched.lint() == ""
    text = patched.recipe.read_text()
    patched.recipe.write_text(re.sub(r", patches: \[.*?\]", "", text))
    assert "0001-word.patch: recipe alpha does not name it" in patched.lint()


@pytest.mark.parametrize("trailer", [*TRAILERS, "Subject", "Date"])
def test_missing_line(trailer: str) -> None:
    path = Path("patches/alpha/0001-word.patch")
    assert lint_file(path, GOOD) == []
    text = re.sub(rf"^{trailer}: .*\n", "", GOOD, flags=re.M)
    assert f"no {trailer}" in lint_file(path, text)


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("Upstream-Status: Inapp", "Upstream-Status: Maybe", "Upstream-Status is not one of"),
        ("Applies-To: alpha 1.0", "Applies-To: alpha 2.0", "Applies-To is not alpha 1.0"),
        ("Last-Update: 2026-11-21", "Last-Update: today", "Last-Update is not a date"),
        ("[PATCH] ", "", "does not start with [PATCH]"),
        ("From 0123", "From x", "not in git format-patch form"),
        (
            "The word was wrong, and a reader would stop at it. It was wrong in every",
            "It",
            "the body has fewer than 15 words",
        ),
    ],
)
def test_bad_value(patched: Patched, old: str, new: str, finding: str) -> None:
    assert old in GOOD
    patched.patch.write_text(GOOD.replace(old, new))
    assert finding in patched.lint() and "0001-word.patch" in patched.lint()


def test_named_by_none_or_twice(patched: Patched) -> None:
    extra = patched.patch.with_name("0002-more.patch")
    extra.write_text(GOOD)
    assert "0002-more.patch: recipe alpha does not name it" in patched.lint()
    extra.unlink()
    name = "../../patches/alpha/0001-word.patch"
    text = patched.recipe.read_text()
    patched.recipe.write_text(text.replace(name, f"{name}, {name}"))
    assert "named more than once" in patched.lint()
    patched.patch.rename(patched.patch.with_name("word.patch"))
    patched.recipe.write_text(text.replace("0001-word", "word"))
    assert "numbers are not 0001" in patched.lint()


def test_patches_of_a_wheel(tmp_path: Path) -> None:
    patched = Patched(tmp_path, wheel=True)
    assert patched.lint() == ""
    assert patched.check() == ("applies", "alpha: 1 patches: applies")
    before = patched.recipes().recipes["alpha"].content
    script = recipe_checks.load("triton", "apply_patches")
    script.apply(tmp_path / "demo", GOOD)
    assert (tmp_path / "demo" / "text").read_text() == TEXT.replace("two", "zwei")
    with pytest.raises(ValueError, match="hunk at line 1 does not apply"):
        script.apply(tmp_path / "demo", GOOD)
    patched.patch.write_text(GOOD.replace("-two", "-2"))
    assert patched.check()[0] == "fails"
    assert patched.recipes().recipes["alpha"].content != before


def test_fuzz_is_refused(patched: Patched) -> None:
    """A hunk whose context differs from the source is refused. rattler-build would apply it."""
    patched.patch.write_text(GOOD.replace(" one\n", " ones\n"))
    state, line = patched.check()
    assert state == "fails" and "0001-word.patch" in line


@pytest.mark.parametrize(("first", "applies"), [("a", True), ("x", False)])
def test_every_line_of_context_counts(first: str, applies: bool, tmp_path: Path) -> None:
    """Each line of a hunk's context must match.

    rattler-build's own patcher would ignore up to two of these lines at each end.
    """
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "text").write_text("a\nb\nc\nd\ne\nf\ng\n")
    hunk = f"@@ -1,7 +1,7 @@\n {first}\n b\n c\n-d\n+D\n e\n f\n g\n"
    (tmp_path / "0001-x.patch").write_text(f"--- a/text\n+++ b/text\n{hunk}")
    problem = patching.apply(tmp_path / "source", [tmp_path / "0001-x.patch"])
    assert (problem == "") is applies


def test_a_git_source(patched: Patched, tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    source = f"git: '{demo.as_uri()}', rev: {commit(demo)},"
    text = patched.recipe.read_text()
    patched.recipe.write_text(re.sub(r"url: .*? sha256: \w+,", source, text))
    assert patched.check() == ("applies", "alpha: 1 patches: applies")


def test_source_out_of_reach(patched: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check whose source cannot be fetched is not attempted. The exit code with --strict is 3."""
    for archive in patched.source_cache.folder.rglob("*.tar.gz"):
        archive.unlink()
    assert patched.check()[0] == "not attempted"
    monkeypatch.setenv("FORGE_ROOT", str(patched.project.root))
    for option, code in (([], 0), (["--strict"], 3)):
        words = ["patches", "check", "--base", "conda-forge", *option]
        assert CliRunner().invoke(app, words).exit_code == code


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (GOOD, {"text"}),
        ("--- /dev/null\n+++ b/new/file\t2026-11-21\n", {"new/file"}),
        ("--- a/old\n+++ /dev/null\n", {"old"}),
        ("--- a/old\n+++ b/../../outside\n", {"old", "../../outside"}),
        ("rename from old\nrename to ../new\n", {"old", "../new"}),
        ("@@ -1,2 +1 @@\n--- a/comment\n rest\n", set()),
    ],
)
def test_touched(text: str, paths: set[str]) -> None:
    assert patching.touched(text) == paths


NEW = "--- /dev/null\n+++ {}\n@@ -0,0 +1 @@\n+x\n"
HOSTILE = {
    "parent": NEW.format("b/../../out"),
    "parent at once": NEW.format("../out"),
    "absolute": NEW.format("/etc/forge-test"),
    "absolute after the first part": NEW.format("b//etc/forge-test"),
    "quoted": NEW.format('"b/\\056\\056/out"'),
    "carriage return": NEW.format("b/../out\r"),
    "time stamp": NEW.format("b/../out\t2026-11-21"),
    "rename": "similarity index 100%\nrename from text\nrename to ../out\n",
    "copy": "diff --git a/text b/out\nsimilarity index 100%\ncopy from text\ncopy to /tmp/out\n",
    "git head": "diff --git a/../out b/../out\ndeleted file mode 100644\nindex 1..0\n",
    "made link": "diff --git a/l b/l\nnew file mode 120000\nindex 0000000..1\n" + NEW.format("b/l"),
    "deleted link": "diff --git a/l b/l\ndeleted file mode 120000\nindex 1..0\n",
    "turned link": "diff --git a/l b/l\nindex 1234567..89abcde 120000\n--- a/l\n+++ b/l\n",
    "in a hunk": GOOD + "--- a/x\n+++ b/../x\n",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_patch_that_leaves_the_source(patched: Patched, case: str) -> None:
    patched.patch.write_text(HOSTILE[case])
    state, line = patched.check()
    assert state == "fails" and ": fails: 0001-word.patch: it " in line


def test_the_longest_name_in_a_patch() -> None:
    assert not patching.find_fault(NEW.format("b/" + "x" * 498))
    assert patching.find_fault(NEW.format("b/" + "x" * 499))


@pytest.mark.parametrize("text", ["", "no patch at all\n", "--- a/text\n+++ b/text\n"])
def test_what_is_no_patch(patched: Patched, text: str) -> None:
    patched.patch.write_text(text)
    assert patched.check()[0] == "fails"


@pytest.mark.parametrize("link", ["text", "sub"])
def test_source_whose_link_leads_out(tmp_path: Path, link: str) -> None:
    """A patch is refused if the source has a link through which it would write outside."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "text").write_text(TEXT)
    tree, patch = tmp_path / "tree", tmp_path / "a.patch"
    tree.mkdir()
    (tree / link).symlink_to(tmp_path / ("out/text" if link == "text" else "out"))
    patch.write_text(GOOD.replace("/text", "/text" if link == "text" else "/sub/text"))
    assert "leads out of the source" in patching.apply(tree, [patch])
    (tree / link).unlink()
    if link == "sub":
        (tree / "sub").mkdir()
        (tree / "sub/text").write_text(TEXT)
    else:
        (tree / "text").write_text(TEXT)
    assert patching.apply(tree, [patch]) == ""
    assert (tmp_path / "out" / "text").read_text() == TEXT


def test_git_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old\n")
    patch = tmp_path / "0001-x.patch"
    patch.write_text("--- a/file\n+++ b/file\n@@ -1 +1 @@\n-old\n+new\n")
    assert patching.apply(tmp_path, [patch]) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ForgeError, match="git is not installed"):
        patching.apply(tmp_path, [patch])


def test_why_a_patch_does_not_apply(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    source, patch = tmp_path / "tree/text", tmp_path / "a.patch"
    patch.write_text(GOOD)
    source.write_text("other\n")
    assert "patch does not apply" in patching.apply(source.parent, [patch])
    source.write_text(TEXT)
    problem = patching.apply(source.parent, [patch, patch])
    assert problem.endswith("upstream has it: drop this patch")


def test_patch_that_is_not_text(patched: Patched) -> None:
    patched.patch.write_bytes(b"\xff")
    state, line = patched.check()
    assert state == "fails" and "is not UTF-8" in line
    with pytest.raises(ForgeError, match=r"0001-word.patch is not UTF-8"):
        patched.lint()


def test_mutants(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Trying a mutated patch changes neither the source nor any other file."""
    tree = tmp_path / "tree"
    patch = tmp_path / "a.patch"
    tally = Tally("patch", record_property)
    tree.mkdir()
    (tree / "text").write_text(TEXT)

    def read() -> None:
        problem = patching.apply(tree, [patch])
        if problem:
            raise ForgeError(problem)

    for data in texts(GOOD.encode(), 10, 70):
        patch.write_bytes(data)
        tally.give(read, lambda _: True, data)
        assert (tree / "text").read_text() == TEXT
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.patch", "tree"]


@pytest.mark.parametrize("record", sorted(CHECKOUT.glob("patches/*/verified.yaml")), ids=str)
def test_patches_compared_by_hand(record: Path) -> None:
    """verified.yaml has the blob and the commit of each file that a patch in its folder changes."""
    files = yaml.safe_load(record.read_text())["files"]
    for entry in files.values():
        assert re.fullmatch("[0-9a-f]{40}", entry["blob"])
        assert re.fullmatch("[0-9a-f]{40}", entry["commit"])
    for path in record.parent.glob("*.patch"):
        assert patching.touched(path.read_text()) <= set(files), path.name


def test_patch_with_a_name_that_no_file_can_have(patched: Patched) -> None:
    text = patched.recipe.read_text()
    patched.recipe.write_text(text.replace("0001-word.patch", f"{'a' * 5000}.patch"))
    with pytest.raises(ForgeError, match="which does not exist"):
        patched.recipes()
