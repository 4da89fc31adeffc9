# SPDX-License-Identifier: BSD-3-Clause
"""The versions of the bindings that the driver runs with, and what differs between them.

py-rattler 0.25 and py-rattler-build 0.72.2 are the newest that conda-forge has for pixi.lock;
0.28.0 and 0.73.0, in requirements.txt, are PyPI's. The tests run with both pairs. py-rattler 0.26
renamed Platform to Subdir and made build strings a type.
"""

from typing import Any

import rattler

from forge.project import SUBDIRS

Subdir: Any = getattr(rattler, "Subdir", None) or rattler.Platform
BuildString: Any = getattr(rattler, "BuildString", str)
ALL_SUBDIRS: Any = SUBDIRS  # the bindings' types spell each name out
