# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run: written as evidence, shown in the terminal and as a page."""

__all__ = ["page", "plots", "record", "speeds", "terminal_table"]
