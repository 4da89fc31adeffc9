# SPDX-License-Identifier: BSD-3-Clause
"""`pixi lock`, `pixi install` and `pixi run` for one pixi.toml, on machines without pixi.

Over py-rattler: the same solver, lock format (version 7) and installer that pixi uses.
"""

from pixi_workspace.manifest import PLATFORM, match_spec
from pixi_workspace.records import Records, at_revision
from pixi_workspace.workspace import Workspace

__all__ = ["PLATFORM", "Records", "Workspace", "at_revision", "match_spec"]
