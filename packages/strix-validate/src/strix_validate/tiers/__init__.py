# SPDX-License-Identifier: BSD-3-Clause
"""The tiers, one module each.

A tier has two functions. ``checks() -> Iterable[Check]`` names every check, of any machine.
``run(wanted, options) -> Iterator[Result]`` yields one result per wanted check, in any order; a
check that has nothing to judge is skipped, and strix_validate.skips decides whether that was
expected. ``announce(wanted, options) -> Iterator[str]``, if a tier has it, yields lines that are
shown before its first check. To add a tier, write its module and name it here.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from types import ModuleType

from strix_validate.checks import Body, CannotRun, Check, CheckFailed, Result, RunOptions, State

__all__ = [
    "GROUPS", "ON_DEVICE", "QUICK", "SLOW", "TIERS", "attention", "backend", "bench", "doctor",
    "emulated", "isolated", "kernels", "libraries", "load", "machine_speed", "run_each", "serve",
]  # fmt: skip
#: In the order in which `run` takes them. Imported on use: most need torch.
TIERS = ("doctor", "backend", "libraries", "attention", "kernels", "emulated", "bench", "serve")
#: Those of `run --quick`, and what it leaves out: MIOpen searches for minutes.
QUICK, SLOW = ("doctor", "backend", "libraries", "attention", "bench", "serve"), ("conv",)
#: Those that need a GPU where one is asked for.
ON_DEVICE = ("backend", "libraries", "attention", "bench")
#: What the ids of a tier's checks begin with, where that is not the tier's name alone.
GROUPS = {
    "libraries": ("gemm", "factors", "gradients", "conv", "host-memory", "compile", "bitsandbytes"),
    "attention": ("attention", "sdpa", "flash-attn"),
}


def load(name: str) -> ModuleType:
    """Import the module of a tier.

    Raises:
        ModuleNotFoundError: a package that the tier needs, usually torch, is not installed.
    """
    return importlib.import_module(f"{__name__}.{name}")


def run_each(
    wanted: list[Check], options: RunOptions, bodies: Mapping[Check, Body]
) -> Iterator[Result]:
    """Run checks that are functions: bodies maps a check to its function.

    A function returns what it measured, or a whole result. It raises CheckFailed to fail (see
    checks.require) and CannotRun to be skipped. Any other exception fails the check as well.
    """
    for check in wanted:
        begin = perf_counter()
        try:
            found = bodies[check](options)
            result = found if isinstance(found, Result) else Result(check, State.PASSED, "", found)
        except CannotRun as reason:
            result = Result(check, State.SKIPPED, str(reason))
        except CheckFailed as error:
            result = Result(check, State.FAILED, str(error))
        except Exception as error:  # a library's exception is a finding, not a crash
            result = Result(check, State.FAILED, f"{type(error).__name__}: {error}")
        yield replace(result, check=check, seconds=perf_counter() - begin)
