# SPDX-License-Identifier: BSD-3-Clause
"""What lies below attention: the checks of the tier libraries, each in its own process."""

__all__ = ["bitsandbytes_numerics", "convolution", "gemm", "host_memory", "inductor", "races"]
