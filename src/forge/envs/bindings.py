# SPDX-License-Identifier: BSD-3-Clause
"""What differs between the versions of the bindings that the tests run with; see pyproject.toml.

py-rattler 0.26 renamed Platform to Subdir and made build strings a type.
"""

from typing import Any

import rattler

Subdir: Any = getattr(rattler, "Subdir", None) or rattler.Platform
BuildString: Any = getattr(rattler, "BuildString", str)

# what pixi checks of a machine before it installs; py-rattler 0.25 cannot detect AMD GPUs
CHECKED = {"__glibc", "__musl", "__linux", "__cuda"}
if hasattr(rattler, "Subdir"):
    CHECKED |= {"__amdgpu", "__amdgpu_arch"}
