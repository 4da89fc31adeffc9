# SPDX-License-Identifier: BSD-3-Clause
"""Where things are, what goes wrong and with which exit code, and how much may run at once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUBDIRS = ("linux-64", "noarch")
# Recipes read it with env.get: a folder for compiler caches that outlives the build folder, so
# that a killed build of hours goes on. Empty where there is none.
FORGE_CACHE = "FORGE_CACHE"
GIB_PER_JOB = 2.0  # one C++ or HIP compiler process of PyTorch's size at its peak
COPY_CHUNK = 1 << 20


class ForgeError(Exception):
    """A usage or configuration error. The message says what, where and what to do."""

    exit_code = 2


class BuildFailed(ForgeError):
    """A build, a package test or an installation failed."""

    exit_code = 1


class Refused(ForgeError):
    """What was asked for contradicts what is known, for example a download with another hash."""

    exit_code = 1


class NotAttempted(ForgeError):
    """Something wanted could not be tried at all, for example an unreachable source."""

    exit_code = 3


@dataclass(frozen=True)
class Project:
    """The folders of one checkout. `channel` is what users get; `build` can always be deleted."""

    root: Path
    channel: Path
    build: Path

    @classmethod
    def at(cls, root: Path, output: Path | None = None) -> Project:
        """The project at `root`, writing packages to `output` (default: ROOT/channel)."""
        root = root.resolve()
        if not (root / "variants.yaml").is_file():
            raise ForgeError(f"{root} is no strix-forge checkout: it has no variants.yaml")
        return cls(root, output.resolve() if output else root / "channel", root / "build")

    @property
    def logs(self) -> Path:
        return self.build / "logs"

    @property
    def sources(self) -> Path:
        return self.build / "sources"

    @property
    def staging(self) -> Path:
        return self.build / "staging"

    @property
    def cache(self) -> Path:
        return self.build / "cache"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only builder of the output folder, and of this checkout's build folder.

        The kernel drops both locks with their holder, however that ends. Raises ForgeError when
        another live process holds one, or a folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            for folder in (self.channel, self.build):
                stack.enter_context(hold(folder, "building into"))
            kill_leftovers(self.staging)
            for leftover in self.staging.glob("tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield


@contextlib.contextmanager
def hold(folder: Path, doing: str) -> Iterator[None]:
    """Be the only one who is `doing` something to FOLDER, by a kernel lock on FOLDER/.lock.

    Raises ForgeError when another live process is, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ForgeError(
            f"cannot write to {error.filename}: {error.strerror}. "
            "Make it writable or choose another folder (--output, --to)"
        ) from None
    with os.fdopen(descriptor, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(32).strip() or "unknown"
            raise ForgeError(
                f"process {holder} is {doing} {folder}. Wait for it, or choose another folder"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def kill_leftovers(folder: Path) -> None:
    """Kill processes whose working directory is inside `folder`.

    A compiler started by a build that was killed with SIGKILL lives on and writes into the folder
    that the next build uses. Whoever holds the lock is the only builder, so they are all stale.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    os.kill(int(entry.name), signal.SIGKILL)


def max_jobs() -> int:
    """Compiler processes a build may run: one per core, and GIB_PER_JOB of memory for each.

    MAX_JOBS in the environment overrides it.
    """
    wanted = os.environ.get("MAX_JOBS")
    if wanted is not None:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ForgeError(f"MAX_JOBS={wanted!r} is not a positive number")
        return int(wanted)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIB_PER_JOB)))


def sha256_file(path: Path) -> str:
    """The sha256 of a file, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_tree(folder: Path) -> str:
    """One sha256 over the names, executable bits, link targets and bytes below `folder`.

    Byte code and packaging leftovers are not content: they appear by merely using the folder.
    """
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part == "__pycache__" or part.endswith(".egg-info") for part in relative.parts):
            continue
        if path.is_symlink():
            line = f"{relative} link {os.readlink(path)}\n"
        elif path.is_file():
            line = f"{relative} {path.stat().st_mode & 0o100:o} {sha256_file(path)}\n"
        else:
            continue
        total.update(line.encode())
    return total.hexdigest()


def read_text(path: Path) -> str:
    """A small text file. Raises ForgeError for one that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ForgeError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(text)
    partial.replace(path)


def place(source: Path, target: Path) -> None:
    """Move a file to `target` so that `target` is never seen half written.

    Raises ForgeError when there is no room or no permission; `source` is then still there.
    """
    partial = target.with_name(f".partial-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as stream, partial.open("wb") as out:
            shutil.copyfileobj(stream, out, COPY_CHUNK)
            out.flush()
            os.fsync(out.fileno())
        # rattler-build writes packages with mode 0600, which a web server cannot read
        partial.chmod(0o644)
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise BuildFailed(
            f"cannot write {target}: {error.strerror}. Free space or fix permissions, then run "
            f"the same command again; {source} is kept"
        ) from None
    source.unlink()
