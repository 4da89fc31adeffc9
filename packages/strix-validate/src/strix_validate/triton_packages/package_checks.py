# SPDX-License-Identifier: BSD-3-Clause
"""The checks of Triton kernels that the tiers kernels, attention and emulated have.

A library is vllm_checks, or a package: flash_cases, or a module of this subpackage. MODULE is what
it is imported as. COMPILED, COMPUTED and EMULATED are its cases by name: compiled only, computed by
the interpreter or a GPU, executed as gfx1151 code. A GPU also computes those of COMPUTED in
bfloat16, but for the patterns of names in FLOAT16_OR_32. A new package is a new module, named here
and in skips.toml.
"""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from types import ModuleType
from typing import Any

from strix_validate.attention import flash_cases
from strix_validate.checks import CannotRun, Check, Result, RunOptions
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import BF16, require
from strix_validate.triton.cases import TIER_TITLES, Case, Judge, make, run_calls, unanswered
from strix_validate.triton_packages import conch, fla, gguf, liger, sage
from strix_validate.vllm import vllm_checks

PACKAGES: tuple[ModuleType, ...] = (flash_cases, conch, fla, gguf, liger, sage)
LIBRARIES = (vllm_checks, *PACKAGES)
_TABLES = {"kernels": "COMPILED", "attention": "COMPUTED", "emulated": "EMULATED"}


@cache
def in_bfloat16(library: ModuleType) -> dict[str, Case]:
    """Return the cases that a GPU computes in bfloat16 too: the interpreter's products are wrong.

    Models are stored in it, and each kernel is compiled for it anew.
    """
    others = getattr(library, "FLOAT16_OR_32", ())
    return {
        f"{name}-bfloat16": replace(case, dtype=BF16)
        for name, case in library.COMPUTED.items()
        if case.dtype is not BF16 and not any(fnmatchcase(name, other) for other in others)
    }


@cache
def _cases(tier: str, library: ModuleType) -> dict[Check, tuple[str, Case]]:
    prefix = getattr(library, "PREFIX", f"{library.__name__.rpartition('.')[2]}-")
    title = f"{library.MODULE}'s kernels {TIER_TITLES[tier]}"
    cases = dict(getattr(library, _TABLES[tier]))
    if tier == "attention":
        cases |= in_bfloat16(library)
    return {
        Check(f"{tier}/{prefix}{which}", f"{title}: {which}", case.catches): (which, case)
        for which, case in cases.items()
    }


def checks(tier: str) -> list[Check]:
    """List the tier's checks, TIER/LIBRARY-NAME."""
    return [check for library in LIBRARIES for check in _cases(tier, library)]


def applies(check: Check, options: RunOptions) -> bool:
    """Return False for a check of the tier attention of another size or kind of device."""
    for library in LIBRARIES:
        if found := _cases("attention", library).get(check):
            name, case = found
            if name in in_bfloat16(library) and options.device != "cuda":
                return False
            suits = library is not vllm_checks or vllm_checks.suits(name, options.device)
            return suits and options.size.holds(case.size)
    return True


def run(
    tier: str, wanted: list[Check], options: RunOptions, mode: triton_modes.Mode, judge: Judge
) -> Iterator[Result]:
    """Yield the results of those of the wanted checks that are the tier's checks here."""
    for library in LIBRARIES:
        cases, problems = _cases(tier, library), {}
        for check in (check for check in wanted if check in cases):
            try:
                more = _given(library, cases[check][0], options)
            except (CannotRun, ValueError) as error:
                yield unanswered(check, error)
                continue
            call, expected = make(*cases[check])
            problems[check] = replace(call, **more), expected
        if problems:
            yield from run_calls(problems, mode, judge)


def _given(library: ModuleType, name: str, options: RunOptions) -> dict[str, Any]:
    """Return what a call needs beside its case. Raise CannotRun where the library is missing."""
    if library is vllm_checks:
        return {"source": vllm_checks.source_for(name, options)}
    require(library.MODULE)
    return {}
