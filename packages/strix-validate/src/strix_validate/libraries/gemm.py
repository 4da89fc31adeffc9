# SPDX-License-Identifier: BSD-3-Clause
"""Compare matrix products of language models, by each of torch's two libraries, with float64."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import PLACEHOLDER, Body, Check, Result, RunOptions, derive_seed, require
from strix_validate.numerics import comparison, reference

#: Torch's names for rocBLAS and hipBLASLt. On NVIDIA, the libraries are cuBLAS and cuBLASLt.
_LIBRARIES = {"blas": "cublas", "blaslt": "cublaslt"}
_NAMES = {"blas": "rocBLAS", "blaslt": "hipBLASLt"}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Largest dimension on a CPU, where the checks test only the harness and no GPU library.
_CPU_LIMIT = 96


@dataclass(frozen=True)
class ProductShape:
    """The sizes of the matrix product out = x @ weight^T.

    The shapes are (tokens, rows) for out, (tokens, columns) for x, and (rows, columns) for weight.

    Attributes:
        tokens: Number of rows of x.
        rows: Number of rows of the weight.
        columns: Number of columns of x and of the weight.
        catches: The bug that the check catches, with a link if there is one.
        plain: True if the weight is stored as (columns, rows), False if as (rows, columns).
        widen: Whether the inputs are bfloat16 and the result is float32.
    """

    tokens: int
    rows: int
    columns: int
    catches: str
    plain: bool = False
    widen: bool = False


_LLM = "a wrong product with one of the tile sizes that the library has for different shapes"
_SGEMM = (
    "rocBLAS's sgemm that is silently wrong on gfx1151: "
    "https://github.com/ROCm/rocm-libraries/issues/11530"
)
_SVOD = (
    "an illegal memory access of hipBLASLt on gfx1151, if the output is wide and the inner "
    "dimension small: https://github.com/npatsakula/svod/issues/108"
)
_HEAD = "a kernel that counts the 248,000 rows of an LM head in 16 bits"
_SHAPES = {
    "square": ProductShape(256, 256, 256, _SGEMM, plain=True),
    "thin-k64": ProductShape(2048, 4096, 64, _SVOD),
    "thin-k512": ProductShape(1024, 3072, 512, _SVOD),
    "qkv": ProductShape(256, 6144, 2048, _LLM),
    "gate-up": ProductShape(65, 12288, 2048, _LLM),
    "down": ProductShape(33, 2048, 6144, _LLM),
    "decode": ProductShape(1, 4096, 4096, _LLM),
    "few": ProductShape(7, 4096, 4096, _LLM),
    "one-row": ProductShape(512, 1, 2048, _SGEMM),
    "head": ProductShape(3, 248320, 1024, _HEAD),
    "thin-k64-widened": ProductShape(2048, 4096, 64, _SVOD, widen=True),
    "thin-k512-widened": ProductShape(1024, 3072, 512, _SVOD, widen=True),
}


def checks() -> dict[Check, Body]:
    """Return one check for each library, shape and data type, with its function."""
    bodies: dict[Check, Body] = {}
    for library in _LIBRARIES:
        for name, shape in _SHAPES.items():
            dtypes = (torch.bfloat16,) if shape.widen else _DTYPES
            for dtype in dtypes:
                case = f"{name}-{str(dtype).removeprefix('torch.')}"
                title = f"{_NAMES[library]}: {case}"
                check = Check(f"gemm/{library}/{case}", title, shape.catches)
                bodies[check] = partial(_check, check.id, library, shape, dtype)
    return bodies


def _check(
    id_: str,
    library: str,
    shape: ProductShape,
    dtype: torch.dtype,
    options: RunOptions,
) -> Result:
    device = options.device
    sizes = [shape.tokens, shape.rows, shape.columns]
    if device != "cuda":
        sizes = [min(size, _CPU_LIMIT) for size in sizes]
    tokens, rows, columns = sizes
    generator = torch.Generator(device).manual_seed(derive_seed(id_))

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    x = randn(tokens, columns)
    weight = randn(columns, rows) if shape.plain else randn(rows, columns).T
    out_dtype = torch.float32 if shape.widen else dtype
    # The output is filled with NaN, because an earlier result in the same memory could hide an
    # element that the kernel does not write. On a GPU, this does not work for a widened product:
    # torch.mm writes it to a new tensor, which is not filled.
    out = torch.full((tokens, rows), float("nan"), dtype=out_dtype, device=device)
    with _preferred(library, device):
        multiply(x, weight, out)
    expected = reference.layer(x.cpu(), weight.T.cpu())
    return comparison.compare(PLACEHOLDER, {"out": out.cpu()}, expected, out_dtype)


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out = x @ weight, the function under test; out may have a wider dtype than x."""
    if out.dtype == x.dtype:
        torch.mm(x, weight, out=out)
    elif x.is_cuda:
        out.copy_(torch.mm(x, weight, out_dtype=out.dtype))
    else:
        torch.mm(x.to(out.dtype), weight.to(out.dtype), out=out)


@contextlib.contextmanager
def _preferred(library: str, device: str) -> Iterator[None]:
    """Make torch use one of the two libraries, and fail afterwards if torch used the other one.

    On a chip that torch does not list for hipBLASLt, torch uses rocBLAS and only prints a warning.
    Without a GPU, nothing is set or tested.
    """
    if device != "cuda":
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(_LIBRARIES[library])
    requested = torch.backends.cuda.preferred_blas_library()
    try:
        yield
        torch.cuda.synchronize()
        used = torch.backends.cuda.preferred_blas_library()
    finally:
        torch.backends.cuda.preferred_blas_library(before)
    expected_name = _LIBRARIES[library].removeprefix("cu")
    used_name = str(used).rsplit(".", 1)[-1].lower().removeprefix("cu")
    is_right = requested == used and used_name == expected_name
    require(is_right, f"torch used {used} instead of {_NAMES[library]}")
