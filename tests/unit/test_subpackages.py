# SPDX-License-Identifier: BSD-3-Clause
"""The public names of the emulator's and the validator's subpackages, and their uses."""

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
# The code that uses the products. The emulator's own tests are left out, since they test private
# functions too.
USERS = ("packages/strix-validate", "packages/strix-emulate/src", "recipes", "tests")


def get_module_name(path: Path) -> str:
    """Return the name of a module or subpackage from its path below src."""
    parts = path.with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")


def read_public_names(path: Path) -> list[str]:
    """Return `__all__` of a module, or of a subpackage."""
    module = path if path.suffix else path / "__init__.py"
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


MODULES = {get_module_name(path): path for path in python_files(*SOURCES.values())}


@pytest.mark.parametrize("subpackage", SUBPACKAGES, ids=get_module_name)
def test_a_subpackage_names_its_public_modules(subpackage: Path) -> None:
    files = [path.relative_to(subpackage) for path in python_files(subpackage)]
    names = {path.parts[0].removesuffix(".py") for path in files}
    public_names = {name for name in names if not name.startswith("_")}
    assert ast.get_docstring(ast.parse((subpackage / "__init__.py").read_text()))
    # The top package of a product exports functions and classes, not modules.
    if subpackage in SOURCES.values():
        return
    assert public_names <= set(read_public_names(subpackage))
    for path in files:
        if len(path.parts) == 1 and path.stem in public_names:
            module = subpackage / path
            assert ast.get_docstring(ast.parse(module.read_text())), module


def list_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import, and of each attribute of a product's module."""
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
    """A private name is used only by modules in the same folder."""
    problems = []
    count = 0
    for path in python_files(*USERS):
        own_folder = path.parent if "src" in path.parts else None
        for module, name in list_imports(ast.parse(path.read_text())):
            if module.split(".")[0] not in SOURCES:
                continue
            count += 1
            full = f"{module}.{name}"
            home = MODULES.get(full) or MODULES.get(module)
            parts = full.split(".")
            is_private = any(part.startswith("_") and not part.endswith("__") for part in parts)
            if is_private and (home is None or home.parent != own_folder):
                problems.append(f"{path.relative_to(CHECKOUT)}: {full}")
    assert count > 500
    assert problems == []


def test_others_use_the_emulator_through_its_public_face() -> None:
    """Other code imports only the names that strix_emulate exports.

    These names are stable. All others may change between releases of the two products.
    """
    public_names = set(read_public_names(SOURCES["strix_emulate"]))
    users = set()
    problems = []
    for path in python_files("packages/strix-validate", "recipes", "src", "tests"):
        file = str(path.relative_to(CHECKOUT))
        for module, name in list_imports(ast.parse(path.read_text())):
            if module.split(".")[0] != "strix_emulate":
                continue
            users.add(file)
            if module != "strix_emulate" or name not in public_names:
                problems.append(f"{file}: {module}.{name}")
    assert any("strix-validate/src" in file for file in users)
    assert problems == []


def test_recipes_use_the_validator_through_its_public_face() -> None:
    """Of the validator, recipes import only strix_validate.testing. They use all its public names.

    Apart from these imports, recipes only run commands of the validator (`python -m`).
    """
    public_module = "strix_validate.testing"
    imports = set()
    for path in python_files("recipes"):
        for module, name in list_imports(ast.parse(path.read_text())):
            if module.split(".")[0] == "strix_validate":
                imports.add(f"{module}.{name}")
    names = {f"{public_module}.{name}" for name in read_public_names(MODULES[public_module])}
    names.add(public_module)
    assert imports == names
    tree = ast.parse("from strix_validate.triton import stand_in; stand_in.install()")
    assert not {".".join(each) for each in list_imports(tree)} <= names
