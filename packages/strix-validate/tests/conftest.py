# SPDX-License-Identifier: BSD-3-Clause
"""Give all tests the same environment: no colours, 80 columns, and signals that arrive."""

import os
import signal

# GitHub's runners and terminals set these variables, which change the output.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "COLUMNS"):
    os.environ.pop(name, None)
# A process that a shell starts in the background ignores SIGINT, and its children inherit this.
# Without this line, a test that interrupts a program would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
