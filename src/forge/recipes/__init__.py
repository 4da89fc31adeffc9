# SPDX-License-Identifier: BSD-3-Clause
"""Recipes: rendered, ordered, and whether each has to be built."""
