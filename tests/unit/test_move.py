# SPDX-License-Identifier: BSD-3-Clause
"""Solve the workspaces of docs/move.md with py-rattler, and check whose pytorch is selected.

The records are ours and conda-forge's. end_to_end/test_pixi_move.py runs the page's commands with a
real pixi, if there is one.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rattler
from rattler.exceptions import SolverError
from support.conda_forge import records_of_both
from support.project import CHECKOUT

from forge.conda.solve import solve as solve_environment
from forge.envs.manifest import match_spec

PAGE = (CHECKOUT / "docs/move.md").read_text()
SECTION = PAGE.split("## From conda-forge's PyTorch\n")[1]
START = tomllib.loads(re.findall(r"(?ms)^```toml\n(.*?)^```", SECTION)[0])
ADDED = re.findall(r"(?m)^pixi add (.*)", SECTION)[0].split()
REMOVED = re.findall(r"(?m)^pixi remove --no-install (.*)", SECTION)[0].split()
# Cases: the requirements of a workspace, and whether solving fails if our channel comes first.
STARTS: dict[str, tuple[dict[str, Any], bool]] = {
    "the page's own": (START["dependencies"], False),
    "any": ({"pytorch": "*"}, False),
    "a range": ({"pytorch": ">=2.10.0,<3"}, False),
    "GPU": ({"pytorch-gpu": "*"}, False),
    "CPU": ({"pytorch-cpu": "*"}, True),
    "an older version": ({"pytorch": "2.10.*"}, True),
    "a build": ({"pytorch": {"version": "*", "build": "cpu*"}}, True),
    "torchvision": ({"torchvision": "*", "pytorch": "*"}, False),
}
# The folders of the channels. The index must be plain JSON, because rattler reads no other form of
# it from a folder.
FOLDERS = {"ours": "ours", "theirs": "solver/conda-forge"}
Lock = Callable[[dict[str, Any], list[str]], str]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our records and those of conda-forge."""
    return records_of_both(tmp_path_factory.mktemp("records"))


@pytest.fixture
def lock(records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """A function that solves requirements with channels, and returns the channel of pytorch."""
    monkeypatch.setenv("CONDA_OVERRIDE_CUDA", "12.9")

    def solve(requirements: dict[str, Any], channels: list[str]) -> str:
        urls = [(records / FOLDERS[channel]).as_uri() for channel in channels]
        requirements = {"python": "3.12.*"} | requirements
        specs = [match_spec(name, value) for name, value in requirements.items()]
        solved = solve_environment(urls, specs, rattler.Gateway(cache_dir=tmp_path))
        (pytorch,) = [record for record in solved if record.name.normalized == "pytorch"]
        return "ours" if "rocm" in str(pytorch.build) else "theirs"

    return solve


@pytest.mark.parametrize("name", STARTS)
def test_our_channel_after_and_before_conda_forge(lock: Lock, name: str) -> None:
    """The order of the channels decides whose pytorch is selected.

    If our channel follows conda-forge, nothing changes. If it precedes conda-forge, our pytorch is
    selected, and requirements that our build does not satisfy are refused.
    """
    requirements, is_refused = STARTS[name]
    assert lock(requirements, ["theirs"]) == "theirs"
    assert lock(requirements, ["theirs", "ours"]) == "theirs"
    if is_refused:
        with pytest.raises(SolverError, match="pytorch"):
            lock(requirements, ["ours", "theirs"])
    else:
        assert lock(requirements, ["ours", "theirs"]) == "ours"


@pytest.mark.parametrize("name", STARTS)
def test_what_the_page_removes_and_adds(lock: Lock, name: str) -> None:
    requirements = dict(STARTS[name][0])
    for removed in (*REMOVED, "pytorch-cpu"):
        requirements.pop(removed, None)
    requirements |= dict.fromkeys(ADDED, "*")
    assert lock(requirements, ["ours", "theirs"]) == "ours"


def test_the_page_removes_what_it_starts_with() -> None:
    assert {*REMOVED} == START["dependencies"].keys() - {"python"}
    assert "pytorch" in ADDED
