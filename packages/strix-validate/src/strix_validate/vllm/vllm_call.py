# SPDX-License-Identifier: BSD-3-Clause
"""A call of vLLM's functions, whose Triton kernels run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from strix_validate.vllm import source as vllm_source


@dataclass(frozen=True)
class VllmCall:
    """A launch of vLLM's kernels by a function of this subpackage, with tensors on their device.

    launch(tensors, **options) returns the tensors that the launch writes, by name. products: of its
    kernels, how many must use the matrix unit. source: vLLM's folder.
    """

    launch: Callable[..., dict[str, Tensor]]
    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    products: int = 0
    source: Path = Path()

    @property
    def name(self) -> str:
        """The name of the launching function."""
        return self.launch.__name__.lstrip("_")

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the numbers that the launch computes."""
        return next(iter(self.tensors.values())).dtype

    def prepare(self) -> str:
        """Make vLLM importable from its source; return its version."""
        vllm_source.install(self.source)
        return vllm_source.version(self.source)

    def execute(self, device: str) -> dict[str, Tensor]:
        """Return the tensors that the launch writes, by name.

        vLLM's own exceptions pass through.
        """
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self.launch(tensors, **self.options)
