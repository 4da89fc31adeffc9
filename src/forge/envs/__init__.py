# SPDX-License-Identifier: BSD-3-Clause
"""`pixi lock`, `pixi install` and `pixi run` for one pixi.toml, on machines without pixi.

Over py-rattler: the same solver, lock format (version 7) and installer that pixi uses.
"""

from forge.envs.manifest import PLATFORM, match_spec
from forge.envs.records import Records, at_revision
from forge.envs.workspace import Workspace

__all__ = ["PLATFORM", "Records", "Workspace", "at_revision", "match_spec"]
