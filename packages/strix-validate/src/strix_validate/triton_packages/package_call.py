# SPDX-License-Identifier: BSD-3-Clause
"""A call of an installed package's Triton kernels, forward and backward."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor

from strix_validate.checks import CannotRun

#: A call whose kernels are shipped: build(randn) gives it and what it must return, and its dtype.
Shipped = tuple[partial, torch.dtype]


@dataclass(frozen=True)
class PackageCall:
    """A call of a package.

    package: as pip calls it. launch: the function here that makes the call, with the tensors and
    options as keywords, and returns what it computed by name. products: of its kernels, how many
    must use the matrix unit.
    """

    package: str
    launch: Callable[..., dict[str, Tensor]]
    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    products: int = 0

    @property
    def name(self) -> str:
        """The package, and the name of the launching function."""
        return f"{self.package} {self.launch.__name__.lstrip('_')}"

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the numbers that the call computes."""
        return next(iter(self.tensors.values())).dtype

    def prepare(self) -> str:
        """Return the package's version; it is installed, and nothing is to be made ready."""
        return f"{self.package} {version(self.package)}"

    def execute(self, device: str) -> dict[str, Tensor]:
        """Return what the call computes, by name; the package's own exceptions pass through."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self.launch(**tensors, **self.options)


def differentiated(
    function: Callable[..., dict[str, Tensor]], inputs: dict[str, Tensor], grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return what a function returns, and dNAME, the gradient of each of its inputs.

    Args:
        inputs: keywords of the function, to differentiate by.
        grads: by name of what it returns, the gradient that comes from there.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    found = function(**leaves)
    torch.autograd.backward([found[name] for name in grads], list(grads.values()))
    own = {name: x.detach() for name, x in found.items()}
    return own | {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}


def require(module: str) -> None:
    """Raise CannotRun where a package is not installed; module: as it is imported."""
    if importlib.util.find_spec(module) is None:
        raise CannotRun(f"{module} is not installed")
