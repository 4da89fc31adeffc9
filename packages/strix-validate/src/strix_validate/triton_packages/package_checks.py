# SPDX-License-Identifier: BSD-3-Clause
"""List and run the checks of Triton kernels, for the tiers "kernels", "attention" and "emulated".

A library is a module that lists cases: vllm_checks, flash_cases, or a module of this subpackage
for another package. It defines:

- MODULE: The name under which the library is imported; for vLLM, its name in titles.
- PREFIX: The beginning of its checks' names. By default it is the last part of the listing module's
  name, and a hyphen.
- COMPILED: Cases that are only compiled, by name.
- COMPUTED: Cases that the interpreter or a GPU computes. A GPU computes each of them in bfloat16 as
  well, unless its name matches a pattern in FLOAT16_OR_32.
- EMULATED: Cases whose gfx1151 code is executed under emulation.

To add a package, write its module, and name the module in PACKAGES and in skips.toml.
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
from strix_validate.triton.cases import (
    TIER_TITLES,
    Case,
    Judge,
    describe_missing_answer,
    make,
    run_calls,
)
from strix_validate.triton_packages import conch, fla, gguf, liger, sage
from strix_validate.vllm import vllm_checks

PACKAGES: tuple[ModuleType, ...] = (flash_cases, conch, fla, gguf, liger, sage)
LIBRARIES = (vllm_checks, *PACKAGES)
#: By tier, the name of a library's table that has the tier's cases.
_TABLES = {
    "kernels": "COMPILED",
    "attention": "COMPUTED",
    "emulated": "EMULATED",
}


@cache
def in_bfloat16(library: ModuleType) -> dict[str, Case]:
    """Return the cases of COMPUTED in bfloat16, which only a GPU computes.

    Models are stored in bfloat16, for which each kernel is compiled separately. The interpreter
    cannot check these kernels, because its products in bfloat16 are wrong.
    """
    excluded_patterns = getattr(library, "FLOAT16_OR_32", ())
    cases = {}
    for name, case in library.COMPUTED.items():
        is_excluded = any(fnmatchcase(name, pattern) for pattern in excluded_patterns)
        if case.dtype is BF16 or is_excluded:
            continue
        cases[f"{name}-bfloat16"] = replace(case, dtype=BF16)
    return cases


@cache
def _list_cases(tier: str, library: ModuleType) -> dict[Check, tuple[str, Case]]:
    """Return a tier's checks of one library, each with the name of its case and the case."""
    module_name = library.__name__.rpartition(".")[2]
    prefix = getattr(library, "PREFIX", f"{module_name}-")
    title = f"{library.MODULE}'s kernels {TIER_TITLES[tier]}"
    cases = dict(getattr(library, _TABLES[tier]))
    if tier == "attention":
        cases |= in_bfloat16(library)
    checks = {}
    for name, case in cases.items():
        check = Check(f"{tier}/{prefix}{name}", f"{title}: {name}", case.catches)
        checks[check] = (name, case)
    return checks


def checks(tier: str) -> list[Check]:
    """List the tier's checks of all libraries.

    Their ids are TIER/LIBRARY-NAME, or TIER/NAME for flash-attn.
    """
    tier_checks: list[Check] = []
    for library in LIBRARIES:
        tier_checks += _list_cases(tier, library)
    return tier_checks


def applies(check: Check, options: RunOptions) -> bool:
    """Return False if a check of "attention" is not for the run's size, or not for its device."""
    for library in LIBRARIES:
        cases = _list_cases("attention", library)
        if check not in cases:
            continue
        name, case = cases[check]
        if name in in_bfloat16(library) and options.device != "cuda":
            return False
        if library is vllm_checks and not vllm_checks.is_for_device(name, options.device):
            return False
        return options.size.includes(case.size)
    return True


def run(
    tier: str,
    selected: list[Check],
    options: RunOptions,
    mode: triton_modes.Mode,
    judge: Judge,
) -> Iterator[Result]:
    """Yield the results of the selected checks that `checks` lists for a tier.

    Args:
        tier: The tier.
        selected: The checks to run. Checks of other kinds are ignored.
        options: The options of the run.
        mode: How the kernels run.
        judge: Judges the answers.
    """
    for library in LIBRARIES:
        cases = _list_cases(tier, library)
        calls = {}
        for check in selected:
            if check not in cases:
                continue
            name, case = cases[check]
            try:
                fields = _read_fields(library, name, options)
            except (CannotRun, ValueError) as error:
                yield describe_missing_answer(check, error)
                continue
            call, expected = make(name, case)
            calls[check] = (replace(call, **fields), expected)
        if calls:
            yield from run_calls(calls, mode, judge)


def _read_fields(library: ModuleType, name: str, options: RunOptions) -> dict[str, Any]:
    """Return the fields of a call that depend on the options of the run.

    Raises:
        CannotRun: The library is not installed, or vllm_checks.find_source raises it.
        ValueError: vllm_checks.find_source raises it.
    """
    if library is vllm_checks:
        return {"source": vllm_checks.find_source(name, options)}
    require(library.MODULE)
    return {}
