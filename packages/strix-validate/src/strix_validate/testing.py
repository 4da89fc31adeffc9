# SPDX-License-Identifier: BSD-3-Clause
"""Functions for the tests of other packages; all other modules may change between releases.

To use Triton kernels without a GPU, call :func:`stand_in` before the kernels' library is imported.
To run them in Triton's interpreter, also set TRITON_INTERPRET=1 before Triton is imported, and call
:func:`complete_interpreter`. This module needs torch.
"""

import sys
from pathlib import Path

from torch import Tensor

from strix_validate.attention.flash import FlashCall
from strix_validate.attention.flash import dense as flash_attention
from strix_validate.checks import PLACEHOLDER
from strix_validate.doctor import kernel_lists, vllm_memory
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import OVERHEAD, MemoryBudget
from strix_validate.numerics.comparison import compare
from strix_validate.precompiled.flash_calls import FLASH_SETS
from strix_validate.triton import modes
from strix_validate.triton.cases import Expected
from strix_validate.triton.interpreter import complete as complete_interpreter
from strix_validate.triton.stand_in import install as stand_in

__all__ = [
    "OVERHEAD",
    "compile_sample",
    "complete_interpreter",
    "find_flash_fault",
    "flash_attention",
    "packaged_kernels",
    "read_memory_budget",
    "stand_in",
]


def find_flash_fault(
    call: FlashCall,
    actual: dict[str, Tensor],
    expected: Expected,
) -> tuple[str, dict]:
    """Compare the results of a call of flash-attn with the expected ones.

    Returns:
        A description of the fault, or "" if there is none; and the measured values.
    """
    result = compare(PLACEHOLDER, actual, expected, call.dtype)
    return result.reason, result.measured


def packaged_kernels(package: str) -> tuple[Path, dict[str, dict]]:
    """Return the folder of a package's kernels in this environment, and the kernels by key.

    Raises:
        KeyError: The package has no list of kernels, or its list cannot be read.
    """
    prefix = Path(sys.base_prefix)
    folder = prefix / kernel_lists.FOLDER / package
    return folder, kernel_lists.read_lists(prefix)[package]


def compile_sample(number: int) -> list[modes.CompiledKernel]:
    """Compile the kernels of some of the calls in flash_calls.FLASH_SETS["sample"].

    Args:
        number: How many of these calls to compile, at most.

    Raises:
        RuntimeError: A call failed, or the process that made the call failed.
    """
    calls = list(FLASH_SETS["sample"]())
    step = max(1, len(calls) // number)
    answers = modes.run(calls[::step][:number], "compile").calls
    kernels: list[modes.CompiledKernel] = []
    for answer in answers:
        if answer.error:
            raise RuntimeError(f"a call failed: {answer.error}")
        kernels += answer.kernels
    return kernels


def read_memory_budget(root: Path) -> MemoryBudget | None:
    """Return the memory that vLLM may use on the machine whose files are below root.

    Returns:
        An object whose method `flags` returns the flags of `vllm serve` for a model; or None if the
        machine's files do not contain a number that is needed.
    """
    return vllm_memory.read_memory_budget(Tree(root))
