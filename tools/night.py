#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Build, publish, install and validate everything on one machine, and pack what came of it.

    python3 tools/night.py [--to FOLDER] [--without-gpu]

Every step is a `./forge` command that resumes by itself: run this again after whatever stopped it.
The archive is written before the first step and after each. docs/owner.md says what it costs.
"""

import argparse
import contextlib
import fcntl
import io
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from forge.errors import without_secrets  # noqa: E402

NODES, DEVICE = Path("/sys/class/kfd/kfd/topology/nodes"), Path("/dev/kfd")
GFX1151 = "gfx_target_version 110501\n"  # as the kernel driver writes it
BUILD = ["build-all", "--yes", "--continue-on-failure", "--package-format", "conda:19"]
LOG_BYTES = 256 << 10  # of each log the archive has the end: an issue takes 25 MB
ARCHIVE_BYTES = 16 << 20  # room on the disk that the archive keeps for itself
END_WITH_NIGHT = ["setpriv", "--pdeathsig", "TERM"]  # also if it is killed


def show(text: str) -> None:
    """Print, if there still is a terminal."""
    with contextlib.suppress(OSError):
        print(text, end="", flush=True)


def is_link(path: Path) -> bool:
    """Return whether a path, or a file by another name, leads to somebody else's data."""
    return path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1)


def read_end(path: Path) -> str:
    """Return the end of a file of ours, without secrets, and nothing of a file behind a link."""
    try:
        if path.resolve() != path or is_link(path) or not path.is_file():
            return ""
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(start)
            text = file.read(LOG_BYTES).decode(errors="replace")
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return f"cannot be read: {error}\n"
    # a word that is cut may be the end of a secret
    return without_secrets(re.sub(r"\A\S*", "", text) if start else text, os.environ)


def make_way(path: Path) -> None:
    """Remove a file or link, and move a folder aside, which may be somebody's."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.{time.time_ns()}"))
    path.unlink(missing_ok=True)


class Night:
    """One run, and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.channel = folder, folder / "channel"
        self.archive, self.partial = folder / "night.tar.gz", folder / "night.partial"
        self.stacks = sorted(path.parent.name for path in ROOT.glob("stacks/*/pixi.toml"))
        self.page = f"# A night\n\nKernel {platform.release()}, {os.cpu_count()} CPUs\n\n"
        self.page += "| step | exit code | minutes | last line |\n| --- | --- | --- | --- |\n"

    def step(self, name: str, *words: str) -> bool:
        """Run a command with its output in a log and shown; returns whether it succeeded."""
        show(f"== {name}: {' '.join(words)}\n")
        log, start, code = self.folder / f"{name}.log", time.monotonic(), -1
        try:
            for pattern in ("packages", "channel", "evidence-*", "evidence-*/*.json"):
                for path in filter(is_link, [*self.folder.glob(pattern)]):
                    path.unlink()  # no step writes through one
            make_way(log)
            with log.open("xb") as out, log.open("rb") as reader:
                code = self.follow(words, out, reader)
        except OSError as error:
            show(f"cannot run: {error}\n")
        last = read_end(log).strip().rpartition("\n")[2][:200].replace("|", "/")
        minutes = (time.monotonic() - start) / 60
        self.page += f"| {name} | {code} | {minutes:.0f} | {last} |\n"
        show(f"== {name}: {'failed, the rest goes on' if code else 'done'}\n")
        self.pack()
        return code == 0

    def follow(self, words: tuple[str, ...], out: IO[bytes], log: IO[bytes]) -> int:
        """Run a command to its end; one that this script is interrupted in is ended."""
        environment = os.environ | {"FORGE_CHANNEL": str(self.channel)}
        command = [*END_WITH_NIGHT, *words]
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                show(log.read().decode(errors="replace"))
            show(log.read().decode(errors="replace"))
        finally:
            for kind in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    if process.poll() is None:
                        os.killpg(process.pid, kind)
                        process.wait(60)
        return process.returncode

    def run(self, gpu: bool) -> bool:
        """Take every step; returns whether all succeeded. A stack that fails costs no other."""
        packages = self.folder / "packages"
        forge = [str(ROOT / "forge"), "--base", "conda-forge", "--output", str(packages)]
        self.step("commit", "git", "-C", str(ROOT), "rev-parse", "HEAD")
        whole = self.step("build", *forge, *BUILD)
        if not any(packages.glob("*/*.conda")):
            return False
        whole &= self.step("publish", *forge, "publish", "--to", str(self.channel))
        for stack in self.stacks:
            installed = self.step(f"lock-{stack}", *forge, "lock", stack)
            installed = installed and self.step(f"install-{stack}", *forge, "install", stack)
            whole &= installed
            if installed and gpu:
                records = str(self.folder / f"evidence-{stack}")
                words = ["run", stack, "--", "strix-validate", "run", "--evidence", records]
                whole &= self.step(f"validate-{stack}", *forge, *words)
        return whole

    def pack(self) -> None:
        """Write the archive of page, logs and records, by one rename."""
        names = ["commit", "build", "publish"]
        names += [f"{step}-{s}" for step in ("lock", "install", "validate") for s in self.stacks]
        files = {f"{name}.log": self.folder / f"{name}.log" for name in names}
        for recipe in sorted(path.parent.name for path in ROOT.glob("recipes/*/recipe.yaml")):
            files[f"packages/{recipe}.log"] = (ROOT / "build").resolve() / f"logs/{recipe}.log"
        for stack in self.stacks:  # a record for each day
            for path in sorted(self.folder.glob(f"evidence-{stack}/*.json"))[-5:]:
                files[f"evidence/{stack}/{path.name}"] = path
        texts = {name: read_end(path).encode() for name, path in files.items()}
        texts["README.md"] = without_secrets(self.page, os.environ).encode()
        try:
            if self.partial.resolve() != self.partial or not self.partial.exists():
                self.keep_room()
            with self.partial.open("r+b") as file:
                with tarfile.open(fileobj=file, mode="w:gz") as tar:
                    for name in filter(texts.get, sorted(texts)):
                        info = tarfile.TarInfo(f"night/{name}")
                        info.size, info.mtime = len(texts[name]), int(time.time())
                        tar.addfile(info, io.BytesIO(texts[name]))
                file.truncate()
                os.fsync(file.fileno())
            if self.archive.is_dir():
                make_way(self.archive)
            self.partial.replace(self.archive)
            self.keep_room()
        except OSError as error:
            show(f"night: cannot write {self.archive}: {error.strerror}. Make room for it\n")

    def keep_room(self) -> None:
        """Take the room on the disk that the next archive will need."""
        make_way(self.partial)
        with self.partial.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, ARCHIVE_BYTES)


def find_obstacle(folder: Path, gpu: bool) -> str:
    """Return what keeps the night from starting, or an empty string once its folder is locked."""
    nodes = (path.read_text(errors="replace") for path in NODES.glob("*/properties"))
    if gpu and not any(GFX1151 in text for text in nodes):
        return "no gfx1151 GPU: the kernel lists none. --without-gpu builds without validating"
    if gpu and not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} is closed to you: join the groups render and video, log in again"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        Night(folder.resolve()).keep_room()
    except BlockingIOError:
        return f"another one works in {folder}"
    except OSError as error:
        return f"cannot write {error.filename or folder}: {error.strerror}"
    return ""


def main() -> int:
    """Run the night; exit 1 if a step failed, 3 if it cannot start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "night", metavar="FOLDER")
    parser.add_argument("--without-gpu", action="store_true")
    options = parser.parse_args()
    if obstacle := find_obstacle(options.to, not options.without_gpu):
        print(f"night: not started: {obstacle}", file=sys.stderr)
        return 3
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal ends no night
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    night, whole = Night(options.to.resolve()), False
    try:
        night.pack()
        whole = night.run(not options.without_gpu)
    except KeyboardInterrupt:
        show("night: interrupted; the same command goes on\n")
    finally:
        night.pack()
    show(f"\n{night.page}\n{night.archive}\nGive it: open an issue with the form `evidence`.\n")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
