# SPDX-License-Identifier: BSD-3-Clause
"""Environments of stacks where no pixi is, by py-rattler; where it is, see forge.cli.stacks."""
