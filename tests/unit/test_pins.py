# SPDX-License-Identifier: BSD-3-Clause
"""The pins of our conda-forge base are those with which conda-forge's newest packages are built.

A package that was built with a pin depends on the run_exports of the pinned package. So a pin is
out of date if the packages that it selects satisfy almost no dependency of the newest records.
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

VARIANTS = CHECKOUT / "recipes/bases/conda-forge/variants.yaml"
PINS: dict[str, list[str]] = yaml.safe_load(VARIANTS.read_text())
# Keys that are not compared. conda-forge does not have the key, or a build with its value adds no
# requirement to a package.
OURS = {"python_min", "pytorch_build", "sources_from", "c_compiler", "cxx_compiler", "c_stdlib"}
# The packages that run_exports add as requirements, by the key of the pin, where the names differ.
EXPORTED = {
    "python": "python_abi",
    "liblzma_devel": "liblzma",
    "c_compiler_version": "libgcc",
    "cxx_compiler_version": "libstdcxx",
    "c_stdlib_version": "__glibc",
}
# Records of this many days count as the newest.
DAYS = 90
# A pin is out of date if at most this fraction of the newest dependents was built with it. A few
# packages are always built with older pins.
FEW = 0.05


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """The committed records of conda-forge."""
    result: list[dict[str, Any]] = []
    for packed in DATA.glob("*/repodata.json.zst"):
        with packed.open("rb") as stream:
            text = zstandard.ZstdDecompressor().stream_reader(stream).read()
        result += json.loads(text)["packages.conda"].values()
    return result


def select_packages(key: str, value: str, records: list[dict[str, Any]]) -> Iterator[PackageRecord]:
    """Yield the packages that a pin selects."""
    name = EXPORTED.get(key, key.replace("_", "-"))
    version = value.split()[0]
    if key == "llvm_library":
        name = value
        version = "*"
    if name == "__glibc":
        yield PackageRecord(name, version, BuildString("0"), 0, "linux-64")
        return
    build = value.partition(" ")[2] if key != "python" else ""
    operator = "=" if version.replace(".", "").isalnum() else ""
    spec = MatchSpec(f"{name} {operator}{version} {build}")
    for data in records:
        if data["name"] != name:
            continue
        record = PackageRecord(
            name,
            data["version"],
            BuildString(data["build"]),
            data["build_number"],
            data["subdir"],
        )
        if spec.matches(record):
            yield record


def find_outdated_pins(
    pins: Mapping[str, list[str]], records: list[dict[str, Any]]
) -> dict[str, set[str]]:
    """Find the pins with which almost no recent record was built.

    Returns:
        For each such pin, as `KEY VALUE`: the requirements of recent records for its package.
    """
    start = max(data.get("timestamp", 0) for data in records) - DAYS * 86_400_000
    requirements: dict[str, Counter[str]] = {}
    for data in records:
        if data.get("timestamp", 0) <= start:
            continue
        for text in data["depends"]:
            name, _, version = text.partition(" ")
            # A requirement without a version does not tell which version was used in the build.
            requirements.setdefault(name, Counter())[text] += bool(version)

    outdated: dict[str, set[str]] = {}
    for key, values in pins.items():
        for value in values:
            packages = list(select_packages(key, value, records))
            name = packages[0].name.normalized if packages else ""
            newest = requirements.get(name, Counter())
            satisfied = 0
            for text, count in newest.items():
                if any(map(MatchSpec(text).matches, packages)):
                    satisfied += count
            if satisfied <= FEW * newest.total():
                outdated[f"{key} {value}"] = set(newest)
    return outdated


def read_recipe_pins() -> dict[str, list[str]]:
    """Return the pins in the host sections of recipes, such as `ffmpeg >=8,<10 lgpl_*`."""
    host_section = re.compile(r"^( *)host:\n((?:\1 +.*\n|\n)+)", re.M)
    pin = re.compile(r"- ([a-z][\w.-]*) ((?:\d[\w.]*\.\*|>=[\w.]+,<\S+ ).*)")
    pins: dict[str, list[str]] = {}
    for path in CHECKOUT.glob("recipes/*/recipe.yaml"):
        for section in host_section.findall(path.read_text()):
            for name, value in pin.findall(section[1]):
                pins.setdefault(name, []).append(value)
    return pins


def test_no_pin_of_a_recipe_is_left_behind(records: list[dict[str, Any]]) -> None:
    """No pin in a recipe is out of date."""
    pins = read_recipe_pins()
    assert pins["ffmpeg"] == [">=8,<10 lgpl_*"]
    versions = {name: [value.split()[0] for value in values] for name, values in pins.items()}
    assert find_outdated_pins(versions, records) == {}
    assert find_outdated_pins({"ffmpeg": ["2.*"]}, records)


def test_no_pin_is_left_behind(records: list[dict[str, Any]]) -> None:
    pins = {key: values for key, values in PINS.items() if key not in OURS}
    assert len(pins) > 10
    assert find_outdated_pins(pins, records) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pybind11_abi", "4"),
        ("libpng", "1.5"),
        ("c_compiler_version", "12"),
        ("python", "3.8.* *_cpython"),
        ("libblas", "3.8.* *netlib"),
        ("no_such_package", "1"),
    ],
)
def test_a_pin_that_was_left_behind_is_found(
    records: list[dict[str, Any]], key: str, value: str
) -> None:
    """A pin that is out of date is reported.

    For example, our pin of pybind11_abi was still 4 three months after conda-forge had built its
    torch with 11.
    """
    assert find_outdated_pins({key: [value]}, records)
