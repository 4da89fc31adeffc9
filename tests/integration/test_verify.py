# SPDX-License-Identifier: BSD-3-Clause
"""`forge verify`: a package beside the recipe that it says it was built from."""

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
import zstandard
from support.conda_packages import file, package, repack, tarball
from support.project import MiniProject

from forge.files import sha256_file

URL = "http://upstream.invalid/demo-1.0.tar.gz"
PATCH_NAME = "patches/alpha/0001-more.patch"
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
Subject: [PATCH] say more

Upstream-Status: Backport https://upstream.invalid/pull/1
Applies-To: alpha 1.0
---
--- a/text
+++ b/text
@@ -1 +1 @@
-upstream
+patched
"""
SCRIPT = """\
mkdir -p "$PREFIX/share/{name}"
cp text own "$PREFIX/share/{name}/"
ln -s text "$PREFIX/share/{name}/link"
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """alpha 1.0, from an archive, a patch and a folder of the repository.

    beta, whose package has a GPU's name in its own, needs it.
    """
    project = MiniProject(tmp_path_factory.mktemp("app"))
    archive = project.root / "demo-1.0.tar.gz"
    archive.write_bytes(tarball(file("demo-1.0/text", b"upstream\n")))
    for name, text in ((PATCH_NAME, PATCH), ("src/alpha/own", "own\n")):
        (project.root / name).parent.mkdir(parents=True)
        (project.root / name).write_text(text)
    source = [
        {"url": URL, "sha256": sha256_file(archive), "patches": [f"../../{PATCH_NAME}"]},
        {"path": "../../src/alpha"},
    ]
    folder = project.recipe("alpha", script=SCRIPT, source=json.dumps(source))
    recipe = (folder / "recipe.yaml").read_text()
    recipe = recipe.replace("  noarch: generic\n", "")  # noarch packages must not hold links
    recipe = recipe.replace("  run: []", '  host: [packaging]\n  run: ["packaging >=20"]')
    (folder / "recipe.yaml").write_text(recipe)
    beta = project.recipe("beta", run=["alpha"]) / "recipe.yaml"
    beta.write_text(beta.read_text().replace("{name: beta,", '{name: "beta-${{ gpu_arch }}",'))
    (project.root / "build" / "sources").unlink()
    project.forge("sources", "add", str(archive))
    project.forge("build-all", "--strict")
    git(project.root, "init", "-q")
    (project.root / ".gitignore").write_text("build\nchannel\n")
    commit(project.root, "built")
    return project


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root: Path, message: str) -> str:
    git(root, "add", "-A")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    git(root, *who, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def built(app: MiniProject) -> Path:
    (path,) = app.channel.glob("*/alpha-*.conda")
    return path


def test_a_package_is_as_its_recipe(app: MiniProject) -> None:
    """With patches and local sources, and where it needs another of ours; also at a commit."""
    files = [*map(str, app.channel.glob("*/*.conda"))]
    for words in ([], ["--commit", "HEAD"]):
        done = app.forge("verify", *files, *words)
        assert done.stdout.count(": as its recipe; compared: ") == 2, done.stdout
        assert "3 files with its own list" in done.stdout
        assert "its recipe with recipes/alpha" in done.stdout


def test_what_extra_states_is_not_compared(app: MiniProject, built: Path) -> None:
    """It says what was done with earlier builds, and changes when a later one is tried."""
    recipe = app.root / "recipes/alpha/recipe.yaml"
    text = recipe.read_text()
    try:
        recipe.write_text(text + "extra:\n  state: {ran: emulated}\n")
        assert ": as its recipe; compared: " in app.forge("verify", str(built)).stdout
    finally:
        recipe.write_text(text)


EDITS: dict[str, tuple[str, str, str, str]] = {
    "a patch": ("patches/alpha/0001-more.patch", "+patched", "+other", "0001-more.patch"),
    "a local source": ("src/alpha/own", "own", "other", "src/alpha"),
    "the script": ("recipes/alpha/build.sh", "mkdir", "install -d", "build.sh"),
    "the hash of a source": ("recipes/alpha/recipe.yaml", '"sha256": "', '"sha256": "0', "sha256"),
    "a requirement": ("recipes/alpha/recipe.yaml", "packaging >=20", "packaging >=21", "run.0"),
    "the summary": ("recipes/alpha/recipe.yaml", "a test package", "another", "about.summary"),
}


@pytest.mark.parametrize("case", EDITS)
def test_another_recipe_is_named(case: str, app: MiniProject, built: Path) -> None:
    """By what differs; the commit that it was built from has it as it was."""
    name, old, new, named = EDITS[case]
    path = app.root / name
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new, 1))
    try:
        done = app.forge("verify", str(built), code=1)
        assert named in done.stdout and "alpha-1.0" in done.stdout, done.stdout
        assert ": differs; compared: " in done.stdout
        assert ": as its recipe" in app.forge("verify", str(built), "--commit", "HEAD").stdout
        changed = commit(app.root, "changed")
        path.write_text(text)
        assert ": as its recipe" in app.forge("verify", str(built)).stdout
        assert named in app.forge("verify", str(built), "--commit", changed, code=1).stdout
    finally:
        path.write_text(text)
        commit(app.root, "as it was")
    assert not [*(app.root / "build").glob(".forge-*")]


def edit_rendered(change: Callable[[dict], object]) -> Callable[[str, str, bytes], bytes]:
    def edit(_: str, name: str, content: bytes) -> bytes:
        if name != "info/recipe/rendered_recipe.yaml":
            return content
        data = yaml.safe_load(content)
        change(data)
        return yaml.safe_dump(data).encode()

    return edit


def edit_content(data: dict) -> None:
    base, content, rest = data["build_configuration"]["variant"]["content_digest"].split("-")
    data["build_configuration"]["variant"]["content_digest"] = f"{base}-{content[::-1]}-{rest}"


def hide_source(data: dict) -> None:
    """State a false source, and the true one in keys that read like the places of its values."""
    (source, *_), recipe = data["recipe"]["source"], data["recipe"]
    recipe |= {f"source.0.{key}": source[key] for key in ("url", "sha256")}
    source |= {"url": "https://evil.invalid/x.tar.gz", "sha256": "1" * 64}


def repeat_without_end(data: dict) -> None:
    """Lists of ten times the list before, which YAML writes as ten names of it."""
    values = ["x"] * 10
    for _ in range(7):
        values = [values] * 10
    data["recipe"]["about"]["more"] = values


LIES: dict[str, tuple[Callable[[dict], object], str]] = {
    "a source's hash": (
        lambda d: d["recipe"]["source"][0].update(sha256="0" * 64),
        "source.0.sha256",
    ),
    "a source's address": (
        lambda d: d["recipe"]["source"][0].update(url="https://evil.invalid/x.tar.gz"),
        "source.0.url",
    ),
    "a source beside the true one": (hide_source, "source.0.sha256: the package has 1111"),
    "values without end": (repeat_without_end, "has more than 10000 values"),
    "no patch": (lambda d: d["recipe"]["source"][0].pop("patches"), "source.0.patches.0"),
    "one patch more": (
        lambda d: d["recipe"]["source"][0]["patches"].append("x.patch"),
        "source.0.patches.1",
    ),
    "other files read": (edit_content, "content: the package was made from files with digest"),
    "a variant": (
        lambda d: d["build_configuration"]["variant"].update(gpu_arch="gfx1100"),
        "variant.gpu_arch|build.string",
    ),
    "no variant": (
        lambda d: d["build_configuration"].pop("variant"),
        "its rendered recipe cannot be read:",
    ),
    "no recipe": (lambda d: d.pop("recipe"), "its rendered recipe cannot be read:"),
    "a recipe that is none": (lambda d: d.update(recipe=[]), "its rendered recipe cannot be read:"),
    "an unknown base": (
        lambda d: d["build_configuration"]["variant"].update(content_digest="../x-0-0"),
        "base|readable",
    ),
}


@pytest.mark.parametrize("case", LIES)
def test_a_package_that_says_something_else(
    case: str, app: MiniProject, built: Path, tmp_path: Path
) -> None:
    change, named = LIES[case]
    other = repack(built, tmp_path / built.name, edit_rendered(change))
    done = app.forge("verify", str(other), code=1)
    assert re.search(named, done.stdout), done.stdout
    assert all(len(line) < 1000 for line in done.stdout.splitlines())


INDEX_LIES: dict[str, object] = {
    "build_number": 7,
    "license": "Apache-2.0",
    "noarch": "generic",
    "depends": ["evil >=1"],
    "constrains": ["packaging <20"],
}


@pytest.mark.parametrize("key", INDEX_LIES)
def test_an_index_that_is_not_of_its_recipe(
    key: str, app: MiniProject, built: Path, tmp_path: Path
) -> None:
    """Solvers and installers read info/index.json, and not the rendered recipe."""

    def edit(_: str, name: str, content: bytes) -> bytes:
        if name != "info/index.json":
            return content
        return json.dumps(json.loads(content) | {key: INDEX_LIES[key]}).encode()

    other = repack(built, tmp_path / built.name, edit)
    assert f"{key}: the package has " in app.forge("verify", str(other), code=1).stdout


def test_another_version_with_the_same_recipe(
    app: MiniProject, built: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(built) as archive:
        (name,) = [item for item in archive.namelist() if item.startswith("info-")]
        content = zstandard.ZstdDecompressor().decompressobj().decompress(archive.read(name))
    with tarfile.open(fileobj=io.BytesIO(content)) as members:
        stream = members.extractfile("info/recipe/rendered_recipe.yaml")
        rendered = ("info/recipe/rendered_recipe.yaml", stream.read() if stream else b"")
    newer = package(
        tmp_path, [file("x")], "alpha", info=[file(*rendered)], version="9.9", dist="alpha-9.9-0"
    )
    done = app.forge("verify", str(newer), code=1)
    assert "version: the package has 9.9, its rendered recipe has 1.0" in done.stdout
    assert "build: the package has 0, its rendered recipe has hostbound_h" in done.stdout


def test_a_file_that_is_not_the_listed_one(app: MiniProject, built: Path, tmp_path: Path) -> None:
    def edit(_: str, name: str, content: bytes) -> bytes:
        return b"other\n" if name.endswith("share/alpha/own") else content

    other = repack(built, tmp_path / built.name, edit)
    done = app.forge("verify", str(other), code=1)
    assert "share/alpha/own: the package has " in done.stdout


def test_a_recipe_file_that_is_not_the_checkouts(
    app: MiniProject, built: Path, tmp_path: Path
) -> None:
    def edit(_: str, name: str, content: bytes) -> bytes:
        return content + b"# more\n" if name == "info/recipe/build.sh" else content

    other = repack(built, tmp_path / built.name, edit)
    assert "build.sh: the package has " in app.forge("verify", str(other), code=1).stdout


def test_a_package_of_no_recipe_is_not_compared(app: MiniProject, tmp_path: Path) -> None:
    stranger = package(tmp_path, [file("x")], name="stranger")
    done = app.forge("verify", str(stranger), code=3)
    assert "no recipe of this checkout yields this package; compared: 1 files" in done.stdout


@pytest.mark.parametrize("text", ["", "[]", "outputs: [", "outputs: 5", "package: 3"])
def test_another_recipe_that_is_none(text: str, app: MiniProject, built: Path) -> None:
    """The message names it, and does not blame the package."""
    (path := app.root / "recipes/aaa/recipe.yaml").parent.mkdir()
    path.write_text(text)
    try:
        assert f"{path} is not a recipe: " in app.forge("verify", str(built), code=1).stdout
    finally:
        shutil.rmtree(path.parent)


def test_a_pipe_is_not_waited_for(app: MiniProject, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "a-1-0.conda")
    assert "is not a file, but a pipe" in app.forge("verify", str(pipe), code=2).stderr


@pytest.mark.parametrize("revision", ["0" * 40, "nosuch", "--help", "-x", "HEAD:recipes"])
def test_a_commit_that_is_not_there(revision: str, app: MiniProject, built: Path) -> None:
    done = app.forge("verify", str(built), f"--commit={revision}", code=2)
    assert "has no commit" in done.stderr and "leave out --commit" in done.stderr


def test_a_commit_whatever_git_is_told(app: MiniProject, built: Path, tmp_path: Path) -> None:
    """As in a hook, and with line ends of Windows; this checkout stays where it is."""
    (config := tmp_path / "config").write_text("[core]\n autocrlf = true\n")
    old, new = git(app.root, "rev-parse", "HEAD"), commit(app.root, "newer")
    for told in ({"GIT_DIR": str(app.root / ".git")}, {"GIT_CONFIG_GLOBAL": str(config)}):
        done = app.forge("verify", str(built), "--commit", old, **told)
        assert ": as its recipe" in done.stdout
        assert git(app.root, "rev-parse", "HEAD") == new
        assert git(app.root, "symbolic-ref", "HEAD") and not git(app.root, "status", "--short")


def test_without_git_the_files_as_they_are(app: MiniProject, built: Path, tmp_path: Path) -> None:
    """As in an archive of this repository."""
    copy = tmp_path / "copy"
    shutil.copytree(app.root, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "build"))
    done = app.forge("verify", str(built), FORGE_ROOT=str(copy))
    assert ": as its recipe" in done.stdout
