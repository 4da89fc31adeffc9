# SPDX-License-Identifier: BSD-3-Clause
"""Is this host ready for gfx1151: its hardware, kernel, packages and memory."""
