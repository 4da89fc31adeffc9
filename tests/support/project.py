# SPDX-License-Identifier: BSD-3-Clause
"""A miniature project: the real bases and driver, tiny recipes, its own channel and build folder.

What is slow to make is shared with the checkout: the host base and the fetched sources.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]

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
        for shared in ("host-base", "sources"):
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
        return [sys.executable, "-m", "forge", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "FORGE_ROOT": str(self.root),
            "FORGE_BASE": "host",
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


def forge(*arguments: str, code: int = 0, root: Path = CHECKOUT) -> str:
    """Run the checkout's launcher and require its exit code; returns what it printed."""
    done = subprocess.run(
        [root / "forge", *arguments], text=True, capture_output=True, check=False,
        env=os.environ | {"FORGE_BASE": "host", "FORGE_NO_PIXI": "1"},
    )  # fmt: skip
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
