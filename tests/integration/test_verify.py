# SPDX-License-Identifier: BSD-3-Clause
"""`forge verify` compares a package with the recipe that the package names as its own."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.conda_packages import file, package, repack, tarball
from support.project import MiniProject

from forge.conda.package import Package
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
    """A project with the packages alpha and beta, in a git repository.

    alpha is built from an archive, a patch and a folder of the repository. beta requires alpha, and
    the name of beta's package contains the GPU's name.
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
    alpha = project.recipe("alpha", script=SCRIPT, source=json.dumps(source)) / "recipe.yaml"
    # A noarch package must not contain links.
    text = alpha.read_text().replace("  noarch: generic\n", "")
    text = text.replace("  run: []", '  host: [packaging]\n  run: ["packaging >=20"]')
    alpha.write_text(text)
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
    """Commit all files of a repository, and return the commit."""
    git(root, "add", "-A")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    git(root, *identity, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def built(app: MiniProject) -> Path:
    """The package of alpha."""
    (path,) = app.channel.glob("*/alpha-*.conda")
    return path


def test_a_package_is_as_its_recipe(app: MiniProject) -> None:
    """Packages agree with their recipes in the checkout and in a commit.

    The package alpha has patches and local sources. The package beta requires alpha.
    """
    files = [str(path) for path in app.channel.glob("*/*.conda")]
    for options in ([], ["--commit", "HEAD"]):
        done = app.forge("verify", *files, *options)
        assert done.stdout.count(": as its recipe; compared: ") == 2, done.stdout
        assert "3 files with its own list" in done.stdout
        assert "its recipe with recipes/alpha" in done.stdout


def test_what_extra_states_is_not_compared(app: MiniProject, built: Path) -> None:
    """A change below the key `extra`, which states how earlier builds ran, is no difference."""
    recipe = app.root / "recipes/alpha/recipe.yaml"
    text = recipe.read_text()
    try:
        recipe.write_text(text + "extra:\n  state: {ran: emulated}\n")
        assert ": as its recipe; compared: " in app.forge("verify", str(built)).stdout
    finally:
        recipe.write_text(text)


# Edits of the checkout: a file, the old text, the new text, and a part of the message.
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
    """The message names what an edit has changed.

    The package still agrees with the commit before the edit, and differs from the commit with the
    edit.
    """
    name, old, new, message = EDITS[case]
    path = app.root / name
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new, 1))
    try:
        done = app.forge("verify", str(built), code=1)
        assert message in done.stdout and "alpha-1.0" in done.stdout, done.stdout
        assert ": differs; compared: " in done.stdout
        assert ": as its recipe" in app.forge("verify", str(built), "--commit", "HEAD").stdout
        changed = commit(app.root, "changed")
        path.write_text(text)
        assert ": as its recipe" in app.forge("verify", str(built)).stdout
        assert message in app.forge("verify", str(built), "--commit", changed, code=1).stdout
    finally:
        path.write_text(text)
        commit(app.root, "as it was")
    assert list((app.root / "build").glob(".forge-*")) == []


def edit_rendered(change: Callable[[dict], object]) -> Callable[[str, str, bytes], bytes]:
    """Return a function for repack() that changes the rendered recipe of a package."""

    def edit(_: str, name: str, content: bytes) -> bytes:
        if name != "info/recipe/rendered_recipe.yaml":
            return content
        data = yaml.safe_load(content)
        change(data)
        return yaml.safe_dump(data).encode()

    return edit


def edit_digest(data: dict) -> None:
    """Change the digest of the files that the package was built from."""
    variant = data["build_configuration"]["variant"]
    base, content, suffix = variant["content_digest"].split("-")
    variant["content_digest"] = f"{base}-{content[::-1]}-{suffix}"


def hide_source(data: dict) -> None:
    """State a false source, and the true source in keys such as `source.0.url`.

    `forge verify` names a value inside lists and dicts by a path such as `source.0.url`, and must
    not mistake such a key for the path.
    """
    recipe = data["recipe"]
    source = recipe["source"][0]
    for key in ("url", "sha256"):
        recipe[f"source.0.{key}"] = source[key]
    source |= {"url": "https://evil.invalid/x.tar.gz", "sha256": "1" * 64}


def add_nested_lists(data: dict) -> None:
    """Add lists that contain a hundred million values and are short in YAML.

    Each list contains the previous list ten times, which YAML writes as ten aliases.
    """
    values = ["x"] * 10
    for _ in range(7):
        values = [values] * 10
    data["recipe"]["about"]["more"] = values


# False rendered recipes: a function that changes the recipe, and a pattern of the message.
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
    "values without end": (add_nested_lists, "has more than 10000 values"),
    "no patch": (lambda d: d["recipe"]["source"][0].pop("patches"), "source.0.patches.0"),
    "one patch more": (
        lambda d: d["recipe"]["source"][0]["patches"].append("x.patch"),
        "source.0.patches.1",
    ),
    "other files read": (edit_digest, "content: the package was made from files with digest"),
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
    change, pattern = LIES[case]
    other = repack(built, tmp_path / built.name, edit_rendered(change))
    done = app.forge("verify", str(other), code=1)
    assert re.search(pattern, done.stdout), done.stdout
    assert all(len(line) < 1000 for line in done.stdout.splitlines())


# False values of info/index.json.
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
    """A false value in info/index.json is named, though the rendered recipe is correct.

    Solvers and installers do not read the rendered recipe.
    """

    def edit(_: str, name: str, content: bytes) -> bytes:
        if name != "info/index.json":
            return content
        return json.dumps(json.loads(content) | {key: INDEX_LIES[key]}).encode()

    other = repack(built, tmp_path / built.name, edit)
    assert f"{key}: the package has " in app.forge("verify", str(other), code=1).stdout


def test_another_version_with_the_same_recipe(
    app: MiniProject, built: Path, tmp_path: Path
) -> None:
    name = "recipe/rendered_recipe.yaml"
    info = [file(f"info/{name}", Package(built).info[name])]
    newer = package(tmp_path, [file("x")], "alpha", info=info, version="9.9", dist="alpha-9.9-0")
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
    """The message names the damaged recipe of another package, and not the verified package."""
    path = app.root / "recipes/aaa/recipe.yaml"
    path.parent.mkdir()
    path.write_text(text)
    try:
        assert f"{path} is not a recipe: " in app.forge("verify", str(built), code=1).stdout
    finally:
        shutil.rmtree(path.parent)


def test_a_pipe_is_not_waited_for(app: MiniProject, tmp_path: Path) -> None:
    pipe = tmp_path / "a-1-0.conda"
    os.mkfifo(pipe)
    assert "is not a file, but a pipe" in app.forge("verify", str(pipe), code=2).stderr


@pytest.mark.parametrize("revision", ["0" * 40, "nosuch", "--help", "-x", "HEAD:recipes"])
def test_a_commit_that_is_not_there(revision: str, app: MiniProject, built: Path) -> None:
    done = app.forge("verify", str(built), f"--commit={revision}", code=2)
    assert "has no commit" in done.stderr and "leave out --commit" in done.stderr


def test_a_commit_whatever_git_is_told(app: MiniProject, built: Path, tmp_path: Path) -> None:
    """`--commit` works in a git hook, which sets GIT_DIR, and with Windows line ends.

    The checkout keeps its commit and its files.
    """
    config = tmp_path / "config"
    config.write_text("[core]\n autocrlf = true\n")
    old = git(app.root, "rev-parse", "HEAD")
    new = commit(app.root, "newer")
    for variables in ({"GIT_DIR": str(app.root / ".git")}, {"GIT_CONFIG_GLOBAL": str(config)}):
        done = app.forge("verify", str(built), "--commit", old, **variables)
        assert ": as its recipe" in done.stdout
        assert git(app.root, "rev-parse", "HEAD") == new
        assert git(app.root, "symbolic-ref", "HEAD") and not git(app.root, "status", "--short")


def test_without_git_the_files_as_they_are(app: MiniProject, built: Path, tmp_path: Path) -> None:
    """`forge verify` works in a checkout without git, for example in an unpacked archive."""
    copy = tmp_path / "copy"
    shutil.copytree(app.root, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "build"))
    done = app.forge("verify", str(built), FORGE_ROOT=str(copy))
    assert ": as its recipe" in done.stdout
