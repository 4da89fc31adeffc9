# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of all tests. A test's folder is its marker: unit, integration or end_to_end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock
from support.project import CHECKOUT, MiniProject, copy_checkout, forge

from forge import bases
from forge.project import Project
from forge.recipes.plan import RecipeSet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker for the tests of a file, and one, from the start, for those of the copy."""
    for item in items:
        kind = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(getattr(pytest.mark, kind))
        ours = {"built", "attention_stack"} & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("checkout" if ours else item.path.stem))
    items.sort(key=lambda item: next(item.iter_markers("xdist_group")).args != ("checkout",))


@pytest.fixture(scope="session")
def host_base(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the checkout's host base once, if it is not there; from PyPI, a few minutes."""
    project = MiniProject(tmp_path_factory.mktemp("base"))
    project.recipe("probe")
    with FileLock(CHECKOUT / "build" / ".tests"):
        project.forge("build-all")


@pytest.fixture
def project(tmp_path: Path, host_base: None) -> MiniProject:
    return MiniProject(tmp_path)


@pytest.fixture(scope="session")
def recipes() -> RecipeSet:
    """This checkout's recipes as the conda-forge base renders them."""
    project = Project.at(CHECKOUT)
    return RecipeSet(project, bases.load(project, "conda-forge"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout with every package that this machine can build; made once a run."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "checkout"
    with FileLock(CHECKOUT / "build" / ".tests"):
        if not root.exists():
            copy_checkout(root)
        forge("build-all", root=root)
    return root


@pytest.fixture(scope="session")
def attention_stack(built: Path) -> Path:
    """The same copy, with the attention stack locked and installed."""
    forge("lock", "attention", root=built)
    forge("install", "attention", root=built)
    return built
