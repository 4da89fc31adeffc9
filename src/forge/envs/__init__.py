# SPDX-License-Identifier: BSD-3-Clause
"""Lock and install the environments of stacks with py-rattler.

Only used without pixi: if pixi is on PATH, forge.cli.stacks runs pixi instead.
"""
