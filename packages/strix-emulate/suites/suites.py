# SPDX-License-Identifier: BSD-3-Clause
"""Run a test suite of another project on the emulated device, and count its cases by outcome.

usage: python suites.py NAME

suites.toml lists the suites. After a case that traps, the device of its process executes nothing
more. Some other cases end their process. So the cases run in several processes, one after the
other. In the folder of the option --out, NAME.jsonl gets a line for each outcome, and NAME.log gets
the output of pytest with all messages of the device. The last line that suites.py prints is a row
for the table in docs/suites.md.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
#: The outcomes of a case, in the order of the columns in docs/suites.md.
OUTCOMES = ("passed", "skipped", "refused", "trapped", "wrong", "error", "ended", "slow")
#: Maximum number of cases that one process runs. Their outcomes are read when the process has
#: ended, so they are lost if this program is killed before.
BATCH = 40
#: Command that starts a program on the device. The budget of 10**12 wave-instructions is so large
#: that only a time limit, that of the case or of the device, ends a launch that hangs.
DEVICE = [sys.executable, "-m", "strix_emulate", "device", "--budget", str(10**12), "--"]


def unpack(recipe: str, folder: Path) -> Path:
    """Unpack a recipe's source and apply its patches; return the folder of the source."""
    subprocess.run([ROOT / "forge", "sources", "fetch", recipe], check=True)
    name = recipe.replace("-", "_")
    (archive,) = (ROOT / "build" / "sources").glob(f"*/{name}-[0-9]*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    for patch in sorted((ROOT / "patches" / recipe).glob("*.patch")):
        subprocess.run(["patch", "-p1", "-s", "-d", source, "-i", patch], check=True)
    return source


def clone(repository: str, version: str, folder: Path) -> Path:
    """Clone a repository at the tag of a version; return the folder of the source."""
    source = folder / "source"
    command = ["git", "clone", "-q", "--depth=1", f"--branch=v{version}", repository, source]
    subprocess.run(command, check=True)
    return source


def channel_versions() -> dict[str, str]:
    """Return the versions of torch and triton in variants.yaml."""
    variants = (ROOT / "variants.yaml").read_text()
    return dict(re.findall(r'^(pytorch|triton):\n  - "([^"]+)"$', variants, re.M))


def requirements(suite: dict) -> list[str]:
    """Return what pip installs for a suite, with variants.yaml's versions of torch and triton."""
    versions = channel_versions()
    return [
        f"torch=={versions['pytorch']}",
        f"triton=={versions['triton']}",
        str(HERE.parent),  # the emulator, whose metadata names its plugin for vLLM
        "pytest",
        *suite.get("requires", []),
    ]


def choose(cases: list[str], count: int) -> list[str]:
    """Return `count` of the cases, at even distances in their list; all if there are no more."""
    if count >= len(cases):
        return cases
    return [cases[i * len(cases) // count] for i in range(count)]


class Runner:
    """Runs the cases of one suite.

    Attributes:
        command: The words of a command line that precede the program, such as DEVICE.
        source: The folder in which pytest runs.
        variables: The environment variables.
        log: The file for the output of the cases.
        seconds: Time limit of a case.
    """

    def __init__(self, command: list[str], source: Path, variables: dict, log: Path, seconds: int):
        self.command, self.source, self.variables = command, source, variables
        self.log, self.seconds = log, seconds

    def collect(self, files: list[str], keyword: str) -> list[str]:
        """Return the names of all cases in test files that match pytest's option -k."""
        with tempfile.NamedTemporaryFile("r") as names:
            command = ["--collect-only", "-k", keyword, *files]
            code = self._pytest(command, {"SUITES_NAMES": names.name})
            cases = names.read().splitlines()
        if code != 0 or not cases:
            raise SystemExit(f"pytest found no case, or could not import a file: see {self.log}")
        return cases

    def run(self, cases: list[str]) -> Iterator[tuple[str, str]]:
        """Run the cases; yield each with its outcome."""
        remaining = list(cases)
        while remaining:
            batch = remaining[:BATCH]
            with (
                tempfile.NamedTemporaryFile("w") as case_file,
                tempfile.NamedTemporaryFile() as outcome_file,
            ):
                case_file.write("\n".join(batch))
                case_file.flush()
                files = sorted({name.partition("::")[0] for name in batch})
                variables = {
                    "SUITES_CASES": case_file.name,
                    "SUITES_OUTCOMES": outcome_file.name,
                    "SUITES_SECONDS": str(self.seconds),
                }
                code = self._pytest(files, variables)
                outcomes = [
                    json.loads(line) for line in Path(outcome_file.name).read_text().splitlines()
                ]
            started = [name for name, outcome in outcomes if outcome == "started"]
            finished = {name: outcome for name, outcome in outcomes if outcome != "started"}
            if not started:
                raise SystemExit(f"pytest ran none of {len(batch)} cases: see {self.log}")
            for name in started:
                # 14 is the number of SIGALRM, which plugin.py requests.
                yield name, finished.get(name, "slow" if code == -14 else "ended")
            remaining = [name for name in remaining if name not in started]

    def _pytest(self, arguments: list[str], variables: dict[str, str]) -> int:
        command = [
            *self.command,
            self.variables.get("SUITES_PYTHON", sys.executable),
            "-m",
            "pytest",
            "-q",
            "-p",
            "plugin",
            "-p",
            "no:cacheprovider",
            "--capture=sys",
            "--rootdir",
            str(self.source),
            *arguments,
        ]
        with self.log.open("a") as log:
            return subprocess.run(
                command,
                cwd=self.source,
                env=self.variables | variables,
                stdout=log,
                stderr=log,
                check=False,
            ).returncode


def environment(source: Path, suite: dict) -> dict[str, str]:
    """Return the environment of a suite's programs."""
    path = [
        *(str(source / folder) for folder in suite.get("path", [])),
        str(HERE),
        str(HERE.parent / "src"),
    ]
    if "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    variables = {"PYTHONPATH": os.pathsep.join(path)}
    return os.environ | variables | suite.get("environment", {})


def main() -> None:
    suites = tomllib.loads((HERE / "suites.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=suites)
    parser.add_argument("--count", type=int, help="number of cases; default: suites.toml's count")
    parser.add_argument("--seconds", type=int, default=600, help="time limit of a case")
    parser.add_argument("--source", type=Path, help="the unpacked and patched source")
    parser.add_argument("--out", type=Path, default=Path("suites"))
    parser.add_argument("--requirements", action="store_true", help="print what pip is to install")
    options = parser.parse_args()
    suite = suites[options.suite]
    if options.requirements:
        print(*requirements(suite))
        return
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log, results = out / f"{options.suite}.log", out / f"{options.suite}.jsonl"
    log.unlink(missing_ok=True)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder, results.open("w") as file:
        if options.source:
            source = options.source
        elif "repository" in suite:
            version = channel_versions()[suite["recipe"]]
            source = clone(suite["repository"], version, Path(folder))
        else:
            source = unpack(suite["recipe"], Path(folder))
        runner = Runner(
            DEVICE, source.resolve(), environment(source.resolve(), suite), log, options.seconds
        )
        cases = runner.collect(suite["files"], suite.get("keyword", ""))
        chosen = choose(cases, options.count or suite["count"])
        for name, outcome in runner.run(chosen):
            counts[outcome] += 1
            print(f"{outcome:8} {name}", flush=True)
            file.write(json.dumps([name, outcome]) + "\n")
            file.flush()
    print(
        f"| {options.suite}, {len(chosen)} of {len(cases)} | "
        + " | ".join(str(counts[x]) for x in OUTCOMES)
        + " |"
    )
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
