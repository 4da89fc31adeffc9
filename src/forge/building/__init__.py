# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan: run engine jobs in child processes, and compare costs with this machine."""
