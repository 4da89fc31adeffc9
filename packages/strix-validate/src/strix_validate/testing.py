# SPDX-License-Identifier: BSD-3-Clause
"""What tests of other packages need of the validator; all else may change between its releases.

For a Triton kernel without a GPU: :func:`stand_in`, before its library is imported, and in Triton's
interpreter :func:`complete_interpreter`. Needs torch, but for :func:`memory_of`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strix_validate.doctor import kernel_lists, vllm_memory
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import OVERHEAD, MemoryBudget

if TYPE_CHECKING:
    import torch

    from strix_validate.attention.flash import FlashCall
    from strix_validate.triton.cases import Expected
    from strix_validate.triton.modes import CompiledKernel

__all__ = [
    "OVERHEAD", "compile_sample", "complete_interpreter", "flash_attention", "flash_fault",
    "memory_of", "packaged_kernels", "stand_in",
]  # fmt: skip


def stand_in() -> None:
    """Make Triton and torch of this process report the GPU, which need not be there."""
    from strix_validate.triton import stand_in as module

    module.install()


def complete_interpreter() -> None:
    """Give Triton's interpreter in this process what it lacks of a compiled kernel's language."""
    from strix_validate.triton import interpreter

    interpreter.complete()


def flash_attention(
    q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", grad_out: "torch.Tensor", causal: bool
) -> "tuple[FlashCall, Expected]":
    """Return a call of flash_attn_func, and what it must return; execute("cpu") makes the call.

    All four have flash-attn's layout: (batch, seqlen, heads, head_dim).
    """
    from strix_validate.attention import flash

    return flash.dense(q, k, v, grad_out, causal=causal)


def flash_fault(
    call: "FlashCall", found: "dict[str, torch.Tensor]", expected: "Expected"
) -> tuple[str, dict]:
    """Return what is wrong with what a call returned, or "", and what was measured."""
    from strix_validate.checks import ANY
    from strix_validate.numerics.comparison import compare

    result = compare(ANY, found, expected, call.dtype)
    return result.reason, result.measured


def packaged_kernels(package: str) -> tuple[Path, dict[str, dict]]:
    """Return the folder of a package's kernels in this environment, and its list, by key.

    Raises:
        KeyError: the package has no list, or none that can be read.
    """
    prefix = Path(sys.base_prefix)
    return prefix / kernel_lists.FOLDER / package, kernel_lists.installed(prefix)[package]


def compile_sample(number: int) -> "list[CompiledKernel]":
    """Compile the kernels of so many of the calls that flash-attn's sample of kernels is made from.

    Raises:
        RuntimeError: a call failed, or the process that made it.
    """
    from strix_validate.precompiled import flash_calls
    from strix_validate.triton import modes

    calls = list(flash_calls.FLASH_SETS["sample"]())
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
