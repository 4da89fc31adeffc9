# SPDX-License-Identifier: BSD-3-Clause
"""The one protocol of all calls whose Triton kernels are compiled, interpreted or executed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Protocol

import torch
from torch import Tensor

from strix_validate.checks import CannotRun

FP16, BF16 = torch.float16, torch.bfloat16
#: A call whose kernels are shipped: build(randn) gives it and what it must return, and its dtype.
Shipped = tuple[partial, torch.dtype]


class Call(Protocol):
    """A call of a library's Python function, which launches Triton kernels.

    A call is pickled into a child process, see :mod:`strix_validate.triton.modes`. Each library has
    its own class: ``FlashCall``, ``VllmCall`` and ``PackageCall`` hold tensors of random numbers; a
    ``DeferredCall`` makes one of these where it is executed.
    """

    @property
    def name(self) -> str:
        """The call's name in messages."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the numbers that the call computes."""

    def prepare(self) -> str:
        """Make the library ready, once per process; return which kernels the calls will run."""

    def execute(self, device: str) -> dict[str, Tensor]:
        """Make the call on a device, and return what it computed, by name.

        The library's own exceptions pass through.
        """


def move(x: Tensor, device: str) -> Tensor:
    """Return a tensor on a device, with the strides it has: Tensor.to makes a slice contiguous."""
    moved = x.to(device)
    if moved.stride() == x.stride() or 0 in x.stride():
        return moved
    slice_of_other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return slice_of_other.copy_(moved)


@dataclass(frozen=True)
class Launch:
    """What calls of vLLM and of packages share: a function of ours that makes the call.

    launch(**tensors, **options), with the tensors on the call's device, returns what it computed by
    name. products: of its kernels, how many must use the matrix unit.
    """

    launch: Callable[..., dict[str, Tensor]]
    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    products: int = 0

    @property
    def name(self) -> str:
        """The name of the launching function."""
        return self.launch.__name__.lstrip("_")

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the numbers that the call computes."""
        return next(iter(self.tensors.values())).dtype

    def execute(self, device: str) -> dict[str, Tensor]:
        """See Call."""
        tensors = {name: move(tensor, device) for name, tensor in self.tensors.items()}
        return self.launch(**tensors, **self.options)


@dataclass(frozen=True)
class PackageCall(Launch):
    """A call of a package; package: as pip calls it."""

    package: str = field(kw_only=True)

    def prepare(self) -> str:
        """Return the package's version; it is installed, and nothing is to be made ready."""
        return f"{self.package} {version(self.package)}"


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


@dataclass(frozen=True)
class DeferredCall:
    """A call that is built where it is executed: its tensors hold zeros, and need not travel there.

    build(randn) gives a call and what it must return. change: of that call's fields, as a source of
    vLLM's, or no grad_out.
    """

    name: str
    build: Callable[..., tuple[Call, object]]
    dtype: torch.dtype
    change: dict = field(default_factory=dict)

    def _call(self) -> Call:
        call, _ = self.build(lambda *shape: torch.zeros(shape, dtype=self.dtype))
        return replace(call, **self.change)  # type: ignore[type-var]

    def prepare(self) -> str:
        """Build the call, and make its library ready; return which kernels it will run."""
        return self._call().prepare()

    def execute(self, device: str) -> dict[str, Tensor]:
        """Build the call, and make it."""
        return self._call().execute(device)


def deferred(build: partial, dtype: torch.dtype, **change) -> DeferredCall:
    """Return the call that a function builds with these keywords, named after both."""
    said = " ".join(f"{name}={value}" for name, value in build.keywords.items())
    kind = str(dtype).removeprefix("torch.")
    return DeferredCall(f"{build.func.__name__} {said} {kind}", build, dtype, change)
