# SPDX-License-Identifier: BSD-3-Clause
"""Environments of stacks without pixi, by py-rattler. With pixi, forge.cli.stacks runs it."""
