# SPDX-License-Identifier: BSD-3-Clause
"""`pixi lock`, `install` and `run` for one pixi.toml, on machines without pixi.

Over py-rattler: the same solver, lock format (version 7) and installer that pixi uses.
"""
