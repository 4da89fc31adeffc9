# SPDX-License-Identifier: BSD-3-Clause
"""Run a test program on the emulated device, and count its cases by outcome.

usage: python programs.py NAME COMMAND...

The test program uses googletest, or is llama.cpp's test-backend-ops. Its output is written to
NAME.log in the folder of the option --out. The last line that programs.py prints is a row for the
table in docs/suites.md.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from suites import OUTCOMES

#: Patterns of the lines, without colours, in which googletest and test-backend-ops report a case;
#: and the outcome of the case.
_REPORTS = {
    re.compile(r"^\[       OK \] .+ \(\d+ ms\)$"): "passed",
    re.compile(r"^\[  SKIPPED \] .+ \(\d+ ms\)$"): "skipped",
    re.compile(r"^\[  FAILED  \] .+ \(\d+ ms\)$"): "wrong",
    re.compile(r"^  \w+\(.*\): OK$"): "passed",
    re.compile(r"^  \w+\(.*\): not supported.*$"): "skipped",
    re.compile(r"^.*\): FAIL$|^\[\w+\] .*\): FAIL$"): "wrong",
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: Messages of the device after which it executes nothing more, each with the outcome of the case
#: that causes it. An error hipErrorNotSupported without such a message is AMD's own answer.
_LOST = {
    "strix-emulate: trap in": "trapped",
    "; all later calls fail": "refused",
    "strix-emulate: internal error": "error",
    "strix-emulate: the emulator is out of memory": "error",
}


def count(output: str, status: int) -> Counter[str]:
    """Count the cases in a program's output by outcome.

    If a case ended the device or the process, the program reports it as failed or not at all.

    Args:
        output: The output of the program.
        status: The exit status of the program. It is negative if a signal or the time limit ended
            the program.
    """
    counts: Counter[str] = Counter()
    lost = ""
    for line in _COLOUR.sub("", output).splitlines():
        lost = lost or next((what for text, what in _LOST.items() if text in line), "")
        for report, outcome in _REPORTS.items():
            if report.match(line):
                # Once the device is lost, every reported failure is a result of this loss.
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
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{options.name}.log"
    command = [
        sys.executable,
        "-m",
        "strix_emulate",
        "device",
        "--target",
        options.target,
        "--",
        *options.command,
    ]
    with log.open("wb") as file:
        try:
            status = subprocess.run(
                command, stdout=file, stderr=file, timeout=options.seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = -14
    counts = count(log.read_text(errors="replace"), status)
    cells = " | ".join(str(counts[x]) for x in OUTCOMES)
    print(f"| {options.name} | {cells} |")
    sys.exit(1 if counts["wrong"] or not counts["passed"] else 0)


if __name__ == "__main__":
    main()
