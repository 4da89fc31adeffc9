#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Build, test, publish and validate everything on one machine, and pack what came of it.

    python docs/night.py [--to FOLDER] [--without-gpu]

Needs Python alone; `./forge` does the work, and docs/owner.md says what it costs. Each step is
noted in FOLDER/state.json when it ends. Run it again after whatever stopped it: it goes on with the
step that had not ended, and tries again those that failed.
"""

import argparse
import ctypes
import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORGE = [str(ROOT / "forge")]
BASE = [*FORGE, "--base", "conda-forge"]
KERNEL = (6, 18, 4)
GFX1151 = "110501"  # as the kernel driver writes it
STACKS = ("attention", "vllm", "diffusion", "finetune")
NODES = Path(os.environ.get("NIGHT_KFD") or "/sys/class/kfd/kfd/topology/nodes")
# what `forge plan` says where a build would not start, or nobody knows whether it could
REFUSALS = re.compile(r"^(?:a build would not start: |whether conda-forge has all ).*$", re.M)

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end a step whose night is killed: it would hold the driver's lock."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Night:
    """The folder of one night: its state, logs and results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state.json"
        folder.joinpath("logs").mkdir(parents=True, exist_ok=True)
        self.ended: dict[str, dict[str, float]] = {}
        if self.state.exists():
            self.ended = json.loads(self.state.read_text())

    def done(self, name: str) -> bool:
        """Return whether the step succeeded, tonight or before."""
        return self.ended.get(name, {}).get("code") == 0

    def note(self, name: str, code: int, seconds: float) -> None:
        """Write how a step ended, by one rename."""
        before = self.ended.get(name, {}).get("seconds", 0)
        self.ended[name] = {"code": code, "seconds": round(before + seconds)}
        partial = self.state.with_suffix(".partial")
        partial.write_text(json.dumps(self.ended, indent=1))
        partial.replace(self.state)

    def step(self, name: str, words: list[str], **environment: str) -> bool:
        """Run a command unless it succeeded before, its output on the terminal and in a log."""
        if self.done(name):
            print(f"== {name}: done before", flush=True)
            return True
        print(f"== {name}: {' '.join(words)}", flush=True)
        start = time.monotonic()
        with (self.folder / "logs" / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, env=os.environ | environment, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,
            )  # fmt: skip
            for line in process.stdout or ():
                print(line, end="", flush=True)
                log.write(line)
                log.flush()
        code = process.wait()
        self.note(name, code, time.monotonic() - start)
        print(
            f"== {name}: {'done' if not code else f'failed ({code}), the rest goes on'}", flush=True
        )
        return not code


def machine_lacks(gpu: bool) -> list[str]:
    """List what this machine lacks, a line for each, before anything is downloaded."""
    lacks = []
    numbers = tuple(map(int, re.findall(r"\d+", platform.release())[:3]))
    if gpu and numbers < KERNEL:
        lacks.append(f"kernel {platform.release()}: a GPU needs 6.18.4 or newer; update it")
    found = [path.read_text() for path in NODES.glob("*/properties")]
    if gpu and not any(f"gfx_target_version {GFX1151}\n" in text for text in found):
        lacks.append(
            "no gfx1151 GPU: the kernel driver lists none. --without-gpu builds without validating"
        )
    planned = subprocess.run(
        [*BASE, "plan"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=end_with_parent,
    )
    print(planned.stdout, end="", flush=True)
    refused = REFUSALS.findall(planned.stdout + planned.stderr)
    if planned.returncode and not refused:
        refused = [(planned.stderr.strip() or f"forge plan ended with {planned.returncode}")]
    return lacks + [text.splitlines()[-1] for text in refused]


def run(night: Night, gpu: bool) -> bool:
    """Take every step whose needs are met; returns whether all succeeded."""
    home, channel = night.folder / "home", night.folder / "channel"
    home.mkdir(exist_ok=True)
    results = [
        night.step("sources", [*BASE, "sources", "fetch"]),
        night.step(
            "build",
            [*BASE, "build-all", "--yes", "--continue-on-failure", "--package-format", "conda:19"],
        ),
        night.step("publish", [*BASE, "publish", "--to", str(channel)]),
        night.step("verify", [*FORGE, "channel", "verify", str(channel)]),
    ]
    new = {"HOME": str(home), "FORGE_CHANNEL": str(channel)}
    for stack in STACKS if night.done("publish") else ():
        installed = night.step(f"lock-{stack}", [*BASE, "lock", stack], **new) and night.step(
            f"install-{stack}", [*BASE, "install", stack], **new
        )
        results.append(installed)
        if installed and gpu:
            records = str(night.folder / "evidence" / stack)
            words = [*BASE, "run", stack, "--", "strix-validate", "run", "--evidence", records]
            results.append(night.step(f"validate-{stack}", words, **new))
    return all(results) and len(results) > len(STACKS)


def page(night: Night, gpu: bool) -> str:
    """Say in one screen what the night proved, from its notes, the packages and the records."""
    index = [json.loads(p.read_text()) for p in night.folder.glob("channel/*/repodata.json")]
    packages = [record for data in index for record in data.get("packages.conda", {}).values()]
    used = "gfx1151" if gpu else "not used: nothing was validated"
    lines = ["# A night of strix-forge", ""]
    lines += [f"Kernel {platform.release()}, {os.cpu_count()} CPUs, GPU {used}", ""]
    lines += ["| step | result | minutes |", "| --- | --- | --- |"]
    for name, ended in night.ended.items():
        result = f"failed ({ended['code']}): logs/{name}.log" if ended["code"] else "done"
        lines.append(f"| {name} | {result} | {ended['seconds'] / 60:.0f} |")
    names = ", ".join(sorted(f"{r['name']} {r['version']}" for r in packages))
    lines += ["", f"**Published ({len(packages)})**: {names or 'nothing'}", ""]
    for record in sorted(night.folder.glob("evidence/*/*.json")):
        summary = json.loads(record.read_text()).get("summary", {})
        counts = ", ".join(
            f"{summary.get(key, '?')} {key}" for key in ("passed", "failed", "skipped")
        )
        lines.append(f"**Checks, {record.parent.name}**: {counts}")
    if not list(night.folder.glob("evidence/*/*.json")):
        lines.append("**Checks**: none ran on the GPU.")
    return "\n".join([*lines, ""])


def pack(night: Night, gpu: bool) -> Path:
    """Write the page and the archive, each by one rename."""
    (night.folder / "README.md").write_text(page(night, gpu))
    archive, partial = night.folder / "night.tar.gz", night.folder / "night.partial"
    with tarfile.open(partial, "w:gz") as tar:
        for name in ("README.md", "state.json", "logs", "evidence"):
            if (night.folder / name).exists():
                tar.add(night.folder / name, f"night/{name}")
        for path in sorted(night.folder.glob("channel/forge/*.provenance.json")):
            tar.add(path, f"night/provenance/{path.name}")
        for path in sorted((ROOT / "build" / "logs").glob("*.log")):
            tar.add(path, f"night/build-logs/{path.name}")
    partial.replace(archive)
    return archive


def main() -> int:
    """Run the night; exit 1 if a step failed, 3 if the machine lacks something, 2 if one runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "night", metavar="FOLDER")
    parser.add_argument("--without-gpu", action="store_true")
    options = parser.parse_args()
    night, gpu = Night(options.to.resolve()), not options.without_gpu
    with (night.folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"night: another one works in {night.folder}", file=sys.stderr)
            return 2
        if not night.done("build") and (lacks := machine_lacks(gpu)):
            print(*(f"night: not started: {line}" for line in lacks), sep="\n", file=sys.stderr)
            return 3
        whole = run(night, gpu)
        archive = pack(night, gpu)
    print(f"\n{(night.folder / 'README.md').read_text()}\n{archive}")
    print(f"Send it: gh issue create --template evidence.yml, and attach {archive.name} to it")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
