# SPDX-License-Identifier: BSD-3-Clause
"""Miniature projects and copies of the checkout, on which tests run the driver.

A miniature project has the real bases, tiny recipes, a channel and a build folder. Both kinds share
with the checkout what takes long to make: the host base and the fetched sources.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from support.faults import Forks

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES, STACKS = (
    sorted(path.parent.name for path in CHECKOUT.glob(pattern))
    for pattern in ("recipes/*/recipe.yaml", "stacks/*/pixi.toml")
)

NOARCH = """\
schema_version: 1
package: {{name: {name}, version: "1.0"}}
source: {source}
build:
  number: 0
  noarch: generic
  variant: {{use_keys: [content_digest]}}
requirements:
  run: {run}
tests:
  - script: {test}
about:
  license: BSD-3-Clause
  summary: a test package
"""
STACK = """\
[workspace]
name = "{name}"
channels = ["https://repo.prefix.dev/strix-forge", "conda-forge"]
platforms = ["linux-64"]

[dependencies]
"""
SCRIPT = """\
mkdir -p "$PREFIX/share/{name}"
echo {name} > "$PREFIX/share/{name}/text"
"""
# The argument `filter` of tarfile's functions, which CPython 3.11 has since 3.11.4.
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


class MiniProject:
    """A project folder with helpers to write recipes and run the driver's command line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if (root / "variants.yaml").exists():  # The folder is a copy of another miniature project.
            return
        root.mkdir(exist_ok=True)
        for name in ("variants.yaml", ".gitignore"):
            shutil.copy(CHECKOUT / name, root)
        shutil.copytree(CHECKOUT / "recipes/bases", root / "recipes/bases")
        share_build(root)

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    def recipe(
        self,
        name: str,
        run: list[str] | None = None,
        test: str = "test -n ok",
        script: str = SCRIPT,
        source: str = "[]",
        extra: Mapping[str, object] = MappingProxyType({}),
    ) -> Path:
        """Write recipes/NAME, a recipe of a noarch package with one file, and return its folder.

        Args:
            name: The name of the recipe and of its package.
            run: The run requirements.
            test: The command of the package's test.
            script: The text of build.sh. `{name}` stands for the name.
            source: The value of `source`, as YAML.
            extra: The value of `extra`.
        """
        folder = self.root / "recipes" / name
        folder.mkdir(exist_ok=True)
        text = NOARCH.format(name=name, run=json.dumps(run or []), test=[test], source=source)
        if extra:
            text += f"extra: {json.dumps(dict(extra))}\n"
        (folder / "recipe.yaml").write_text(text)
        (folder / "build.sh").write_text(script.format(name=name))
        return folder

    def stack(self, name: str, *packages: str, text: str = "") -> Path:
        """Write stacks/NAME/pixi.toml and return it.

        Args:
            name: The name of the stack.
            packages: The names of the packages that the stack depends on.
            text: The text of the manifest, in place of one with these packages.
        """
        manifest = self.root / "stacks" / name / "pixi.toml"
        manifest.parent.mkdir(parents=True)
        dependencies = "".join(f'{package} = "*"\n' for package in packages)
        manifest.write_text(text or STACK.format(name=name) + dependencies)
        return manifest

    def command(self, *arguments: str) -> list[str]:
        return driver(CHECKOUT, *arguments)

    @property
    def environment(self) -> dict[str, str]:
        return driver_environment(self.root) | {"COLUMNS": "200"}

    def forge(
        self, *arguments: str, code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and require its exit code."""
        done = drive(CHECKOUT, *arguments, **self.environment | environment)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        if arguments[0] in ("build", "build-all", "rebuild"):
            # Import contents only here, because it imports the driver. plain_rendering imports this
            # module, and has to show that recipes are rendered without the driver.
            from support import contents

            contents.check(self.channel)
        return done

    def plan(self) -> dict[str, dict]:
        return {step["recipe"]: step for step in json.loads(self.forge("plan", "--json").stdout)}

    def to_build(self) -> set[str]:
        return {name for name, step in self.plan().items() if step["action"] == "build"}

    def packages(self) -> set[str]:
        return {file.name for file in self.channel.glob("*/*.conda")}


def share_build(root: Path) -> None:
    """Make ROOT/build with links to the checkout's host base and sources."""
    (root / "build").mkdir()
    for shared in ("host-base", "sources"):
        (CHECKOUT / "build" / shared).mkdir(parents=True, exist_ok=True)
        (root / "build" / shared).symlink_to(CHECKOUT / "build" / shared)


def tracked_files() -> list[Path]:
    """Return the files of this checkout that git tracks or does not ignore."""
    return _tracked_below(CHECKOUT)


@cache
def _tracked_below(root: Path) -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = [root / name for name in sorted(names.split("\0")) if name]
    return [path for path in paths if path.is_file()]


def python_files(*folders: str | Path) -> list[Path]:
    """Return the Python files of `tracked_files` that are below these folders of this checkout."""
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py" and any(path.is_relative_to(CHECKOUT / name) for name in folders)
    ]


def copy_checkout(root: Path, packages: bool = True) -> None:
    """Copy the files that git tracks or does not ignore, and the files of channel/, to `root`.

    The copy then has the packages that were built in the checkout. It shares the checkout's host
    base and sources by links. Tests that use the copy write to nothing else in the checkout.
    Packages are hard links if possible.

    Args:
        root: The copy.
        packages: Whether to copy channel/. Without it the copy is like a new clone.
    """
    channel = [file for file in (CHECKOUT / "channel").rglob("*") if file.name != ".lock"]
    files = [*tracked_files(), *(filter(Path.is_file, channel) if packages else ())]
    for file in files:
        target = root / file.relative_to(CHECKOUT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            continue
        # Packages may be hard links, because nothing changes a package in place. If /tmp is another
        # filesystem, hard links are impossible.
        with suppress(OSError):
            if file.suffix == ".conda":
                target.hardlink_to(file)
                continue
        shutil.copy2(file, target, follow_symlinks=False)
    share_build(root)


def driver(root: Path, *arguments: str) -> list[str]:
    """Return a command line of the driver in `root`, for the interpreter that runs the tests."""
    return [sys.executable, str(root / "src" / "forge"), *arguments]


def driver_environment(root: Path) -> dict[str, str]:
    """Return the environment of a driver that works on `root` with the host base, without pixi."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"FORGE_ROOT": str(root), "FORGE_BASE": "host", "FORGE_NO_PIXI": "1", "PATH": path}
    return os.environ | variables


def drive(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the driver of a checkout.

    It works on the same checkout, unless `environment` has FORGE_ROOT.
    """
    command = driver(root, *arguments)
    variables = driver_environment(root) | environment
    if root == CHECKOUT and "PYTHONPATH" not in environment:
        done = forks()(*arguments, **variables)
        return subprocess.CompletedProcess(command, done.code, done.out, done.err)
    return subprocess.run(command, env=variables, text=True, capture_output=True, check=False)


@cache
def forks() -> Forks:
    """Return the process that forks this checkout's driver. It ends when the tests end."""
    return Forks(None, {})


def forge(*arguments: str, code: int = 0, root: Path = CHECKOUT) -> str:
    """Run the driver of a checkout, require its exit code, and return its standard output."""
    done = drive(root, *arguments)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commit(folder: Path) -> str:
    """Commit all files of a folder, in a new repository if there is none; return the commit."""
    script = "git init -q . && git add . && git -c user.name=x -c user.email=x@example.com commit"
    script += " -q --allow-empty -m x && git rev-parse HEAD"
    return subprocess.check_output(["sh", "-ec", script], cwd=folder, text=True).strip()


def module(path: Path) -> ModuleType:
    """Import a program that is in no package, and return it as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def processes_in(folder: Path) -> list[str]:
    """Return the command line of each process whose working folder is inside a folder."""
    command_lines = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                command_lines.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return command_lines
