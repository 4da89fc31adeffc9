# SPDX-License-Identifier: BSD-3-Clause
"""Feedstocks: a recipe of this repository as a repository of its own, for conda-forge's tools.

What only the driver understands is taken out (the content digest, the tag of the host base, the
place of PyPI's files), and what lies elsewhere in this repository is copied in under its own path.
`conda-smithy rerender` makes the rest: .ci_support, .scripts, workflows, README and licence.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from pip._internal.models.index import PyPI
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from forge.bases import DIGEST_KEY
from forge.errors import ForgeError
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, sources_of

PYPI_PREFIX = re.compile(r"\$\{\{ *env\.get\(.PYPI_SOURCES.\) *\}\}/")
BASE_TAG = "${{ base_tag }}"
VARIABLE = re.compile(r"\$\{\{ *(\w+) *\}\}")
# What conda-forge's own pinning decides. An own value would part them from the keys that are
# zipped with them there.
PINNED = {
    "base_tag", "c_compiler", "c_compiler_version", "c_stdlib", "cxx_compiler",
    "cxx_compiler_version", "target_platform", DIGEST_KEY,
}  # fmt: skip
CONDA_FORGE_YML = """\
conda_build_tool: rattler-build
conda_install_tool: pixi
provider:
  linux_64: github_actions
  osx_64: null
  win_64: null
"""
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")

yaml = YAML()
yaml.preserve_quotes, yaml.width = True, 1 << 16
yaml.indent(mapping=2, sequence=4, offset=2)


def write(
    recipes: RecipeSet, recipe: Recipe, folder: Path, maintainers: Sequence[str] = ()
) -> None:
    """Write the feedstock of `recipe` to `folder`, or its recipe/ anew in one that is there.

    `recipes` have to be rendered for the conda-forge base; `maintainers` are GitHub names in place
    of the recipe's. Everything else that a feedstock holds is left alone, its conda-forge.yml too.
    Raises ForgeError for a folder of something else, and for a recipe that needs a file which
    would not be in the feedstock; nothing in `folder` is changed then.
    """
    sources_of(recipe)  # has what is fetched a hash, and PyPI's files a package URL?
    settings = folder / "conda-forge.yml"
    if folder.exists() and not settings.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ForgeError(f"{folder} exists and is no feedstock: it has no conda-forge.yml")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".recipe-", dir=folder) as temporary:
        new = Path(temporary) / "recipe"
        shutil.copytree(recipe.path.parent, new, ignore=LEFTOVERS)
        data = yaml.load(recipe.path)
        _bring_sources(data, recipe, recipes.project.root, new)
        _take_out_ours(data, recipe, recipes)
        if maintainers:
            data.setdefault("extra", {})["recipe-maintainers"] = list(maintainers)
        _dump(data, new / "recipe.yaml")
        _refuse_outside(new)
        _dump(_variants(recipes, new / "recipe.yaml"), new / "conda_build_config.yaml")
        shutil.rmtree(folder / "recipe", ignore_errors=True)
        new.replace(folder / "recipe")
    if not settings.exists():
        settings.write_text(CONDA_FORGE_YML)


def refusal(recipe: Recipe) -> str:
    """Why conda-forge would take no feedstock of a recipe, or nothing."""
    wheels = [s["url"] for s in recipe.sources if str(s.get("url", "")).endswith(".whl")]
    compiled = [url for url in wheels if not url.endswith("-none-any.whl")]
    return "conda-forge takes no compiled wheels" if compiled else ""


def _bring_sources(data: Any, recipe: Recipe, root: Path, new: Path) -> None:
    """Copy patches and local sources from outside the recipe's folder, and name the copies."""
    for source in _sources(data):
        patches = source.get("patches", [])
        for index, name in enumerate(patches):
            patches[index] = f"patches/{Path(name).name}"
            (new / "patches").mkdir(exist_ok=True)
            shutil.copy(recipe.path.parent / name, new / patches[index])
        local = (recipe.path.parent / source.get("path", ".")).resolve()
        if local.is_relative_to(recipe.path.parent):
            continue
        if not local.is_relative_to(root):
            raise ForgeError(f"{recipe.path}: the source {local} is not in this repository")
        source["path"] = local.relative_to(root).as_posix()
        target = new / source["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        if local.is_dir():
            shutil.copytree(local, target, ignore=LEFTOVERS)
        else:
            shutil.copy(local, target)


def _sources(data: Any) -> Iterator[Any]:
    """Every source mapping of a recipe, in both branches of a condition."""
    for section in [data, *data.get("outputs", [])]:
        for entry in _listed(section.get("source", [])):
            branches = [entry.get("then"), entry.get("else")] if "if" in entry else [entry]
            for branch in branches:
                yield from _listed(branch or [])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _take_out_ours(data: Any, recipe: Recipe, recipes: RecipeSet) -> None:
    """Replace what only the driver gives a meaning to."""
    _each_text(data, lambda text: _upstream_url(text, recipe).replace(BASE_TAG, ""))
    for section in [data, *data.get("outputs", [])]:
        build = section.get("build", {})
        keys = build.get("variant", {}).get("use_keys", [])
        if DIGEST_KEY in keys:
            keys.remove(DIGEST_KEY)
            if not keys:
                del build["variant"]["use_keys"]
            if not build["variant"]:
                del build["variant"]
    # a version that bots can read and raise
    context = data.get("context", {})
    if given := VARIABLE.fullmatch(str(context.get("version"))):
        context["version"] = str(recipes.base.variants[given[1]][0])


def _each_text(node: Any, change: Callable[[str], str]) -> None:
    """Change every string below a mapping or list in place, keeping its YAML style."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(items):
        if isinstance(value, dict | list):
            _each_text(value, change)
        elif isinstance(value, str) and (new := change(value)) != value:
            node[key] = type(value)(new)


def _upstream_url(url: str, recipe: Recipe) -> str:
    """A file of PyPI under PyPI's own address, which does not hold its hash.

    That address is pip's constant, not its configured index: a feedstock is for everybody.
    """
    found = PYPI_PREFIX.match(url)
    if not found:
        return url
    file = url[found.end() :]
    purls = [PackageURL.from_string(text) for text in recipe.extra["purls"]]
    literal = file.split("$")[0]
    name = next(p.name for p in purls if p.qualifiers["file_name"].startswith(literal))
    tag = file.split("-")[-3] if file.endswith(".whl") else "source"
    return f"{PyPI.url}packages/{tag}/{name[0]}/{name}/{file}"


def _refuse_outside(new: Path) -> None:
    """Raise ForgeError when a file of the recipe would reach out of the feedstock's recipe/."""
    for file in [new / "recipe.yaml", *new.glob("*.sh"), *new.glob("*.py")]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if re.search(r"RECIPE_DIR\W*/\.\.|^\s*(- )?(path: )?\.\./", line):
                raise ForgeError(
                    f"{file.name} line {number} leaves the recipe's folder, which is all that a "
                    f"feedstock has: {line.strip()}. Name the file under source: path"
                )


def _variants(recipes: RecipeSet, exported: Path) -> CommentedMap:
    """The variant values that the exported recipe uses and conda-forge's pinning does not give."""
    used = set()
    for rendered in recipes.render(exported, "none"):
        used |= set(rendered["build_configuration"]["variant"])
    ours = recipes.base.variants
    chosen = CommentedMap(
        (key, CommentedSeq(ours[key])) for key in sorted(used - PINNED) if key in ours
    )
    if "python" in chosen:  # zipped with it in conda-forge's pinning
        chosen["is_python_min"] = ["true"]
    if "c_stdlib_version" in chosen:  # the linter reads it as macOS's, too
        chosen["c_stdlib_version"].yaml_add_eol_comment("[linux]", 0)
    return chosen


def _dump(data: Any, path: Path) -> None:
    with path.open("w") as stream:
        yaml.dump(data, stream)
