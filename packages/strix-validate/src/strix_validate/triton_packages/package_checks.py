# SPDX-License-Identifier: BSD-3-Clause
"""The checks of Triton packages that the tiers kernels, attention and emulated have.

A module of this subpackage, or flash_cases, is a package: MODULE is what it is imported as, and
COMPILED, COMPUTED and EMULATED are its cases by name: compiled only, computed by the interpreter or
a GPU, executed as gfx1151 code. A new package is a new module, named here and in skips.toml.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from strix_validate.attention import flash_cases
from strix_validate.checks import CannotRun, Check, Result, RunOptions, Size
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.cases import HOW, Case, Judge, answered, make, unanswered
from strix_validate.triton_packages import conch, fla, gguf, liger, sage
from strix_validate.triton_packages.package_call import require

PACKAGES: tuple[ModuleType, ...] = (flash_cases, conch, fla, gguf, liger, sage)
_TABLES = {"kernels": "COMPILED", "attention": "COMPUTED", "emulated": "EMULATED"}


def _cases(tier: str, package: ModuleType) -> dict[Check, tuple[str, Case]]:
    # checks of flash-attn, the first package, have no prefix
    prefix = f"{package.__name__.rpartition('.')[2]}-" * (package is not flash_cases)
    title = f"{package.MODULE}'s kernels {HOW[tier]}"
    return {
        Check(f"{tier}/{prefix}{which}", f"{title}: {which}", case.why): (which, case)
        for which, case in getattr(package, _TABLES[tier]).items()
    }


def checks(tier: str) -> list[Check]:
    """List the tier's checks, TIER/PACKAGE-NAME."""
    return [check for package in PACKAGES for check in _cases(tier, package)]


def applies(check: Check, size: Size) -> bool:
    """Return False for a check of the tier attention of another size."""
    cases = (_cases("attention", package).get(check) for package in PACKAGES)
    return all(case is None or size.holds(case[1].size) for case in cases)


def run(
    tier: str,
    wanted: list[Check],
    options: RunOptions,
    mode: triton_modes.Mode,
    judge: Judge[Any],
) -> Iterator[Result]:
    """Yield the results of those of the wanted checks that are the tier's checks here."""
    for package in PACKAGES:
        cases = _cases(tier, package)
        mine = [check for check in wanted if check in cases]
        try:
            require(package.MODULE)
        except CannotRun as error:
            yield from unanswered(mine, error)
            continue
        if problems := {check: make(*cases[check]) for check in mine}:
            yield from answered(problems, "", mode, judge)
