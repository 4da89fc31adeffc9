# SPDX-License-Identifier: BSD-3-Clause
"""A recipe's lower bounds are not higher than upstream's, unless a comment states the reason.

Upstream's bounds are in the metadata of the pinned sdist. A higher bound makes our package
uninstallable while conda-forge does not have that version yet.
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
from forge.sources.cache import Source, SourceCache

PROJECT = Project.at(CHECKOUT)
NAMES = pypi.read_names(PROJECT.recipes)
# The files with upstream's requirements, for recipes whose requirements are not in PKG-INFO. vLLM's
# PKG-INFO has the requirements of the CUDA build.
FILES = {"vllm": ["requirements/common.txt", "requirements/rocm.txt"]}
VARIABLES = {"python_version": "3.12", "platform_machine": "x86_64", "extra": ""}
Bounds = dict[str, Version]


def list_sdists() -> list[tuple[Recipe, Source]]:
    """Return the recipes whose source is an sdist on PyPI, each with that source."""
    base = bases.load(PROJECT, "conda-forge", {"sources_from": ["pypi"]})
    sdists = []
    for recipe in RecipeSet(PROJECT, base).recipes.values():
        for source in list_sources(recipe):
            if source.purl is None or not source.purl.qualifiers["file_name"].endswith(".tar.gz"):
                continue
            if canonicalize_name(source.purl.name) == canonicalize_name(recipe.name):
                sdists.append((recipe, source))
    return sdists


def find_lower_bound(specifiers: SpecifierSet) -> Version | None:
    versions = [Version(s.version) for s in specifiers if s.operator in (">=", ">", "~=", "==")]
    return max(versions, default=None)


def read_bounds(requirements: list[str]) -> Bounds:
    """Return the lower bound of each required package, for Linux on x86-64."""
    bounds: Bounds = {}
    for text in requirements:
        requirement = Requirement(text)
        bound = find_lower_bound(requirement.specifier)
        applies = requirement.marker is None or requirement.marker.evaluate(VARIABLES)
        if bound and applies:
            name = canonicalize_name(requirement.name)
            bounds[name] = max(bound, bounds.get(name, bound))
    return bounds


def read_upstream_bounds(recipe: Recipe, archive: Path) -> Bounds:
    """Return upstream's lower bounds, from PKG-INFO or from the recipe's files in FILES."""
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
    return read_bounds(requirements)


def find_unexplained(requirements: list[str], upstream: Bounds, text: str) -> list[str]:
    """Return the requirements with a bound that is higher than upstream's and not explained.

    A bound is explained if the line above the requirement is a comment that names the version.

    Args:
        requirements: The requirements of the recipe.
        upstream: Upstream's bounds.
        text: The recipe.
    """
    unexplained = []
    for spec in requirements:
        name, _, version = spec.partition(" ")
        name = parse_package_name(name)
        if not re.match("[<>=!~]", version):
            continue
        bound = find_lower_bound(SpecifierSet(version))
        upstream_bound = upstream.get(canonicalize_name(NAMES.get(name) or name))
        if not bound or not upstream_bound or bound <= upstream_bound:
            continue
        if not re.search(rf"# .*{re.escape(str(bound))}.*\n *- {re.escape(spec)}\n", text):
            unexplained.append(spec)
    return unexplained


SDISTS = list_sdists()


@pytest.mark.parametrize(("recipe", "source"), SDISTS, ids=[recipe.name for recipe, _ in SDISTS])
def test_no_lower_bound_is_above_upstreams(recipe: Recipe, source: Source) -> None:
    try:
        archive = SourceCache(PROJECT).fetch(source, lambda *_: None)
    except NotAttempted as error:
        pytest.skip(f"not attempted: {error}")
    upstream = read_upstream_bounds(recipe, archive)
    requirements = recipe.requirements["run"]
    text = recipe.path.read_text()
    assert find_unexplained(requirements, upstream, text) == []
    if recipe.name == "vllm":
        # This shows that the test can fail: a bound that is too high is reported.
        higher = [re.sub(r"^mcp >=2\.2", "mcp >=2.3", spec) for spec in requirements]
        assert find_unexplained(higher, upstream, text) == ["mcp >=2.3.0,<3.0.0"]


def test_the_reason_names_the_version() -> None:
    upstream = read_bounds(
        ["alpha>=1", "alpha>=1.2; extra == 'x'", "beta==2; python_version < '3'"]
    )
    assert upstream == {"alpha": Version("1")}
    for comment, expected in (("1.1 is the first that does", []), ("why", ["alpha >=1.1"])):
        text = f"  run:\n    # {comment}\n    - alpha >=1.1\n    - beta >=3\n"
        assert find_unexplained(["alpha >=1.1", "beta >=3"], upstream, text) == expected
