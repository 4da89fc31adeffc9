# SPDX-License-Identifier: BSD-3-Clause
"""Check one kernel that torch.compile generates: compare its results with float64."""

import os
import shutil
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import PLACEHOLDER, Body, CannotRun, Check, Result, RunOptions, require
from strix_validate.numerics import comparison, reference

_CATCHES = (
    "Inductor that generates no kernel and runs eagerly, or Triton that compiles a wrong kernel"
)


def checks() -> dict[Check, Body]:
    """Return one check for each data type, with its function."""
    bodies: dict[Check, Body] = {}
    for name in ("float32", "float16"):
        title = f"torch.compile with Inductor: {name}"
        check = Check(f"compile/inductor-{name}", title, _CATCHES)
        bodies[check] = partial(_check, getattr(torch, name))
    return bodies


def normalise(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """Compute RMS norm with a gate: a reduction, and operations that Inductor fuses with it."""
    scaled = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return scaled * weight * gate.sigmoid()


def _check(dtype: torch.dtype, options: RunOptions) -> Result:
    from torch._inductor import metrics

    if options.device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise CannotRun("torch.compile needs a C++ compiler on the CPU")
    generator = torch.Generator().manual_seed(4)
    sizes = ((70, 1000), (1000,), (70, 1000))
    inputs = [torch.randn(size, generator=generator).to(dtype) for size in sizes]

    def normalise_in_float32(*tensors: Tensor) -> Tensor:
        return normalise(*(t.float() for t in tensors)).to(dtype)

    metrics.reset()
    compiled = torch.compile(normalise_in_float32)
    out = compiled(*(t.to(options.device) for t in inputs))
    require(metrics.generated_kernel_count, "Inductor generated no kernel")

    def expected(precision: reference.Precision) -> dict[str, Tensor]:
        exact = normalise(*(t.to(reference.working_dtype(precision)) for t in inputs))
        return {"out": reference.store(exact, precision)}

    result = comparison.compare(PLACEHOLDER, {"out": out.cpu()}, expected, dtype)
    measured = result.measured | {"kernels": metrics.generated_kernel_count}
    return replace(result, measured=measured)
