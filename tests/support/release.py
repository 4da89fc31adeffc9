# SPDX-License-Identifier: BSD-3-Clause
"""Packages as users get them: built on the conda-forge base, published to a folder, served."""

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

# What PyPI alone is enough for on this base. All else that a stack needs comes from the stand-in.
RECIPES = ("flash-attn", "liger-kernel", "strix-emulate", "strix-validate")
# An output of these that the host base builds and tests: C, for half a minute. The stand-in has it.
OPTIONAL = "strix-emulate-native"
OUTPUTS = (*RECIPES, "strix-emulate-hip")
VARIANTS = Path("recipes/bases", "conda-forge", "variants.yaml")


class Release:
    """A clone of this checkout with the recipes of RECIPES, a home folder, and what they publish.

    `url` is where `root` is served. The home's configuration gives conda-forge and our
    published channel addresses on this machine: nothing else has to be changed.
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
            if outputs := recipe.get("outputs"):
                outputs[:] = [out for out in outputs if out["package"]["name"] != OPTIONAL]
            for part in recipe.get("outputs", [recipe]):
                # its own scripts run when it is built on the host base, which has a PyTorch
                there = {"script": [f"ls $PREFIX/conda-meta/{part['package']['name']}-*.json"]}
                part["tests"] = [there if "script" in test else test for test in part["tests"]]
            file.write_text(yaml.safe_dump(recipe, sort_keys=False))

    @property
    def environment(self) -> dict[str, str]:
        environment = clean_environment(self.home)
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        own = {"FORGE_ROOT": str(self.checkout), "FORGE_BASE": "conda-forge", "COLUMNS": "200"}
        return environment | own | {"FORGE_NO_PIXI": "1", "PATH": path}

    @property
    def cache(self) -> Path:
        """rattler's cache of its home folder."""
        return self.home / ".cache" / "rattler" / "cache"

    def hold(self, packages: Iterable[Path]) -> None:
        """Have its cache hold packages, which nobody then fetches."""
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
        """The files that are published, by name."""
        return {str(Package(f).index["name"]): f for f in self.published.glob("*/*.conda")}


def one_python(checkout: Path) -> None:
    """Two Pythons are in the committed file; the stand-in has the one that runs this, and PyPI."""
    variants = yaml.safe_load((checkout / VARIANTS).read_text())
    variants |= {"python": [f"{PYTHON}.* *_cpython"], "python_min": [PYTHON]}
    variants |= {"sources_from": ["pypi"]}
    (checkout / VARIANTS).write_text(yaml.safe_dump(variants))


def run(
    command: Iterable[str | Path], environment: dict[str, str], code: int | None = 0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and require its exit code, if not None; the failure has what it printed."""
    done = subprocess.run(
        [*command], env=environment, text=True, capture_output=True, check=False, **more
    )
    printed = f"exit {done.returncode}: {done.args}\n{done.stdout}\n{done.stderr}"
    assert code in (None, done.returncode), printed
    return done


def host_bound(path: Path) -> list[str]:
    """What of a channel, a lock or an installed environment was built on the host base."""
    if path.is_file():
        return [line.strip() for line in path.read_text().splitlines() if HOST_BOUND in line]
    indexes, installed = path.glob("*/repodata.json"), path.glob("conda-meta/*.json")
    names = [name for file in indexes for name in json.loads(file.read_bytes())["packages.conda"]]
    names += [file.name for file in [*path.glob("*/*.conda"), *installed]]
    return sorted({name for name in names if HOST_BOUND in name})


def published_in(stack: str) -> list[str]:
    """What a stack asks for of RECIPES."""
    manifest = tomllib.loads((CHECKOUT / "stacks" / stack / "pixi.toml").read_text())
    return [name for name in RECIPES if name in manifest["feature"][stack]["dependencies"]]


def copy_stack(name: str, folder: Path) -> Path:
    """A stack as a user copies it."""
    return shutil.copytree(CHECKOUT / "stacks" / name, folder / name, symlinks=True)
