# SPDX-License-Identifier: BSD-3-Clause
"""`python src/forge` or `python -m forge`: the command line."""

import os
import sys
from pathlib import Path

# `python src/forge` puts this folder first, where the package is not found. The driver's own child
# processes find it by PYTHONPATH.
sys.path[0] = str(Path(__file__).resolve().parents[1])
before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([*before, sys.path[0]])))

# pixi runs a task in the root of its workspace, and paths are meant from where the caller is
caller = os.environ.pop("INIT_CWD", "")
if caller and Path.cwd() == Path(sys.path[0]).parent:
    os.chdir(caller)

from forge.cli.main import main  # noqa: E402

main()
