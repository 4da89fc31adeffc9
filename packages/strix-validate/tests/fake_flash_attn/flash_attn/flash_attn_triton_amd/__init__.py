# SPDX-License-Identifier: BSD-3-Clause
"""Of the built-in backend: the tiles alone."""
