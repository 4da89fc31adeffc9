# SPDX-License-Identifier: BSD-3-Clause
"""What tests of other packages need of the validator; all else may change between its releases.

For a Triton kernel without a GPU: :func:`stand_in`, before its library is imported, and in Triton's
interpreter :func:`complete_interpreter`. Needs torch.
"""

import sys
from pathlib import Path

from torch import Tensor

from strix_validate.attention.flash import FlashCall
from strix_validate.attention.flash import dense as flash_attention
from strix_validate.checks import ANY
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
    "OVERHEAD", "compile_sample", "complete_interpreter", "flash_attention", "flash_fault",
    "memory_of", "packaged_kernels", "stand_in",
]  # fmt: skip


def flash_fault(call: FlashCall, found: dict[str, Tensor], expected: Expected) -> tuple[str, dict]:
    """Return what is wrong with what a call returned, or "", and what was measured."""
    result = compare(ANY, found, expected, call.dtype)
    return result.reason, result.measured


def packaged_kernels(package: str) -> tuple[Path, dict[str, dict]]:
    """Return the folder of a package's kernels in this environment, and its list, by key.

    Raises:
        KeyError: the package has no list, or none that can be read.
    """
    prefix = Path(sys.base_prefix)
    return prefix / kernel_lists.FOLDER / package, kernel_lists.installed(prefix)[package]


def compile_sample(number: int) -> list[modes.CompiledKernel]:
    """Compile the kernels of so many of the calls that flash-attn's sample of kernels is made from.

    Raises:
        RuntimeError: a call failed, or the process that made it.
    """
    calls = list(FLASH_SETS["sample"]())
    answers = modes.run(calls[:: max(1, len(calls) // number)][:number], "compile").calls
    for answer in answers:
        if answer.error:
            raise RuntimeError(f"a call failed: {answer.error}")
    return [kernel for answer in answers for kernel in answer.kernels]


def memory_of(root: Path) -> MemoryBudget | None:
    """Return what vLLM may use of the memory of the machine whose files are below root.

    None if a number cannot be read. Of a model, flags() says which flags of `vllm serve` fit.
    """
    return vllm_memory.memory_of(Tree(root))
