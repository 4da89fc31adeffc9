# SPDX-License-Identifier: BSD-3-Clause
"""Make a release as users get it: build on the conda-forge base, publish to a folder, serve it."""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.project import CHECKOUT, copy_checkout, driver
from support.stand_in import MAPPING, PYTHON, clean_environment, write_mapping, write_mirrors

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.conda import cache
from forge.conda.local import HOST_BOUND
from forge.conda.package import Package

# The recipes that can be built here, because their sources are on PyPI or in this checkout. Other
# packages that a stack needs come from the stand-in for conda-forge.
RECIPES = ("flash-attn", "liger-kernel", "strix-emulate", "strix-validate")
# An output of these recipes that is left out here, because it compiles C for half a minute. Tests
# on the host base build this output. The stand-in for conda-forge has a stub of it.
OPTIONAL = "strix-emulate-native"
OUTPUTS = (*RECIPES, "strix-emulate-hip")
VARIANTS = Path("recipes/bases", "conda-forge", "variants.yaml")


class Release:
    """A clone of this checkout with only the recipes of RECIPES, a home folder, and a channel.

    The configuration in the home folder sets mirrors on this machine for conda-forge, for our
    published channel and for pixi's mapping of names on PyPI. No other configuration is changed.

    Args:
        root: The folder of the clone, the home folder and the channel.
        conda_forge: The URL of the stand-in for conda-forge.
        url: The URL at which `root` is served.
    """

    def __init__(self, root: Path, conda_forge: str, url: str) -> None:
        self.root, self.url = root, f"{url}/published"
        self.checkout, self.home = root / "checkout", root / "home"
        self.published = root / "published"
        write_mapping(root / "mapping", pytorch="torch")
        self.mirrors = {CONDA_FORGE: conda_forge, PUBLISHED: self.url, MAPPING: f"{url}/mapping"}
        write_mirrors(self.home, self.mirrors)
        self.checkout.mkdir()
        copy_checkout(self.checkout, packages=False)
        one_python(self.checkout)
        for folder in (self.checkout / "recipes").iterdir():
            if folder.is_dir() and folder.name not in (*RECIPES, "bases", "checks"):
                shutil.rmtree(folder)
        for name in RECIPES:
            file = self.checkout / "recipes" / name / "recipe.yaml"
            recipe = yaml.safe_load(file.read_text())
            if "outputs" in recipe:
                outputs = recipe["outputs"]
                recipe["outputs"] = [out for out in outputs if out["package"]["name"] != OPTIONAL]
            for part in recipe.get("outputs", [recipe]):
                # The recipe's own test scripts need a real PyTorch. Tests on the host base run
                # them. Here a script only shows that the package is installed.
                installed = {"script": [f"ls $PREFIX/conda-meta/{part['package']['name']}-*.json"]}
                tests = []
                for test in part["tests"]:
                    tests.append(installed if "script" in test else test)
                part["tests"] = tests
            file.write_text(yaml.safe_dump(recipe, sort_keys=False))

    @property
    def environment(self) -> dict[str, str]:
        environment = clean_environment(self.home)
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        variables = {
            "FORGE_ROOT": str(self.checkout),
            "FORGE_BASE": "conda-forge",
            "COLUMNS": "200",
        }
        return environment | variables | {"FORGE_NO_PIXI": "1", "PATH": path}

    @property
    def cache(self) -> Path:
        """Return rattler's cache in the home folder."""
        return self.home / ".cache" / "rattler" / "cache"

    def hold(self, packages: Iterable[Path]) -> None:
        """Put large packages into the cache, so that the clone's driver does not fetch them."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RATTLER_CACHE_DIR", str(self.cache))
            for package in packages:
                cache.offer(package)

    def forge(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the clone's driver, without pixi, and require its exit code."""
        return run([*self.driver, *words], self.environment, code=code)

    @property
    def driver(self) -> list[str]:
        return driver(self.checkout)

    def build(self, *names: str) -> str:
        return self.forge("build", *(names or RECIPES)).stdout

    def publish(self, *words: str) -> None:
        self.forge("publish", "--to", str(self.published), *words)

    def packages(self) -> dict[str, Path]:
        """Return the published files by package name."""
        return {str(Package(f).index["name"]): f for f in self.published.glob("*/*.conda")}


def one_python(checkout: Path) -> None:
    """Change a checkout's variants to the stand-in's only Python, and take sources from PyPI."""
    variants = yaml.safe_load((checkout / VARIANTS).read_text())
    variants |= {"python": [f"{PYTHON}.* *_cpython"], "python_min": [PYTHON]}
    variants |= {"sources_from": ["pypi"]}
    (checkout / VARIANTS).write_text(yaml.safe_dump(variants))


def run(
    command: Iterable[str | Path], environment: dict[str, str], code: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command, and require its exit code unless `code` is None.

    `options` are further arguments of subprocess.run.
    """
    done = subprocess.run(
        [*command], env=environment, text=True, capture_output=True, check=False, **options
    )
    message = f"exit {done.returncode}: {done.args}\n{done.stdout}\n{done.stderr}"
    assert code in (None, done.returncode), message
    return done


def host_bound(path: Path) -> list[str]:
    """Return the host-bound packages in a channel, a lock or an environment."""
    if path.is_file():
        return [line.strip() for line in path.read_text().splitlines() if HOST_BOUND in line]
    names: set[str] = set()
    for index in path.glob("*/repodata.json"):
        names.update(json.loads(index.read_bytes())["packages.conda"])
    for pattern in ("*/*.conda", "conda-meta/*.json"):
        names.update(file.name for file in path.glob(pattern))
    return sorted(name for name in names if HOST_BOUND in name)


def published_in(stack: str) -> list[str]:
    """Return the names in RECIPES on which a stack depends."""
    manifest = tomllib.loads((CHECKOUT / "stacks" / stack / "pixi.toml").read_text())
    return [name for name in RECIPES if name in manifest["feature"][stack]["dependencies"]]


def copy_stack(name: str, folder: Path) -> Path:
    """Copy a stack into a folder as a user does, and return the copy."""
    return shutil.copytree(CHECKOUT / "stacks" / name, folder / name, symlinks=True)
