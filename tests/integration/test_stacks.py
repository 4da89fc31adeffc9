# SPDX-License-Identifier: BSD-3-Clause
"""Stacks without pixi: solve, lock, install exactly the lock, run activated."""

import re
import shutil
from pathlib import Path

import pytest
from support.commands import expect_error
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
    """alpha and beta are built, and locked; never-built names a host that does not exist."""
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
    project.stack("app", text=MANIFEST)
    project.forge("lock", "app")
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
    project.stack("app", text=MANIFEST)
    error = expect_error("lock", "app", **project.environment)
    assert str(error) == "the host base is not made yet: run forge build-all --base host"
    assert not lock_of(project).exists()


def test_a_package_tested_again_installs(tmp_path: Path, host_base: None) -> None:
    """rattler-build leaves an import test's script in the cache, if the package is in there."""
    project = MiniProject(tmp_path)
    recipe = project.recipe("alpha", run=["python"]) / "recipe.yaml"
    text, imports = recipe.read_text(), "python: {imports: [os]}"
    recipe.write_text(text.replace("script: ['test -n ok']", imports))
    project.forge("build-all")
    project.stack("app", "python", "alpha")
    project.forge("lock", "app")
    project.forge("install", "app")
    project.forge("test-packages", "alpha")
    shutil.rmtree(project.root / "build" / "stacks" / "app" / ".pixi")
    project.forge("install", "app")


def test_a_lock_has_the_hash_of_what_was_built(app: MiniProject) -> None:
    """Twice the same; test_locks.py shows that the bindings write it in the form of pixi."""
    text = lock_of(app).read_text()
    app.forge("lock", "app")
    assert lock_of(app).read_text() == text
    entry = r"(?m)^- conda: (\S+/channel/noarch/alpha-\S+)\n((?:  .*\n)+)"
    ((file, fields),) = re.findall(entry, text)
    assert f"  sha256: {sha256_file(Path(file))}\n" in fields
    (app.channel / "noarch" / "repodata.json").unlink()
    app.forge("lock", "app")  # which makes the index first


def test_path_with_a_space(tmp_path: Path) -> None:
    project = MiniProject(tmp_path / "with space")
    project.recipe("alpha")
    project.forge("build-all")
    project.stack("app", "alpha")
    project.forge("lock", "app")
    project.forge("install", "app")
    run = project.forge("run", "app", "--", "sh", "-c", 'cat "$CONDA_PREFIX/share/alpha/text"')
    assert run.stdout.strip() == "alpha"


def test_tampered_package_is_not_installed(app: MiniProject) -> None:
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


def test_usage(app: MiniProject) -> None:
    lock, here = lock_of(app), app.environment
    text = lock.read_text()
    assert "no environment 'x'" in str(expect_error("install", "app", "-e", "x", **here))
    error = expect_error("run", "app", "-e", "x", "--", "true", **here)
    assert "app -e x is not installed: run forge install app -e x" in str(error)
    for damaged, says in (("version: [", "not a lock file"), (None, "not locked")):
        lock.write_text(damaged) if damaged else lock.unlink()
        error = expect_error("install", "app", **here)
        assert says in str(error) and error.exit_code == 2
    lock.write_text(text)


def test_what_does_not_solve(app: MiniProject) -> None:
    """test_locks.py has what else a manifest may not have."""
    manifest, text = app.root / "stacks/app/pixi.toml", lock_of(app).read_text()
    manifest.write_text(MANIFEST.replace('"1.0.*"', '"2.0.*"'))
    error = expect_error("lock", "app", **app.environment)
    manifest.write_text(MANIFEST)
    assert "does not solve" in str(error) and error.exit_code == 1
    assert lock_of(app).read_text() == text
