# SPDX-License-Identifier: BSD-3-Clause
"""Stacks without pixi: solve, lock, install exactly the lock, run activated."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.lock_format import PACKAGE_KEYS
from support.project import MiniProject

from forge.bases import PUBLISHED
from forge.files import sha256_file

MANIFEST = f"""\
[workspace]
name = "app"
channels = ["{PUBLISHED}", "conda-forge"]
platforms = ["linux-64"]

[dependencies]
python = ">=3.11"
alpha = "1.0.*"
never-built = "*"

[feature.more.dependencies]
beta = {{ version = "1.0" }}

[environments]
more = ["more"]
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """alpha and beta are built; never-built names a host that does not exist."""
    project = MiniProject(tmp_path_factory.mktemp("app"))
    project.recipe(
        "alpha",
        script='mkdir -p "$PREFIX/etc/conda/activate.d" "$PREFIX/bin"\n'
        'echo "export ALPHA=on" > "$PREFIX/etc/conda/activate.d/alpha.sh"\n'
        'printf \'#!/bin/sh\\necho "$PREFIX"\\n\' > "$PREFIX/bin/where"\n'
        'chmod +x "$PREFIX/bin/where"\n',
    )
    project.recipe("beta", run=["alpha"])
    source = '[{url: "http://upstream.invalid/a.tar.gz", sha256: "%s"}]' % ("0" * 64)
    project.recipe("never-built", source=source)
    project.forge("build-all")
    manifest = project.root / "stacks" / "app" / "pixi.toml"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(MANIFEST)
    return project


def lock_of(project: MiniProject) -> Path:
    return project.root / "build" / "stacks" / "app" / "pixi.lock"


def test_lock_install_run(app: MiniProject) -> None:
    done = app.forge("lock", "app")
    assert "left out never-built" in done.stdout
    assert not (app.root / "stacks/app/pixi.lock").exists(), "a host-bound lock where pixi reads"
    installed = app.forge("install", "app").stdout
    assert "left out never-built: the channel lacks it (forge build never-built" in installed
    app.forge("install", "app", "-e", "more")
    run = app.forge("run", "app", "--", "sh", "-c", 'echo "$ALPHA $CONDA_PREFIX"; exit 3', code=3)
    state, prefix = run.stdout.split()
    assert state == "on" and Path(prefix).is_relative_to(app.root)
    where = app.forge("run", "app", "--", "python", "-c", "import sys; print(sys.prefix)")
    assert where.stdout.strip() == prefix
    assert not list(Path(prefix).glob("share/beta"))
    more = app.forge("run", "app", "-e", "more", "--", "sh", "-c", 'ls "$CONDA_PREFIX/share"')
    assert "beta" in more.stdout


def test_a_lock_before_anything_was_built_says_what_to_run(tmp_path: Path) -> None:
    project = MiniProject(tmp_path)
    (project.root / "build" / "host-base").unlink()
    manifest = project.root / "stacks" / "app" / "pixi.toml"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(MANIFEST)
    said = project.forge("lock", "app", code=2).stderr
    assert "error: the host base is not made yet: run forge build-all --base host" in said
    assert not lock_of(project).exists()


def test_a_package_tested_again_installs(tmp_path: Path, host_base: None) -> None:
    """rattler-build leaves an import test's script in the cache, if the package is in there."""
    project = MiniProject(tmp_path)
    recipe = project.recipe("alpha", run=["python"]) / "recipe.yaml"
    text, imports = recipe.read_text(), "python: {imports: [os]}"
    recipe.write_text(text.replace("script: ['test -n ok']", imports))
    project.forge("build-all")
    manifest = project.root / "stacks" / "app" / "pixi.toml"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(re.sub("(?s)never-built.*", "", MANIFEST))
    project.forge("lock", "app")
    project.forge("install", "app")
    project.forge("test-packages", "alpha")
    shutil.rmtree(project.root / "build" / "stacks" / "app" / ".pixi")
    project.forge("install", "app")


def test_lock_has_the_form_of_pixi(app: MiniProject) -> None:
    """Field by field: order of sections, channels, package keys and hashes."""
    app.forge("lock", "app")
    text = lock_of(app).read_text()
    top = re.findall(r"^(\w+):", text, re.M)
    assert top == ["version", "platforms", "environments", "packages"]
    head = "version: 7\nplatforms:\n- name: linux-64\nenvironments:\n  default:\n    channels:\n"
    assert text.startswith(f"{head}    - url: ")
    packages = text.split("\npackages:\n")[1]
    entries = re.split(r"^- ", packages, flags=re.M)[1:]
    for entry in entries:
        keys = re.findall(r"^(?:  )?([a-z_0-9]+):", entry, re.M)
        assert keys[0] == "conda" and keys == sorted(keys, key=PACKAGE_KEYS.index)
        assert "sha256" in keys and "size" in keys
    urls = [re.match(r"conda: (\S+)", entry)[1] for entry in entries]
    for url in re.findall(r"^      - conda: (\S+)$", text, re.M):
        assert url in urls
    local = [entry for entry in entries if "/channel/noarch/alpha-" in entry]
    file = Path(re.search(r"conda: (\S+)", local[0])[1])
    assert f"sha256: {sha256_file(file)}" in local[0]


def test_lock_is_reproducible(app: MiniProject) -> None:
    app.forge("lock", "app")
    first = lock_of(app).read_bytes()
    app.forge("lock", "app")
    assert lock_of(app).read_bytes() == first


def test_path_with_a_space(tmp_path: Path) -> None:
    project = MiniProject(tmp_path / "with space")
    project.recipe("alpha")
    project.forge("build-all")
    manifest = project.root / "stacks" / "app" / "pixi.toml"
    manifest.parent.mkdir(parents=True)
    kept = [line for line in MANIFEST.splitlines() if not line.startswith(("python", "never"))]
    manifest.write_text("\n".join(kept).replace('["more"]', "[]"))
    project.forge("lock", "app")
    project.forge("install", "app")
    run = project.forge("run", "app", "--", "sh", "-c", 'cat "$CONDA_PREFIX/share/alpha/text"')
    assert run.stdout.strip() == "alpha"


def test_tampered_package_is_not_installed(app: MiniProject) -> None:
    app.forge("lock", "app")
    (file,) = app.channel.glob("noarch/beta-*.conda")
    content = file.read_bytes()
    file.write_bytes(content + b"x")
    try:
        error = app.forge("install", "app", "-e", "more", code=1).stderr
        assert str(file) in error and "tampered" in error
        assert "damaged" in app.forge("status").stdout
        file.unlink()
        assert "missing" in app.forge("install", "app", "-e", "more", code=1).stderr
    finally:
        file.write_bytes(content)


def test_with_pixi_the_commands_are_pixis(app: MiniProject, tmp_path: Path) -> None:
    """On the copy in build/stacks, which names the channels in use; its exit codes are theirs."""
    pixi = tmp_path / "pixi"
    pixi.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/said\nexit 7\n')
    pixi.chmod(0o755)
    path = f"{tmp_path}:{app.environment['PATH']}"
    copy = lock_of(app).with_name("pixi.toml")
    app.forge("lock", "app")
    for words, becomes in (
        (["lock", "app"], ["lock"]),
        (["install", "app", "-e", "more"], ["install", "--locked", "-e", "more"]),
        (
            ["run", "app", "--", "sh", "-c", "exit 3"],
            ["run", "--as-is", "-e", "default", "--", "sh", "-c", "exit 3"],
        ),
    ):
        app.forge(*words, code=7, PATH=path, FORGE_NO_PIXI="")
        command, *options = becomes
        said = (tmp_path / "said").read_text().splitlines()
        assert (said[2] == str(copy)) == (command != "lock"), "it locks beside the old lock"
        assert said == [command, "--manifest-path", said[2], *options]
    text = copy.read_text()
    assert PUBLISHED not in text and app.channel.as_uri() in text and "never-built" not in text
    assert "host-base" in text and 'python = "3.' in text


def test_usage(app: MiniProject, tmp_path: Path) -> None:
    assert "not locked" in unlocked_copy(app, tmp_path).forge("install", "app", code=2).stderr
    app.forge("lock", "app")
    assert "no environment 'x'" in app.forge("install", "app", "-e", "x", code=2).stderr
    error = app.forge("run", "app", "-e", "x", "--", "true", code=2).stderr
    assert "app -e x is not installed: run forge install app -e x" in error
    lock_of(app).write_text("version: [")
    assert "not a lock file" in app.forge("install", "app", code=2).stderr


def unlocked_copy(app: MiniProject, folder: Path) -> MiniProject:
    """The manifest in a project of its own, without a lock."""
    project = MiniProject(folder)
    project.recipe("alpha")
    (folder / "stacks" / "app").mkdir(parents=True)
    (folder / "stacks/app/pixi.toml").write_text(MANIFEST)
    return project


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"1.0.*"', '"2.0.*"', "does not solve"),
        ("[dependencies]", "[other]", "[top level] other is not supported"),
        ("[dependencies]", "[dependencies", "not TOML"),
        ('["more"]', '["less"]', "features: less is not defined"),
    ],
)
def test_bad_manifest(app: MiniProject, tmp_path: Path, old: str, new: str, message: str) -> None:
    project = unlocked_copy(app, tmp_path)
    manifest = tmp_path / "stacks/app/pixi.toml"
    manifest.write_text(MANIFEST.replace(old, new))
    code = 1 if "solve" in message else 2
    assert message in project.forge("lock", "app", code=code).stderr


def test_status_agrees_with_the_files(app: MiniProject) -> None:
    rows = json.loads(app.forge("status", "--json").stdout)["packages"]
    assert {row["name"]: row["state"] for row in rows} == {
        "alpha": "built", "beta": "built", "never-built": "not built",
    }  # fmt: skip
    for row in rows:
        if row["file"]:
            file = app.channel / row["file"]
            assert (row["sha256"], row["size"]) == (sha256_file(file), file.stat().st_size)
            assert file.name == f"{row['name']}-{row['version']}-{row['build']}.conda"
