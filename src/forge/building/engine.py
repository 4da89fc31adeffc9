# SPDX-License-Identifier: BSD-3-Clause
"""The child process that runs rattler-build: `python -m forge.building.engine JOB`.

JOB is a JSON file that contains an object. Its member `action` is build, convert or test. The other
members are the arguments of the function with that name. The driver starts a process for each job,
because rattler-build holds the GIL for hours and may abort.
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
from typing import TYPE_CHECKING, Any

import rattler
from rattler_build import Package

from forge import network
from forge.conda import cache
from forge.files import write_text
from forge.project import DONE
from forge.recipes.render import build_recipes

if TYPE_CHECKING:
    from forge.hostbase.wheels import Conversion

PR_SET_PDEATHSIG = 1
SCRIPT_LOG = "conda_build.log"
# rattler-build prints this text if it cannot solve the environment of a test.
NOT_SET_UP = "failed to setup test environment"
# Default time limit of a test. The longest test takes minutes. A recipe can set another limit in
# `extra.cost`.
TEST_HOURS = 2


def test(
    packages: list[str],
    channel: list[str],
    hours: float = TEST_HOURS,
) -> None:
    """Run the tests inside each package.

    A package that passes is offered to the package cache, because the test environments of later
    packages may need it. Offering a package before its own tests would not help, because
    rattler-build always unpacks the package that it tests.

    Args:
        packages: The package files in the order of the tests. A package may need earlier packages.
        channel: The channels for the environments of the tests, by priority.
        hours: Time limit of each test. After that time, SIGALRM ends this process, without a signal
            handler, because no handler can run while rattler-build holds the GIL. The last line of
            the log names the test.

    Raises:
        RuntimeError: Tests failed; the message names them.
    """
    failed = []
    for path in packages:
        package = open_package(path)
        failed_tests = _run_tests(package, channel, hours)
        failed += failed_tests
        if not failed_tests:
            cache.offer(Path(package.path))
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _run_tests(
    package: Package,
    channel: list[str],
    hours: float,
) -> list[str]:
    """Run the tests of one package, and return the names of the tests that failed."""
    failed = []
    count = package.test_count
    for index in range(count):
        number = index + 1
        print(
            f"== test {number} of {count}: {package.filename}, limit {hours:g} hours",
            flush=True,
        )
        signal.setitimer(signal.ITIMER_REAL, hours * 3600)
        try:
            result = package.run_test(index, channel=channel)
            passed = result.success
            output = list(result.output)
        except Exception as error:
            passed = False
            output = [str(error)]
        signal.setitimer(signal.ITIMER_REAL, 0)
        if any(NOT_SET_UP in line for line in output):
            output += _explain_unsolved(package, index, channel)
        print(*output, sep="\n", flush=True)
        if not passed:
            failed.append(f"{package.name} test {number}")
    return failed


def open_package(path: str) -> Package:
    """Open a package, read its tests, and remove the files that were unpacked to read them.

    rattler-build itself would keep the unpacked files until the last test has ended. For rocm-sdk,
    these files have gigabytes.
    """
    package = Package.from_file(path)
    job_folder = os.environ["TMPDIR"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        try:
            # This unpacks the package; the object keeps the tests.
            _ = package.test_count
        finally:
            os.environ["TMPDIR"] = job_folder
    return package


def _explain_unsolved(
    package: Package,
    index: int,
    channels: list[str],
) -> list[str]:
    """Solve the environment of a test again, and return a line with the solver's error, if any.

    rattler-build does not print the solver's error.
    """
    from forge.conda.solve import solve

    test = package.tests[index]
    specs = [f"{package.name} =={package.version} {package.build_string}"]
    specs += getattr(test, "requirements_run", [])
    python = test.to_dict().get("python_version")
    if python:
        specs += ["pip", f"python {python}"]
    gateway = rattler.Gateway(client=network.make_solver_client())
    try:
        solve(channels, specs, gateway)
    except Exception as error:
        return [f"its environment ({', '.join(specs)}): {error}"]
    return []


def convert(
    wheels: list[dict[str, Any]],
    subdir: str,
    output_dir: str,
) -> None:
    """Convert wheels to packages in CPU_COUNT processes, the largest wheels first.

    Args:
        wheels: The fields of a `Conversion` for each wheel.
        subdir: The folder for the packages.
        output_dir: The folder of the job's file. `jobs.run_job` reads this member; this action does
            not use it.
    """
    # Imported only here, because this import takes a third of the start time of a child.
    from forge.hostbase.wheels import Conversion

    conversions = [Conversion(**wheel) for wheel in wheels]
    conversions.sort(key=Conversion.size, reverse=True)
    subdirs = [Path(subdir)] * len(conversions)
    executor = futures.ProcessPoolExecutor(
        max_workers=int(os.environ["CPU_COUNT"]),
        initializer=end_with_parent,
    )
    with executor as pool:
        for package in pool.map(_convert_wheel, conversions, subdirs):
            print(package.name, flush=True)


def _convert_wheel(conversion: "Conversion", subdir: Path) -> Path:
    """Convert a wheel, offer the package to the cache, and return the package's file.

    Raises:
        RuntimeError: The conversion failed. The original exception might not be picklable.
    """
    try:
        package = conversion.make(subdir)
        cache.offer(package)
    except Exception as error:
        name = Path(conversion.file).name
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from None
    return package


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, even if the parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def build(
    recipes: list[str | Path],
    output_dir: str,
    variant_overrides: dict[str, list[str]],
    pythons: Sequence[str] = (),
    **arguments: Any,
) -> None:
    """Build the packages of a recipe, for one Python after another.

    rattler-build is called once per Python. In a single call for all Pythons, rattler-build would
    stage the files for a Python in a prefix that still has the files for the previous Python. If
    the script did not fail because of these files, the package would contain the files for both. In
    addition, rattler-build would keep the build trees of all Pythons until the end.

    Args:
        recipes: A list of one path, that of the recipe.
        output_dir: The folder for the packages, which is also rattler-build's work folder.
        variant_overrides: Values that replace those of the variant files.
        pythons: Values of the variant `python`; empty if the packages do not depend on it.
        arguments: Further arguments of rattler-build's `build_recipes`.
    """
    output = Path(output_dir)
    for number, python in enumerate(pythons or [""]):
        done = output / f"{DONE}{number}"
        if done.exists():
            # An earlier run has built these packages before it was stopped.
            continue
        overrides = dict(variant_overrides)
        if python:
            overrides["python"] = [python]
        build_recipes(
            recipes,
            output_dir=output_dir,
            variant_overrides=overrides,
            test="skip",
            # The build folder contains the log.
            keep_build=True,
            # To continue a stopped build, the paths must stay the same.
            no_build_id=True,
            **arguments,
        )
        remove_trees(output)
        packages = []
        for path in output.glob("*/*.conda"):
            packages.append(str(path.relative_to(output)))
        write_text(done, "\n".join(packages))


def remove_trees(output: Path) -> None:
    """Remove rattler-build's build folders, except for the logs, which the driver reads.

    Args:
        output: The job's output folder.
    """
    for tree in (output / "bld", output / "build_cache"):
        for folder, subfolders, files in os.walk(tree, topdown=False):
            for name in files + subfolders:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    # rmdir fails for a folder with a log.
                    if path.is_dir() and not path.is_symlink():
                        path.rmdir()
                    elif name != SCRIPT_LOG:
                        path.unlink()


ACTIONS: dict[str, Callable[..., None]] = {
    "build": build,
    "convert": convert,
    "test": test,
}


def main() -> None:
    """Run the job, and exit without Python's shutdown, in which the bindings may abort."""
    end_with_parent()
    arguments = json.loads(Path(sys.argv[1]).read_bytes())
    status = 0
    try:
        action = ACTIONS[arguments.pop("action")]
        action(**arguments)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        status = 1
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
