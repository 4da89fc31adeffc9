# SPDX-License-Identifier: BSD-3-Clause
"""The gradient of an embedding: each row is the sum of what came for its token.

Many tokens of few rows, in many rounds: a sum that is read before another wave's store has arrived
loses a summand now and then, and nothing says so.
"""

from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import Body, Check, RunOptions, require

_WHY = (
    "a summand that is lost where the compiler lost the wait for it, as clang 22 does in this "
    "kernel: https://github.com/llvm/llvm-project/pull/220357"
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Up to 3072 tokens torch takes the kernel in which the waits were lost.
_TOKENS = (48, 1024, 3000)
_ROUNDS = {"cuda": 50, "cpu": 2}
_ROWS, _WIDTH = 8, 96


def checks() -> dict[Check, Body]:
    """Return one check for each type, with its function."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
    return {
        Check(f"gradients/embedding-{name}", f"embedding's gradient: {name}", _WHY): partial(
            _check, dtype
        )
        for dtype, name in names.items()
    }


def gradient(tokens: Tensor, incoming: Tensor) -> Tensor:
    """Compute what is under test: the gradient of a table of _ROWS by _WIDTH."""
    table = torch.zeros(_ROWS, _WIDTH, dtype=incoming.dtype, device=incoming.device)
    torch.nn.functional.embedding(tokens, table.requires_grad_()).backward(incoming)
    return table.grad


def _check(dtype: torch.dtype, options: RunOptions) -> dict:
    generator = torch.Generator().manual_seed(7)
    for turn in range(_ROUNDS[options.device]):
        for count in _TOKENS:
            tokens = torch.randint(_ROWS, (count,), generator=generator)
            # whole numbers whose sums every type holds exactly, so that the order cannot matter
            most = 256 // count + 1 if dtype is torch.bfloat16 else 2048 // count + 1
            signs = torch.randint(-most, most + 1, (count, _WIDTH), generator=generator)
            expected = torch.zeros(_ROWS, _WIDTH, dtype=signs.dtype).index_add_(0, tokens, signs)
            given = signs.to(options.device, dtype)
            found = gradient(tokens.to(options.device), given).cpu()
            wrong = int((found.double() != expected).sum())
            require(
                not wrong,
                f"round {turn}, {count} tokens of {_ROWS} rows: {wrong} of {found.numel()} sums of "
                "whole numbers are wrong",
            )
    return {"rounds": _ROUNDS[options.device]}
