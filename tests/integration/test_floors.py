# SPDX-License-Identifier: BSD-3-Clause
"""A recipe's lower bounds are upstream's, or lower; for a higher one the recipe has the reason.

Upstream's are those in the metadata of the pinned sdist. A bound that is higher than upstream's
makes a package uninstallable on a day on which conda-forge is behind.
"""

import re
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.project import CHECKOUT

from forge import bases
from forge.conda import pypi
from forge.errors import NotAttempted
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, list_sources, parse_package_name
from forge.sources.cache import SourceCache

PROJECT = Project.at(CHECKOUT)
NAMES = pypi.read_names(PROJECT.recipes)
# What vLLM requires where it is built for ROCm. Its metadata on PyPI is that of the CUDA build.
FILES = {"vllm": ["requirements/common.txt", "requirements/rocm.txt"]}
VARIABLES = {"python_version": "3.12", "platform_machine": "x86_64", "extra": ""}
Bounds = dict[str, Version]


def sdists() -> list[tuple[Recipe, str]]:
    """Recipes whose source is an sdist of their own on PyPI, with its file name."""
    base = bases.load(PROJECT, "conda-forge", {"sources_from": ["pypi"]})
    recipes = RecipeSet(PROJECT, base).recipes.values()
    named = [(recipe, source.purl) for recipe in recipes for source in list_sources(recipe)]
    return [
        (recipe, purl.qualifiers["file_name"])
        for recipe, purl in named
        if purl
        and purl.qualifiers["file_name"].endswith(".tar.gz")
        and canonicalize_name(purl.name) == canonicalize_name(recipe.name)
    ]


def lower_bound(specifiers: SpecifierSet) -> Version | None:
    versions = [Version(s.version) for s in specifiers if s.operator in (">=", ">", "~=", "==")]
    return max(versions, default=None)


def bounds(requirements: list[str]) -> Bounds:
    """The lower bound of each package of a list of requirements, for Linux on x86-64."""
    result: Bounds = {}
    for text in requirements:
        requirement = Requirement(text)
        bound = lower_bound(requirement.specifier)
        applies = requirement.marker is None or requirement.marker.evaluate(VARIABLES)
        if bound and applies:
            name = canonicalize_name(requirement.name)
            result[name] = max(bound, result.get(name, bound))
    return result


def upstream_bounds(recipe: Recipe, archive: Path) -> Bounds:
    names = FILES.get(recipe.name, ["PKG-INFO"])
    requirements: list[str] = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.partition("/")[2] in names:
                text = tar.extractfile(member).read().decode()
                if names == ["PKG-INFO"]:
                    requirements += re.findall(r"(?m)^Requires-Dist: (.*)$", text)
                else:
                    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
                    requirements += [line for line in lines if re.match(r"\w", line)]
    return bounds(requirements)


def unexplained(requirements: list[str], upstream: Bounds, text: str) -> list[str]:
    """Requirements with a higher bound than upstream's, which no comment right above them names."""
    result = []
    for spec in requirements:
        name, _, version = spec.partition(" ")
        name = parse_package_name(name)
        bound = lower_bound(SpecifierSet(version)) if re.match("[<>=!~]", version) else None
        known = upstream.get(canonicalize_name(NAMES.get(name) or name))
        reason = re.search(rf"# .*{re.escape(str(bound))}.*\n *- {re.escape(spec)}\n", text)
        if bound and known and bound > known and not reason:
            result.append(spec)
    return result


@pytest.mark.parametrize(("recipe", "file"), sdists(), ids=lambda value: getattr(value, "name", ""))
def test_no_lower_bound_is_above_upstreams(recipe: Recipe, file: str) -> None:
    source = next(
        s for s in list_sources(recipe) if s.purl and s.purl.qualifiers["file_name"] == file
    )
    try:
        archive = SourceCache(PROJECT).fetch(source, lambda *_: None)
    except NotAttempted as error:
        pytest.skip(f"not attempted: {error}")
    upstream = upstream_bounds(recipe, archive)
    assert unexplained(recipe.requirements["run"], upstream, recipe.path.read_text()) == []
    if recipe.name == "vllm":
        higher = [re.sub(r"^mcp >=2\.2", "mcp >=2.3", s) for s in recipe.requirements["run"]]
        assert unexplained(higher, upstream, recipe.path.read_text()) == ["mcp >=2.3.0,<3.0.0"]


def test_the_reason_names_the_version() -> None:
    upstream = bounds(["alpha>=1", "alpha>=1.2; extra == 'x'", "beta==2; python_version < '3'"])
    assert upstream == {"alpha": Version("1")}
    for comment, expected in (("1.1 is the first that does", []), ("why", ["alpha >=1.1"])):
        text = f"  run:\n    # {comment}\n    - alpha >=1.1\n    - beta >=3\n"
        assert unexplained(["alpha >=1.1", "beta >=3"], upstream, text) == expected
