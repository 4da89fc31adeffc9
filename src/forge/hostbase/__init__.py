# SPDX-License-Identifier: BSD-3-Clause
"""The host base: conda packages of this machine's CPython and compilers, and of PyPI's wheels."""
