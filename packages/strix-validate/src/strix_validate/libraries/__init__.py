# SPDX-License-Identifier: BSD-3-Clause
"""Checks of operations other than attention: matrix products, convolutions and so on.

Each module lists its checks with their functions. The tier `libraries` runs each module, and each
mode of convolution, in its own process.
"""

__all__ = [
    "bitsandbytes_numerics",
    "convolution",
    "gemm",
    "host_memory",
    "inductor",
    "races",
]
