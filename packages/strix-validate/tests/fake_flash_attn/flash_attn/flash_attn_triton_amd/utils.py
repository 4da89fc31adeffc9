# SPDX-License-Identifier: BSD-3-Clause
"""The tiles that a file has, as patch 0013 of flash-attn reads them."""

TILES: dict = {}
