# SPDX-License-Identifier: BSD-3-Clause
"""The child process that runs rattler-build: `python -m forge.building.engine JOB`.

JOB is a file of JSON: {"action": "build", "test" or "convert", and its arguments}. A child of its
own because rattler-build holds the GIL for hours and may abort.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import rattler
from rattler_build import Package

from forge import network
from forge.conda import cache
from forge.files import write_text
from forge.project import DONE
from forge.recipes.render import build_recipes

PR_SET_PDEATHSIG = 1
SCRIPT_LOG = "conda_build.log"
NOT_SET_UP = "failed to setup test environment"
TEST_HOURS = 2  # limit of a test; the longest takes minutes. `extra.cost` may give a recipe another


def test(packages: list[str], channel: list[str], hours: float = TEST_HOURS) -> None:
    """Run the tests inside each package; raises RuntimeError that names those that failed.

    What passes is offered to the package cache, for the environments of what comes after it: not
    before, since rattler-build unpacks the package that it tests in any case.

    A test that takes longer than `hours` ends this process by SIGALRM: rattler-build holds the GIL,
    so that no handler would run. The line that names the test is then the log's last.
    """
    failed = list[str]()
    for package in map(open_package, packages):
        before = len(failed)
        for index in range(package.test_count):
            number = f"{index + 1} of {package.test_count}"
            print(f"== test {number}: {package.filename}, limit {hours:g} hours", flush=True)
            signal.setitimer(signal.ITIMER_REAL, hours * 3600)
            try:
                result = package.run_test(index, channel=channel)
                passed, output = result.success, result.output
            except Exception as error:
                passed, output = False, [str(error)]
            signal.setitimer(signal.ITIMER_REAL, 0)
            if any(NOT_SET_UP in line for line in output):
                output = [*output, *unsolved(package, index, channel)]
            print(*output, sep="\n", flush=True)
            if not passed:
                failed.append(f"{package.name} test {index + 1}")
        if len(failed) == before:
            cache.offer(Path(package.path))
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def open_package(path: str) -> Package:
    """Open a package whose tests are read, and remove what rattler-build unpacks to read them.

    It would keep the files, gigabytes with rocm-sdk, until the last test has ended.
    """
    package, usual = Package.from_file(path), os.environ["TMPDIR"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        try:
            _ = package.test_count  # reads the tests, once
        finally:
            os.environ["TMPDIR"] = usual
    return package


def unsolved(package: Package, index: int, channels: list[str]) -> list[str]:
    """Give the solver's reason if a test's environment does not solve; rattler-build gives none."""
    from forge.envs.solver import solve  # what few need is a third of each child's start

    test = package.tests[index]
    specs = [f"{package.name} =={package.version} {package.build_string}"]
    specs += getattr(test, "requirements_run", [])
    if python := test.to_dict().get("python_version"):
        specs += ["pip", f"python {python}"]
    try:
        solve(channels, specs, rattler.Gateway(client=network.for_indexes()))
    except Exception as error:
        return [f"its environment ({', '.join(specs)}): {error}"]
    return []


def convert(wheels: list[dict[str, Any]], subdir: str, output_dir: str) -> None:
    """Convert wheels to packages in `subdir`, the largest first, one per core at a time."""
    from forge.hostbase.wheels import Conversion

    todo = sorted((Conversion(**wheel) for wheel in wheels), key=Conversion.size, reverse=True)
    with futures.ProcessPoolExecutor(int(os.environ["CPU_COUNT"]), None, end_with_parent) as pool:
        for made in pool.map(make, todo, [Path(subdir)] * len(todo)):
            print(made.name, flush=True)


def make(wheel: Any, subdir: Path) -> Path:
    """Convert a wheel. Raises RuntimeError, since not every exception crosses processes."""
    try:
        made = wheel.make(subdir)
        cache.offer(made)
        return made
    except Exception as error:
        raise RuntimeError(f"{Path(wheel.file).name}: {type(error).__name__}: {error}") from None


def end_with_parent() -> None:
    """Let whatever ends the parent process end this one as well."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def build(
    recipes: list[str | Path],
    output_dir: str,
    variant_overrides: dict[str, list[str]],
    pythons: Sequence[str] = (),
    **arguments: Any,
) -> None:
    """Build the packages of a recipe in `output_dir`, for one of the Pythons after another.

    In one call, rattler-build would stage the files for a Python in the prefix that still holds
    those for the Python before: both would be packed, if the script did not fail. It would also
    keep the trees of all Pythons until the end.
    """
    for number, python in enumerate(pythons or [""]):
        done = Path(output_dir, f"{DONE}{number}")
        if done.exists():  # built before the last run was stopped
            continue
        one = {"python": [python]} if python else {}
        build_recipes(
            recipes,
            output_dir=output_dir,
            variant_overrides=variant_overrides | one,
            test="skip",
            keep_build=True,  # it has the log
            no_build_id=True,  # a stopped run goes on with the same paths
            **arguments,
        )
        remove_trees(Path(output_dir))
        packages = [
            str(path.relative_to(output_dir)) for path in Path(output_dir).glob("*/*.conda")
        ]
        write_text(done, "\n".join(packages))


def remove_trees(output: Path) -> None:
    """Remove what rattler-build has built in, except for the logs, which the driver still reads."""
    for folder in (output / "bld", output / "build_cache"):
        for place, folders, files in os.walk(folder, topdown=False):
            for path in [Path(place, name) for name in files + folders]:
                with contextlib.suppress(OSError):  # a folder that holds a log
                    if path.is_dir() and not path.is_symlink():
                        path.rmdir()
                    elif path.name != SCRIPT_LOG:
                        path.unlink()


ACTIONS: dict[str, Callable[..., None]] = {"build": build, "convert": convert, "test": test}


def main() -> None:
    """Run the job and leave at once: the bindings sometimes abort while Python shuts down."""
    end_with_parent()
    job, status = json.loads(Path(sys.argv[1]).read_bytes()), 0
    try:
        ACTIONS[job.pop("action")](**job)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        status = 1
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
