# SPDX-License-Identifier: BSD-3-Clause
"""Compare a package with the recipe that it says it was built from, and with its own file list.

A package carries the recipe folder, the rendered recipe (sources and their hashes, patches,
requirements, variant) and a digest of all that the recipe reads from this repository. The same is
computed from the recipes of a commit. What rattler-build did with them is not: for that, rebuild.
"""

import hashlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forge import bases, limits
from forge.conda.package import RENDERED, Package, Places, scratch
from forge.errors import ForgeError, Refused, one_line
from forge.files import git, require_file
from forge.project import Project
from forge.recipes.recipe import Recipe, packages_in, without_extra
from forge.recipes.render import render
from forge.sources.git import environment

# what rattler-build adds to the recipe's own files
ADDED = (RENDERED, "recipe/variant_config.yaml")
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")  # in a name, such as x-kernels-${{ gpu_arch }}


@dataclass
class Verdict:
    """What was compared.

    Attributes:
        compared: In words, what the package was compared with.
        differences: One line each.
        not_compared: Why it was not compared with a recipe, or nothing.
        places: Where the package is installed, if its files are those that it lists.
    """

    compared: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    not_compared: str = ""
    places: list[Places] = field(default_factory=list)


def verify(path: Path, project: Project) -> Verdict:
    """Compare a package file with its own list of files, and with the recipes of a project."""
    verdict, package = Verdict(), Package(require_file(path))
    try:
        verdict.compared.append(f"{len(package.listed)} files with its own list")
        verdict.differences += _compare(package.held, package.listed, "info/paths.json")
        if not verdict.differences:
            verdict.places.append(package.require_safe())
        recipe_file = _recipe_of(str(package.index["name"]), project)
        if not recipe_file:
            verdict.not_compared = "no recipe of this checkout yields such a package"
            return verdict
        folder = recipe_file.parent.relative_to(project.root)
        verdict.compared.append(f"its recipe with {folder}")
        verdict.differences += _compare_files(package, recipe_file.parent)
        verdict.differences += _compare_recipe(package, recipe_file, project)
    except ForgeError as error:
        verdict.differences.append(one_line(str(error)))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        verdict.differences.append(f"its rendered recipe cannot be read: {one_line(repr(error))}")
    return verdict


@contextmanager
def project_at(project: Project, commit: str) -> Iterator[Project]:
    """Yield the project as it was at a commit, in a folder that goes with the context.

    Raises ForgeError for a commit that this checkout does not have.
    """
    sha = git(project.root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").strip()
    if commit.startswith("-") or not sha:
        reason = f"{project.root} has no commit {commit!a:.80}"
        raise ForgeError(f"{reason}: fetch it, or leave out --commit for the files as they are")
    # a hook's GIT_DIR would have the clone's checkout move HEAD here, and core.autocrlf the files
    # be others; who owns the repository was no matter to rev-parse
    clean = environment({"protocol.file.allow": "always", "safe.directory": "*"})
    with scratch(project.build) as folder:
        root = Path(folder, "checkout")
        for words in (
            ["clone", "--quiet", "--shared", "--no-checkout", str(project.root), str(root)],
            ["-C", str(root), "checkout", "--quiet", "--detach", sha],
        ):
            command = ["git", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean)
            if done.returncode:
                raise ForgeError(f"cannot check out {sha}: {one_line(done.stderr)}")
        yield Project.at(root)


def _recipe_of(name: str, project: Project) -> Path | None:
    """Return the recipe.yaml that yields a package of that name, if there is one."""
    for path in sorted(project.root.glob("recipes/*/recipe.yaml")):
        for written in packages_in(path):
            if fnmatchcase(name, EXPRESSION.sub("*", written)):
                return path
    return None


def _compare_files(package: Package, folder: Path) -> list[str]:
    """Compare the recipe folder in a package with that of the project, but for `extra`."""
    prefix = "recipe/"
    packed = {
        name.removeprefix(prefix): _hash_recipe_file(name.removeprefix(prefix), content)
        for name, content in package.info.items()
        if name.startswith(prefix) and name not in ADDED
    }
    # rattler-build leaves out some files, of which the content digest tells
    present = {
        name: _hash_recipe_file(name, (folder / name).read_bytes())
        for name in packed
        if (folder / name).is_file()
    }
    return _compare(packed, present, folder.name)


def _hash_recipe_file(name: str, content: bytes) -> str:
    """Return the sha256 of a file of a recipe folder, as its content digest counts it."""
    counted = without_extra(content) if name == "recipe.yaml" else content
    return hashlib.sha256(counted).hexdigest()


def _compare_recipe(package: Package, recipe_file: Path, project: Project) -> list[str]:
    """Compare the rendered recipe in a package with the project's, in the package's variant."""
    configuration = package.rendered["build_configuration"]
    variant = {key: str(value) for key, value in configuration["variant"].items()}
    base_name, content, _ = variant[bases.DIGEST_KEY].rsplit("-", 2)
    base = bases.load(project, base_name)
    overrides = {key: [value] for key, value in variant.items() if base.variants.get(key)}
    base = replace(base, overrides=base.overrides | overrides)
    differences = _compare_index(package)
    recipe = Recipe(recipe_file, base)
    if recipe.content != content:
        read = ", ".join(sorted(str(p.relative_to(project.root)) for p in recipe.files_read()))
        differences.append(
            f"content: the package was made from files with digest {content}, "
            f"these have {recipe.content}: {read}"
        )
    packed = package.rendered["recipe"]
    number = int(str(packed["build"]["string"]).rsplit("_", 1)[1])
    name = packed["package"]["name"]
    outputs = [
        data["recipe"] | {"variant": data["build_configuration"]["variant"]}
        for data in render(recipe_file, base, variant[bases.DIGEST_KEY], number)
        if data["recipe"]["package"]["name"] == name
    ]
    if not outputs:
        return [*differences, f"{recipe_file.parent.name} yields no {name} in this variant"]
    same = [data for data in outputs if data["build"]["string"] == packed["build"]["string"]]
    ours = _flatten(packed | {"variant": variant, "extra": None})
    theirs = _flatten((same or outputs)[0] | {"extra": None})
    return [*differences, *_compare(ours, theirs, "the recipe")]


def _compare_index(package: Package) -> list[str]:
    """Compare what solvers and installers read of a package with its own rendered recipe."""
    packed, kinds = package.rendered["recipe"], package.rendered["finalized_dependencies"]["run"]
    stated = {
        "name": packed["package"]["name"],
        "version": packed["package"]["version"],
        "build": packed["build"]["string"],
        "build_number": packed["build"]["number"],
        "noarch": packed["build"].get("noarch"),
        "license": packed["about"].get("license"),
        "subdir": package.rendered["build_configuration"]["target_platform"],
    }
    for key, kind in (("depends", "depends"), ("constrains", "constraints")):
        stated[key] = [spec.get("spec") or spec["source"] for spec in kinds.get(kind) or []]
    index, recipe = (
        {key: str(values.get(key) or "nothing") for key in stated}
        for values in (package.index, stated)
    )
    return _compare(index, recipe, "its rendered recipe")


def _flatten(value: Any) -> dict[str, str]:
    """Map the place of each leaf of a rendered recipe, such as source.0.sha256, to its text.

    Raises Refused for more values than a recipe has: in YAML a few lines stand for any number.
    """
    leaves: dict[str, str] = {}
    rest = [("", value)]
    for _ in range(limits.VALUES):
        if not rest:
            return leaves
        at, inner = rest.pop()
        if isinstance(inner, dict):
            items = [(str(key).replace(".", "\\."), each) for key, each in inner.items()]
        elif isinstance(inner, list):
            items = [(str(index), each) for index, each in enumerate(inner)]
        else:
            leaves[at] = str(inner)
            continue
        rest += [(f"{at}.{key}" if at else key, each) for key, each in items]
    raise Refused(f"its rendered recipe has more than {limits.VALUES} values: trust nothing of it")


def _compare(package: Mapping[str, str], other: Mapping[str, str], name: str) -> list[str]:
    """List the keys whose values differ, a line each; `name` says where `other` comes from."""
    return [
        one_line(
            f"{key}: the package has {package.get(key, 'nothing')}, "
            f"{name} has {other.get(key, 'nothing')}"
        )
        for key in sorted(package.keys() | other.keys())
        if package.get(key) != other.get(key)
    ]
