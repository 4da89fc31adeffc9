# SPDX-License-Identifier: BSD-3-Clause
"""`python src/forge` or `python -m forge`: the command line."""

import os
import signal
import sys
from pathlib import Path

# imports take a second, in which Ctrl-C would print where they are; forge.cli.main has its own way
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

# `python src/forge` puts this folder first, where the package is not found. The driver's own child
# processes find it by PYTHONPATH, before any other module of its name.
sys.path[0] = str(Path(__file__).resolve().parents[1])
before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([sys.path[0], *before])))

from forge.cli.main import main  # noqa: E402

main()
