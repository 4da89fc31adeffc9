# SPDX-License-Identifier: BSD-3-Clause
"""The table of tiles that patch 0013 of flash-attn reads from a file."""

TILES: dict = {}
