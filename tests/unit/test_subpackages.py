# SPDX-License-Identifier: BSD-3-Clause
"""The subpackages of the two products: what each shows to others, and that others take no more."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.project import CHECKOUT, python_files

SOURCES = {
    "strix_validate": CHECKOUT / "packages/strix-validate/src/strix_validate",
    "strix_emulate": CHECKOUT / "packages/strix-emulate/src/strix_emulate",
}
SUBPACKAGES = [path.parent for path in python_files(*SOURCES.values()) if path.stem == "__init__"]
# what uses the products, besides the emulator's own tests: those look at each part
USERS = ("packages/strix-validate", "packages/strix-emulate/src", "recipes", "tests")


def name_of(path: Path) -> str:
    """a.b.c for .../src/a/b/c.py; a.b for .../src/a/b/__init__.py."""
    parts = path.with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")


def shown(place: Path) -> list[str]:
    """What a module shows, or a subpackage."""
    module = place if place.suffix else place / "__init__.py"
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


MODULES = {name_of(path): path for path in python_files(*SOURCES.values())}


@pytest.mark.parametrize("subpackage", SUBPACKAGES, ids=name_of)
def test_a_subpackage_names_its_public_modules(subpackage: Path) -> None:
    below = [path.relative_to(subpackage) for path in python_files(subpackage)]
    inside = {path.parts[0].removesuffix(".py") for path in below}
    public = {name for name in inside if not name.startswith("_")}
    assert ast.get_docstring(ast.parse((subpackage / "__init__.py").read_text()))
    if subpackage in SOURCES.values():
        return  # a product: what it exports are functions and classes
    assert public <= set(shown(subpackage))
    modules = [subpackage / path for path in below if len(path.parts) == 1 and path.stem in public]
    assert [path for path in modules if not ast.get_docstring(ast.parse(path.read_text()))] == []


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from the products, and of each attribute of a module."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES:
                    modules[alias.asname or alias.name] = full
                yield node.module, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module:
                yield module, node.attr


def test_nothing_private_is_used_outside_its_room() -> None:
    wrong, seen = [], 0
    for path in python_files(*USERS):
        own = path.parent if "src" in path.parts else None
        for module, name in imported(ast.parse(path.read_text())):
            if module.split(".")[0] not in SOURCES:
                continue
            seen += 1
            full = f"{module}.{name}"
            home = MODULES.get(full) or MODULES.get(module)
            private = any(p.startswith("_") and not p.endswith("__") for p in full.split("."))
            if private and (home is None or home.parent != own):
                wrong.append(f"{path.relative_to(CHECKOUT)}: {full}")
    assert seen > 500
    assert wrong == []


def test_others_use_the_emulator_through_its_public_face() -> None:
    """strix_emulate says what stays; all else may change between releases of two packages."""
    face = set(shown(SOURCES["strix_emulate"]))
    folders = ("packages/strix-validate", "recipes", "src", "tests")
    used = {
        (str(path.relative_to(CHECKOUT)), module, name)
        for path in python_files(*folders)
        for module, name in imported(ast.parse(path.read_text()))
        if module.split(".")[0] == "strix_emulate"
    }
    assert any("strix-validate/src" in path for path, _, _ in used)
    assert {u for u in used if u[1] != "strix_emulate" or u[2] not in face} == set()


def test_recipes_use_the_validator_through_its_public_face() -> None:
    """strix_validate.testing is for them; beside it they only run commands (`python -m`)."""
    face = "strix_validate.testing"
    used = {
        (str(path.relative_to(CHECKOUT)), f"{module}.{name}")
        for path in python_files("recipes")
        for module, name in imported(ast.parse(path.read_text()))
        if module.split(".")[0] == "strix_validate"
    }
    names = {face, *(f"{face}.{name}" for name in shown(MODULES[face]))}
    assert {name for _, name in used} == names
    tree = ast.parse("from strix_validate.triton import stand_in; stand_in.install()")
    assert not {".".join(each) for each in imported(tree)} <= names


def test_the_emulators_names_are_where_they_are_said_to_be() -> None:
    """They are imported at first use, from a table beside the imports that mypy reads."""
    tree = ast.parse((SOURCES["strix_emulate"] / "__init__.py").read_text())
    assert isinstance(tree.body[0], ast.Expr)
    checked = {
        (node.module.removeprefix("strix_emulate."), alias.asname or alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    (homes,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    ]
    assert checked == {(home, name) for home, names in homes.items() for name in names}
    assert sorted(name for _, name in checked) == sorted(shown(SOURCES["strix_emulate"]))
