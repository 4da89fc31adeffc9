# SPDX-License-Identifier: BSD-3-Clause
"""`forge bump` and `forge outdated`, against an index, a file host and git tags of this machine."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject
from support.servers import served
from test_patches import GOOD, TEXT

from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import write_text
from forge.project import Project
from forge.sources import cache as sources
from forge.sources import download
from forge.sources import git as git_sources
from forge.sources.cache import PYPI_SOURCES, PYPI_URL
from forge.upkeep import draft, pins, relations, upstream
from forge.upkeep.pins import Bump

IDENTITY = {f"GIT_{who}_{what}": "x@example.com" for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")}  # fmt: skip
SHARED = "c0ffee" + "0" * 34
OWN = "beef" + "1" * 36
RECIPE = """\
# a comment that stays
schema_version: 1

context:
  version: {version}
  build_number: {number}

package:
  name: {name}
  version: ${{{{ version }}}}

source: # so does this
{source}

build:
  number: ${{{{ build_number }}}}
  noarch: generic
  variant: {{use_keys: [content_digest]}}
  script:
    env:
      USES: {uses}
    content: "true"

requirements:
  host: {host}
  run: {run}

about:
  license: BSD-3-Clause
  summary: a package of the tests

extra:
  purls:
{purls}
"""
VARIANTS = f"""\
# the reason of engine
engine:
  - "1.0.0"

# the reason of wheels
wheels:
  - "1.0.0"

# the reason of the commit
library_commit:
  - {SHARED}

# the oldest toy that will do
toy_min:
  - "1.0"
"""
README = """\
| Package | Version | Renders |
| --- | --- | --- |
| toy | 1.1 | yes |
| engine | 1.0.0 | yes |

```toml
toy = "1.1.*"
engine = "1.0.*"
```
"""
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n- toy 1.1.\n\n## [0.1]\n- nothing\n"
STACK = """\
[workspace]
name = "s" # a stack

[dependencies]
engine = "1.0.*"   # as exact as it was
toy = ">=1.0"

[feature.more.dependencies]
toy = { version = "<9" }
"""
PATCH = GOOD.replace("alpha 1.0", "toy 1.1")


def tar(top: str, files: dict[str, str]) -> bytes:
    """A .tar.gz of files below the folder `top`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def wheel(name: str, version: str, requires: str = "") -> bytes:
    """A wheel that holds nothing but metadata."""
    out, info = io.BytesIO(), f"{name}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    text += "".join(f"Requires-Dist: {spec}\n" for spec in requires.split(";;") if spec)
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(f"{info}/METADATA", text)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return out.getvalue()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder with byte ranges. A file NAME.how beside a file tells how it misbehaves."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        file = Path(self.translate_path(self.path))
        trick = file.with_name(f"{file.name}.how")
        how = trick.read_text() if trick.exists() else ""
        if how.startswith("/"):
            self.send_response(302)
            self.send_header("Location", how)
            self.end_headers()
            return
        file = file / "index.html" if file.is_dir() else file
        if how == "stall":
            time.sleep(1)
            self.close_connection = True
            return
        if not file.is_file():
            self.send_error(404)
            return
        data, asked = file.read_bytes(), re.match(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        start, end = (
            (int(asked[1]), int(asked[2] or len(data) - 1)) if asked else (0, len(data) - 1)
        )
        part = data[start : end + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Type", "text/html" if file.suffix == ".html" else "x/y")
        self.send_header("Accept-Ranges", "none" if how == "no ranges" else "bytes")
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        if how != "no length":
            self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body:
            self.wfile.write(part[: len(part) // 2] if how in ("cut", "no length") else part)

    def log_message(self, *_: object) -> None:
        pass


class World:
    """A project under git, and the hosts that it knows."""

    def __init__(self, project: MiniProject, hosts: Path, url: str) -> None:
        self.root, self.hosts, self.url = project.root, hosts, url
        self.index: dict[str, dict[str, str]] = {}

    def release(self, file: str, data: bytes, attributes: str = "", sha256: str = "") -> str:
        """Put a file on the index; returns its sha256. `sha256` is what the index claims."""
        project = re.match(r"(.+?)-\d", file)[1]
        path = self.hosts / "files" / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        links = self.index.setdefault(project, {})
        href = f"/files/{file}#sha256={sha256 or digest}"
        links[file] = f'<a href="{href}" {attributes}>{file}</a>\n'
        page = self.hosts / "simple" / project / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"<!DOCTYPE html><html><body>{''.join(links.values())}</body></html>")
        return digest

    def sdist(self, version: str, text: str = TEXT, attributes: str = "") -> str:
        files = {"PKG-INFO": f"Name: toy\nVersion: {version}\n", "text": text}
        return self.release(f"toy-{version}.tar.gz", tar(f"toy-{version}", files), attributes)

    def host(self, file: str, files: dict[str, str]) -> str:
        """Put an archive on the plain file host; returns its sha256."""
        path = self.hosts / "dist" / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tar("x", files))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def how(self, path: str, trick: str) -> None:
        (self.hosts / f"{path}.how").write_text(trick)

    def recipe(self, name: str, version: str, source: str, **more: str) -> None:
        folder = self.root / "recipes" / name
        folder.mkdir(parents=True, exist_ok=True)
        fields = {"number": "3", "host": "[]", "run": "[]", "uses": "none", "purls": "    []"}
        text = RECIPE.format(name=name, version=version, source=source, **(fields | more))
        (folder / "recipe.yaml").write_text(text)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", self.root, *arguments], env=os.environ | IDENTITY, check=True,
            capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        return done.stdout

    def bump(self, force: bool = False, **wanted: str | None) -> Bump:
        return pins.bump(Project.at(self.root), wanted, lambda *_: None, force)

    def refused(self, match: str, kind: type[ForgeError] = Refused, **wanted: str | None) -> None:
        """The bump is refused with this message, and changed no file."""
        before = self.git("status", "--porcelain") + self.git("diff")
        with pytest.raises(kind, match=match):
            self.bump(**wanted)
        assert self.git("status", "--porcelain") + self.git("diff") == before

    def diff(self) -> list[str]:
        """The changed lines since the last commit."""
        return re.findall(r"^[+-](?![+-]{2}).*", self.git("diff"), re.M)

    def rows(self) -> dict[str, pins.Row]:
        recipes = draft.every_source(Project.at(self.root))
        return {row.name: row for row in pins.outdated(recipes, recipes.recipes)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """toy (sdist on PyPI), wheels (a file per Python), engine (a host's file, PyPI's metadata)."""
    root, hosts = tmp_path / "project", tmp_path / "hosts"
    root.mkdir(), hosts.mkdir()
    project = MiniProject(root)
    shutil.rmtree(root / "build")
    with served(hosts, Handler) as url:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{url}/simple",
                    "NO_PROXY": "127.0.0.1", PYPI_SOURCES: PYPI_URL}  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        made = World(project, hosts, url)
        populate(made)
        yield made


def populate(world: World) -> None:
    (world.root / "variants.yaml").write_text(VARIANTS)
    for name, text in (("README.md", README), ("CHANGELOG.md", CHANGELOG), (".gitignore", "build")):
        (world.root / name).write_text(text)
    (world.root / "stacks" / "s").mkdir(parents=True)
    (world.root / "stacks" / "s" / "pixi.toml").write_text(STACK)
    (world.root / "patches" / "toy").mkdir(parents=True)
    (world.root / "patches" / "toy" / "0001-word.patch").write_text(PATCH)
    world.sdist("1.0"), world.sdist("1.2rc1"), world.sdist("1.1.1", "other\n")
    world.sdist("1.3", attributes='data-yanked="wrong numbers"')
    source = '  url: ${{ env.get("PYPI_SOURCES") }}/toy-${{ version }}.tar.gz\n  sha256: %s\n'
    source += "  patches:\n    # why\n    - ../../patches/toy/0001-word.patch"
    purl = "    - pkg:pypi/toy@1.1?file_name=toy-1.1.tar.gz"
    world.recipe("toy", '"1.1"', source % world.sdist("1.1"), purls=purl)

    hashes = {}
    for version in ("1.0.0", "2.0.0"):
        for tag in ("cp311-cp311", "cp312-cp312"):
            hashes[version, tag] = world.release(
                f"wheels-{version}-{tag}-manylinux_2_28_x86_64.whl",
                wheel("wheels", version, tag[:5]),
            )
    files = [(tag, f"wheels-%s-{tag}-manylinux_2_28_x86_64.whl") for tag in
             ("cp311-cp311", "cp312-cp312")]  # fmt: skip
    source = "\n".join(
        f'  - if: match(python, "3.1{tag[4]}.*")\n    then:\n'
        f'      url: ${{{{ env.get("PYPI_SOURCES") }}}}/{file % "${{ version }}"}\n'
        f"      sha256: {hashes['1.0.0', tag]}"
        for tag, file in files
    )
    purls = "\n".join(f"    - pkg:pypi/wheels@1.0.0?file_name={f % '1.0.0'}" for _, f in files)
    world.recipe("wheels", '"1.0.0"', source, host="[python]", purls=purls)

    for version in ("1.0.0", "2.0.0"):
        requires = f"wheels=={version};;toy>=1;;nothing==9; python_version < '3'"
        world.release(f"engine-{version}-py3-none-any.whl", wheel("engine", version, requires))
    digest = world.host("engine-1.0.0.tar.gz", {"pins.cmake": f"set(COMMIT {SHARED})\n"})
    world.host("engine-2.0.0.tar.gz", {"pins.cmake": f"set(VERSION 2)\nset(COMMIT {SHARED})\n"})
    source = f"  url: {world.url}/dist/engine-${{{{ version }}}}.tar.gz\n  sha256: {digest}"
    world.recipe(
        "engine", "${{ engine }}", source, uses="${{ library_commit }}",
        purls="    - pkg:pypi/engine",
        run='["wheels ${{ wheels }}.*", "toy >=${{ toy_min }}"]',
    )  # fmt: skip
    world.git("init", "-q")
    world.git("add", "-A")
    world.git("commit", "-qm", "as released")


def test_there_and_back(world: World) -> None:
    """Only the lines that had to change did; back again, nothing did."""
    done = world.bump(toy="1.0")
    assert done.moves == ["toy 1.1 -> 1.0"]
    old, new = (hashlib.sha256((world.hosts / "files" / f"toy-{v}.tar.gz").read_bytes()).hexdigest()
                for v in ("1.1", "1.0"))  # fmt: skip
    assert sorted(world.diff()) == sorted([
        "-| toy | 1.1 | yes |", "+| toy | 1.0 | yes |", '-toy = "1.1.*"', '+toy = "1.0.*"',
        "+### Changed", "+- toy 1.1 -> 1.0", "+",
        '-  version: "1.1"', '+  version: "1.0"', "-  build_number: 3", "+  build_number: 0",
        f"-  sha256: {old}", f"+  sha256: {new}",
        "-    - pkg:pypi/toy@1.1?file_name=toy-1.1.tar.gz",
        "+    - pkg:pypi/toy@1.0?file_name=toy-1.0.tar.gz",
    ])  # fmt: skip
    assert any("Applies-To is not toy 1.0" in line for line in done.to_do)
    assert any("patches of toy: applies" in r.text for r in done.relations)
    done = world.bump(toy="1.1.1")
    assert any(r.state == relations.NOTE and "0001-word.patch" in r.text for r in done.relations)
    assert "+- toy 1.1 -> 1.1.1" in world.diff() and "+- toy 1.0 -> 1.1.1" not in world.diff()
    world.bump(toy="1.1")
    # a published build 0 of 1.1 exists: the number is not invented again
    assert world.diff() == ["-  build_number: 3", "+  build_number: 0"]


def test_newest_is_neither_pre_release_nor_yanked(world: World) -> None:
    assert world.bump(toy=None).moves == ["toy 1.1 -> 1.1.1"]
    assert world.bump(toy=None).moves == ["toy 1.1.1: PyPI has nothing newer"]
    assert world.bump(toy="1.2rc1").moves == ["toy 1.1.1 -> 1.2rc1"]


@pytest.mark.parametrize(
    ("name", "version", "kind", "match"),
    [
        ("toy", "7", ForgeError, "no toy 7: PyPI ends with .*1.2rc1, 1.3"),
        ("toy", "seven", ForgeError, "'seven' is no version"),
        ("toy", "1.3", Refused, "yanked by upstream: wrong numbers"),
    ],
)
def test_versions_that_are_refused(
    world: World, name: str, version: str, kind: type[ForgeError], match: str
) -> None:
    world.refused(match, kind, **{name: version})


@pytest.mark.parametrize(
    ("file", "old", "new", "match"),
    [
        ("stacks/s/pixi.toml", "[workspace]", "[workspace", "stacks/s/pixi.toml: "),
        ("README.md", "yes", "\udcff", "project/README.md is not UTF-8"),
        ("recipes/toy/recipe.yaml", "pkg:pypi", "pypi", "toy/recipe.yaml: extra.purls: "),
    ],
)
def test_files_that_cannot_be_read(world: World, file: str, old: str, new: str, match: str) -> None:
    path = world.root / file
    path.write_text(path.read_text().replace(old, new, 1), errors="surrogateescape")
    world.refused(match, ForgeError, toy="1.0")


def test_damaged_on_its_way(world: World) -> None:
    """The index has one hash, the file another."""
    (world.hosts / "files" / "toy-1.0.tar.gz").write_bytes(tar("toy-1.0", {"text": "evil\n"}))
    world.refused("tampered with", toy="1.0")
    assert not list((world.root / "build" / "sources").rglob("toy*"))


def test_replaced_by_upstream(world: World) -> None:
    """Index and file agree on other bytes than the recipe was made from."""
    world.sdist("1.1", "replaced\n")
    world.refused("ALARM.*toy-1.1.tar.gz", toy="1.1")
    world.bump(toy="1.0")
    world.refused("ALARM.*toy-1.1.tar.gz", toy="1.1")


def test_same_version_again(world: World) -> None:
    assert world.bump(toy="1.1").moves == ["toy 1.1: the bytes are the recipe's"]
    assert world.diff() == []


def test_wheel_of_every_python_and_the_pin_that_others_share(world: World) -> None:
    world.bump(force=True, wheels="2.0.0")
    text = (world.root / "recipes/wheels/recipe.yaml").read_text()
    for file in (world.hosts / "files").glob("wheels-2.0.0-*"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in text and f"={file.name}\n" in text
    assert 'wheels:\n  - "2.0.0"\n' in (world.root / "variants.yaml").read_text()


def test_relations(world: World) -> None:
    world.refused(r"engine 2.0.0 requires wheels==2.0.0.*wheels 1.0.0", engine="2.0.0")
    world.refused(r"engine 1.0.0 requires wheels==1.0.0.*wheels 2.0.0", wheels="2.0.0")
    done = world.bump(engine="2.0.0", wheels="2.0.0")
    assert {r.state for r in done.relations} == {relations.HOLDS}
    assert f"its source names {SHARED} (library_commit" in str(done.relations)
    assert "stacks/s: ./forge lock s" in done.to_do
    diff = world.diff()
    assert '+engine = "2.0.*"   # as exact as it was' in diff and '+engine = "2.0.*"' in diff
    assert '+  - "2.0.0"' in diff and "+- engine 1.0.0 -> 2.0.0" in diff
    world.bump(engine="1.0.0", wheels="1.0.0")
    assert set(world.diff()) == {"-  build_number: 3", "+  build_number: 0"}


def test_relation_that_cannot_be_read(world: World) -> None:
    """It is told, and counts neither as kept nor as broken."""
    world.how("files/engine-2.0.0-py3-none-any.whl", "no ranges")
    done = world.bump(engine="2.0.0")
    assert [r.text for r in done.relations if r.state == relations.UNKNOWN] == [
        "what engine 2.0.0 requires: "
        "engine-2.0.0-py3-none-any.whl: its host serves no parts of files"
    ]


def test_release_to_go_back_to(world: World) -> None:
    """A recipe with a section for each of two releases, as rocm-sdk: their hashes are known."""
    hashes = {v: world.host(f"sdk-{v}.tar.gz", {"text": v}) for v in ("10.0", "7.1", "11.0")}
    (world.hosts / "dist" / "index.html").write_text(
        "".join(f'<a href="sdk-{version}.tar.gz">x</a>' for version in hashes)
    )
    source = "\n".join(
        f'  - if: sdk == "{version}"\n    then:\n      url: {world.url}/dist/sdk-{version}.tar.gz\n'
        f"      sha256: {hashes[version]}"
        for version in ("10.0", "7.1")
    ).replace("sdk-10.0", "sdk-${{ version }}")
    world.recipe("sdk", "${{ sdk }}", source)
    variants = world.root / "variants.yaml"
    variants.write_text(f'{VARIANTS}\n# the reason of sdk\nsdk:\n  - "10.0"\n')
    world.git("add", "-A")
    world.git("commit", "-qm", "sdk")
    world.bump(sdk="7.1")
    assert {'-  - "10.0"', '+  - "7.1"'} < set(world.diff()) and hashes["7.1"] not in world.diff()
    world.git("checkout", "-q", ".")
    world.bump(sdk=None)
    assert {'-  - if: sdk == "10.0"', '+  - if: sdk == "11.0"', f"+      sha256: {hashes['11.0']}",
            '+  - "11.0"'} < set(world.diff())  # fmt: skip
    world.host("sdk-7.1.tar.gz", {"text": "replaced"})
    world.refused("ALARM.*sdk-7.1", sdk="7.1")


def test_what_recipes_and_stacks_allow(world: World) -> None:
    world.sdist("0.9")
    world.refused("recipes/engine has toy >=1.0; toy 0.9", toy="0.9")
    world.sdist("9.1")
    world.refused("stacks/s has toy <9; toy 9.1", toy="9.1")


def test_commits_that_a_source_names(world: World) -> None:
    """A shared one has to agree; the recipe's own is left to whoever bumps."""
    world.host("engine-2.0.0.tar.gz", {"pins.cmake": f"set(COMMIT {OWN})\n"})
    both = {"engine": "2.0.0", "wheels": "2.0.0"}
    world.refused(f"does not name {SHARED} [(]library_commit in variants.yaml", **both)
    recipe = world.root / "recipes/engine/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("${{ library_commit }}", f"x-{OWN[::-1]}"))
    done = world.bump(**both)
    assert f"does not name {OWN[::-1]}: see what it names" in str(done.relations)


@pytest.mark.parametrize(
    ("trick", "match"),
    [
        ("missing", "HTTP 404"),
        ("cut", r"ended after \d+ of \d+ bytes|IncompleteRead"),
        ("stall", "(?i)timed out"),
        ("no length", "is no whole archive"),
        ("page", "is no whole archive"),
    ],
)
def test_host_that_misbehaves(
    world: World, trick: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CONNECT_SECONDS", 0.2)
    file = world.hosts / "dist" / "engine-2.0.0.tar.gz"
    if trick == "missing":
        file.rename(file.with_name("gone"))
        (file.parent / "index.html").write_text('<a href="engine-2.0.0.tar.gz">x</a>')
    elif trick == "page":
        file.write_text("<html>please log in</html>")
    else:
        world.how("dist/engine-2.0.0.tar.gz", trick)
    kind = Refused if match == "is no whole archive" else NotAttempted
    world.refused(match, kind, engine="2.0.0", wheels="2.0.0")


def test_redirect(world: World) -> None:
    file = world.hosts / "dist" / "engine-2.0.0.tar.gz"
    file.rename(world.hosts / "moved.tar.gz")
    world.how("dist/engine-2.0.0.tar.gz", "/moved.tar.gz")
    world.bump(engine="2.0.0", wheels="2.0.0")
    digest = hashlib.sha256((world.hosts / "moved.tar.gz").read_bytes()).hexdigest()
    assert f"+  sha256: {digest}" in world.diff()


def test_rest_of_a_killed_try_is_not_used(world: World) -> None:
    """Two halves of different files would have a hash that neither has."""
    file = world.hosts / "dist" / "engine-2.0.0.tar.gz"
    key = sources.cache_key(f"{world.url}/dist/{file.name}", "")
    partial = world.root / "build" / "sources" / f"pin-{key}" / f"{file.name}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 20)
    world.bump(engine="2.0.0", wheels="2.0.0")
    assert f"+  sha256: {hashlib.sha256(file.read_bytes()).hexdigest()}" in world.diff()
    assert not partial.parent.exists()


def test_killed_while_it_writes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command completes it: the tree is that of a bump in one go."""
    both = {"engine": "2.0.0", "wheels": "2.0.0"}
    names = [str(path.relative_to(world.root)) for path in world.bump(**both).changed]
    assert names == ["README.md", "CHANGELOG.md", "stacks/s/pixi.toml",
                     "recipes/engine/recipe.yaml", "variants.yaml",
                     "recipes/wheels/recipe.yaml"]  # fmt: skip
    whole, left = world.git("diff"), 0

    def dies(path: Path, text: str) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        write_text(path, text)

    for written in (1, 4, 5):
        left = written
        world.git("checkout", "-q", ".")
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(draft, "write_text", dies)
            world.bump(**both)
        assert world.git("diff") != whole
        world.bump(**both)
        assert world.git("diff") == whole


def test_edited_meanwhile(world: World, tmp_path: Path) -> None:
    """What somebody writes while a bump downloads is neither undone nor written over."""
    folder = tmp_path / "draft"
    folder.mkdir()
    made, readme = draft.Draft(Project.at(world.root), folder), world.root / "README.md"
    mine = readme.read_text() + "mine\n"
    readme.write_text(mine)
    made.set_variant("engine", "2.0.0")
    made.write()
    assert readme.read_text() == mine and "2.0.0" in (world.root / "variants.yaml").read_text()
    made.edit("README.md", r"\A", "bumped\n")
    with pytest.raises(Refused, match="README.md was edited meanwhile. Nothing was written"):
        made.write()
    assert readme.read_text() == mine


def test_installed_stack_is_not_copied(world: World, tmp_path: Path) -> None:
    (world.root / "stacks" / "s" / ".pixi" / "envs").mkdir(parents=True)
    folder = tmp_path / "draft"
    folder.mkdir()
    draft.Draft(Project.at(world.root), folder)
    assert [path.name for path in (folder / "stacks" / "s").iterdir()] == ["pixi.toml"]


def test_tag_of_a_git_host(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive follows from the version, commit and tree from the tag, which is annotated."""
    repository = tmp_path / "host" / "strix-forge-tests" / "library"
    repository.mkdir(parents=True)
    script = "git init -q -b main . && for v in 1.0 1.1; do echo $v > text && git add . && "
    script += (
        "git commit -qm $v && git tag -a -m $v ${v}b; done; git rev-parse 1.0b^{} 1.0b^{tree} "
    )
    script += "1.1b^{} 1.1b^{tree}"
    done = subprocess.run(["sh", "-ec", script], cwd=repository, env=os.environ | IDENTITY,
                          text=True, capture_output=True, check=True)  # fmt: skip
    old, old_tree, commit, tree = done.stdout.split()
    settings = {"COUNT": "1", "KEY_0": f"url.file://{tmp_path}/host/.insteadOf",
                "VALUE_0": "https://github.com/"}  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    digest = world.host("1.0b.tar.gz", {"text": "1.0"})
    world.host("1.1b.tar.gz", {"text": "1.1"})
    tag = '${{ (version ~ "b") | replace(".0b", "b") }}'
    # where github.com answers, it has no such repository
    source = f"""\
  url:
    - https://github.com/strix-forge-tests/library/archive/refs/tags/{tag}.tar.gz
    - {world.url}/dist/{tag}.tar.gz
  sha256: {digest}"""
    world.recipe("library", "${{ library }}", source, uses="${{ library_commit }} ${{ tree }}")
    recipe = world.root / "recipes/library/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("\n\npackage", f"\n  tree: {old_tree}\n\npackage"))
    variants = world.root / "variants.yaml"
    text = f'{VARIANTS}\n# the reason of library\nlibrary:\n  - "1.0.0"\n'
    variants.write_text(text.replace(SHARED, old))
    world.host("engine-1.0.0.tar.gz", {"pins": f"{old} {commit}"})
    engine = world.root / "recipes/engine/recipe.yaml"
    digest = hashlib.sha256((world.hosts / "dist/engine-1.0.0.tar.gz").read_bytes()).hexdigest()
    engine.write_text(re.sub("sha256: .*", f"sha256: {digest}", engine.read_text()))
    world.git("add", "-A")
    world.git("commit", "-qm", "library")
    assert world.rows()["library"].newest == "1.1.0"
    world.bump(library=None)
    assert f"+  - {commit}" in world.diff() and f"+  tree: {tree}" in world.diff()
    assert '+  - "1.1.0"' in world.diff()
    world.refused("no library 3", ForgeError, library="3")
    shutil.rmtree(repository)
    world.refused("cannot be asked", NotAttempted, library=None)
    assert world.rows()["library"].note.startswith("not asked: ")
    with pytest.raises(NotAttempted):
        git_sources.tree("https://github.com/strix-forge-tests/library", commit)


def test_outdated(world: World) -> None:
    (world.hosts / "dist" / "index.html").write_text(
        '<a href="../">up</a><a href="engine-1.0.0.tar.gz?x=1">a</a>'
        '<a href="engine-2.0.0.tar.gz">b</a>'
    )
    engine = world.root / "recipes/engine/recipe.yaml"
    engine.write_text(engine.read_text().replace("    - pkg:pypi/engine", "    []"))
    rows = world.rows()
    assert (rows["toy"].newest, rows["toy"].outdated, rows["toy"].asked) == ("1.1.1", True, "PyPI")
    assert (rows["engine"].newest, rows["engine"].asked) == ("2.0.0", f"{world.url}/dist/")
    world.sdist("1.1", attributes='data-yanked=""')
    shutil.rmtree(world.hosts / "simple" / "wheels")
    (world.hosts / "dist" / "index.html").unlink()
    rows = world.rows()
    assert rows["toy"].note == "1.1 was yanked: no reason given"
    assert rows["wheels"].note == "not asked: pip's index offers no wheels"
    assert "HTTP 404" in rows["engine"].note and not rows["engine"].outdated


def test_commands(world: World) -> None:
    """Exit codes and words of the command line, in one go."""
    project = MiniProject(world.root)
    rows = json.loads(project.forge("outdated", "--json", code=1).stdout)
    assert {row["name"]: row["outdated"] for row in rows}["toy"]
    done = project.forge("bump", "engine", "2.0.0", code=1)
    assert "refused, nothing was changed" in done.stderr and "--with" in done.stderr
    done = project.forge("bump", "engine", "2.0.0", "--with", "wheels=2.0.0")
    assert "engine 1.0.0 -> 2.0.0" in done.stdout and "wrote variants.yaml" in done.stdout
    assert "not PKG=VERSION" in project.forge("bump", "toy", "--with", "wheels", code=2).stderr
    shutil.rmtree(world.hosts)
    assert "toy: not asked: pip's index" in project.forge("outdated", code=3).stderr


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


@pytest.mark.parametrize(
    ("spec", "old", "new", "pinned"),
    [
        ("2.13.*", "2.13.0", "2.14.1", "2.14.*"),
        ("2.8.3.post2.*", "2.8.3.post2", "2.8.4", "2.8.4.*"),
        (">=0.1.19", "0.1.20", "0.1.21", ">=0.1.19"),
        ("2.1", "2.13.0", "3.0.0", "2.1"),
        ("*", "1.0", "1.1", "*"),
    ],
)
def test_pin_like(spec: str, old: str, new: str, pinned: str) -> None:
    assert draft.pin_like(spec, old, new) == pinned


LINES: list[Callable[[str], str]] = [
    lambda body: body,
    lambda body: body + "\n## [1.0]\n- first\n",
    lambda body: body + "\n### Changed\n- something else\n",
    lambda body: (
        body + "\n### Changed\n- something else\n\n### Fixed\n- that\n\n## [1.0]\n- first\n"
    ),
]


@pytest.mark.parametrize("make", LINES)
def test_changelog_there_and_back(make: Callable[[str], str]) -> None:
    text = make("# Changelog\n\n## [Unreleased]\n\n### Added\n- a\n")
    moved = draft.changelog(text, "p", "1", "2")
    assert moved.count("- p 1 -> 2\n") == 1 and moved.count("### Changed\n") == 1
    assert draft.changelog(moved, "p", "1", "2") == moved
    again = draft.changelog(moved, "p", "2", "3")
    assert "- p 1 -> 3\n" in again and "-> 2" not in again
    assert draft.changelog(again, "p", "3", "1") == text


def test_flash_attn_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real recipe and PyPI, in a copy of this repository under git."""
    monkeypatch.setenv(PYPI_SOURCES, PYPI_URL)
    root = tmp_path / "copy"
    names = ("recipes", "patches", "bases", "stacks", "src", "tests", *draft.COPIED[:2],
             draft.VARIANTS, "LICENSE")  # fmt: skip
    root.mkdir()
    for name in names:
        path = CHECKOUT / name
        if path.is_dir():
            shutil.copytree(path, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, root)
    git = ["git", "-C", str(root)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True, env=os.environ | IDENTITY)
    project = Project(root, root / "channel", tmp_path / "build")
    recipe = draft.every_source(project).recipes["flash-attn"]
    place = pins.place_of(draft.every_source(project), recipe)
    assert isinstance(place, upstream.Place)
    versions = [r.version for r in place.releases(recipe.version) if r.usual]
    before = versions[versions.index(recipe.version) - 1]
    moves = pins.bump(project, {"flash-attn": before}, lambda *_: None).moves
    assert moves == [f"flash-attn {recipe.version} -> {before}"]
    assert before in (root / "recipes/flash-attn/recipe.yaml").read_text()
    done = pins.bump(project, {"flash-attn": recipe.version}, lambda *_: None)
    assert any("patches of flash-attn: applies" in r.text for r in done.relations)
    status = [*git, "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, check=True).stdout == b""
