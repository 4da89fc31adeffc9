# SPDX-License-Identifier: BSD-3-Clause
"""Checks of torch's other libraries: matrix products, factorisations, convolutions and so on.

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
