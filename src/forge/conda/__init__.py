# SPDX-License-Identifier: BSD-3-Clause
"""Conda packages and their channels, read and written: what every other subpackage builds on."""
