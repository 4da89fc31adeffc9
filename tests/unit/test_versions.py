# SPDX-License-Identifier: BSD-3-Clause
"""`forge outdated`, and moving a recipe to another release.

The index, the files and the tags of upstream projects are in local folders.
"""

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.conda_packages import file, tarball
from support.mutants import Tally, texts
from support.patches import GOOD, TEXT, lint
from support.project import MiniProject, commit
from support.servers import served
from typer.testing import CliRunner, Result

from forge import versions
from forge.cli.main import app
from forge.files import write_text
from forge.project import Project
from forge.recipes.plan import RecipeSet, load_all_sources
from forge.sources import download, git
from forge.sources.cache import PYPI_SOURCES, PYPI_URL

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
VARIANTS = 'engine:\n  - "1.0"\n\nwheels:\n  - "1.0"\n'
STACK = """[workspace]
channels = []
platforms = ["linux-64"]

[dependencies]
toy = ">=1.0,<1.1.1"
"""


class World:
    """A project, and a folder that stands for the servers of upstream projects.

    Attributes:
        root: The folder of the project.
        hosts: The folder of the servers: an index, its files and a git repository.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.hosts = folder / "hosts"
        MiniProject(self.root)
        (self.root / "build" / "sources").unlink()
        write_text(self.root / "variants.yaml", VARIANTS)
        write_text(self.root / "stacks/s/pixi.toml", STACK)
        write_text(self.root / "patches/toy/0001-word.patch", GOOD.replace("alpha 1.0", "toy 1.1"))

    def file(self, name: str, text: str) -> str:
        """Put an archive into the folder of files and return its sha256."""
        path = self.hosts / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tarball(file(f"{name}/text", text.encode())))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def release(self, name: str, text: str = TEXT, attributes: str = "") -> str:
        """Put a file on the index and return its sha256."""
        digest = self.file(name, text)
        page = self.hosts / "simple" / name.partition("-")[0] / "index.html"
        lines = page.read_text().splitlines() if page.exists() else []
        lines = [line for line in lines if f">{name}<" not in line]
        link = f'<a href="../../files/{name}#sha256={digest}" {attributes}>{name}</a>'
        write_text(page, "\n".join([*lines, link]))
        return digest

    def recipe(self, name: str, version: str, source: str, **others: str) -> None:
        """Write a recipe. `others` has further fields of RECIPE."""
        fields = {"host": "[]", "run": "[]", "purls": "", "uses": "x"} | others
        text = RECIPE.format(name=name, version=version, source=source, **fields)
        write_text(self.root / "recipes" / name / "recipe.yaml", text)

    def edit(self, name: str, **changes: str) -> None:
        """Replace texts in a recipe, as a maintainer does: each key of `changes` by its value."""
        path = self.root / "recipes" / name / "recipe.yaml"
        text = path.read_text()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)

    def recipes(self) -> RecipeSet:
        return load_all_sources(Project.at(self.root))

    def forge(self, *words: str) -> Result:
        """Run a command with --quiet, which does not hide the results of these commands."""
        words = ("--quiet", *words)
        return CliRunner().invoke(app, [*words, "--base", "conda-forge"], env={"COLUMNS": "400"})

    def rows(self) -> dict[str, versions.Row]:
        return {row.recipe.name: row for row in versions.outdated(self.recipes().recipes.values())}

    def next_set(self) -> list[str]:
        rows = self.rows().values()
        return list(versions.next_set(self.recipes(), rows, lambda *_: None))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A project with the recipes toy, wheels and engine.

    toy has an sdist, wheels a file for each Python, and engine a version from variants.yaml.
    """
    settings = {"index-url": (tmp_path / "hosts" / "simple").as_uri()}
    monkeypatch.setattr(download, "pip_settings", lambda: settings)
    monkeypatch.setenv(PYPI_SOURCES, PYPI_URL)
    world = World(tmp_path)
    monkeypatch.setenv("FORGE_ROOT", str(world.root))
    world.release("toy-1.0.tar.gz")
    world.release("toy-1.2rc1.tar.gz")
    world.release("toy-1.1.1.tar.gz", "other\n")
    world.release("toy-1.3.tar.gz", attributes='data-yanked="wrong numbers"')
    source = f"  url: {PYPI}/toy-${{{{ version }}}}.tar.gz\n  sha256: "
    source += world.release("toy-1.1.tar.gz")
    source += "\n  patches: [../../patches/toy/0001-word.patch] # why"
    world.recipe("toy", '"1.1"', source, purls="pkg:pypi/toy@1.1?file_name=toy-1.1.tar.gz")
    names = [f"wheels-1.0-{tag}-{tag}-any.whl" for tag in ("cp311", "cp312")]
    hashes = [world.release(name, name) for name in names]
    purls = ", ".join(f"'pkg:pypi/wheels@1.0?file_name={name}'" for name in names)
    world.recipe("wheels", '"1.0"', WHEELS.format(*hashes), host="[python]", purls=purls)
    world.recipe("engine", "${{ engine }}", "  path: recipe.yaml", run='["wheels ${{ wheels }}.*"]')
    return world


def test_outdated(world: World) -> None:
    """The newest release is never a pre-release, a yanked release or a local version."""
    world.recipe("library", '"3.0"', "  path: recipe.yaml", purls="'pkg:pypi/toy@1.1'")
    world.release("toy-1.1.tar.gz", attributes='data-yanked=""')
    world.release("toy-1.9+mine.tar.gz")
    (world.hosts / "simple" / "wheels" / "index.html").unlink()
    rows = world.rows()
    assert (rows["toy"].newest, rows["toy"].state) == ("1.1.1", "newer")
    assert rows["toy"].note == "1.1 was yanked: no reason given"
    assert rows["wheels"].state == "unreachable"
    assert rows["wheels"].note.startswith("pip's index offers no wheels")
    # engine has no upstream source, and library has the source of another recipe.
    for name in ("engine", "library"):
        assert (rows[name].newest, rows[name].note) == ("", "no upstream of its own")


def test_exit_codes(world: World) -> None:
    done = world.forge("outdated")
    assert done.exit_code == 1
    assert "toy " in done.output
    assert " newer " in done.output
    assert world.forge("outdated", "engine").exit_code == 0
    (world.hosts / "simple" / "wheels" / "index.html").unlink()
    assert world.forge("outdated", "wheels").exit_code == 3
    assert world.forge("outdated").exit_code == 1


def test_a_release_of_which_one_file_is_yanked(world: World) -> None:
    """A release of which only some files are yanked counts: a recipe may name the other files."""
    for tag, attributes in (("cp311", ""), ("cp312", 'data-yanked="broken"')):
        world.release(f"wheels-2.0-{tag}-{tag}-any.whl", attributes=attributes)
    assert world.rows()["wheels"].newest == "2.0"
    world.release("wheels-2.0-cp311-cp311-any.whl", attributes='data-yanked="broken"')
    assert world.rows()["wheels"].newest == "1.0"


def test_our_versions_satisfy_our_recipes_and_stacks(recipes: RecipeSet) -> None:
    assert list(versions.conflicts(recipes)) == []


def test_conflicts(world: World) -> None:
    """After a recipe moves, the recipes and stacks that require its old version are named."""
    assert list(versions.conflicts(world.recipes())) == []
    world.edit("toy", **{'"1.1"': '"1.1.1"'})
    world.edit("wheels", **{'"1.0"': '"2.0"'})
    expected = [
        "recipes/engine requires wheels 1.0.*, but ours is 2.0",
        "stacks/s requires toy >=1.0,<1.1.1, but ours is 1.1.1",
    ]
    assert list(versions.conflicts(world.recipes())) == expected


def test_a_move_to_another_release(world: World) -> None:
    """After a maintainer edits the version and the package URL, commands report what else to edit.

    `sources fetch` states the sha256 to write. Lint and `patches check` report the patch.
    """
    changes = {'"1.1"': '"1.1.1"', "toy@1.1?": "toy@1.1.1?", "toy-1.1.tar": "toy-1.1.1.tar"}
    world.edit("toy", **changes)
    old = sha256(world, "toy-1.1.tar.gz")
    new = sha256(world, "toy-1.1.1.tar.gz")
    done = world.forge("sources", "fetch", "toy")
    assert done.exit_code == 1
    assert f"has sha256 {new}, the recipe says {old}; pip's index states the same" in done.output
    assert "If you have just changed the recipe" in done.output
    assert "find out why" in done.output
    world.edit("toy", **{old: new})
    # The file is in the cache, so it is not fetched again.
    (world.hosts / "files" / "toy-1.1.1.tar.gz").unlink()
    assert world.forge("sources", "fetch", "toy").exit_code == 0
    assert any("Applies-To is not toy 1.1.1" in line for line in lint(world.recipes()))
    assert "patches: fails: 0001-word.patch" in world.forge("patches", "check").output


def test_every_file_is_reported_in_one_run(world: World) -> None:
    """--every reports the files of all Pythons, although the first file is already refused."""
    for tag in ("cp311", "cp312"):
        world.release(f"wheels-2.0-{tag}-{tag}-any.whl", f"2.0 {tag}")
    changes = {'"1.0"': '"2.0"', "wheels@1.0": "wheels@2.0", "wheels-1.0": "wheels-2.0"}
    world.edit("wheels", **changes)
    done = world.forge("sources", "fetch", "wheels", "--every")
    assert done.exit_code == 1
    assert done.output.count("pip's index states the same") == 2
    for tag in ("cp311", "cp312"):
        assert f"has sha256 {sha256(world, f'wheels-2.0-{tag}-{tag}-any.whl')}" in done.output
    (world.hosts / "files" / "wheels-2.0-cp312-cp312-any.whl").unlink()
    done = world.forge("sources", "fetch", "wheels", "--every")
    assert done.exit_code == 1, (
        "a refused file, and not an unreachable one, must decide the exit code"
    )
    assert "cannot be fetched" in done.output
    assert world.forge("sources", "fetch", "wheels").output.count("wheels: ") == 1


def test_a_file_for_another_python_is_added(world: World) -> None:
    """`sources add` accepts files for any Python.

    A machine without a network may have another Python than the machine that fetched the files.
    """
    files = sorted((world.hosts / "files").glob("wheels-1.0-*"))
    assert len(files) == 2
    done = world.forge("sources", "add", *map(str, files))
    assert done.exit_code == 0, done.output


def sha256(world: World, name: str) -> str:
    """Return the sha256 of an upstream file."""
    return hashlib.sha256((world.hosts / "files" / name).read_bytes()).hexdigest()


@pytest.fixture
def git_host(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A repository in place of one on GitHub. Two tags are releases: 1.0b and 1.1b."""
    repository = world.hosts / "strix-forge-tests" / "library"
    repository.mkdir(parents=True)
    commit(repository)
    for tag in ("1.0b", "1.1b", "1.9-rocmb", "1.9+mineb"):
        subprocess.run(["git", "tag", tag], cwd=repository, check=True)
    subprocess.run(["git", "update-server-info"], cwd=repository, check=True)
    (repository / ".git").rename(repository.with_suffix(".git"))
    shutil.rmtree(repository)
    repository.with_suffix(".git").rename(repository)
    with served(world.hosts) as url:
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{url}/.insteadOf")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
        yield


@pytest.mark.usefixtures("git_host")
def test_tags_of_a_git_host(world: World) -> None:
    """The releases are the tags of a repository, in the form that the package URL states."""
    purl = 'pkg:github/strix-forge-tests/library@${{ (version ~ "b") | replace(".0b", "b") }}'
    world.recipe("library", '"1.0.0"', "  path: recipe.yaml", purls=f"'{purl}'")
    row = world.rows()["library"]
    assert row.newest == "1.1"
    assert row.state == "newer"
    assert row.note == "https://github.com/strix-forge-tests/library"


STATED = """\
ARG ENGINE_VERSION={}+rocm10
ARG TOY_BRANCH="v9"
ARG WHEELS_TAG="v1.0"
"""


def add_paired(world: World, text: str, files: str = "text") -> None:
    """Write a recipe whose source states the versions of packages with which upstream builds it.

    Args:
        world: The project.
        text: The content of the file that states the versions in release 2.0.
        files: The names of the files that `extra.built_with` lists, separated by spaces.
    """
    source = f"  - url: {PYPI}/paired-${{{{ version }}}}.tar.gz\n    sha256: "
    source += world.release("paired-1.0.tar.gz")
    source += f"\n  - url: https://more.invalid/more-1.0.tar.gz\n    sha256: {'0' * 64}"
    world.release("paired-2.0.tar.gz", text)
    world.recipe("paired", '"1.0"', source, purls="pkg:pypi/paired@1.0?file_name=paired-1.0.tar.gz")
    file = world.root / "recipes/paired/recipe.yaml"
    pairs = "{ENGINE_VERSION: engine, WHEELS_TAG: wheels}"
    built_with = ", ".join(f"{name}: {pairs}" for name in files.split())
    file.write_text(f"{file.read_text()}  built_with: {{{built_with}}}\n")


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        (STATED.format("1.0"), "1.0, and"),
        (STATED.format("1.1"), "1.1, but"),
        ("RUN ENGINE_VERSION=1.0\nARG WHEELS_TAG=v1.0\n", "nothing, but"),
    ],
    ids=["same", "another", "no longer stated"],
)
def test_what_upstream_builds_a_release_with(world: World, text: str, engine: str) -> None:
    """The versions that the newest release is built with are compared with ours.

    For example, vLLM's Dockerfile for ROCm states the version of torch.
    """
    add_paired(world, text)
    assert world.next_set() == [
        f"text of paired 2.0 has ENGINE_VERSION={engine} our engine is 1.0",
        "text of paired 2.0 has WHEELS_TAG=1.0, and our wheels is 1.0",
    ]
    assert f"ENGINE_VERSION={engine} our engine is" in world.forge("outdated").output


def test_a_file_that_a_release_no_longer_has(world: World) -> None:
    add_paired(world, "", "gone")
    line = "gone of paired 2.0 has ENGINE_VERSION=nothing, but our engine is 1.0"
    assert line in world.next_set()


def test_a_package_that_no_recipe_yields(world: World) -> None:
    """A wrong name in `extra.built_with` is reported in one line, and the command goes on."""
    add_paired(world, STATED.format("1.0"))
    file = world.root / "recipes/paired/recipe.yaml"
    file.write_text(file.read_text().replace("WHEELS_TAG: wheels", "WHEELS_TAG: weels"))
    assert world.next_set()[1:] == [
        "cannot read the versions that paired 2.0 is built with: "
        "no recipe yields weels, which extra.built_with names"
    ]


@pytest.mark.parametrize("damage", ["missing", "cut", "no archive"])
def test_a_newest_release_that_cannot_be_read(world: World, damage: str) -> None:
    """A newest release that cannot be read is reported in one line, and the command goes on."""
    add_paired(world, STATED.format("1.1"))
    file = world.hosts / "files/paired-2.0.tar.gz"
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:60])
    else:
        file.write_bytes(b"<html>please log in</html>")
    (line,) = world.next_set()
    assert line.startswith("cannot read the versions that paired 2.0 is built with: ")


def test_what_became_of_links_counts(world: World) -> None:
    """Unless packages are named, `outdated` also runs tools/upstream_links.py.

    If that program fails, so does `outdated`.
    """
    script = world.root / "tools/upstream_links.py"
    script.parent.mkdir()
    script.write_text("open(__file__ + '.ran', 'w')")
    mark = script.with_name(f"{script.name}.ran")
    assert world.forge("outdated", "engine").exit_code == 0
    assert not mark.exists()
    assert world.forge("outdated").exit_code in (1, 3)
    assert mark.exists()
    script.write_text("raise SystemExit(1)")
    world.hosts.joinpath("files").rename(world.hosts / "away")
    assert world.forge("outdated").exit_code == 1


@pytest.mark.parametrize(
    ("tag", "example", "version", "expected"),
    [
        ("0.13b", "0.12b", "0.12.0", ["0.13"]),
        ("0.12.1b", "0.12b", "0.12.0", ["0.12.1"]),
        ("v2.14.0", "v2.13.0", "2.13.0", ["2.14.0"]),
        ("2.14.0", "v2.13.0", "2.13.0", []),
        ("therock-10.1", "therock-10.0.0", "10.0.0", ["10.1"]),
        ("therock-9.2.1", "therock-10.0.0", "10.0.0", ["9.2.1"]),
        ("anything", "nightly", "1.0", []),
    ],
)
def test_versions_in_tags(tag: str, example: str, version: str, expected: list[str]) -> None:
    assert versions.versions_in([tag], example, version) == expected


@pytest.mark.parametrize("kind", ["index", "tags"])
def test_mutants_of_what_upstream_answers(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    kind: str,
) -> None:
    """From a damaged index or list of tags, the driver reads no local version.

    It may read other versions, or none.
    """
    recipe = world.recipes().recipes["toy"]
    downloader = download.Downloader()
    file = world.hosts / "simple" / "toy" / "index.html"
    valid = file.read_bytes()
    if kind == "tags":
        recipe.extra = {"purls": ["pkg:github/x/toy@v1.1"]}
        lines = [b"%040d\trefs/tags/v1.%d\n" % (number, number) for number in range(5)]
        valid = b"".join(lines)

        def answer(*_: object, **__: object) -> str:
            return file.read_bytes().decode(errors="replace")

        monkeypatch.setattr(git, "_git", answer)
    tally = Tally(f"upstream's {kind}", record_property)
    for text in [valid, *texts(valid, 7, 45)]:
        file.write_bytes(text)
        tally.give(
            lambda: versions.releases(downloader, recipe),
            lambda releases: not any(version.local for version in releases),
            text,
        )
    assert tally.outcomes["accepted"]
