# SPDX-License-Identifier: BSD-3-Clause
"""`forge demo`: the wheels that it fetches, its patches, and its description of a record."""

import copy
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packageurl import PackageURL
from packaging.utils import canonicalize_name
from support.project import CHECKOUT, MiniProject
from support.wheels import write_wheel
from typer.testing import CliRunner

from forge import demo
from forge.cli.main import app
from forge.errors import Failed, NotAttempted
from forge.hostbase.base import LOCK
from forge.hostbase.lock import Pin, read_pins
from forge.project import Project
from forge.recipes.recipe import Recipe
from forge.sources import patching
from forge.sources.cache import PYPI_URL, Source, SourceCache

REQUIRES = {
    "torch": ["sympy", 'nvidia-cublas; sys_platform == "linux"', "cuda-toolkit[cublas]==13"],
    "sympy": ["Mp_Math>=1"],
    "rich": ['dataclasses; python_version < "3.7"', 'ipywidgets; extra == "jupyter"'],
}


def test_it_fetches_what_the_validator_needs_and_nothing_of_nvidia(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo fetches each required wheel once, and none for CUDA, other machines or extras."""
    fetched: list[str] = []

    def fetch(pins: Iterable[Pin], *_: object) -> Iterator[tuple[Path, Source]]:
        for pin in pins:
            fetched.append(pin.name)
            file = write_wheel(tmp_path, pin.name, requires=REQUIRES.get(pin.name, ()))
            purl = PackageURL("pypi", None, pin.name, "1.0", {"file_name": file.name})
            yield file, Source(f"{PYPI_URL}/{file.name}", "0" * 64, purl)

    names = [*read_pins(CHECKOUT / "recipes/bases/host" / LOCK), "mp-math"]
    pins = {name: Pin(name, "1.0", ()) for name in names}
    monkeypatch.setattr(demo, "fetch_wheels", fetch)
    monkeypatch.setattr(demo, "read_pins", lambda _: pins)
    project = Project.at(CHECKOUT)
    wheels = list(demo.fetch_closure(project, tmp_path / LOCK, SourceCache(project), print))
    required = {
        canonicalize_name(requirement.name) for requirement in demo.list_requirements(project)
    }
    assert {"torch", "numpy", "pyelftools", "einops"} < required
    assert sorted(fetched) == sorted({wheel.name for wheel in wheels})
    assert set(fetched) == required | {"sympy", "mp-math"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source with one file, inside the git repository of something else."""
    folder = tmp_path / "repository" / "source"
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", tmp_path / "repository"], check=True)
    (folder / "a.py").write_text("one\n")
    return folder


def patch(folder: Path, before: str, after: str) -> Path:
    """Write a patch of a.py into a folder, and return it."""
    path = folder / f"{after}.patch"
    path.write_text(f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-{before}\n+{after}\n")
    return path


def test_patches_change_the_source(tree: Path, tmp_path: Path) -> None:
    patches = [patch(tmp_path, "one", "two"), patch(tmp_path, "two", "three")]
    assert patching.apply_in_place(tree, patches) == ""
    assert (tree / "a.py").read_text() == "three\n"


def test_patches_that_do_not_apply_change_nothing(tree: Path, tmp_path: Path) -> None:
    patches = [patch(tmp_path, "one", "two"), patch(tmp_path, "one", "three")]
    assert patching.apply_in_place(tree, patches).startswith("three.patch: ")
    assert (tree / "a.py").read_text() == "one\n"


def test_a_validator_that_ends_without_a_record(tmp_path: Path) -> None:
    """The error has the last lines that the validator printed."""
    package = tmp_path / "strix_validate"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text("raise SystemExit('no such device')")
    with pytest.raises(Failed, match="strix-validate ended with 1:\nno such device"):
        demo.validate([tmp_path], tmp_path, tmp_path)


COMPILED = {"0-attn_fwd": {"wmma": 64, "vgprs": 254, "vgpr_spills": 2, "sgpr_spills": 1, "lds": 8}}
NUMBERS = {name: {"error": 7.6e-4, "bound": 5e-3} for name in demo.ERRORS}
EXECUTED = NUMBERS | {"kernels": {"0-attn_fwd": {"wave_instructions": 33736}}}
RECORD: dict[str, Any] = {
    "versions": {"flash-attn": "2.8.3.post2", "triton": "3.7.1", "torch": "2.13.0"},
    "checks": [
        {"id": demo.COMPILED, "state": "passed", "reason": "", "measured": COMPILED},
        {"id": demo.EXECUTED, "state": "passed", "reason": "", "measured": EXECUTED},
    ],
}


def test_a_record_in_words() -> None:
    text = "\n".join(demo.describe(RECORD))
    assert "64 matrix instructions (WMMA), 254 vector registers, 3 spilled, 8 bytes" in text
    assert "33,736 instructions" in text
    assert text.count("largest error 7.6e-04, allowed 5.0e-03") == 4
    assert "No GPU was used" in text.splitlines()[-1]


def test_the_command_compiles_flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = MiniProject(tmp_path)
    project.recipe("alpha")
    project.recipe("flash-attn")
    recipes: list[str] = []

    def run(_: Project, recipe: Recipe, *__: object) -> dict[str, Any]:
        recipes.append(recipe.name)
        return RECORD

    monkeypatch.setenv("FORGE_ROOT", str(project.root))
    monkeypatch.setattr(demo, "run", run)
    done = CliRunner().invoke(app, ["demo", "--base", "host"])
    assert recipes == ["flash-attn"]
    assert "No GPU was used" in done.output


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("state", "error", "code"), [("failed", Failed, 1), ("skipped", NotAttempted, 3)]
)
def test_what_did_not_pass_is_an_error(
    number: int, state: str, error: type[Exception], code: int
) -> None:
    """A check that did not pass is an error, and no line states that the results are correct."""
    record = copy.deepcopy(RECORD)
    check = record["checks"][number]
    check |= {"state": state, "reason": "no disassembler", "measured": {}}
    lines = []
    with pytest.raises(error, match=f"{check['id']} {state}: no disassembler") as raised:
        lines.extend(demo.describe(record))
    assert raised.value.exit_code == code
    del record["checks"][number]
    with pytest.raises(NotAttempted, match="the validator did not run it"):
        lines.extend(demo.describe(record))
    assert not any("correct" in line for line in lines)
