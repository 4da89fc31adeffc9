# SPDX-License-Identifier: BSD-3-Clause
"""What is spoilt now and then, with nothing said, where a wave lags behind: in many rounds.

Factorisations of torch.linalg: their factors, multiplied in float64, are the matrix again. The
gradient of an embedding: each row is the sum of what came for its token.
"""

from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.linalg import cholesky, eigh, lu, qr, svd

from strix_validate.checks import Body, Check, RunOptions, is_emulated, require

_CHOLESKY = (
    "rocSOLVER's Cholesky factors silently wrong, of a race in potf2: "
    "https://github.com/ROCm/rocm-libraries/pull/10909"
)
_JACOBI = (
    "rocSOLVER's eigenvectors silently wrong on gfx11, of a race in syevj: "
    "https://github.com/ROCm/rocm-libraries/pull/12266"
)
_WAITS = (
    "waits that LLVM lost at the start of loops, as in rocSOLVER's getf2: "
    "https://github.com/llvm/llvm-project/pull/220357"
)
_WHY = {"cholesky": _CHOLESKY, "eigh": _JACOBI, "svd": _JACOBI, "lu": _WAITS, "qr": _WAITS}
_SUMS = (
    "a summand that is lost where the compiler lost the wait for it, as clang 22 does in this "
    "kernel: https://github.com/llvm/llvm-project/pull/220357"
)
#: On a GPU; and where no wave lags behind now and then, two sizes of a batch.
_MANY, _FEW = 50, 2
#: Rows of a matrix: one wave's work, and blocks of the size at which the races were seen.
_SIDES = (12, 48)
#: Allowed error of an element in units of rows, eps and the largest element. LAPACK came to 2.5.
_FACTOR = 20
#: Up to 3072 tokens torch takes the kernel in which the waits were lost.
_TOKENS = (48, 1024, 3000)
#: Of an embedding's table.
_ROWS, _WIDTH = 8, 96


def checks() -> dict[Check, Body]:
    """Return one check for each factorisation, or sum, and data type, with its function."""
    found: dict[Check, Body] = {}
    for kind, name in product(_WHY, ("float32", "float64")):
        check = Check(f"factors/{kind}-{name}", f"torch.linalg: {kind}-{name}", _WHY[kind])
        found[check] = partial(_check_factors, kind, getattr(torch, name))
    for name in ("float32", "float16", "bfloat16"):
        check = Check(f"gradients/embedding-{name}", f"embedding's gradient: {name}", _SUMS)
        found[check] = partial(_check_sums, getattr(torch, name))
    return found


def _rounds(options: RunOptions) -> int:
    return _FEW if options.device == "cpu" or is_emulated(options) else _MANY


def factorise(kind: str, a: Tensor) -> tuple[Tensor, ...]:
    """Compute what is under test: factors, whose product is a."""
    match kind:
        case "cholesky":
            lower = cholesky(a)
            return lower, lower.mT
        case "eigh":
            values, vectors = eigh(a)
            return vectors, values.diag_embed(), vectors.mT
        case "svd":
            left, values, right = svd(a)
            return left, values.diag_embed(), right
        case "lu":
            return lu(a)
        case _:
            return qr(a)


def _check_factors(kind: str, dtype: torch.dtype, options: RunOptions) -> dict:
    generator = torch.Generator().manual_seed(7)
    rounds, worst = _rounds(options), 0.0
    for turn in range(rounds):
        for rows in _SIDES:
            x = torch.randn(1 + turn % 9 * 8, rows, rows, generator=generator, dtype=torch.float64)
            if kind == "cholesky":
                x = x @ x.mT + torch.eye(rows)
            elif kind == "eigh":
                x = x + x.mT
            a = x.to(dtype)
            first, *rest = (t.cpu().double() for t in factorise(kind, a.to(options.device)))
            for factor in rest:
                first = first @ factor
            unit = rows * torch.finfo(dtype).eps * a.abs().max().double()
            off = float((first - a.double()).abs().max() / unit)
            require(
                off <= _FACTOR,
                f"round {turn}, {len(a)} matrices of {rows} rows: their factors give them back "
                f"within {off:.3g} units of rounding, allowed {_FACTOR}",
            )
            worst = max(worst, off)
    return {"units": worst, "rounds": rounds}


def gradient(tokens: Tensor, incoming: Tensor) -> Tensor:
    """Compute what is under test: the gradient of a table of _ROWS by _WIDTH."""
    table = torch.zeros(_ROWS, _WIDTH, dtype=incoming.dtype, device=incoming.device)
    torch.nn.functional.embedding(tokens, table.requires_grad_()).backward(incoming)
    return table.grad


def _check_sums(dtype: torch.dtype, options: RunOptions) -> dict:
    generator = torch.Generator().manual_seed(7)
    rounds = _rounds(options)
    for turn in range(rounds):
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
    return {"rounds": rounds}
