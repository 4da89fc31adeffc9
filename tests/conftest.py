# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for all tests. Each test has its folder's name as a marker, such as `unit`."""

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

# xdist's workers share the cores. If torch had more threads than cores, they would busy-wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that a shell starts in the background ignores SIGINT, and its children inherit this.
# Some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Users, terminals and GitHub's runners set these variables. PYTHONPATH would make a driver that a
# test starts import other modules. The others change the colours and the width of typer's output,
# which tests read.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "COLUMNS", "PYTHONPATH"):
    os.environ.pop(name, None)
# If a user has set this to 1, an expected panic of the bindings would print a stack trace.
os.environ["RUST_BACKTRACE"] = "0"
Tally.refusal = ForgeError


def pytest_report_header() -> str:
    return f"mutants: FORGE_SEED={SEED} repeats those of this run"


# This hook must run before that of xdist, which reads the markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder and its group, and put tests with slow fixtures first.

    xdist runs the tests of a group in one worker. `groups_by_fixture` has the groups of tests with
    slow fixtures. The other tests are grouped by the name of their file.
    """
    groups_by_fixture = {
        "built": "checkout",
        "attention_stack": "checkout",
        "conda_forge": "release",
        "hosting": "hosted",
    }
    slow_items = []
    other_items = []
    for item in items:
        kind = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(getattr(pytest.mark, kind))
        fixtures = getattr(item, "fixturenames", ())
        groups = [groups_by_fixture[name] for name in fixtures if name in groups_by_fixture]
        if groups:
            item.add_marker(pytest.mark.xdist_group(groups[0]))
            slow_items.append(item)
        else:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            other_items.append(item)
    items[:] = slow_items + other_items


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how often each reader accepted or refused mutated data (support/mutants.py)."""
    readers: dict[str, Counter[str]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "mutants":
                reader, outcomes = value
                readers.setdefault(reader, Counter()).update(outcomes)
    if not readers:
        return
    total = sum(readers.values(), Counter())
    for reader, outcomes in [*sorted(readers.items()), ("all readers", total)]:
        counts = ", ".join(f"{number} {word}" for word, number in sorted(outcomes.items()))
        terminalreporter.write_line(
            f"mutants, {reader}: {outcomes.total()}: {counts}, 0 tracebacks"
        )


@pytest.fixture(scope="session")
def host_base(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the host base of the checkout from PyPI, unless it exists. This takes a few minutes."""
    project = MiniProject(tmp_path_factory.mktemp("base"))
    project.recipe("probe")
    with FileLock(CHECKOUT / "build" / ".tests"):
        # project.forge has the time limit of support/faults.py, which does not suffice on a busy
        # machine.
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
    """A small project whose host base exists."""
    return MiniProject(tmp_path)


@pytest.fixture(scope="session")
def recipes() -> RecipeSet:
    """The recipes of this checkout, rendered with the conda-forge base."""
    project = Project.at(CHECKOUT)
    return RecipeSet(project, bases.load(project, "conda-forge"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout with all packages that this machine can build, made once per run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Share the folder between the workers of a run.
        folder = folder.parent
    root = folder / "checkout"
    with FileLock(CHECKOUT / "build" / ".tests"):
        if not root.exists():
            copy_checkout(root)
        forge("build-all", root=root)
        contents.check(root / "channel")
    return root


@pytest.fixture(scope="session")
def attention_stack(built: Path) -> Path:
    """The copy `built`, with the attention stack locked and installed."""
    forge("lock", "attention", root=built)
    forge("install", "attention", root=built)
    return built


@pytest.fixture(scope="session")
def emulated_stack(attention_stack: Path) -> Path:
    """The copy `built`, with the attention stack's environment `emulated` installed too.

    The emulator in that environment is compiled. This makes it ten times as fast.
    """
    forge("install", "attention", "-e", "emulated", root=attention_stack)
    return attention_stack
