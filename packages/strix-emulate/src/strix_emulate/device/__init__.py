# SPDX-License-Identifier: BSD-3-Clause
"""A gfx1151 device without a GPU: the server behind the stand-in libamdhip64.so.7 of hip/."""
