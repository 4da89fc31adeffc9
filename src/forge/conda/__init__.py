# SPDX-License-Identifier: BSD-3-Clause
"""Conda packages and their channels, read: what every other room builds on."""
