# SPDX-License-Identifier: BSD-3-Clause
"""A kernel as basic blocks, and the grid of workgroups that executes them."""
