# SPDX-License-Identifier: BSD-3-Clause
"""Mutants for the readers of both products, of another seed than their packages' own tests take."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.project import CHECKOUT, MiniProject

PACKAGES = CHECKOUT / "packages"
PRODUCTS = ("strix-validate", "strix-emulate")
NEEDS = (
    "jinja2",
    "matplotlib-base",
    "msgpack-python",
    "numpy",
    "pydantic",
    "pyelftools",
    "pytest",
    "python",
    "pytorch",
    "rich",
    "triton",
    "typer",
)


@pytest.fixture(scope="module")
def products(host_base: None, tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """An environment of what they and their tests import; they themselves are the checkout's."""
    project = MiniProject(tmp_path_factory.mktemp("products"))
    project.recipe("probe")
    project.stack("products", *NEEDS)
    project.forge("lock", "products")
    project.forge("install", "products")
    return project


@pytest.mark.skipif("FORGE_SEED" not in os.environ, reason="FORGE_SEED names no other seed")
@pytest.mark.parametrize("name", PRODUCTS)
def test_mutants_of_a_product(
    name: str, products: MiniProject, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    report, path = tmp_path / "report.xml", ":".join(str(PACKAGES / p / "src") for p in PRODUCTS)
    words = [
        "env",
        f"PYTHONPATH={path}",
        "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "junit_family=xunit1",
        f"--junitxml={report}",
        f"--basetemp={tmp_path}/tests",
        str(PACKAGES / name / "tests" / "test_damaged.py"),
    ]
    done = products.forge("run", "products", "--", *words)
    found = [
        ast.literal_eval(p.attrib["value"]) for p in ElementTree.parse(report).iter("property")
    ]
    if not found:  # the emulator's tests want a disassembler
        pytest.skip(done.stdout.strip()[-500:])
    for reader in found:
        record_property("mutants", reader)
