# SPDX-License-Identifier: BSD-3-Clause
"""Fail unless torch names the AOTriton commit that our package is built from.

usage: check_aotriton_pin.py cmake/External/aotriton.cmake COMMIT

AOTriton's headers and library change from commit to commit under the same file names, and with
AOTRITON_INSTALLED_PREFIX torch's build checks no version: a mismatch would only show at run time.
"""

import re
import sys
from pathlib import Path

PIN = re.compile(r'^\s*set\(\s*__AOTRITON_CI_COMMIT\s+"?([^"\s)]+)"?\s*\)', re.M)


def wrong(text: str, commit: str) -> str:
    """What is wrong with the pin in `text`, the content of aotriton.cmake, or an empty string."""
    pins = [pin for pin in PIN.findall(text) if not pin.startswith("$ENV{")]
    if len(pins) != 1:
        return f"has {len(pins)} lines set(__AOTRITON_CI_COMMIT ...) with a commit, expected one"
    if not re.fullmatch("[0-9a-f]{40}", pins[0]):
        return f"pins {pins[0]!r}, which is not a full commit"
    if pins[0] != commit:
        return (
            f"pins AOTriton {pins[0]}, but recipes/aotriton builds {commit}: see `aotriton` and "
            "`aotriton_commit` in variants.yaml"
        )
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n\n")[1])
    path, commit = Path(sys.argv[1]), sys.argv[2]
    if not path.is_file():
        sys.exit(f"{path} does not exist: torch has moved it")
    if reason := wrong(path.read_text(), commit):
        sys.exit(f"{path} {reason}")
    print(f"{path} pins AOTriton {commit}")
