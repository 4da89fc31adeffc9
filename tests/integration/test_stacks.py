# SPDX-License-Identifier: BSD-3-Clause
"""Without pixi the driver locks a stack, installs it from the lock, and runs commands in it."""

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
    """A project with a locked stack of alpha and beta.

    The stack also requires never-built, a package that cannot be built because the server of its
    source does not exist.
    """
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


def get_lock(project: MiniProject) -> Path:
    return project.root / "build" / "stacks" / "app" / "pixi.lock"


def test_lock_install_run(app: MiniProject) -> None:
    done = app.forge("lock", "app")
    assert "left out never-built" in done.stdout
    lock = app.root / "stacks/app/pixi.lock"
    assert not lock.exists(), "no host-bound lock may be in the folder that pixi reads"
    done = app.forge("install", "app")
    assert "left out never-built: the channel lacks it (./forge build never-built" in done.stdout
    app.forge("install", "app", "-e", "more")
    done = app.forge("run", "app", "--", "sh", "-c", 'echo "$ALPHA $CONDA_PREFIX"; exit 3', code=3)
    state, prefix = done.stdout.split()
    assert state == "on" and Path(prefix).is_relative_to(app.root)
    done = app.forge("run", "app", "--", "python", "-c", "import sys; print(sys.prefix)")
    assert done.stdout.strip() == prefix
    assert not list(Path(prefix).glob("share/beta"))
    done = app.forge("run", "app", "-e", "more", "--", "sh", "-c", 'ls "$CONDA_PREFIX/share"')
    assert "beta" in done.stdout


def test_a_lock_before_anything_was_built_says_what_to_run(tmp_path: Path) -> None:
    project = MiniProject(tmp_path)
    (project.root / "build" / "host-base").unlink()
    project.stack("app", text=MANIFEST)
    error = expect_error("lock", "app", **project.environment)
    assert str(error) == "the host base is not made yet: run ./forge build-all --base host"
    assert not get_lock(project).exists()


def test_a_package_tested_again_installs(tmp_path: Path, host_base: None) -> None:
    """A package can be installed after its import test was repeated.

    When rattler-build repeats the test, it leaves the test's script in the package's folder in the
    cache.
    """
    project = MiniProject(tmp_path)
    recipe = project.recipe("alpha", run=["python"]) / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text.replace("script: ['test -n ok']", "python: {imports: [os]}"))
    project.forge("build-all")
    project.stack("app", "python", "alpha")
    project.forge("lock", "app")
    project.forge("install", "app")
    project.forge("test-packages", "alpha")
    shutil.rmtree(project.root / "build" / "stacks" / "app" / ".pixi")
    project.forge("install", "app")


def test_a_lock_has_the_hash_of_what_was_built(app: MiniProject) -> None:
    """The lock has the sha256 of each built package, and a second `lock` writes the same text.

    test_locks.py tests that the bindings do not change a lock of pixi.
    """
    text = get_lock(app).read_text()
    app.forge("lock", "app")
    assert get_lock(app).read_text() == text
    entry = r"(?m)^- conda: (\S+/channel/noarch/alpha-\S+)\n((?:  .*\n)+)"
    ((file, fields),) = re.findall(entry, text)
    assert f"  sha256: {sha256_file(Path(file))}\n" in fields
    # If the channel's index is missing, `lock` writes the index first.
    (app.channel / "noarch" / "repodata.json").unlink()
    app.forge("lock", "app")


def test_path_with_a_space(tmp_path: Path) -> None:
    project = MiniProject(tmp_path / "with space")
    project.recipe("alpha")
    project.forge("build-all")
    project.stack("app", "alpha")
    project.forge("lock", "app")
    project.forge("install", "app")
    done = project.forge("run", "app", "--", "sh", "-c", 'cat "$CONDA_PREFIX/share/alpha/text"')
    assert done.stdout.strip() == "alpha"


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
    """With pixi, `install` and `run` run pixi on the copy of the stack in build/stacks.

    `lock` runs pixi in another folder. The driver ends with pixi's exit code. The copy names the
    channels in use.
    """
    pixi = tmp_path / "pixi"
    words_file = tmp_path / "words"
    pixi.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {words_file}\nexit 7\n')
    pixi.chmod(0o755)
    path = f"{tmp_path}:{app.environment['PATH']}"
    copy = get_lock(app).with_name("pixi.toml")
    (copy.parent / ".pixi/envs/default/conda-meta").mkdir(parents=True, exist_ok=True)
    for words, expected in (
        (["lock", "app"], ["lock"]),
        (["install", "app", "-e", "more"], ["install", "--locked", "-e", "more"]),
        (
            ["run", "app", "--", "sh", "-c", "exit 3"],
            ["run", "--as-is", "-e", "default", "--", "sh", "-c", "exit 3"],
        ),
    ):
        app.forge(*words, code=7, PATH=path, FORGE_NO_PIXI="")
        command, option, manifest, *options = words_file.read_text().splitlines()
        assert [command, *options] == expected and option == "--manifest-path"
        message = "only `lock` must work in another folder, so that a kill leaves the old lock"
        assert (manifest == str(copy)) == (command != "lock"), message
    text = copy.read_text()
    assert PUBLISHED not in text and app.channel.as_uri() in text and "never-built" not in text
    assert "host-base" in text and 'python = "3.' in text


def test_usage(app: MiniProject) -> None:
    """A missing environment, a damaged lock and a missing lock are reported."""
    lock = get_lock(app)
    text = lock.read_text()
    assert "no environment 'x'" in str(expect_error("install", "app", "-e", "x", **app.environment))
    error = expect_error("run", "app", "-e", "x", "--", "true", **app.environment)
    assert "app -e x is not installed: run ./forge install app -e x" in str(error)
    lock.write_text("version: [")
    error = expect_error("install", "app", **app.environment)
    assert "not a lock file" in str(error) and error.exit_code == 2
    lock.unlink()
    error = expect_error("install", "app", **app.environment)
    assert "not locked" in str(error) and error.exit_code == 2
    lock.write_text(text)


def test_what_does_not_solve(app: MiniProject) -> None:
    """If a stack does not solve, its lock stays. test_locks.py has other faults of manifests."""
    text = get_lock(app).read_text()
    manifest = app.root / "stacks/app/pixi.toml"
    manifest.write_text(MANIFEST.replace('"1.0.*"', '"2.0.*"'))
    error = expect_error("lock", "app", **app.environment)
    manifest.write_text(MANIFEST)
    assert "does not solve" in str(error) and error.exit_code == 1
    assert get_lock(app).read_text() == text
