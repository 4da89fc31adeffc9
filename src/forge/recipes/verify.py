# SPDX-License-Identifier: BSD-3-Clause
"""Compare a package with the recipe from which it claims to be built, and with its own file list.

A package contains the recipe folder, the rendered recipe (sources and their hashes, patches,
requirements, variant) and a digest of all files of this repository that the recipe reads. The same
values are computed from the recipes of a checkout or a commit, and compared. The compiled files are
compared only with the package's own list. To check their content, build the package again.
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
from forge.conda.package import RENDERED, Package, Places
from forge.conda.scratch import scratch
from forge.errors import ForgeError, Refused, one_line
from forge.files import git, require_file
from forge.project import Project
from forge.recipes.recipe import Recipe, list_packages, remove_extra
from forge.recipes.render import render
from forge.sources.git import environment

# Files that rattler-build adds to the recipe folder in a package.
ADDED = (RENDERED, "recipe/variant_config.yaml")
# An expression in a name, such as x-kernels-${{ gpu_arch }}.
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")
# Stands in a message for a value that is missing on one side of the comparison.
NOTHING = "nothing"


@dataclass
class Verdict:
    """The result of comparing a package.

    Attributes:
        compared: Descriptions of the comparisons that were made.
        differences: One line for each difference.
        not_compared: The reason why the package was not compared with a recipe, or "".
        places: The places of the package's files in a prefix, if they match the package's own list.
    """

    compared: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    not_compared: str = ""
    places: list[Places] = field(default_factory=list)


def verify(path: Path, project: Project) -> Verdict:
    """Compare a package file with its own list of files, and with the recipes of a project."""
    verdict = Verdict()
    package = Package(require_file(path))
    try:
        _verify_files(package, verdict)
        _verify_recipe(package, project, verdict)
    except ForgeError as error:
        verdict.differences.append(one_line(str(error)))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = one_line(repr(error))
        verdict.differences.append(f"its rendered recipe cannot be read: {reason}")
    return verdict


def _verify_files(package: Package, verdict: Verdict) -> None:
    """Compare a package's files with the list of files in the package."""
    verdict.compared.append(f"{len(package.listed)} files with its own list")
    verdict.differences += _compare(package.digests, package.listed, "info/paths.json")
    if not verdict.differences:
        verdict.places.append(package.require_safe())


def _verify_recipe(package: Package, project: Project, verdict: Verdict) -> None:
    """Compare a package with the recipe that yields it."""
    recipe_file = find_recipe(str(package.index["name"]), project)
    if not recipe_file:
        verdict.not_compared = "no recipe of this checkout yields this package"
        return
    folder = recipe_file.parent
    verdict.compared.append(f"its recipe with {folder.relative_to(project.root)}")
    verdict.differences += _compare_files(package, folder)
    verdict.differences += _compare_recipe(package, recipe_file, project)


@contextmanager
def project_at(project: Project, commit: str) -> Iterator[Project]:
    """Check a commit out into a temporary folder, and yield the project there.

    Raises:
        ForgeError: The checkout does not have the commit, or git cannot check it out.
    """
    revision = f"{commit}^{{commit}}"
    sha = git(project.root, "rev-parse", "--verify", "--quiet", revision).strip()
    if commit.startswith("-") or not sha:
        reason = f"{project.root} has no commit {commit!a:.80}"
        raise ForgeError(f"{reason}: fetch it, or leave out --commit to use the checkout's files")
    # A clean environment is necessary. With GIT_DIR, which is set in git hooks, the checkout in the
    # clone would move HEAD of this repository. With core.autocrlf, git would change the files.
    # safe.directory is set because the clone has to work for any owner of the repository, as the
    # rev-parse above does.
    clean = environment(
        [
            ("protocol.file.allow", "always"),
            ("safe.directory", "*"),
        ]
    )
    with scratch(project.build) as folder:
        root = Path(folder, "checkout")
        clone = ["clone", "--quiet", "--shared", "--no-checkout", str(project.root), str(root)]
        checkout = ["-C", str(root), "checkout", "--quiet", "--detach", sha]
        for arguments in (clone, checkout):
            result = subprocess.run(
                ["git", *arguments],
                capture_output=True,
                text=True,
                check=False,
                env=clean,
            )
            if result.returncode:
                raise ForgeError(f"cannot check out {sha}: {one_line(result.stderr)}")
        yield Project.at(root)


def find_recipe(package: str, project: Project) -> Path | None:
    """Return the recipe.yaml that yields a package of this name; None if there is none."""
    for path in sorted(project.root.glob("recipes/*/recipe.yaml")):
        for name in list_packages(path):
            pattern = EXPRESSION.sub("*", name)
            if fnmatchcase(package, pattern):
                return path
    return None


def _compare_files(package: Package, folder: Path) -> list[str]:
    """Compare the recipe folder in a package with that of the project, without `extra`.

    rattler-build does not pack all files of the folder. The content digest covers the other files.
    """
    packed = {}
    present = {}
    for path, content in package.info.items():
        if not path.startswith("recipe/") or path in ADDED:
            continue
        name = path.removeprefix("recipe/")
        packed[name] = _hash_recipe_file(name, content)
        file = folder / name
        if file.is_file():
            present[name] = _hash_recipe_file(name, file.read_bytes())
    return _compare(packed, present, folder.name)


def _hash_recipe_file(name: str, content: bytes) -> str:
    """Return the sha256 of a file of a recipe folder. In recipe.yaml, `extra` does not count."""
    if name == "recipe.yaml":
        content = remove_extra(content)
    return hashlib.sha256(content).hexdigest()


def _compare_recipe(package: Package, recipe_file: Path, project: Project) -> list[str]:
    """Compare the rendered recipe in a package with the project's, in the package's variant."""
    configuration = package.rendered["build_configuration"]
    variant = {key: str(value) for key, value in configuration["variant"].items()}
    digest = variant[bases.DIGEST_KEY]
    base_name, content, _ = digest.rsplit("-", 2)
    base = _load_base(project, base_name, variant)
    differences = _compare_index(package)
    recipe = Recipe(recipe_file, base)
    if recipe.content != content:
        files = [str(file.relative_to(project.root)) for file in recipe.files_read()]
        differences.append(
            f"content: the package was made from files with digest {content}, "
            f"those of the checkout have {recipe.content}: {', '.join(sorted(files))}"
        )
    packed = package.rendered["recipe"]
    name = packed["package"]["name"]
    build = str(packed["build"]["string"])
    number = int(build.rsplit("_", 1)[1])
    outputs = []
    for rendered in render(recipe_file, base, digest, number):
        output = rendered["recipe"]
        output["variant"] = rendered["build_configuration"]["variant"]
        if output["package"]["name"] == name:
            outputs.append(output)
    if not outputs:
        return [*differences, f"{recipe_file.parent.name} yields no {name} in this variant"]
    output = outputs[0]
    for candidate in outputs:
        if candidate["build"]["string"] == packed["build"]["string"]:
            output = candidate
            break
    packed_values = _flatten(packed | {"variant": variant, "extra": None})
    project_values = _flatten(output | {"extra": None})
    differences += _compare(packed_values, project_values, "the recipe")
    return differences


def _load_base(
    project: Project,
    name: str,
    variant: Mapping[str, str],
) -> bases.Base:
    """Load a base with the values of a package's variant."""
    base = bases.load(project, name)
    overrides = dict(base.overrides)
    for key, value in variant.items():
        if base.variants.get(key):
            overrides[key] = [value]
    return replace(base, overrides=overrides)


def _compare_index(package: Package) -> list[str]:
    """Compare info/index.json, which solvers and installers read, with the rendered recipe."""
    recipe = package.rendered["recipe"]
    dependencies = package.rendered["finalized_dependencies"]["run"]
    stated = {
        "name": recipe["package"]["name"],
        "version": recipe["package"]["version"],
        "build": recipe["build"]["string"],
        "build_number": recipe["build"]["number"],
        "noarch": recipe["build"].get("noarch"),
        "license": recipe["about"].get("license"),
        "subdir": package.rendered["build_configuration"]["target_platform"],
        "depends": _list_specs(dependencies.get("depends")),
        "constrains": _list_specs(dependencies.get("constraints")),
    }
    index_values = {}
    recipe_values = {}
    for key, value in stated.items():
        index_values[key] = str(package.index.get(key) or NOTHING)
        recipe_values[key] = str(value or NOTHING)
    return _compare(index_values, recipe_values, "its rendered recipe")


def _list_specs(dependencies: list[dict[str, Any]] | None) -> list[str]:
    """Return the match specs of finalized dependencies."""
    specs = []
    for dependency in dependencies or []:
        specs.append(dependency.get("spec") or dependency["source"])
    return specs


def _flatten(value: Any) -> dict[str, str]:
    """Return the leaves of a rendered recipe as text, by a path such as source.0.sha256.

    Raises:
        Refused: There are too many values for a recipe. With YAML's aliases, a few lines can stand
            for any number of values.
    """
    leaves: dict[str, str] = {}
    pending = [("", value)]
    for _ in range(limits.VALUES):
        if not pending:
            return leaves
        path, inner = pending.pop()
        items: list[tuple[str, Any]] = []
        if isinstance(inner, dict):
            for key, child in inner.items():
                escaped = str(key).replace(".", "\\.")
                items.append((escaped, child))
        elif isinstance(inner, list):
            for index, child in enumerate(inner):
                items.append((str(index), child))
        else:
            leaves[path] = str(inner)
        for key, child in items:
            pending.append((f"{path}.{key}" if path else key, child))
    raise Refused(f"its rendered recipe has more than {limits.VALUES} values: do not trust it")


def _compare(
    package: Mapping[str, str],
    other: Mapping[str, str],
    name: str,
) -> list[str]:
    """Return a line for each key whose values differ.

    Args:
        package: The values of the package.
        other: The values to compare with.
        name: A description of `other` for the lines.
    """
    differences = []
    for key in sorted(package.keys() | other.keys()):
        if package.get(key) == other.get(key):
            continue
        packed = package.get(key, NOTHING)
        expected = other.get(key, NOTHING)
        line = f"{key}: the package has {packed}, {name} has {expected}"
        differences.append(one_line(line))
    return differences
