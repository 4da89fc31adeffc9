# SPDX-License-Identifier: BSD-3-Clause
"""A stack's environments on machines without pixi, over py-rattler: its solver and installer.

Where pixi is, it locks, installs and runs; see forge.cli.stacks.
"""
