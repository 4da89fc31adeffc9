# SPDX-License-Identifier: BSD-3-Clause
"""Run the emulator's and the validator's tests of damaged data with the seed FORGE_SEED.

The package tests of the products always use the same seed.
"""

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
    """An environment with the requirements of both products and of their tests.

    The products themselves are imported from the checkout.
    """
    project = MiniProject(tmp_path_factory.mktemp("products"))
    project.recipe("probe")
    project.stack("products", *NEEDS)
    project.forge("lock", "products")
    project.forge("install", "products")
    return project


@pytest.mark.skipif("FORGE_SEED" not in os.environ, reason="FORGE_SEED is not set")
@pytest.mark.parametrize("name", PRODUCTS)
def test_mutants_of_a_product(
    name: str, products: MiniProject, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    report = tmp_path / "report.xml"
    path = ":".join(str(PACKAGES / product / "src") for product in PRODUCTS)
    command = ["env", f"PYTHONPATH={path}", "python", "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    command += [f"--basetemp={tmp_path}/tests", str(PACKAGES / name / "tests" / "test_damaged.py")]
    done = products.forge("run", "products", "--", *command)
    properties = list(ElementTree.parse(report).iter("property"))
    if not properties:
        # Without a disassembler the emulator's tests are skipped.
        pytest.skip(done.stdout.strip()[-500:])
    for entry in properties:
        record_property("mutants", ast.literal_eval(entry.attrib["value"]))
