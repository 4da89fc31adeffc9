#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Build, test, publish and validate everything on one machine, and pack what came of it.

    python3 docs/night.py [--to FOLDER] [--without-gpu]

Needs Python alone; `./forge` does the work, and docs/owner.md says what it costs. Each step is
noted in FOLDER/state.json when it ends, with what it was made of. Run it again after whatever
stopped it: it goes on with the step that had not ended, and tries again those that failed.
"""

import argparse
import ctypes
import fcntl
import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORGE = str(ROOT / "forge")
KERNEL = (6, 18, 4)
GFX1151 = "110501"  # as the kernel driver writes it
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DEVICE = Path("/dev/kfd")
# what `forge plan` says where a build would not start, or nobody knows whether it could
REFUSALS = re.compile(r"^(?:a build would not start: |whether conda-forge has all ).*$", re.M)
HOURS = re.compile(r"^(\S+): .*, ([\d.]+) CPU hours$", re.M)
LOST = re.compile(r"^(\S+) +\S+ +\S+ +(failed|not attempted) +[\d.]+$", re.M)
LOG_BYTES = 2 << 20  # of each log the archive has the end: an issue takes 25 MB
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end a step whose night is killed: it would hold the driver's lock."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def digest(*paths: Path) -> str:
    """Hash those of the files that exist."""
    found = hashlib.sha256()
    for path in filter(Path.is_file, paths):
        found.update(path.read_bytes())
    return found.hexdigest()


def git(*words: str) -> str:
    """Return what git says of this checkout, or nothing."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


class TimeLeft:
    """Says how long a build takes yet, from the CPU hours of `forge plan`, at each package."""

    def __init__(self, planned: str) -> None:
        self.hours = {name: float(hours) for name, hours in HOURS.findall(planned)}
        self.all, self.start = sum(self.hours.values()), time.monotonic()

    def __call__(self, line: str) -> None:
        """Print it where a package begins; once a tenth is done, at the pace of that tenth."""
        begun = re.match(r"\[\d+/\d+\] (\S+) \S+: building", line)
        if begun and begun[1] in self.hours:
            left, passed = sum(self.hours.values()), time.monotonic() - self.start
            done = self.all - left
            pace = done / passed * 3600 if done > self.all / 10 else len(os.sched_getaffinity(0))
            print(f"== build: about {left / pace:.1f} hours left", flush=True)
            del self.hours[begun[1]]


class Night:
    """The folder of one night: its state, logs and results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.steps = folder, folder / "state.json", folder / ".step"
        self.packages, self.channel = folder / "packages", folder / "channel"
        folder.joinpath("logs").mkdir(parents=True, exist_ok=True)
        self.ended: dict[str, dict[str, float | str]] = {}
        if self.state.exists():
            self.ended = json.loads(self.state.read_text())

    @property
    def base(self) -> list[str]:
        """The driver on conda-forge, with packages of this night alone."""
        return [FORGE, "--base", "conda-forge", "--output", str(self.packages)]

    def done(self, name: str, made_of: str) -> bool:
        """Return whether the step succeeded with this input, tonight or before."""
        ended = self.ended.get(name, {})
        return ended.get("code") == 0 and ended.get("of") == made_of

    def note(self, name: str, code: int, seconds: float, made_of: str) -> None:
        """Write how a step ended, by one rename."""
        before = float(self.ended.get(name, {}).get("seconds", 0))
        self.ended[name] = {"code": code, "seconds": round(before + seconds), "of": made_of}
        partial = self.state.with_suffix(".partial")
        partial.write_text(json.dumps(self.ended, indent=1))
        partial.replace(self.state)

    def wait_for_step(self) -> None:
        """Wait for the step of a night that was killed: it ends on its own, but not at once."""
        with self.steps.open("w") as held:
            for _ in range(60):  # what it left running beyond that, the driver ends
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except OSError:
                    time.sleep(1)

    def step(
        self, name: str, words: list[str], made_of: str,
        watch: Callable[[str], None] = lambda _: None, **environment: str,
    ) -> bool:  # fmt: skip
        """Run a command unless it succeeded before, its output on the terminal and in a log."""
        if self.done(name, made_of):
            print(f"== {name}: done before", flush=True)
            return True
        print(f"== {name}: {' '.join(words)}", flush=True)
        start = time.monotonic()
        log_file = self.folder / "logs" / f"{name}.log"
        self.steps.unlink(missing_ok=True)  # something may hold it for longer than was waited
        with log_file.open("a") as log, self.steps.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # ends with the step, for `wait_for_step`
            process = subprocess.Popen(
                words, cwd=ROOT, env=os.environ | environment, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,
                pass_fds=[held.fileno()],
            )  # fmt: skip
            for line in process.stdout or ():
                print(line, end="", flush=True)
                log.write(line)
                log.flush()
                watch(line)
        code = process.wait()
        self.note(name, code, time.monotonic() - start, made_of)
        result = f"failed ({code}), the rest goes on" if code else "done"
        print(f"== {name}: {result}", flush=True)
        return not code


def gpu_lacks() -> list[str]:
    """List what keeps this machine's GPU from computing, a line for each."""
    lacks = []
    numbers = tuple(map(int, re.findall(r"\d+", platform.release())[:3]))
    if numbers < KERNEL:
        needed = ".".join(map(str, KERNEL))
        lacks.append(f"kernel {platform.release()}: a GPU needs {needed} or newer; update it")
    found = [path.read_text() for path in NODES.glob("*/properties")]
    if not any(f"gfx_target_version {GFX1151}\n" in text for text in found):
        lacks.append(
            "no gfx1151 GPU: the kernel driver lists none. --without-gpu builds without validating"
        )
    elif not os.access(DEVICE, os.R_OK | os.W_OK):
        lacks.append(f"{DEVICE} is closed to you: join the groups render and video, log in again")
    return lacks


def build_lacks(night: Night) -> tuple[list[str], str]:
    """Print cost and order; list what keeps the build from starting, and return what was printed.

    Nothing is downloaded but conda-forge's index.
    """
    planned = subprocess.run(
        [*night.base, "plan"], cwd=ROOT, capture_output=True, text=True, errors="replace",
        check=False, preexec_fn=end_with_parent,
    )  # fmt: skip
    print(planned.stdout, end="", flush=True)
    refused = REFUSALS.findall(planned.stdout + planned.stderr)
    if planned.returncode and not refused:
        said = planned.stderr or f"forge plan ended with {planned.returncode}"
        refused = [" ".join((said.partition("error: ")[2] or said).split())]
    return refused, planned.stdout


def make_home(home: Path) -> dict[str, str]:
    """Make a new home folder, which knows the owner's mirrors; returns its environment."""
    for name in (".pixi/config.toml", ".config/pixi/config.toml"):
        if (Path.home() / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path.home() / name, home / name)
    home.mkdir(exist_ok=True)
    return {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}


def run(night: Night, gpu: bool, planned: str) -> bool:
    """Take every step whose needs are met; returns whether all succeeded."""
    commit, channel = git("rev-parse", "HEAD"), str(night.channel)
    build = ["build-all", "--yes", "--continue-on-failure", "--package-format", "conda:19"]
    results = [
        night.step("sources", [*night.base, "sources", "fetch"], commit),
        night.step("build", [*night.base, *build], commit, TimeLeft(planned)),
    ]
    made = digest(*sorted(night.packages.glob("*/repodata.json")))
    results.append(night.step("publish", [*night.base, "publish", "--to", channel], made))
    published = any(night.channel.glob("*/repodata.json"))
    new = make_home(night.folder / "home") | {"FORGE_CHANNEL": channel}
    for manifest in sorted(ROOT.glob("stacks/*/pixi.toml")) if published else ():
        stack, copy = manifest.parent.name, ROOT / "build/stacks" / manifest.parent.name
        whole = night.step(f"lock-{stack}", [*night.base, "lock", stack], made, **new)
        locked = digest(copy / "pixi.lock")
        install = [*night.base, "install", stack]
        whole = whole and night.step(f"install-{stack}", install, locked, **new)
        if whole and gpu:
            records = str(night.folder / "evidence" / stack)
            words = [*night.base, "run", stack, "--"]
            words += ["strix-validate", "run", "--evidence", records]
            whole = night.step(f"validate-{stack}", words, locked, **new)
        results.append(whole)
    return published and all(results)


def page(night: Night, gpu: bool) -> str:
    """Say in one screen what the night proved, from its notes, the packages and the records."""
    index = [json.loads(p.read_text()) for p in night.channel.glob("*/repodata.json")]
    packages = [record for data in index for record in data.get("packages.conda", {}).values()]
    used = "gfx1151" if gpu else "not used: nothing was validated"
    commit = git("rev-parse", "HEAD") or "unknown"
    lines = ["# A night of strix-forge", ""]
    lines += [f"Commit {commit}, kernel {platform.release()}, {os.cpu_count()} CPUs, GPU {used}"]
    lines += ["", "| step | result | minutes |", "| --- | --- | --- |"]
    for name, ended in night.ended.items():
        result = f"failed ({ended['code']}): logs/{name}.log" if ended["code"] else "done"
        lines.append(f"| {name} | {result} | {float(ended['seconds']) / 60:.0f} |")
    names = ", ".join(sorted({f"{r['name']} {r['version']}" for r in packages}))  # of any build
    lines += ["", f"**Published ({len(packages)})**: {names or 'nothing'}", ""]
    log = night.folder / "logs/build.log"
    said = log.read_text().rpartition("\npackage ")[2] if log.exists() else ""
    lost = ", ".join(f"{name} ({why})" for name, why in LOST.findall(said))
    lines += [f"**Not built**: {lost or 'nothing'}", ""]
    for folder in sorted(night.folder.glob("evidence/*")):
        record = max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)
        summary = json.loads(record.read_text()).get("summary", {}) if record else {}
        counts = (f"{summary.get(key, '?')} {key}" for key in ("passed", "failed", "skipped"))
        lines.append(f"**Checks, {folder.name}**: {', '.join(counts)}")
    if not list(night.folder.glob("evidence/*/*.json")):
        lines.append("**Checks**: none ran on the GPU.")
    return "\n".join([*lines, ""])


def add(tar: tarfile.TarFile, path: Path, folder: str) -> None:
    """Add a file, of a log its last LOG_BYTES; nothing of who owns it."""
    data = path.read_bytes()
    data = data[-LOG_BYTES:] if path.suffix == ".log" else data
    info = tarfile.TarInfo(f"night/{folder}{path.name}")
    info.size, info.mtime = len(data), int(path.stat().st_mtime)
    tar.addfile(info, io.BytesIO(data))


def pack(night: Night, gpu: bool) -> Path:
    """Write the page and the archive, each by one rename."""
    (night.folder / "README.md").write_text(page(night, gpu))
    archive, partial = night.folder / "night.tar.gz", night.folder / "night.partial"
    with tarfile.open(partial, "w:gz") as tar:
        for path in (night.folder / "README.md", night.state):
            add(tar, path, "")
        for path in sorted(night.folder.glob("evidence/*/*.json")):
            add(tar, path, f"evidence/{path.parent.name}/")
        for path in sorted(night.folder.glob("logs/*.log")):
            add(tar, path, "logs/")
        for path in sorted((ROOT / "build/logs").glob("*.log")):
            add(tar, path, "build-logs/")
    partial.replace(archive)
    return archive


def issue() -> str:
    """Return the address that opens an issue for the archive, if GitHub has this repository."""
    found = re.search(
        r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?$", git("remote", "get-url", "origin")
    )
    return f"https://github.com/{found[1]}/issues/new?template=evidence.yml" if found else ""


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
        night.wait_for_step()
        lacks, planned = gpu_lacks() if gpu else [], ""
        if not night.done("build", git("rev-parse", "HEAD")):
            refused, planned = build_lacks(night)
            lacks += refused
        if lacks:
            print(*(f"night: not started: {line}" for line in lacks), sep="\n", file=sys.stderr)
            return 3
        whole = run(night, gpu, planned)
        archive = pack(night, gpu)
    where = issue() or "the issue form `evidence` of the repository that this clone is from"
    print(f"\n{(night.folder / 'README.md').read_text()}\n{archive}")
    print(f"Give it: open {where}\nand drop the archive and evidence/*/*.json of it there")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
