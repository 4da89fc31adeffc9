# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan: run engine jobs in child processes, keep their logs, compare their costs."""
