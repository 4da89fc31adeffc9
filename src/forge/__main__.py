# SPDX-License-Identifier: BSD-3-Clause
"""`python src/forge` or `python -m forge`: the command line."""

import os
import signal
import sys
from pathlib import Path

# The imports take a second. Ctrl-C during that time would print a traceback, so this handler exits
# at once. Later, forge.cli.main installs its own handler.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

# `python src/forge` puts the folder src/forge first in sys.path. Replace it by src, in which Python
# finds the package forge. The driver's own child processes find this package through PYTHONPATH,
# before any other module of the name forge.
source_folder = str(Path(__file__).resolve().parents[1])
sys.path[0] = source_folder
python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
unique = dict.fromkeys([source_folder, *python_path])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, unique))

from forge.cli.main import main  # noqa: E402 (sys.path has to be changed before)

main()
