# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run, on the terminal and as a page."""
