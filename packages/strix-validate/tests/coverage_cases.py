# SPDX-License-Identifier: BSD-3-Clause
"""The quick checks of each library's Triton kernels, for record_coverage.py and its test."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from strix_validate.attention import flash_cases
from strix_validate.checks import Size
from strix_validate.triton.cases import Case, make
from strix_validate.triton_packages import conch, fla, gguf, liger, sage
from strix_validate.vllm import vllm_checks

#: Each library's table of cases, except flash-attn's, whose cases have another format.
_TABLES = {
    "conch": conch.COMPUTED,
    "fla": fla.COMPUTED,
    "gguf": gguf.COMPUTED,
    "liger": liger.COMPUTED,
    "sage": sage.COMPUTED,
    "vllm": vllm_checks.COMPUTED,
}
#: The prefix of each library's module names. flash-attn's checks launch the kernels of amd-aiter if
#: it is installed, and flash-attn's built-in kernels otherwise. The kernels of both are recorded,
#: but the arguments of flash-attn's functions only once.
LIBRARIES = {
    "flash": "flash_attn",
    "aiter": "aiter.",
    "conch": "conch",
    "fla": "fla.",
    "gguf": "vllm_gguf_plugin",
    "liger": "liger_kernel",
    "sage": "sageattention",
    "vllm": "vllm.",
}
#: Libraries with kernels that flash-attn's checks launch, and flash-attn's name for each backend.
BACKENDS = {"flash": "built-in", "aiter": "aiter"}


@dataclass(frozen=True)
class QuickCase:
    """A check of the size `quick` that runs on a CPU.

    Attributes:
        case: how to build its call, and the dtype.
        refusals: names of exceptions that the library may raise without failing the check.
    """

    name: str
    case: Case
    refusals: tuple[str, ...] = ()

    def make_call(self) -> Any:
        """Return the check's call."""
        return make(self.name, self.case)[0]

    def digest(self) -> str:
        """Return a hash of the call: its name, options, shapes, strides and integer values.

        Random tensors are replaced by zeros, because random numbers depend on the CPU.
        """
        call, _ = self.case.build(lambda *shape: torch.zeros(shape, dtype=self.case.dtype))
        parts = [call.name, repr(getattr(call, "options", "")), repr(getattr(call, "repeats", ""))]
        for name, x in call.tensors.items():
            parts.append(f"{name} {x.dtype} {tuple(x.shape)} {x.stride()}")
            if not x.is_floating_point():
                parts.append(str(x.contiguous().numpy().tobytes()))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def quick_cases(library: str) -> Iterator[QuickCase]:
    """Yield a library's quick checks. A check in several dtypes is yielded only in float16."""
    if library in BACKENDS:
        for flash_case in flash_cases.CASES:
            if flash_case.size is Size.QUICK:
                case = Case(flash_case.build, flash_case.catches, torch.float16)
                yield QuickCase(flash_case.label, case, flash_case.refusals)
        return
    for name, case in _TABLES[library].items():
        is_for_cpu = library != "vllm" or vllm_checks.is_for_device(name, "cpu")
        if is_for_cpu and case.size is Size.QUICK:
            yield QuickCase(name, case)
