# SPDX-License-Identifier: BSD-3-Clause
"""Factorisations of torch.linalg: their factors, multiplied in float64, are the matrix again.

A wave that lags behind spoils a factor now and then, and the library's status stays 0: so there are
many rounds, with batches of changing size.
"""

from functools import partial

import torch
from torch import Tensor
from torch.linalg import cholesky, eigh, lu, qr, svd

from strix_validate.checks import Body, Check, RunOptions, require

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
_DTYPES = (torch.float32, torch.float64)
#: Rows: one wave's work, and blocks of the size at which the races were seen.
_ROWS = (12, 48)
_ROUNDS = {"cuda": 50, "cpu": 2}
#: Allowed error of an element in units of rows, eps and the largest element. LAPACK came to 2.5.
_FACTOR = 20


def checks() -> dict[Check, Body]:
    """Return one check for each factorisation and data type, with its function."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
    return {
        Check(f"factors/{kind}-{name}", f"torch.linalg: {kind}-{name}", why): partial(
            _check, kind, dtype
        )
        for kind, why in _WHY.items()
        for dtype, name in names.items()
    }


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


def _check(kind: str, dtype: torch.dtype, options: RunOptions) -> dict:
    generator = torch.Generator().manual_seed(7)
    worst = 0.0
    for turn in range(_ROUNDS[options.device]):
        for rows in _ROWS:
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
    return {"units": worst, "rounds": _ROUNDS[options.device]}
