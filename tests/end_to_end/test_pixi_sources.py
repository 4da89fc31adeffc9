# SPDX-License-Identifier: BSD-3-Clause
"""pixi builds our recipes as source dependencies, without our channel and driver.

docs/build.md describes this.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from packaging.version import Version
from support import stand_in
from support.conda_forge import LACKS, Rendered, Solver
from support.pixi import Pixi, require
from support.project import CHECKOUT, RECIPES, copy_checkout
from support.release import Release, one_python, run
from support.servers import Revalidating, served
from support.static_channel import unzstd

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.project import SUBDIRS

pytestmark = pytest.mark.pixi

BACKEND = "pixi-build-rattler-build"
# For these recipes, a workspace requires this package instead of the one with the recipe's name.
OUTPUTS = {"rocm-sdk": "rocm-sdk-core", "pytorch": "libtorch"}
# The packages that this machine can build without torch, and their recipes. The other packages,
# except flash-attn, are only rendered as for a build, in tests/unit/test_plain_rendering.py.
RECIPE_BY_PACKAGE = {
    "model-hosting-container-standards": "model-hosting-container-standards",
    "strix-emulate": "strix-emulate",
    "strix-emulate-hip": "strix-emulate",
    "strix-emulate-native": "strix-emulate",
    "strix-validate": "strix-validate",
    "triton": "triton",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The local URLs of conda-forge's committed records and of our records, by public URL."""
    folder = tmp_path_factory.mktemp("records")
    specs = set()
    for python in ("3.12", "3.13"):  # pixi renders recipes for both Pythons.
        rendered = Rendered({}, python)
        rendered.repodata(folder / "ours", Solver(folder / f"solver-{python}", rendered)._has)
        for recipe in RECIPES:
            for environment in rendered.environments(recipe):
                specs.update(environment.specs)
    add_missing_records(folder / "ours" / "linux-64" / "repodata.json", specs)
    shutil.copytree(stand_in.RECORDS, folder / "theirs", ignore=shutil.ignore_patterns("*.yaml"))
    for channel, subdir in itertools.product(("ours", "theirs"), SUBDIRS):
        write_empty_run_exports(folder / channel / subdir)
    with served(folder, Revalidating) as url:
        yield {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours"}


def add_missing_records(index: Path, specs: set[str]) -> None:
    """Add records for the packages that lacks.yaml lists, which the committed records lack.

    No package files exist for these records. Each record has the highest version that the
    requirements `specs` name.
    """
    requirements = re.findall(r"^(\S+) [=>~]*(\d[\w.]*)", "\n".join(specs), re.M)
    requirements.sort(key=lambda requirement: Version(requirement[1].rstrip(".")))
    versions = dict(requirements)
    data = json.loads(index.read_bytes())
    for name in set(itertools.chain(*LACKS.values())):
        version = versions.get(name, "1")
        data["packages.conda"][f"{name}-{version}-0.conda"] = {
            "name": name,
            "version": version,
            "build": "0",
            "build_number": 0,
            "subdir": "linux-64",
            "depends": [],
            "sha256": "0" * 64,
            "size": 1,
        }
    index.write_text(json.dumps(data))


def write_empty_run_exports(subdir: Path) -> None:
    """Write an index of run exports for a subdir. It says that no package has any.

    Without this index, pixi downloads packages to read their run exports.
    """
    index = subdir / "repodata.json"
    compressed = subdir / "repodata.json.zst"
    text = index.read_bytes() if index.exists() else unzstd(compressed.read_bytes())
    repodata = json.loads(text)
    exports: dict[str, Any] = {"info": {"subdir": subdir.name, "version": 1}}
    for kind in ("packages", "packages.conda"):
        exports[kind] = {name: {"run_exports": {}} for name in repodata.get(kind, {})}
    text = json.dumps(exports).encode()
    (subdir / "run_exports.json").write_bytes(text)
    (subdir / "run_exports.json.zst").write_bytes(zstandard.compress(text))


class Workspace(Pixi):
    """A user's workspace, which requires packages of recipes in `root`."""

    def __init__(self, folder: Path, mirrors: dict[str, str], root: Path, *recipes: str) -> None:
        super().__init__(folder / "home", mirrors)
        self.folder = folder
        files = [str(root / "variants.yaml"), str(root / "recipes/bases/conda-forge/variants.yaml")]
        lines = [
            "[workspace]",
            'name = "mine"',
            'platforms = ["linux-64"]',
            'preview = ["pixi-build"]',
            f'channels = ["{PUBLISHED}", "conda-forge"]',
            f"build-variants-files = {json.dumps(files)}",
            "[dependencies]",
        ]
        for recipe in recipes:
            path = json.dumps(str(root / "recipes" / RECIPE_BY_PACKAGE.get(recipe, recipe)))
            lines.append(f"{OUTPUTS.get(recipe, recipe)} = {{ path = {path} }}")
        (folder / "pixi.toml").write_text("\n".join([*lines, ""]))

    @property
    def environment(self) -> dict[str, str]:
        # Without PIXI_BUILD_BACKEND_OVERRIDE, pixi would install the backend from conda-forge.
        override = {"PIXI_BUILD_BACKEND_OVERRIDE": f"{BACKEND}={require(BACKEND)}"}
        return super().environment | override


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_resolves(records: dict[str, str], tmp_path: Path, recipe: str) -> None:
    workspace = Workspace(tmp_path, records, CHECKOUT, recipe)
    workspace("lock", cwd=tmp_path)
    assert f"/recipes/{recipe}" in (tmp_path / "pixi.lock").read_text()


def test_recipe_needs_the_variant_files(records: dict[str, str], tmp_path: Path) -> None:
    """A recipe does not lock without the variant files, because it uses their keys."""
    workspace = Workspace(tmp_path, records, CHECKOUT, "flash-attn")
    manifest = tmp_path / "pixi.toml"
    lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join(line for line in lines if not line.startswith("build-variants")))
    workspace("lock", cwd=tmp_path, code=1)


def test_built_and_installed(release: Release, tmp_path: Path) -> None:
    """pixi builds and installs strix-validate and flash-attn from their recipes."""
    sources = tmp_path / "pypi-sources"
    sources.mkdir()
    for file in CHECKOUT.glob("build/sources/*/flash_attn-*"):
        (sources / file.name).symlink_to(file)
    names = ("flash-attn", "strix-validate")
    workspace = Workspace(tmp_path, release.mirrors, release.checkout, *names)
    workspace("install", cwd=tmp_path, PYPI_SOURCES=sources.as_uri())
    prefix = tmp_path / ".pixi" / "envs" / "default"
    for name in names:
        assert len(list(prefix.glob(f"conda-meta/{name}-*.json"))) == 1, name
    done = run([prefix / "bin" / "strix-validate", "--version"], workspace.environment)
    assert done.stdout.startswith("strix-validate 0.")
    assert list(prefix.glob("lib/python3*/site-packages/flash_attn/__init__.py"))


def test_every_output_is_built_and_installed(conda_forge: str, tmp_path: Path) -> None:
    """pixi builds every output of several recipes from source and installs it."""
    root = tmp_path / "checkout"
    sources = tmp_path / "pypi-sources"
    folder = tmp_path / "mine"
    for new_folder in (root, sources, folder):
        new_folder.mkdir()
    copy_checkout(root, packages=False)
    one_python(root)
    # Other tests may leave several files with the same name in build/sources. Any of them will do.
    files = {file.name: file for file in CHECKOUT.glob("build/sources/*/*")}
    for name, file in files.items():
        if file.suffix in (".whl", ".gz"):
            (sources / name).symlink_to(file.resolve())
    (tmp_path / "ours").mkdir()
    for subdir in SUBDIRS:
        stand_in.write_repodata(tmp_path / "ours", subdir, {})
    with served(tmp_path / "ours", Revalidating) as url:
        mirrors = {CONDA_FORGE: conda_forge, PUBLISHED: url}
        workspace = Workspace(folder, mirrors, root, *RECIPE_BY_PACKAGE)
        workspace("install", cwd=folder, PYPI_SOURCES=sources.as_uri())
    prefix = folder / ".pixi" / "envs" / "default"
    for name in RECIPE_BY_PACKAGE:
        assert len(list(prefix.glob(f"conda-meta/{name}-[0-9]*.json"))) == 1, name
    done = run([prefix / "bin" / "strix-emulate", "--version"], workspace.environment)
    assert "executes with libstrix-emulate" in done.stdout
    done = run([prefix / "bin" / "strix-validate", "--version"], workspace.environment)
    assert done.stdout.startswith("strix-validate 0.")
