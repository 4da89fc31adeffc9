# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of all tests. A test's folder is its marker: unit, integration or end_to_end."""

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock
from support import contents
from support.mutants import SEED, Tally
from support.project import CHECKOUT, MiniProject, copy_checkout, forge

from forge import bases
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.plan import RecipeSet

# the workers share the cores, and threads of torch that wait for one spin
os.environ.setdefault("OMP_NUM_THREADS", "1")
# what a shell starts in the background ignores Ctrl-C, and so do its children
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# by these, which GitHub's runners and terminals set, typer colours and wraps what tests read; and
# with a person's PYTHONPATH a driver that a test starts would find other modules
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "COLUMNS", "PYTHONPATH"):
    os.environ.pop(name, None)
# as the driver has it: an expected panic of the bindings prints no stack between the dots
os.environ["RUST_BACKTRACE"] = "0"
Tally.refusal = ForgeError


def pytest_report_header() -> str:
    return f"mutants: FORGE_SEED={SEED} repeats those of this run"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker for the tests of a file; and one, from the start, for those of a slow fixture."""
    slow = {"built": "checkout", "attention_stack": "checkout", "conda_forge": "release"}
    slow |= {"hosting": "hosted"}
    for item in items:
        kind = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(getattr(pytest.mark, kind))
        groups = [slow[name] for name in getattr(item, "fixturenames", ()) if name in slow]
        item.add_marker(pytest.mark.xdist_group(groups[0] if groups else item.path.stem))
    items.sort(key=lambda item: next(item.iter_markers("xdist_group")).args[0] not in slow.values())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The tally of mutated foreign data (support/mutants.py), over all workers."""
    readers: dict[str, Counter[str]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "mutants":
                readers.setdefault(value[0], Counter()).update(value[1])
    total = sum(readers.values(), Counter())
    for reader, outcomes in [*sorted(readers.items()), ("all readers", total)] if readers else ():
        counts = ", ".join(f"{number} {word}" for word, number in sorted(outcomes.items()))
        terminalreporter.write_line(
            f"mutants, {reader}: {outcomes.total()}: {counts}, 0 tracebacks"
        )


@pytest.fixture(scope="session")
def host_base(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the checkout's host base once, if it is not there; from PyPI, a few minutes."""
    project = MiniProject(tmp_path_factory.mktemp("base"))
    project.recipe("probe")
    with FileLock(CHECKOUT / "build" / ".tests"):
        # without the time limit of project.forge: on a busy machine this takes longer
        done = subprocess.run(
            project.command("build-all"),
            env=project.environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr


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
        contents.check(root / "channel")
    return root


@pytest.fixture(scope="session")
def attention_stack(built: Path) -> Path:
    """The same copy, with the attention stack locked and installed."""
    forge("lock", "attention", root=built)
    forge("install", "attention", root=built)
    return built


@pytest.fixture(scope="session")
def emulated_stack(attention_stack: Path) -> Path:
    """The same copy, with the environment that executes instructions in C: a tenth of the time."""
    forge("install", "attention", "-e", "emulated", root=attention_stack)
    return attention_stack
