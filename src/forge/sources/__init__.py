# SPDX-License-Identifier: BSD-3-Clause
"""Fetch source files and git commits, verify them, and keep them in a cache."""
