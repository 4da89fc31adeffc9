#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Build, publish, install and validate everything on one machine, and pack the logs and records.

    python3 tools/night.py [--to FOLDER] [--without-gpu]

The packages, the channel, the steps' logs and the archive are written to FOLDER, by default
build/night. If this program is stopped, run it again: all steps except validation continue where
they were stopped. The archive is written before the first step and after each step.
docs/owner.md states the time and the disk space that this program needs.
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

from forge.errors import remove_secrets  # noqa: E402 (sys.path has to be changed before)

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DEVICE = Path("/dev/kfd")
GFX1151 = "gfx_target_version 110501\n"  # the kernel driver's notation
FORGE = [str(ROOT / "forge"), "--base", "conda-forge"]
BUILD = [
    "build-all",
    "--yes",
    "--continue-on-failure",
    "--package-format",
    "conda:19",
]
# Number of bytes at the end of each log or record that are packed. GitHub's issues accept at most
# 25 MB.
LOG_BYTES = 256 << 10
# Bytes on the disk that are reserved for the archive.
ARCHIVE_BYTES = 16 << 20
# Number of records that are packed for each stack. The newest records are packed. A stack has a
# record per day.
RECORDS = 5
# With this prefix, a command ends together with this script, even if the script is killed.
END_WITH_NIGHT = ["setpriv", "--pdeathsig", "TERM"]
FAILED = 1
NOT_STARTED = 3


def show(text: str) -> None:
    """Print a text. Do nothing if the terminal no longer exists."""
    with contextlib.suppress(OSError):
        print(text, end="", flush=True)


def is_link(path: Path) -> bool:
    """Return whether a path is a symbolic or hard link, and so may lead to other files."""
    if path.is_symlink():
        return True
    return path.is_file() and path.stat().st_nlink > 1


def read_end(path: Path) -> str:
    """Return the end of a file, without secrets.

    Return an empty string for a link or a missing file, and the reason if a file cannot be read.
    """
    try:
        if path.resolve() != path or is_link(path) or not path.is_file():
            return ""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - LOG_BYTES)
            file.seek(start)
            text = file.read(LOG_BYTES).decode(errors="replace")
    except (OSError, RuntimeError) as error:  # RuntimeError: links form a circle
        return f"cannot be read: {error}\n"
    if start:
        # Remove the first word, because it is cut off and may be the end of a secret.
        text = re.sub(r"\A\S*", "", text)
    return remove_secrets(text, os.environ)


def clear_path(path: Path) -> None:
    """Remove a file or link at a path. Rename a folder instead, since it may have other data."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.{time.time_ns()}"))
    path.unlink(missing_ok=True)


class Night:
    """One run of all steps.

    Attributes:
        folder: The folder for the packages, the channel, the logs and the records.
        packages: The folder of the packages.
        channel: The folder of the published channel.
        archive: The archive to send.
        partial: The file of the next archive. Until it is written, it reserves disk space.
        stacks: The names of all stacks.
        page: The text of the archive's README.md, with a table of the steps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "packages"
        self.channel = folder / "channel"
        self.archive = folder / "night.tar.gz"
        self.partial = folder / "night.partial"
        manifests = sorted(ROOT.glob("stacks/*/pixi.toml"))
        self.stacks = [path.parent.name for path in manifests]
        self.page = (
            f"# A night\n\nKernel {platform.release()}, {os.cpu_count()} CPUs\n\n"
            "| step | exit code | minutes | last line |\n"
            "| --- | --- | --- | --- |\n"
        )

    def step(self, name: str, *words: str) -> bool:
        """Run a command, show its output and write it to a log.

        Args:
            name: The name of the step and of its log.
            words: The command and its arguments.

        Returns:
            Whether the command succeeded.
        """
        show(f"== {name}: {' '.join(words)}\n")
        log = self.folder / f"{name}.log"
        start = time.monotonic()
        code = -1
        try:
            self.remove_links()
            clear_path(log)
            with log.open("xb") as out, log.open("rb") as reader:
                code = self.follow(words, out, reader)
        except OSError as error:
            show(f"cannot run: {error}\n")
        lines = read_end(log).strip()
        last_line = lines.rpartition("\n")[2][:200].replace("|", "/")
        minutes = (time.monotonic() - start) / 60
        self.page += f"| {name} | {code} | {minutes:.0f} | {last_line} |\n"
        result = "failed; the night continues" if code else "done"
        show(f"== {name}: {result}\n")
        self.pack()
        return code == 0

    def remove_links(self) -> None:
        """Remove links at the places to which a step writes."""
        for pattern in ("packages", "channel", "evidence-*", "evidence-*/*.json"):
            for path in list(self.folder.glob(pattern)):
                if is_link(path):
                    path.unlink()

    def follow(self, words: tuple[str, ...], out: IO[bytes], log: IO[bytes]) -> int:
        """Run a command, and end it if this script is interrupted.

        Args:
            words: The command and its arguments.
            out: The log, opened for writing.
            log: The log, opened for reading, to show it.

        Returns:
            The exit code.
        """
        environment = dict(os.environ)
        environment["FORGE_CHANNEL"] = str(self.channel)
        process = subprocess.Popen(
            [*END_WITH_NIGHT, *words],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
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
        """Run all steps. If a stack fails, continue with the next one.

        Stop after the build if there is no package.

        Args:
            gpu: Validate the stacks on the GPU.

        Returns:
            Whether all steps of ./forge succeeded.
        """
        forge = [*FORGE, "--output", str(self.packages)]
        self.step("commit", "git", "-C", str(ROOT), "rev-parse", "HEAD")
        succeeded = [self.step("build", *forge, *BUILD)]
        has_packages = any(self.packages.glob("*/*.conda"))
        if not has_packages:
            return False
        succeeded.append(self.step("publish", *forge, "publish", "--to", str(self.channel)))
        for stack in self.stacks:
            succeeded.append(self.run_stack(stack, forge, gpu))
        return all(succeeded)

    def run_stack(self, stack: str, forge: list[str], gpu: bool) -> bool:
        """Lock, install and (with `gpu`) validate a stack. Return whether all steps succeeded."""
        if not self.step(f"lock-{stack}", *forge, "lock", stack):
            return False
        if not self.step(f"install-{stack}", *forge, "install", stack):
            return False
        if not gpu:
            return True
        records = str(self.folder / f"evidence-{stack}")
        validator = ["strix-validate", "run", "--evidence", records]
        return self.step(f"validate-{stack}", *forge, "run", stack, "--", *validator)

    def pack(self) -> None:
        """Write the archive with the page, the logs and the records, and rename it into place."""
        texts = {}
        for name, path in self.list_files().items():
            texts[name] = read_end(path).encode()
        texts["README.md"] = remove_secrets(self.page, os.environ).encode()
        try:
            if self.partial.resolve() != self.partial or not self.partial.exists():
                self.keep_room()
            with self.partial.open("r+b") as file:
                with tarfile.open(fileobj=file, mode="w:gz") as tar:
                    for name, text in sorted(texts.items()):
                        if not text:
                            continue
                        info = tarfile.TarInfo(f"night/{name}")
                        info.size = len(text)
                        info.mtime = int(time.time())
                        tar.addfile(info, io.BytesIO(text))
                file.truncate()
                os.fsync(file.fileno())
            if self.archive.is_dir():
                clear_path(self.archive)
            self.partial.replace(self.archive)
            self.keep_room()
        except OSError as error:
            show(f"night: cannot write {self.archive}: {error.strerror}. Fix that\n")

    def list_files(self) -> dict[str, Path]:
        """Return the paths of the files to pack by their names in the archive. Not all exist."""
        steps = ["commit", "build", "publish"]
        for stack in self.stacks:
            steps += [f"lock-{stack}", f"install-{stack}", f"validate-{stack}"]
        files = {}
        for step in steps:
            files[f"{step}.log"] = self.folder / f"{step}.log"
        build_logs = (ROOT / "build").resolve() / "logs"
        for path in ROOT.glob("recipes/*/recipe.yaml"):
            recipe = path.parent.name
            files[f"packages/{recipe}.log"] = build_logs / f"{recipe}.log"
        for stack in self.stacks:
            records = sorted(self.folder.glob(f"evidence-{stack}/*.json"))
            for path in records[-RECORDS:]:
                files[f"evidence/{stack}/{path.name}"] = path
        return files

    def keep_room(self) -> None:
        """Reserve disk space for the next archive."""
        clear_path(self.partial)
        with self.partial.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, ARCHIVE_BYTES)


def find_obstacle(folder: Path, gpu: bool) -> str:
    """Check that the night can start, and lock its folder.

    Args:
        folder: The folder.
        gpu: Require the GPU.

    Returns:
        The reason why the night cannot start; empty if the folder is locked now.
    """
    if gpu:
        nodes = list(NODES.glob("*/properties"))
        if not any(GFX1151 in path.read_text(errors="replace") for path in nodes):
            return "no gfx1151 GPU: the kernel lists none. --without-gpu builds without validating"
        if not os.access(DEVICE, os.R_OK | os.W_OK):
            advice = "join the groups render and video, and log in again"
            return f"{DEVICE} cannot be opened: {advice}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Night(folder.resolve()).keep_room()
    except BlockingIOError:
        return f"another night is running in {folder}"
    except OSError as error:
        return f"cannot write {error.filename or folder}: {error.strerror}"
    return ""


def main() -> int:
    """Run the night, and return the exit code.

    It is 1 if a step failed or the night was interrupted, and 3 if the night cannot start.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "build" / "night",
        metavar="FOLDER",
    )
    parser.add_argument("--without-gpu", action="store_true")
    options = parser.parse_args()
    gpu = not options.without_gpu
    obstacle = find_obstacle(options.to, gpu)
    if obstacle:
        print(f"night: not started: {obstacle}", file=sys.stderr)
        return NOT_STARTED
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # continue when the terminal is closed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    night = Night(options.to.resolve())
    has_succeeded = False
    try:
        night.pack()
        has_succeeded = night.run(gpu)
    except KeyboardInterrupt:
        show("night: interrupted; run the same command again to continue\n")
    finally:
        night.pack()
    advice = "To send this archive, open an issue with the form `evidence`."
    show(f"\n{night.page}\n{night.archive}\n{advice}\n")
    return 0 if has_succeeded else FAILED


if __name__ == "__main__":
    sys.exit(main())
