# SPDX-License-Identifier: BSD-3-Clause
"""Render recipes, put them in build order, and decide which of them have to be built."""
