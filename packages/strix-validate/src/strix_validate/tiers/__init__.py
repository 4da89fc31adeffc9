# SPDX-License-Identifier: BSD-3-Clause
"""The tiers: groups of checks that a run selects, one module each.

Each module that TIERS names defines ``TIER``, an instance of :class:`Tier`, whose functions
strix_validate.runner calls. To add a tier, write its module and name it in TIERS and, where they
apply, in QUICK, ON_DEVICE and GROUPS.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from strix_validate.checks import Body, CannotRun, Check, CheckFailed, Result, RunOptions, State

__all__ = [
    "GROUPS",
    "ON_DEVICE",
    "QUICK",
    "SLOW",
    "TIERS",
    "Tier",
    "attention",
    "backend",
    "bench",
    "check_from_purpose",
    "doctor",
    "emulated",
    "isolated",
    "kernels",
    "libraries",
    "load",
    "machine_speed",
    "run_each",
    "serve",
]
#: Names of the tiers in the order in which `run` runs them. A tier's module is imported only when
#: the tier is loaded, because most of these modules need torch.
TIERS = ("doctor", "backend", "libraries", "attention", "kernels", "emulated", "bench", "serve")
#: Tiers of `run --quick`.
QUICK = ("doctor", "backend", "libraries", "attention", "bench", "serve")
#: Groups of checks that `run --quick` leaves out. In "conv", MIOpen's search takes minutes.
SLOW = ("conv",)
#: Tiers that are skipped if a GPU was requested and torch finds none.
ON_DEVICE = ("backend", "libraries", "attention", "bench")
#: The first parts of the ids of checks, by tier. The ids of a tier that is not listed here begin
#: with its name.
GROUPS = {
    "libraries": ("gemm", "factors", "gradients", "conv", "host-memory", "compile", "bitsandbytes"),
    "attention": ("attention", "sdpa", "flash-attn"),
}


def _always_applies(check: Check, options: RunOptions) -> bool:
    del check, options
    return True


def _announce_nothing(selected: list[Check], options: RunOptions) -> Iterator[str]:
    del selected, options
    return iter(())


@dataclass(frozen=True)
class Tier:
    """The functions of a tier.

    Attributes:
        checks: Lists every check of the tier, for any machine and any size of run.
        run: Yields one result per selected check, in any order. A check that has nothing to judge
            is skipped; strix_validate.skips decides whether the skip was expected.
        applies: Returns whether a check belongs to a run with these options, for example with this
            size and device. By default every check applies.
        announce: Yields lines that are shown before the first selected check runs, such as its
            cost. By default there are none.
    """

    checks: Callable[[], list[Check]]
    run: Callable[[list[Check], RunOptions], Iterator[Result]]
    applies: Callable[[Check, RunOptions], bool] = _always_applies
    announce: Callable[[list[Check], RunOptions], Iterator[str]] = _announce_nothing


def load(name: str) -> Tier:
    """Import the module of a tier and return its functions.

    Raises:
        ModuleNotFoundError: A package that the tier needs, usually torch, is not installed.
    """
    return importlib.import_module(f"{__name__}.{name}").TIER


def check_from_purpose(check_id: str, purpose: str) -> Check:
    """Return a check whose title is the first sentence of its purpose.

    Args:
        check_id: Unique id, such as "backend/versions".
        purpose: The title as the first sentence, then the bug that the check would catch, with a
            link.
    """
    title = purpose.split(". ")[0]
    return Check(check_id, title, purpose)


def run_each(
    selected: list[Check],
    options: RunOptions,
    bodies: Mapping[Check, Body],
) -> Iterator[Result]:
    """Run the function of each check, and yield a result with the time that the check took.

    Args:
        selected: The checks to run.
        options: The argument of each function.
        bodies: The function of each check. A function returns its measurements, or a whole Result.
            It raises CheckFailed (see checks.require) to fail the check, and CannotRun to skip it.
            Any other exception fails the check as well.
    """
    for check in selected:
        begin = perf_counter()
        try:
            measured = bodies[check](options)
            if isinstance(measured, Result):
                result = measured
            else:
                result = Result(check, State.PASSED, "", measured)
        except CannotRun as reason:
            result = Result(check, State.SKIPPED, str(reason))
        except CheckFailed as error:
            result = Result(check, State.FAILED, str(error))
        except Exception as error:  # an exception in a library fails the check, not the run
            result = Result(check, State.FAILED, f"{type(error).__name__}: {error}")
        yield replace(result, check=check, seconds=perf_counter() - begin)
