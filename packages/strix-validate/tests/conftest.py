# SPDX-License-Identifier: BSD-3-Clause
"""Give all tests the same output: no colours, and 80 columns."""

import os

# GitHub's runners and terminals set these variables, which change the output.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "COLUMNS"):
    os.environ.pop(name, None)
