# SPDX-License-Identifier: BSD-3-Clause
"""Run a program of tests on the emulated device, and count: python programs.py NAME COMMAND...

The program is one of googletest's, or llama.cpp's test-backend-ops. Its output goes to
OUT/NAME.log; the last line of this program's is the row of docs/suites.md.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from suites import OUTCOMES

#: How googletest and test-backend-ops report a case, and the outcome; colours are left out.
_REPORTS = {
    re.compile(r"^\[       OK \] .+ \(\d+ ms\)$"): "passed",
    re.compile(r"^\[  SKIPPED \] .+ \(\d+ ms\)$"): "skipped",
    re.compile(r"^\[  FAILED  \] .+ \(\d+ ms\)$"): "wrong",
    re.compile(r"^  \w+\(.*\): OK$"): "passed",
    re.compile(r"^  \w+\(.*\): not supported.*$"): "skipped",
    re.compile(r"^.*\): FAIL$|^\[\w+\] .*\): FAIL$"): "wrong",
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: What the device says when it does no more.
_LOST = {"strix-emulate: trap in": "trapped", "hipErrorNotSupported": "refused"}


def count(output: str, status: int) -> Counter[str]:
    """Count the outcomes in a program's output; status: that it ended with, below 0 by a signal.

    The case in which the device, or the process, ended has no report, or a failed one.
    """
    counts: Counter[str] = Counter()
    lost = ""
    for line in _COLOUR.sub("", output).splitlines():
        lost = lost or next((what for text, what in _LOST.items() if text in line), "")
        for report, outcome in _REPORTS.items():
            if report.match(line):
                # what fails behind a trap failed by it, or was not executed
                counts[lost if lost and outcome == "wrong" else outcome] += 1
                break
    if lost and not counts[lost]:
        counts[lost] = 1
    elif not lost and status < 0:
        counts["ended"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--target", default="gfx1151")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--out", type=Path, default=Path("suites"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.out / f"{given.name}.log"
    command = [
        sys.executable,
        "-m",
        "strix_emulate",
        "device",
        "--target",
        given.target,
        "--",
        *given.command,
    ]
    with log.open("wb") as file:
        try:
            status = subprocess.run(
                command, stdout=file, stderr=file, timeout=given.seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = -14
    counts = count(log.read_text(errors="replace"), status)
    cells = " | ".join(str(counts[x]) for x in OUTCOMES)
    print(f"| {given.name} | {cells} |")
    sys.exit(1 if counts["wrong"] or not counts["passed"] else 0)


if __name__ == "__main__":
    main()
