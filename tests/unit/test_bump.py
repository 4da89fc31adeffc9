# SPDX-License-Identifier: BSD-3-Clause
"""`bump` and `outdated` with an index, files and git tags that lie in folders of this machine."""

from __future__ import annotations

import difflib
import hashlib
import io
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.mutants import Tally, texts
from support.patches import GOOD, TEXT
from support.project import MiniProject
from unearth import Link
from unearth.collector import IndexPage

from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import write_text
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.sources import download, git
from forge.sources.cache import PYPI_SOURCES, PYPI_URL
from forge.upkeep import bump, outdated, upstream

RECIPE = """\
# a comment that stays
schema_version: 1

context:
  version: {version}
  build_number: 3

package:
  name: {name}
  version: ${{{{ version }}}}

source: # so does this
{source}

build:
  number: ${{{{ build_number }}}}
  noarch: generic
  variant: {{use_keys: [content_digest]}}
  script: {{content: "true", env: {{USES: {uses}}}}}

requirements:
  host: {host}
  run: {run}

about:
  license: BSD-3-Clause
  summary: a package of the tests

extra:
  purls: [{purls}]
"""
PYPI = '${{ env.get("PYPI_SOURCES") }}'
WHEELS = """\
  - if: match(python, "3.11.*")
    then:
      url: ${{{{ env.get("PYPI_SOURCES") }}}}/wheels-${{{{ version }}}}-cp311-cp311-any.whl
      sha256: {}
  - if: match(python, "3.12.*")
    then:
      url: ${{{{ env.get("PYPI_SOURCES") }}}}/wheels-${{{{ version }}}}-cp312-cp312-any.whl
      sha256: {}"""
ENGINE = """\
  - if: engine == "1.0"
    then:
      url: {files}/engine-${{{{ version }}}}.tar.gz
      sha256: {}
  - if: engine == "0.9"
    then:
      url: {files}/engine-0.9.tar.gz
      sha256: {}"""
VARIANTS = '# the reason\nengine:\n  - "1.0"\n\nwheels:\n  - "1.0"\n'
STACK = """[workspace]
channels = []
platforms = ["linux-64"]

[dependencies]
toy = ">=1.0,<1.1.1"
"""


def archive(top: str, text: str) -> bytes:
    """A .tar.gz of TOP/text."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo(f"{top}/text")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


class World:
    """A project, and the folders that serve as its upstreams."""

    def __init__(self, folder: Path) -> None:
        self.root, self.hosts = folder / "project", folder / "hosts"
        MiniProject(self.root)
        (self.root / "build" / "sources").unlink()
        for name, text in (("variants.yaml", VARIANTS), ("stacks/s/pixi.toml", STACK)):
            write_text(self.root / name, text)
        write_text(self.root / "patches/toy/0001-word.patch", GOOD.replace("alpha 1.0", "toy 1.1"))

    def file(self, name: str, text: str) -> str:
        """Put an archive into the folder of files; returns its sha256."""
        path = self.hosts / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive(name, text))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def release(self, name: str, text: str = TEXT, attributes: str = "") -> str:
        """Put a file on the index; returns its sha256."""
        digest = self.file(name, text)
        page = self.hosts / "simple" / name.partition("-")[0] / "index.html"
        lines = page.read_text().splitlines() if page.exists() else []
        lines = [line for line in lines if f">{name}<" not in line]
        link = f'<a href="../../files/{name}#sha256={digest}" {attributes}>{name}</a>'
        write_text(page, "\n".join([*lines, link]))
        return digest

    def recipe(self, name: str, version: str, source: str, **more: str) -> None:
        fields = {"host": "[]", "run": "[]", "purls": "", "uses": "x"} | more
        text = RECIPE.format(name=name, version=version, source=source, **fields)
        write_text(self.root / "recipes" / name / "recipe.yaml", text)

    def commit(self) -> None:
        self.before = self.texts()

    def texts(self) -> dict[Path, str]:
        files = [self.root / "variants.yaml", *self.root.glob("recipes/*/recipe.yaml")]
        return {path: path.read_text() for path in files}

    def restore(self) -> None:
        for path, text in self.before.items():
            path.write_text(text)

    def diff(self) -> list[str]:
        """The changed lines since `commit`."""
        lines: list[str] = []
        for path, text in self.texts().items():
            lines += difflib.ndiff(self.before[path].splitlines(), text.splitlines())
        return [line for line in lines if line[0] in "+-"]

    def recipes(self) -> RecipeSet:
        return bump.every_source(Project.at(self.root))

    def bump(self, **wanted: str | None) -> bump.Bumped:
        return bump.bump(Project.at(self.root), self.recipes(), wanted, lambda *_: None)

    def refused(self, match: str, kind: type[ForgeError] = Refused, **wanted: str | None) -> None:
        """The bump is refused with this message, and changed no file."""
        before = self.texts()
        with pytest.raises(kind, match=match):
            self.bump(**wanted)
        assert self.texts() == before

    def rows(self) -> dict[str, outdated.Row]:
        recipes = self.recipes()
        return {row.name: row for row in outdated.outdated(recipes.recipes.values())}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """toy (sdist), wheels (a file per Python), engine (version in variants.yaml, two releases)."""
    settings = {"index-url": (tmp_path / "hosts" / "simple").as_uri()}
    monkeypatch.setattr(download, "pip_settings", lambda: settings)
    monkeypatch.setenv(PYPI_SOURCES, PYPI_URL)
    made = World(tmp_path)
    made.release("toy-1.0.tar.gz"), made.release("toy-1.2rc1.tar.gz")
    made.release("toy-1.1.1.tar.gz", "other\n")
    made.release("toy-1.3.tar.gz", attributes='data-yanked="wrong numbers"')
    source = f"  url: {PYPI}/toy-${{{{ version }}}}.tar.gz\n  sha256: "
    source += made.release("toy-1.1.tar.gz")
    source += "\n  patches: [../../patches/toy/0001-word.patch] # why"
    made.recipe("toy", '"1.1"', source, purls="pkg:pypi/toy@1.1?file_name=toy-1.1.tar.gz")
    tags = ("cp311", "cp312")
    wheels = [f"wheels-%s-{tag}-{tag}-any.whl" for tag in tags]
    hashes = [made.release(name % version, name) for version in ("2.0", "1.0") for name in wheels]
    purls = [f"'pkg:pypi/wheels@1.0?file_name={name % '1.0'}'" for name in wheels]
    made.recipe("wheels", '"1.0"', WHEELS.format(*hashes[2:]), host="[python]",
                purls=", ".join(purls))  # fmt: skip
    hashes = [made.release(f"engine-{version}.tar.gz", version) for version in ("1.0", "0.9")]
    made.release("engine-2.0.tar.gz")
    source = ENGINE.format(*hashes, files=(made.hosts / "files").as_uri())
    made.recipe("engine", "${{ engine }}", source, run='["wheels ${{ wheels }}.*"]',
                purls="pkg:pypi/engine")  # fmt: skip
    made.commit()
    return made


def sha256(world: World, name: str) -> str:
    return hashlib.sha256((world.hosts / "files" / name).read_bytes()).hexdigest()


def test_there_and_back(world: World) -> None:
    """Only the lines that have to change do; back again, none did."""
    done = world.bump(toy="1.0")
    assert done.moves == ["toy 1.1 -> 1.0"]
    assert done.changed == [world.root / "recipes/toy/recipe.yaml"]
    old, new = (sha256(world, f"toy-{v}.tar.gz") for v in ("1.1", "1.0"))
    assert sorted(world.diff()) == sorted([
        '-   version: "1.1"', '+   version: "1.0"', "-   build_number: 3", "+   build_number: 0",
        f"-   sha256: {old}", f"+   sha256: {new}",
        "-   purls: [pkg:pypi/toy@1.1?file_name=toy-1.1.tar.gz]",
        "+   purls: [pkg:pypi/toy@1.0?file_name=toy-1.0.tar.gz]",
    ])  # fmt: skip
    assert any("Applies-To is not toy 1.0" in line for line in done.to_do)
    assert not any("fails" in line or "requires" in line for line in done.to_do)
    world.bump(toy="1.1")
    # a published build 0 of 1.1 exists: the number is not invented again
    assert world.diff() == ["-   build_number: 3", "+   build_number: 0"]


def test_newest_is_neither_pre_release_nor_yanked(world: World) -> None:
    done = world.bump(toy=None)
    assert done.moves == ["toy 1.1 -> 1.1.1"]
    assert any("patches/toy: fails: 0001-word.patch" in line for line in done.to_do)
    assert "stacks/s requires toy >=1.0,<1.1.1, but ours is 1.1.1" in done.to_do
    assert world.bump(toy=None).moves == ["toy 1.1.1 is the newest"]
    assert world.bump(toy="1.2rc1").moves == ["toy 1.1.1 -> 1.2rc1"]


def test_our_versions_satisfy_our_recipes_and_stacks(recipes: RecipeSet) -> None:
    assert list(bump.conflicts(recipes)) == []


@pytest.mark.parametrize(
    ("version", "kind", "match"),
    [
        ("7", ForgeError, "no toy 7: PyPI ends with .*1.2rc1, 1.3"),
        ("seven", ForgeError, "no toy seven: PyPI ends with"),
        ("1.3", Refused, "yanked by upstream: wrong numbers"),
    ],
)
def test_versions_that_are_refused(
    world: World, version: str, kind: type[ForgeError], match: str
) -> None:
    world.refused(match, kind, toy=version)


def test_files_that_are_refused(world: World) -> None:
    file = world.hosts / "files" / "toy-1.0.tar.gz"
    file.write_bytes(archive("x", "evil\n"))
    world.refused("tampered with", toy="1.0")
    page = world.hosts / "simple" / "toy" / "index.html"
    page.write_text(re.sub("#sha256=[0-9a-f]+", "", page.read_text()))
    for rest in (b"<html>please log in</html>", file.read_bytes()[:60]):
        file.write_bytes(rest)
        world.refused("not a whole archive", toy="1.0")
    file.unlink()
    world.refused("HTTP 404", NotAttempted, toy="1.0")
    assert not list((world.root / "build" / "sources").rglob("*toy*"))


def test_replaced_by_upstream(world: World) -> None:
    """Index and file agree on other bytes than those that the recipe names."""
    assert world.bump(toy="1.1").changed == []
    world.release("toy-1.1.tar.gz", "replaced\n")
    world.refused("ALARM.*toy@1.1", toy="1.1")


def test_file_of_every_python_and_the_version_that_others_share(world: World) -> None:
    world.bump(wheels="2.0")
    text = (world.root / "recipes/wheels/recipe.yaml").read_text()
    for file in (world.hosts / "files").glob("wheels-2.0-*"):
        assert sha256(world, file.name) in text and f"wheels@2.0?file_name={file.name}" in text
    assert 'wheels:\n  - "2.0"\n' in (world.root / "variants.yaml").read_text()


def test_release_to_go_back_to(world: World) -> None:
    """A recipe with a source for each of two releases, as rocm-sdk: their hashes are known."""
    done = world.bump(engine="0.9")
    assert world.diff() == ['-   - "1.0"', '+   - "0.9"', "-   build_number: 3",
                            "+   build_number: 0"]  # fmt: skip
    assert "variants.yaml: the reason above engine" in done.to_do
    world.restore()
    world.release("engine-0.9.tar.gz", "replaced")
    world.refused("ALARM.*engine-0.9", engine="0.9")
    world.bump(engine=None)
    new = sha256(world, "engine-2.0.tar.gz")
    assert {'-   - if: engine == "1.0"', '+   - if: engine == "2.0"', f"+       sha256: {new}",
            '+   - "2.0"'} < set(world.diff())  # fmt: skip


def test_killed_while_it_writes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command completes it."""
    both = {"engine": "2.0", "wheels": "2.0"}
    done = world.bump(**both)
    assert [path.parent.name for path in done.changed] == ["engine", "project", "wheels"]
    whole = world.texts()
    for written in (1, 2):
        world.restore()
        left = [write_text] * written
        with monkeypatch.context() as patched, pytest.raises(IndexError):
            patched.setattr(bump, "write_text", lambda *given, left=left: left.pop()(*given))
            world.bump(**both)
        assert world.texts() != whole
        world.bump(**both)
        assert world.texts() == whole


def test_edited_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody writes while a bump downloads is not overwritten."""
    path = world.root / "recipes/toy/recipe.yaml"

    def edits(*_: object) -> list[str]:
        path.write_text(path.read_text() + "# mine\n")
        return []

    monkeypatch.setattr(bump, "to_do", edits)
    with pytest.raises(Refused, match=r"toy/recipe.yaml was edited meanwhile"):
        world.bump(toy="1.0")
    assert world.diff() == ["+ # mine"]


@pytest.fixture
def git_host(world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """A repository with the tags 1.0b and 1.1b in the place of GitHub; returns its commit."""
    repository = world.hosts / "strix-forge-tests" / "library"
    repository.mkdir(parents=True)
    script = (
        "git init -q . && git -c user.name=x -c user.email=x@example.com commit -q --allow-empty"
    )
    script += " -m x && git tag 1.0b && git tag 1.1b && git rev-parse HEAD"
    done = subprocess.run(
        ["sh", "-ec", script], cwd=repository, check=True, capture_output=True, text=True
    )
    for name, value in {"COUNT": "1", "KEY_0": f"url.{world.hosts.as_uri()}/.insteadOf",
                        "VALUE_0": "https://github.com/"}.items():  # fmt: skip
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    return done.stdout.strip()


def test_tags_of_a_git_source(world: World, git_host: str) -> None:
    """Its package URL says where releases are tags; the commit is left to people."""
    source = f"  git: https://github.com/strix-forge-tests/library.git\n  rev: {git_host}"
    purl = 'pkg:github/strix-forge-tests/library@${{ (version ~ "b") | replace(".0b", "b") }}'
    world.recipe("library", '"1.0.0"', source, purls=f"'{purl}'")
    done = world.bump(library=None)
    assert done.moves == ["library 1.0.0 -> 1.1.0"]
    assert f"recipes/library uses {git_host}: is it right for 1.1.0?" in done.to_do


@pytest.mark.usefixtures("git_host")
def test_tags_of_a_git_host(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the archive follows from the version; commits are left to people."""
    files, digest = (world.hosts / "files").as_uri(), world.file("1.0b.tar.gz", "old")
    tag = '${{ (version ~ "b") | replace(".0b", "b") }}'
    path = f"strix-forge-tests/library/archive/refs/tags/{tag}.tar.gz"
    source = (
        f"  url:\n    - https://github.com/{path}\n    - {files}/{tag}.tar.gz\n  sha256: {digest}"
    )
    purl = f"'pkg:github/strix-forge-tests/library@{tag}'"
    world.recipe("library", '"1.0.0"', source, uses="c0ffee00" * 5, purls=purl)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # the real host must not answer
    new = world.file("1.1b.tar.gz", "new")
    done = world.bump(library=None)
    assert done.moves == ["library 1.0.0 -> 1.1.0"]
    assert new in (world.root / "recipes/library/recipe.yaml").read_text()
    assert f"recipes/library uses {'c0ffee00' * 5}: is it right for 1.1.0?" in done.to_do


STATED = """\
ARG ENGINE_VERSION={}+rocm10
ARG TOY_BRANCH="v9"
ARG WHEELS_TAG="v1.0"
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STATED.format("1.0"), []),
        (STATED.format("1.1"), ["ENGINE_VERSION=1.1, but ours is engine 1.0"]),
        ("RUN ENGINE_VERSION=1.0\nARG WHEELS_TAG=v1.0\n",
         ["ENGINE_VERSION=nothing, but ours is engine 1.0"]),
    ],
    ids=["same", "another", "no longer stated"],
)  # fmt: skip
def test_what_upstream_builds_a_release_with(world: World, text: str, said: list[str]) -> None:
    """As vLLM's Dockerfile for ROCm, which pairs it with torch; read from the new release."""
    source = f"  url: {PYPI}/paired-${{{{ version }}}}.tar.gz\n  sha256: "
    source += world.release("paired-1.0.tar.gz")
    world.release("paired-2.0.tar.gz", text)
    world.recipe("paired", '"1.0"', source, purls="pkg:pypi/paired@1.0?file_name=paired-1.0.tar.gz")
    file = world.root / "recipes/paired/recipe.yaml"
    pairs = "{ENGINE_VERSION: engine, WHEELS_TAG: wheels}"
    file.write_text(f"{file.read_text()}  built_with: {{text: {pairs}, gone: {{X: toy}}}}\n")
    to_do = [line for line in world.bump(paired=None).to_do if "ours is" in line]
    assert to_do == [
        "gone of paired 2.0 says X=nothing, but ours is toy 1.1",
        *(f"text of paired 2.0 says {line}" for line in said),
    ]


def test_a_patch_that_upstream_has_taken(world: World) -> None:
    world.release("toy-1.1.2.tar.gz", TEXT.replace("two", "zwei"))
    (said,) = [line for line in world.bump(toy=None).to_do if "patches/toy: fails" in line]
    assert said.endswith("0001-word.patch: upstream has it: drop this patch")


@pytest.mark.parametrize("lost", [False, True])
def test_the_next_set(world: World, lost: bool) -> None:
    """What the newest release pairs, the same as ours or not; which patches wait for a release."""
    source = f"  url: {PYPI}/paired-${{{{ version }}}}.tar.gz\n  sha256: "
    source += world.release("paired-1.0.tar.gz")
    world.release("paired-2.0.tar.gz", STATED.format("1.1"))
    if lost:
        (world.hosts / "files/paired-2.0.tar.gz").unlink()
    world.recipe("paired", '"1.0"', source, purls="pkg:pypi/paired@1.0?file_name=paired-1.0.tar.gz")
    file = world.root / "recipes/paired/recipe.yaml"
    pairs = "{ENGINE_VERSION: engine, WHEELS_TAG: wheels}"
    file.write_text(f"{file.read_text()}  built_with: {{text: {pairs}}}\n")
    patch = world.root / "patches/toy/0001-word.patch"
    patch.write_text(
        patch.read_text().replace("Inappropriate (a test)", "Backport https://a.invalid")
    )
    before, rows = world.texts(), [*world.rows().values()]
    project, recipes = Project.at(world.root), world.recipes()
    said = list(outdated.next_set(project, recipes, rows, lambda *_: None))
    falls, pairs = "patches/toy/0001-word.patch falls away when never", "text of paired 2.0 says"
    assert falls in said and world.texts() == before
    said.remove(falls)
    if lost:
        (line,) = said
        assert line.startswith("paired 2.0: unreachable: ") and "elsewhere" not in line
    else:
        assert said == [
            f"{pairs} ENGINE_VERSION=1.1, but ours is engine 1.0",
            f"{pairs} WHEELS_TAG=1.0, as ours is wheels 1.0",
        ]


def test_outdated(world: World) -> None:
    world.recipe("mine", '"1.0"', "  path: recipe.yaml")
    world.recipe("follower", "${{ engine }}", "  path: recipe.yaml")
    world.release("toy-1.1.tar.gz", attributes='data-yanked=""')
    (world.hosts / "simple" / "wheels" / "index.html").unlink()
    rows = world.rows()
    toy, wheels = rows["toy"], rows["wheels"]
    assert (toy.newest, toy.outdated, toy.asked) == ("1.1.1", True, "PyPI")
    assert toy.note == "1.1 was yanked: no reason given"
    assert not wheels.outdated and "unreachable: pip's index offers no wheels" in wheels.note
    assert rows["mine"].note == "it is made here"
    assert rows["follower"].note == "it follows engine in variants.yaml"


@pytest.mark.parametrize(
    ("name", "example", "version", "found"),
    [
        ("0.13b", "0.12b", "0.12.0", ["0.13.0"]),
        ("0.12.1b", "0.12b", "0.12.0", ["0.12.1"]),
        ("v2.14.0", "v2.13.0", "2.13.0", ["2.14.0"]),
        ("2.14.0", "v2.13.0", "2.13.0", []),
        ("v1.0-rocm", "v2.13.0", "2.13.0", []),
        ("x-gfx1151-10.1.0.tar.gz", "x-gfx1151-10.0.0.tar.gz", "10.0.0", ["10.1.0"]),
        ("x-gfx942-10.1.0.tar.gz", "x-gfx1151-10.0.0.tar.gz", "10.0.0", []),
        ("anything", "nightly", "1.0", []),
    ],
)
def test_versions_in_names(name: str, example: str, version: str, found: list[str]) -> None:
    assert upstream.versions_in([name], example, version) == found


@pytest.mark.parametrize("kind", ["index", "page", "tags"])
def test_mutants_of_what_upstream_answers(
    world: World, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None],
    kind: str,
) -> None:  # fmt: skip
    """A damaged list names a release of its own, or none; nothing that is no version."""
    recipe, downloader = world.recipes().recipes["toy"], download.Downloader()
    file = world.hosts / "simple" / "toy" / "index.html"
    valid = file.read_bytes()
    if kind != "index":
        url = (world.hosts / "simple" / "toy" / "toy-1.1.tar.gz").as_uri()
        recipe.extra, recipe.sources = {}, [{"url": url, "sha256": "0"}]
    if kind == "page":
        link = Link(file.parent.as_uri())
        monkeypatch.setattr(
            upstream, "fetch_page", lambda *_: IndexPage(link, file.read_bytes(), None, "text/html")
        )
    if kind == "tags":
        recipe.extra = {"purls": ["pkg:github/x/toy@v1.1"]}
        valid = b"".join(b"%040d\trefs/tags/v1.%d\n" % (number, number) for number in range(5))
        monkeypatch.setattr(git, "_git", lambda *_: file.read_bytes().decode(errors="replace"))
    tally = Tally(f"upstream's {kind}", record_property)
    for text in [valid, *texts(valid, 7, 45)]:
        file.write_bytes(text)
        tally.give(
            lambda: upstream.newest(upstream.releases(downloader, recipe)),
            lambda found: found is None or not found.key.is_prerelease,
            text,
        )
    assert tally.outcomes["accepted"]
