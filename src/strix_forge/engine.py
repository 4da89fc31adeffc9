# SPDX-License-Identifier: BSD-3-Clause
"""The child process that runs rattler-build: `python -m strix_forge.engine JOB.json`.

A child of its own because build_recipes is silent, holds the GIL for hours and may abort; the
parent follows its log and outlives it. JOB.json holds the arguments of `build` or `test` below.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def build(
    recipe: str, channels: list[str], variant_files: list[str], overrides: dict[str, list[str]],
    output: str, number: int | None, prefix: str, package_format: str,
) -> None:  # fmt: skip
    """Build all outputs of one recipe into `output`, untested.

    build_recipes is deprecated, but its announced successor runs a staging output's script once
    per output; py-rattler-build is pinned for that reason.
    """
    from rattler_build.cli_api import build_recipes

    warnings.simplefilter("ignore", DeprecationWarning)
    build_recipes(
        [recipe],
        channel=channels,
        variant_config=variant_files,
        variant_overrides=overrides,
        ignore_recipe_variants=True,
        output_dir=output,
        build_num=number,
        build_string_prefix=prefix.rstrip("_") or None,
        package_format=package_format,
        test="skip",
    )


def test(packages: list[str], channels: list[str]) -> None:
    """Run the tests inside each package; raises SystemExit(1) when one fails."""
    from rattler_build import Package

    failed = []
    for path in packages:
        package = Package.from_file(path)
        for index in range(package.test_count):
            print(f"== test {index + 1} of {package.test_count}: {package.filename}", flush=True)
            try:
                result = package.run_test(index, channel=channels)
                print(*result.output, sep="\n", flush=True)
                passed = result.success
            except Exception as error:
                print(error, flush=True)
                passed = False
            if not passed:
                failed.append(f"{package.name} test {index + 1}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    """Run the job and leave at once: the bindings sometimes abort while Python shuts down."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    status = 0
    try:
        {"build": build, "test": test}[job.pop("action")](**job)
    except SystemExit as stop:
        print(stop, flush=True)
        status = 1
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
