# SPDX-License-Identifier: BSD-3-Clause
"""A miniature project: the real bases and driver, tiny recipes, its own channel and build folder.

What is slow to make is shared with the checkout: the embedded base and the fetched sources.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from forge_store import bases
from forge_store.project import Project
from forge_store.sources import PYPI_SOURCES, PYPI_URL
from strix_forge.recipes import RecipeSet

CHECKOUT = Path(__file__).resolve().parent.parent

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
SCRIPT = """\
mkdir -p "$PREFIX/share/{name}"
echo {name} > "$PREFIX/share/{name}/text"
"""


class MiniProject:
    """A project folder with helpers to write recipes and run the driver's command line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if (root / "variants.yaml").exists():  # a copy of another one
            return
        root.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / "variants.yaml", root)
        shutil.copytree(CHECKOUT / "bases", root / "bases")
        (root / "recipes").mkdir()
        (root / "build").mkdir()
        for shared in ("embedded", "sources"):
            (CHECKOUT / "build" / shared).mkdir(parents=True, exist_ok=True)
            (root / "build" / shared).symlink_to(CHECKOUT / "build" / shared)

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
    ) -> Path:
        """Write recipes/NAME: a noarch package of one file."""
        folder = self.root / "recipes" / name
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_text(
            NOARCH.format(name=name, run=json.dumps(run or []), test=[test], source=source)
        )
        (folder / "build.sh").write_text(script.format(name=name))
        return folder

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "strix_forge", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "FORGE_ROOT": str(self.root),
            "FORGE_BASE": "embedded",
            "PYTHONPATH": str(CHECKOUT / "src"),
            "COLUMNS": "200",
        }

    def forge(
        self, *arguments: str, code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and require its exit code."""
        done = subprocess.run(
            self.command(*arguments), env=self.environment | environment, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def plan(self) -> dict[str, dict]:
        return {step["recipe"]: step for step in json.loads(self.forge("plan", "--json").stdout)}

    def to_build(self) -> set[str]:
        return {name for name, step in self.plan().items() if step["action"] == "build"}

    def packages(self) -> set[str]:
        return {file.name for file in self.channel.glob("*/*.conda")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker for the tests of a file, and one, from the start, for those of this checkout."""
    for item in items:
        ours = {"built", "attention_stack"} & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("checkout" if ours else item.path.stem))
    items.sort(key=lambda item: next(item.iter_markers("xdist_group")).args != ("checkout",))


@pytest.fixture(scope="session", autouse=True)
def embedded_base(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the checkout's embedded base once, if it is not there; from PyPI, a few minutes."""
    project = MiniProject(tmp_path_factory.mktemp("base"))
    project.recipe("probe")
    with FileLock(CHECKOUT / "build" / ".tests"):
        project.forge("build-all")


@pytest.fixture
def project(tmp_path: Path) -> MiniProject:
    return MiniProject(tmp_path)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder as any static host does, without a line per request."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(
    folder: Path, handler: type[http.server.BaseHTTPRequestHandler] = QuietHandler
) -> Iterator[str]:
    """Serve `folder` on a free port of this machine; yields its URL."""
    make = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        # the default looks for shutdown() every half second
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def forge(*arguments: str, code: int = 0, root: Path = CHECKOUT) -> str:
    """Run the checkout's launcher and require its exit code; returns what it printed."""
    done = subprocess.run(
        [root / "forge", *arguments], text=True, capture_output=True, check=False,
        env=os.environ | {"FORGE_BASE": "embedded", "FORGE_NO_PIXI": "1"},
    )  # fmt: skip
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def recipes() -> RecipeSet:
    """This checkout's recipes as the conda-forge base renders them."""
    os.environ[PYPI_SOURCES] = PYPI_URL
    project = Project.at(CHECKOUT)
    return RecipeSet(project, bases.load(project, "conda-forge"))


@pytest.fixture(scope="session")
def built() -> str:
    """Every package that this machine can build, in the checkout's channel."""
    return forge("build-all")


@pytest.fixture(scope="session")
def attention_stack(built: str) -> None:
    """The attention stack, locked and installed in the checkout's build folder."""
    forge("lock", "attention")
    forge("install", "attention")
