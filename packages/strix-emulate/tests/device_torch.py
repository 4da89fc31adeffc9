# SPDX-License-Identifier: BSD-3-Clause
"""torch's tensors in the memory of the emulated device, and kernels of Triton on them.

Prints as JSON what a kernel of three sizes gives, and what becomes of one that leaves its tensor.
"""

import json
import sys

from strix_emulate import torch_device

torch_device.install()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def add(X, Y, Z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, i < n, other=0.0)
    tl.store(Z + i, x + tl.load(Y + i, i < n, other=0.0), i < n)


def run(n: int, length: int) -> bool:
    """Add n numbers of tensors of a length; return whether all of those are right."""
    x = torch.randn(length, device="cuda")
    y = torch.randn(length).cuda()
    z = torch.zeros_like(x)
    add[(triton.cdiv(n, 128),)](x, y, z, n, BLOCK=128)
    torch.cuda.synchronize()
    return torch.equal(z, x + y)


@torch.library.custom_op("emulated::where", mutates_args=())
def where(x: torch.Tensor) -> torch.Tensor:
    """Return whether an operator sees its tensor on the device."""
    return torch.tensor(x.is_cuda)


torch.manual_seed(0)
answers = {
    "equal": [run(n, n) for n in (1, 128, 1000)],
    "device": [
        torch.empty(1, device="cuda").is_cuda,
        bool(where(torch.ones(1))),
        torch.cuda.get_device_name(),
    ],
}
print(json.dumps(answers), flush=True)
if sys.argv[1:] == ["outside"]:
    run(1 << 20, 128)
