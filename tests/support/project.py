# SPDX-License-Identifier: BSD-3-Clause
"""A miniature project: the real bases and driver, tiny recipes, its own channel and build folder.

Also copies of the checkout. What is slow to make is shared with it: the host base and the fetched
sources.
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
# tarfile's, which CPython 3.11 has since 3.11.4
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


class MiniProject:
    """A project folder with helpers to write recipes and run the driver's command line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if (root / "variants.yaml").exists():  # a copy of another one
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
        """Write recipes/NAME: a noarch package of one file."""
        folder = self.root / "recipes" / name
        folder.mkdir(exist_ok=True)
        text = NOARCH.format(name=name, run=json.dumps(run or []), test=[test], source=source)
        if extra:
            text += f"extra: {json.dumps(dict(extra))}\n"
        (folder / "recipe.yaml").write_text(text)
        (folder / "build.sh").write_text(script.format(name=name))
        return folder

    def stack(self, name: str, *wants: str, text: str = "") -> Path:
        """Write stacks/NAME/pixi.toml, which asks for packages, or is `text`."""
        manifest = self.root / "stacks" / name / "pixi.toml"
        manifest.parent.mkdir(parents=True)
        asked = "".join(f'{package} = "*"\n' for package in wants)
        manifest.write_text(text or STACK.format(name=name) + asked)
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
            from support import contents  # imports the driver, which plain_rendering must not

            contents.check(self.channel)
        return done

    def plan(self) -> dict[str, dict]:
        return {step["recipe"]: step for step in json.loads(self.forge("plan", "--json").stdout)}

    def to_build(self) -> set[str]:
        return {name for name, step in self.plan().items() if step["action"] == "build"}

    def packages(self) -> set[str]:
        return {file.name for file in self.channel.glob("*/*.conda")}


def share_build(root: Path) -> None:
    """Make ROOT/build, with the checkout's host base and sources in it."""
    (root / "build").mkdir()
    for shared in ("host-base", "sources"):
        (CHECKOUT / "build" / shared).mkdir(parents=True, exist_ok=True)
        (root / "build" / shared).symlink_to(CHECKOUT / "build" / shared)


def tracked_files() -> list[Path]:
    """The files of this checkout that git tracks or would track: nothing that a build leaves."""
    return _tracked_below(CHECKOUT)


@cache
def _tracked_below(root: Path) -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = [root / name for name in sorted(names.split("\0")) if name]
    return [path for path in paths if path.is_file()]


def python_files(*folders: str | Path) -> list[Path]:
    """The tracked Python files below folders of this checkout."""
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py" and any(path.is_relative_to(CHECKOUT / name) for name in folders)
    ]


def copy_checkout(root: Path, packages: bool = True) -> None:
    """Copy what git tracks or would track to `root`, and link the packages of channel/ there.

    So that what the checkout has built need not be built again, and nothing is written to it.
    Without `packages` the copy is as a clone is: nothing is built.
    """
    channel = [file for file in (CHECKOUT / "channel").rglob("*") if file.name != ".lock"]
    files = [*tracked_files(), *(filter(Path.is_file, channel) if packages else ())]
    for file in files:
        target = root / file.relative_to(CHECKOUT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            continue
        with suppress(OSError):  # /tmp is another filesystem
            if file.suffix == ".conda":  # nobody writes to it
                target.hardlink_to(file)
                continue
        shutil.copy2(file, target, follow_symlinks=False)
    share_build(root)


def driver(root: Path, *arguments: str) -> list[str]:
    """The command line of the driver in `root`, run by the interpreter of the tests."""
    return [sys.executable, str(root / "src" / "forge"), *arguments]


def driver_environment(root: Path) -> dict[str, str]:
    """The environment for a driver that works on `root`, on the host base, without pixi."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"FORGE_ROOT": str(root), "FORGE_BASE": "host", "FORGE_NO_PIXI": "1", "PATH": path}
    return os.environ | own


def drive(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the driver of a checkout, on that unless FORGE_ROOT is another."""
    command, there = driver(root, *arguments), driver_environment(root) | environment
    if root == CHECKOUT and "PYTHONPATH" not in environment:
        done = forks()(*arguments, **there)
        return subprocess.CompletedProcess(command, done.code, done.out, done.err)
    return subprocess.run(command, env=there, text=True, capture_output=True, check=False)


@cache
def forks() -> Forks:
    """This checkout's driver, imported once: it ends with the tests."""
    return Forks(None, {})


def forge(*arguments: str, code: int = 0, root: Path = CHECKOUT) -> str:
    """Run the driver of a checkout and require its exit code; returns what it printed."""
    done = drive(root, *arguments)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commit(folder: Path) -> str:
    """Have git keep all that is in a folder; returns the commit."""
    script = "git init -q . && git add . && git -c user.name=x -c user.email=x@example.com commit"
    script += " -q --allow-empty -m x && git rev-parse HEAD"
    return subprocess.check_output(["sh", "-ec", script], cwd=folder, text=True).strip()


def module(path: Path) -> ModuleType:
    """A program that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def processes_in(folder: Path) -> list[str]:
    """The command lines of the processes that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found
