# SPDX-License-Identifier: BSD-3-Clause
"""The tiers, one module each.

A tier has two functions: ``checks() -> list[Check]``, all that it knows on any machine, and
``run(wanted, options) -> Iterator[Result]``, one result for each wanted check, in any order. A
check that has nothing to judge is yielded as skipped; strix_validate.skips decides whether that was
to be expected. To add a tier, write its module and name it here.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from types import ModuleType

from strix_validate.checks import CannotRun, Check, Options, Result, State

#: In the order in which `run` takes them; imported when used, because most need torch.
TIERS = ("doctor", "backend", "attention", "kernels", "emulated", "bench", "serve")


def load(name: str) -> ModuleType:
    """The module of a tier.

    Raises:
        ModuleNotFoundError: what the tier needs, torch for most, is not installed.
    """
    return importlib.import_module(f"{__name__}.{name}")


def run_each(
    wanted: list[Check], options: Options, bodies: dict[str, Callable[[Options], Result | dict]]
) -> Iterator[Result]:
    """For tiers whose checks are functions: bodies maps a check's id to its function.

    A function returns what it measured, or a whole result; it raises AssertionError to fail and
    CannotRun to be skipped. Any other exception is a failure, too.
    """
    for check in wanted:
        begin = perf_counter()
        try:
            found = bodies[check.id](options)
            result = found if isinstance(found, Result) else Result(check, State.PASSED, "", found)
        except CannotRun as reason:
            result = Result(check, State.SKIPPED, str(reason))
        except AssertionError as error:
            result = Result(check, State.FAILED, str(error))
        except Exception as error:  # whatever a library raises is a finding, not a crash
            result = Result(check, State.FAILED, f"{type(error).__name__}: {error}")
        yield replace(result, check=check, seconds=perf_counter() - begin)
