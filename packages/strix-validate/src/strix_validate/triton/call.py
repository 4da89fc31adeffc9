# SPDX-License-Identifier: BSD-3-Clause
"""Calls of libraries whose Triton kernels are compiled, interpreted or executed.

A call is one use of a library's Python function, with its tensors. It can be pickled, sent to a
child process, and made there on any device. A :class:`strix_validate.triton.cases.Case` is a call
that is checked, with the results that it must return.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Protocol

import torch
from torch import Tensor

from strix_validate.checks import CannotRun

FP16 = torch.float16
BF16 = torch.bfloat16
#: A call whose kernels are shipped precompiled: its builder (see cases.Build) and its dtype.
Shipped = tuple[partial, torch.dtype]


class Call(Protocol):
    """A call of a library's Python function, which launches Triton kernels.

    A call can be pickled and sent to a child process; see :mod:`strix_validate.triton.modes`. The
    classes ``FlashCall``, ``VllmCall`` and ``PackageCall`` hold tensors of random numbers. A
    ``DeferredCall`` builds one of these calls in the process that executes it.
    """

    @property
    def name(self) -> str:
        """The call's name in messages."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the numbers that the call computes."""

    def prepare(self) -> str:
        """Prepare the library, once per process, and describe the kernels that its calls run."""

    def execute(self, device: str) -> dict[str, Tensor]:
        """Make the call on a device, and return the computed tensors by name.

        An exception of the library is not caught.
        """


def move(x: Tensor, device: str) -> Tensor:
    """Return a tensor on a device, with the same strides.

    Tensor.to alone loses the strides of a tensor with gaps. For a tensor with a stride of 0, this
    function does not restore them.
    """
    moved = x.to(device)
    if moved.stride() == x.stride() or 0 in x.stride():
        return moved
    strided = torch.empty_strided(
        x.shape,
        x.stride(),
        dtype=x.dtype,
        device=device,
    )
    return strided.copy_(moved)


@dataclass(frozen=True)
class FunctionCall:
    """A call of one of this package's functions, which launches a library's kernels.

    It is the base class for calls of vLLM and of other packages.

    Attributes:
        launch: The function. launch(**tensors, **options), with the tensors on the device of the
            call, returns the computed tensors by name.
        tensors: The function's tensors, on the CPU. The first one has the dtype of the call.
        options: The function's other arguments.
        products: Minimum number of launched kernels that use the matrix unit.
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
        first = next(iter(self.tensors.values()))
        return first.dtype

    def execute(self, device: str) -> dict[str, Tensor]:
        """Make the call on a device; see Call."""
        tensors = {name: move(tensor, device) for name, tensor in self.tensors.items()}
        return self.launch(**tensors, **self.options)


@dataclass(frozen=True)
class PackageCall(FunctionCall):
    """A call of a package's kernels.

    Attributes:
        package: The name of the distribution, as in pip.
    """

    package: str = field(kw_only=True)

    def prepare(self) -> str:
        """Return the package's name and version. There is nothing to prepare."""
        return f"{self.package} {version(self.package)}"


def differentiate(
    function: Callable[..., dict[str, Tensor]],
    inputs: dict[str, Tensor],
    grads: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return the results of a function, and the gradient of each input x under the name "dx".

    An input that does not affect the results has no gradient.

    Args:
        function: Takes the inputs as keywords, and returns tensors by name.
        inputs: The tensors whose gradients are computed.
        grads: The gradients of the results, by the result's name.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves)
    differentiated = [outputs[name] for name in grads]
    torch.autograd.backward(differentiated, list(grads.values()))
    results = {name: x.detach() for name, x in outputs.items()}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            results[f"d{name}"] = leaf.grad
    return results


def require(module: str) -> None:
    """Raise CannotRun if a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise CannotRun(f"{module} is not installed")


@dataclass(frozen=True)
class DeferredCall:
    """A call that is built in the process that executes it.

    Only the builder is sent to the child process, which builds the tensors, with zeros in place of
    random numbers.

    Attributes:
        name: The call's name in messages.
        build: Builds the call; see cases.Build.
        dtype: The dtype of the tensors.
        change: Fields to replace in the built call, with their new values. For example, `source`
            is replaced by the path of vLLM's source, and `grad_out` by None.
    """

    name: str
    build: Callable[..., tuple[Call, object]]
    dtype: torch.dtype
    change: dict = field(default_factory=dict)

    def _build_call(self) -> Call:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype)

        call, _ = self.build(zeros)
        return replace(call, **self.change)  # type: ignore[type-var]

    def prepare(self) -> str:
        """Build the call, prepare its library, and describe the kernels that it will run."""
        return self._build_call().prepare()

    def execute(self, device: str) -> dict[str, Tensor]:
        """Build the call, and make it on a device."""
        return self._build_call().execute(device)


def defer(build: partial, dtype: torch.dtype, **change) -> DeferredCall:
    """Return a deferred call that is named after its builder and the builder's keywords.

    Args:
        build: A builder with its keywords; see cases.Build.
        dtype: The dtype of the tensors.
        change: Fields to replace in the built call.
    """
    keywords = " ".join(f"{name}={value}" for name, value in build.keywords.items())
    dtype_name = str(dtype).removeprefix("torch.")
    name = f"{build.func.__name__} {keywords} {dtype_name}"
    return DeferredCall(name, build, dtype, change)
