# SPDX-License-Identifier: BSD-3-Clause
"""Check that torch pins the AOTriton commit from which our aotriton package is built.

usage: check_aotriton_pin.py cmake/External/aotriton.cmake COMMIT

COMMIT is the commit from which our aotriton package is built.

AOTriton's headers and library change between commits, but their file names do not. With
AOTRITON_INSTALLED_PREFIX, torch's build does not check the version. So without this check, a
mismatch would be noticed only at run time.
"""

import re
import sys
from pathlib import Path

COMMIT = re.compile("[0-9a-f]{40}")
PIN = re.compile(r'^\s*set\(\s*__AOTRITON_CI_COMMIT\s+"?([^"\s)]+)"?\s*\)', re.M)


def find_fault(text: str, commit: str) -> str:
    """Return the fault of torch's pin, or an empty string if the pin is right.

    Args:
        text: The content of aotriton.cmake.
        commit: The commit that our package is built from.
    """
    pins = [pin for pin in PIN.findall(text) if not pin.startswith("$ENV{")]
    if len(pins) != 1:
        return f"has {len(pins)} lines set(__AOTRITON_CI_COMMIT ...) with a commit, expected one"
    pin = pins[0]
    if not COMMIT.fullmatch(pin):
        return f"pins {pin!r}, which is not a full commit"
    if pin != commit:
        return (
            f"pins AOTriton {pin}, but recipes/aotriton builds {commit}: see `aotriton` and "
            "`aotriton_commit` in variants.yaml"
        )
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n\n")[1])
    path = Path(sys.argv[1])
    commit = sys.argv[2]
    if not path.is_file():
        sys.exit(f"{path} does not exist: this release of torch has it elsewhere")
    fault = find_fault(path.read_text(), commit)
    if fault:
        sys.exit(f"{path} {fault}")
    print(f"{path} pins AOTriton {commit}")
