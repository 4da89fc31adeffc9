# SPDX-License-Identifier: BSD-3-Clause
"""Functional emulator of gfx1151 (RDNA3.5): runs AMDGPU code objects on a CPU, without timing."""
