# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan: engine jobs in child processes, their logs, and what a run costs."""
