# SPDX-License-Identifier: BSD-3-Clause
"""What is printed has no colours and 80 columns, wherever these tests run."""

import os

# as GitHub's runners and terminals set them
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "COLUMNS"):
    os.environ.pop(name, None)
