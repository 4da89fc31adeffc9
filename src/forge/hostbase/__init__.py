# SPDX-License-Identifier: BSD-3-Clause
"""The host base, made from this machine: CPython, its compilers, and wheels as conda packages."""
