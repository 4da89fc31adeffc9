# SPDX-License-Identifier: BSD-3-Clause
"""The one protocol of all calls whose Triton kernels are compiled, interpreted or executed."""

from typing import Protocol

import torch
from torch import Tensor


class Call(Protocol):
    """A call of a library's Python function, which launches Triton kernels.

    A call is pickled into a child process, see :mod:`strix_validate.triton.modes`. Each library has
    its own class: ``FlashCall``, ``VllmCall`` and ``PackageCall`` hold tensors of random numbers;
    ``AttentionCall``, ``ExpertsCall`` and ``DeferredCall`` make theirs where they are executed.
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
