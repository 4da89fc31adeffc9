# SPDX-License-Identifier: BSD-3-Clause
"""Run the program strix-validate in a process of its own."""

import os
import subprocess
import sys

CODE = """if True:
    import os, runpy, sys
    if os.environ.get("WITHOUT"):
        sys.modules[os.environ["WITHOUT"]] = None
    runpy.run_module("strix_validate.cli", run_name="__main__")
"""


def run(*arguments: object, without: str = "", **variables: str) -> subprocess.CompletedProcess:
    """Run strix-validate. `without` names a module that cannot be imported."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WITHOUT": without}
    return subprocess.run(
        [sys.executable, "-c", CODE, *map(str, arguments)],
        env=os.environ | path | variables,
        capture_output=True,
        text=True,
    )
