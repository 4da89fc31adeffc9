# SPDX-License-Identifier: BSD-3-Clause
"""The pins of the conda-forge base are what conda-forge's newest packages are built with.

A package that was built with a pin depends on what the pin exports. So a pin is out of date when
the packages that it selects satisfy hardly a dependency of the newest records.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
import zstandard
from rattler import MatchSpec, PackageRecord
from support.bindings import BuildString
from support.conda_forge import DATA
from support.project import CHECKOUT

PINS: dict[str, list[str]] = yaml.safe_load(
    (CHECKOUT / "recipes/bases/conda-forge/variants.yaml").read_text()
)
# conda-forge has no such key, or its value is a name that others need not depend on
OURS = {"python_min", "pytorch_build", "sources_from", "c_compiler", "cxx_compiler", "c_stdlib"}
# the package that a pin's dependents depend on, where it is not called like the key
EXPORTED = {
    "python": "python_abi", "liblzma_devel": "liblzma", "c_compiler_version": "libgcc",
    "cxx_compiler_version": "libstdcxx", "c_stdlib_version": "__glibc",
}  # fmt: skip
DAYS = 90
FEW = 0.05  # of the newest dependents: stragglers, which do not show what conda-forge pins


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for packed in DATA.glob("*/repodata.json.zst"):
        text = zstandard.ZstdDecompressor().stream_reader(packed.open("rb")).read()
        found += json.loads(text)["packages.conda"].values()
    return found


def selected(key: str, value: str, records: list[dict[str, Any]]) -> Iterator[PackageRecord]:
    """The packages that a pin stands for."""
    name, version = EXPORTED.get(key, key.replace("_", "-")), value.split()[0]
    if key == "llvm_library":
        name, version = value, "*"
    if name == "__glibc":
        yield PackageRecord(name, version, BuildString("0"), 0, "linux-64")
        return
    build = value.partition(" ")[2] if key != "python" else ""
    spec = MatchSpec(f"{name} {'=' if version.replace('.', '').isalnum() else ''}{version} {build}")
    for data in records:
        if data["name"] == name:
            where = data["build"], data["build_number"], data["subdir"]
            record = PackageRecord(name, data["version"], BuildString(where[0]), *where[1:])
            if spec.matches(record):
                yield record


def find_output_holders(
    pins: Mapping[str, list[str]], records: list[dict[str, Any]]
) -> dict[str, set[str]]:
    """Pins `KEY VALUE` that hardly a record of the last DAYS is built with -> what those need."""
    newest = max(data.get("timestamp", 0) for data in records) - DAYS * 86_400_000
    wanted: dict[str, Counter[str]] = {}
    for data in records:
        if data.get("timestamp", 0) > newest:
            for text in data["depends"]:
                name, _, version = text.partition(" ")
                # a bare name says nothing of what it was built with
                wanted.setdefault(name, Counter())[text] += bool(version)
    found = {}
    for key, value in ((key, value) for key, values in pins.items() for value in values):
        packages = list(selected(key, value, records))
        name = packages[0].name.normalized if packages else ""
        newer = wanted.get(name, Counter())
        fit = sum(n for text, n in newer.items() if any(map(MatchSpec(text).matches, packages)))
        if fit <= FEW * newer.total():
            found[f"{key} {value}"] = set(newer)
    return found


def pins_in_recipes() -> dict[str, list[str]]:
    """What host sections of recipes pin themselves, as `ffmpeg >=8,<10 lgpl_*`."""
    pins: dict[str, list[str]] = {}
    for path in CHECKOUT.glob("recipes/*/recipe.yaml"):
        for section in re.findall(r"^( *)host:\n((?:\1 +.*\n|\n)+)", path.read_text(), re.M):
            for name, value in re.findall(
                r"- ([a-z][\w.-]*) ((?:\d[\w.]*\.\*|>=[\w.]+,<\S+ ).*)", section[1]
            ):
                pins.setdefault(name, []).append(value)
    return pins


def test_no_pin_of_a_recipe_is_left_behind(records: list[dict[str, Any]]) -> None:
    """A pin in a recipe is as easily forgotten as one in variants.yaml."""
    pins = pins_in_recipes()
    assert pins["ffmpeg"] == [">=8,<10 lgpl_*"]
    versions = {name: [value.split()[0] for value in values] for name, values in pins.items()}
    assert find_output_holders(versions, records) == {}
    assert find_output_holders({"ffmpeg": ["2.*"]}, records)


def test_no_pin_is_left_behind(records: list[dict[str, Any]]) -> None:
    pins = {key: values for key, values in PINS.items() if key not in OURS}
    assert len(pins) > 10
    assert find_output_holders(pins, records) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("pybind11_abi", "4"), ("libpng", "1.5"), ("c_compiler_version", "12"),
     ("python", "3.8.* *_cpython"), ("libblas", "3.8.* *netlib"), ("no_such_package", "1")],
)  # fmt: skip
def test_a_pin_that_was_left_behind_is_found(
    records: list[dict[str, Any]], key: str, value: str
) -> None:
    """pybind11_abi was 4 here for three months after conda-forge's torch had 11."""
    assert find_output_holders({key: [value]}, records)
