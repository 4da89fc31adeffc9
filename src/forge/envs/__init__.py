# SPDX-License-Identifier: BSD-3-Clause
"""Lock and install the environments of stacks with py-rattler.

If pixi is on PATH and FORGE_NO_PIXI is not set, forge.cli.stacks runs pixi instead. That module
then uses this subpackage only to read manifests and to find folders.
"""
