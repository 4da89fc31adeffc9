# SPDX-License-Identifier: BSD-3-Clause
"""The libraries below attention: products, factors, convolutions, host memory, and torch.compile.

Each module lists its checks with their functions. The tier `libraries` runs each module in its own
process.
"""

__all__ = [
    "bitsandbytes_numerics",
    "convolution",
    "gemm",
    "host_memory",
    "inductor",
    "races",
]
