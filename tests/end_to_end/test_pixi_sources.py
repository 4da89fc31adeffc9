# SPDX-License-Identifier: BSD-3-Clause
"""Our recipes as source dependencies of a pixi workspace: no channel, no driver (docs/build.md)."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from packaging.version import Version
from support import stand_in
from support.conda_forge import LACKS, Rendered, Solver
from support.pixi import Pixi, require
from support.project import CHECKOUT, RECIPES, copy_checkout
from support.release import Release, one_python, run
from support.servers import Revalidating, served

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.project import SUBDIRS

pytestmark = pytest.mark.pixi

BACKEND = "pixi-build-rattler-build"
# One package of each recipe; the others are outputs of the same.
OUTPUTS = {"rocm-sdk": "rocm-sdk-core", "pytorch": "libtorch"}
# What this machine builds without torch: each package, and its recipe. The rest is rendered as pixi
# renders it for a build, in tests/unit/test_plain_rendering.py.
BUILT = {
    "model-hosting-container-standards": "model-hosting-container-standards",
    "strix-emulate": "strix-emulate",
    "strix-emulate-hip": "strix-emulate",
    "strix-emulate-native": "strix-emulate",
    "strix-validate": "strix-validate",
    "triton": "triton",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The committed records, and the packages of our other recipes as they render."""
    folder, wanted = tmp_path_factory.mktemp("records"), set()
    for python in ("3.12", "3.13"):  # pixi resolves a recipe for both
        rendered = Rendered({}, python)
        rendered.repodata(folder / "ours", Solver(folder / f"solver-{python}", rendered)._has)
        wanted |= {s for name in RECIPES for w in rendered.environments(name) for s in w.specs}
    add_lacking(folder / "ours" / "linux-64" / "repodata.json", wanted)
    shutil.copytree(stand_in.RECORDS, folder / "theirs", ignore=shutil.ignore_patterns("*.yaml"))
    for subdir in (folder / c / s for c in ("ours", "theirs") for s in SUBDIRS):
        say_run_exports(subdir)
    with served(folder, Revalidating) as url:
        yield {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours"}


def add_lacking(index: Path, wanted: set[str]) -> None:
    """What the committed records lack, as records without files, in a version that is wanted."""
    found = re.findall(r"^(\S+) [=>~]*(\d[\w.]*)", "\n".join(wanted), re.M)
    least = dict(sorted(found, key=lambda pair: Version(pair[1].rstrip("."))))  # the highest wins
    data = json.loads(index.read_bytes())
    for name in {name for names in LACKS.values() for name in names}:
        version = least.get(name, "1")
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


def say_run_exports(subdir: Path) -> None:
    """An index of no run exports, so that pixi fetches no package to look for its own."""
    plain = subdir / "repodata.json"
    unzstd = zstandard.ZstdDecompressor().decompressobj().decompress
    text = plain.read_bytes() if plain.exists() else unzstd(Path(f"{plain}.zst").read_bytes())
    data = json.loads(text)
    exports = {
        kind: {name: {"run_exports": {}} for name in data.get(kind, {})}
        for kind in ("packages", "packages.conda")
    }
    text = json.dumps({"info": {"subdir": subdir.name, "version": 1}, **exports}).encode()
    (subdir / "run_exports.json").write_bytes(text)
    (subdir / "run_exports.json.zst").write_bytes(zstandard.compress(text))


class Workspace(Pixi):
    """Somebody's workspace that takes packages from recipes in `root`."""

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
            path = json.dumps(str(root / "recipes" / BUILT.get(recipe, recipe)))
            lines.append(f"{OUTPUTS.get(recipe, recipe)} = {{ path = {path} }}")
        (folder / "pixi.toml").write_text("\n".join([*lines, ""]))

    @property
    def environment(self) -> dict[str, str]:
        # in the place of the one that pixi would install from conda-forge
        override = {"PIXI_BUILD_BACKEND_OVERRIDE": f"{BACKEND}={require(BACKEND)}"}
        return super().environment | override


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_resolves(records: dict[str, str], tmp_path: Path, recipe: str) -> None:
    workspace = Workspace(tmp_path, records, CHECKOUT, recipe)
    workspace("lock", cwd=tmp_path)
    assert f"/recipes/{recipe}" in (tmp_path / "pixi.lock").read_text()


def test_recipe_needs_the_variant_files(records: dict[str, str], tmp_path: Path) -> None:
    """They hold the keys that recipes use."""
    workspace = Workspace(tmp_path, records, CHECKOUT, "flash-attn")
    manifest = tmp_path / "pixi.toml"
    lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join(line for line in lines if not line.startswith("build-variants")))
    workspace("lock", cwd=tmp_path, code=1)


def test_built_and_installed(release: Release, tmp_path: Path) -> None:
    """strix-validate and flash-attn, as pixi builds them from their recipes."""
    sources = tmp_path / "pypi-sources"
    sources.mkdir()
    for file in CHECKOUT.glob("build/sources/*/flash_attn-*"):
        (sources / file.name).symlink_to(file)
    names = ("flash-attn", "strix-validate")
    workspace = Workspace(tmp_path, release.mirrors, release.checkout, *names)
    workspace("install", cwd=tmp_path, PYPI_SOURCES=sources.as_uri())
    prefix = tmp_path / ".pixi" / "envs" / "default"
    assert len([f for n in names for f in prefix.glob(f"conda-meta/{n}-*.json")]) == 2
    done = run([prefix / "bin" / "strix-validate", "--version"], workspace.environment)
    assert done.stdout.startswith("strix-validate 0.")
    assert list(prefix.glob("lib/python3*/site-packages/flash_attn/__init__.py"))


def test_every_output_is_built_and_installed(conda_forge: str, tmp_path: Path) -> None:
    """Of recipes with several outputs too, each built with the variant keys of its own alone."""
    root, sources, mine = (tmp_path / name for name in ("checkout", "pypi-sources", "mine"))
    for folder in (root, sources, mine):
        folder.mkdir()
    copy_checkout(root, packages=False)
    one_python(root)
    # by name: other tests leave files of one name and several contents there
    found = {file.name: file for file in CHECKOUT.glob("build/sources/*/*")}
    for name, file in found.items():
        if file.suffix in (".whl", ".gz"):
            (sources / name).symlink_to(file.resolve())
    (tmp_path / "ours").mkdir()
    for subdir in SUBDIRS:
        stand_in.write_repodata(tmp_path / "ours", subdir, {})
    with served(tmp_path / "ours", Revalidating) as url:
        workspace = Workspace(mine, {CONDA_FORGE: conda_forge, PUBLISHED: url}, root, *BUILT)
        workspace("install", cwd=mine, PYPI_SOURCES=sources.as_uri())
    prefix = mine / ".pixi" / "envs" / "default"
    for name in BUILT:
        assert len(list(prefix.glob(f"conda-meta/{name}-[0-9]*.json"))) == 1, name
    done = run([prefix / "bin" / "strix-emulate", "--version"], workspace.environment)
    assert "executes with libstrix-emulate" in done.stdout
    done = run([prefix / "bin" / "strix-validate", "--version"], workspace.environment)
    assert done.stdout.startswith("strix-validate 0.")
