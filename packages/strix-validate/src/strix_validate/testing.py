# SPDX-License-Identifier: BSD-3-Clause
"""The functions that tests of other packages use; all else may change between releases.

For a Triton kernel without a GPU: :func:`stand_in`, before its library is imported, and in Triton's
interpreter :func:`complete_interpreter`. Needs torch.
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
    """Compare the results of a call with the expected ones.

    Returns:
        What is wrong, or "", and what was measured.
    """
    result = compare(PLACEHOLDER, actual, expected, call.dtype)
    return result.reason, result.measured


def packaged_kernels(package: str) -> tuple[Path, dict[str, dict]]:
    """Return the folder of a package's kernels in this environment, and its list, by key.

    Raises:
        KeyError: The package has no list, or none that can be read.
    """
    prefix = Path(sys.base_prefix)
    folder = prefix / kernel_lists.FOLDER / package
    return folder, kernel_lists.read_lists(prefix)[package]


def compile_sample(number: int) -> list[modes.CompiledKernel]:
    """Compile kernels of flash-attn's sample.

    Args:
        number: How many of the sample's calls to compile.

    Raises:
        RuntimeError: A call failed, or the process that made it.
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

    Its method flags returns the flags of `vllm serve` that fit a model.

    Returns:
        The memory, or None if a number cannot be read.
    """
    return vllm_memory.read_memory_budget(Tree(root))
