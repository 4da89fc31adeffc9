# SPDX-License-Identifier: BSD-3-Clause
"""Find races that make a result wrong now and then, without an error, when one wave is late.

On a GPU, each check runs many rounds. The checks of torch.linalg factorise a matrix, multiply the
factors in float64, and compare the product with the matrix. The checks of gradients compute the
gradient of an embedding, whose rows are sums over tokens, and compare it with exact sums.
"""

from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.linalg import cholesky, eigh, lu, qr, svd

from strix_validate.checks import Body, Check, RunOptions, is_emulated, require

_CHOLESKY = (
    "rocSOLVER's Cholesky factors that are silently wrong, because of a race in potf2: "
    "https://github.com/ROCm/rocm-libraries/pull/10909"
)
_JACOBI = (
    "rocSOLVER's eigenvectors that are silently wrong on gfx11, because of a race in syevj: "
    "https://github.com/ROCm/rocm-libraries/pull/12266"
)
_WAITS = (
    "a wait that LLVM dropped at the start of a loop, as in rocSOLVER's getf2: "
    "https://github.com/llvm/llvm-project/pull/220357"
)
#: The bug that the check of each factorisation catches.
_CATCHES = {
    "cholesky": _CHOLESKY,
    "eigh": _JACOBI,
    "svd": _JACOBI,
    "lu": _WAITS,
    "qr": _WAITS,
}
_SUMS = (
    "a lost summand, because the compiler dropped the wait for it, as clang 22 does in this "
    "kernel: https://github.com/llvm/llvm-project/pull/220357"
)
_ROUNDS_ON_GPU = 50
#: Rounds on a CPU or under emulation, where no wave is late by chance. The two rounds of a
#: factorisation have different batch sizes.
_ROUNDS_ELSEWHERE = 2
#: Numbers of rows of a matrix. One wave computes 12 rows; races were seen in blocks of 48 rows.
_SIDES = (12, 48)
#: Allowed error of an element in units of rows * eps * the largest element. LAPACK's error was 2.5.
_FACTOR = 20
#: Numbers of tokens. Up to 3072 tokens, torch uses the kernel in which the compiler dropped waits.
_TOKENS = (48, 1024, 3000)
#: Rows and columns of the embedding.
_ROWS = 8
_WIDTH = 96


def checks() -> dict[Check, Body]:
    """Return the checks of each factorisation and of the gradient, one for each data type."""
    bodies: dict[Check, Body] = {}
    for kind, name in product(_CATCHES, ("float32", "float64")):
        title = f"torch.linalg: {kind}-{name}"
        check = Check(f"factors/{kind}-{name}", title, _CATCHES[kind])
        bodies[check] = partial(_check_factors, kind, getattr(torch, name))
    for name in ("float32", "float16", "bfloat16"):
        check = Check(f"gradients/embedding-{name}", f"embedding's gradient: {name}", _SUMS)
        bodies[check] = partial(_check_sums, getattr(torch, name))
    return bodies


def _count_rounds(options: RunOptions) -> int:
    if options.device == "cpu" or is_emulated(options):
        return _ROUNDS_ELSEWHERE
    return _ROUNDS_ON_GPU


def factorise(kind: str, a: Tensor) -> tuple[Tensor, ...]:
    """Factorise matrices with the function under test; return factors whose product is `a`."""
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
    rounds = _count_rounds(options)
    largest_error = 0.0
    for turn, rows in product(range(rounds), _SIDES):
        batch = 1 + turn % 9 * 8
        a = _draw_matrices(kind, batch, rows, generator).to(dtype)
        factors = factorise(kind, a.to(options.device))
        error = _measure_factors(factors, a)
        require(
            error <= _FACTOR,
            f"round {turn}, {batch} matrices of {rows} rows: a product of factors differs from its "
            f"matrix by {error:.3g} times rows * eps * its largest element, {_FACTOR} times are "
            "allowed",
        )
        largest_error = max(largest_error, error)
    return {"units": largest_error, "rounds": rounds}


def _draw_matrices(kind: str, batch: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draw square matrices in float64 for which the factorisation is defined."""
    x = torch.randn(batch, rows, rows, generator=generator, dtype=torch.float64)
    if kind == "cholesky":
        return x @ x.mT + torch.eye(rows)
    if kind == "eigh":
        return x + x.mT
    return x


def _measure_factors(factors: tuple[Tensor, ...], a: Tensor) -> float:
    """Return the largest error of the factors' product, in units of rows * eps * max(abs(a))."""
    product_of_factors, *others = (t.cpu().double() for t in factors)
    for factor in others:
        product_of_factors = product_of_factors @ factor
    unit = a.shape[-1] * torch.finfo(a.dtype).eps * a.abs().max().double()
    return float((product_of_factors - a.double()).abs().max() / unit)


def gradient(tokens: Tensor, incoming: Tensor) -> Tensor:
    """Return the gradient of an embedding, the function under test.

    Args:
        tokens: (count,), integers from 0 to _ROWS - 1.
        incoming: (count, _WIDTH), the gradient of each token's vector.
    """
    table = torch.zeros(_ROWS, _WIDTH, dtype=incoming.dtype, device=incoming.device)
    torch.nn.functional.embedding(tokens, table.requires_grad_()).backward(incoming)
    return table.grad


def _check_sums(dtype: torch.dtype, options: RunOptions) -> dict:
    generator = torch.Generator().manual_seed(7)
    rounds = _count_rounds(options)
    # The sums of these integers are exact in the type, so the order of summation cannot matter.
    largest_sum = 256 if dtype is torch.bfloat16 else 2048
    for turn, count in product(range(rounds), _TOKENS):
        tokens = torch.randint(_ROWS, (count,), generator=generator)
        limit = largest_sum // count + 1
        integers = torch.randint(-limit, limit + 1, (count, _WIDTH), generator=generator)
        expected = torch.zeros(_ROWS, _WIDTH, dtype=integers.dtype)
        expected.index_add_(0, tokens, integers)
        incoming = integers.to(options.device, dtype)
        actual = gradient(tokens.to(options.device), incoming).cpu()
        wrong = int((actual.double() != expected).sum())
        require(
            not wrong,
            f"round {turn}, {count} tokens, an embedding of {_ROWS} rows: {wrong} of "
            f"{actual.numel()} sums of whole numbers are wrong",
        )
    return {"rounds": rounds}
