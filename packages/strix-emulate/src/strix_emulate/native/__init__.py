# SPDX-License-Identifier: BSD-3-Clause
"""Runs of instructions in C: its sources, how they are compiled, and when they run."""
