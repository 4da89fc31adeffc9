# SPDX-License-Identifier: BSD-3-Clause
"""A mock of GitHub: what it keeps between jobs, and the published actions that our steps use."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.expressions import Unsupported
from support.machine import Lost, Machine


class StepFailed(Exception):
    """An action or a script failed."""


@dataclass
class Cache:
    """An entry of the cache. `used` orders entries by their last use."""

    key: str
    folder: Path
    size: int
    used: int


@dataclass
class Hub:
    """A repository on GitHub.

    Attributes:
        folder: The folder of the releases, caches, artifacts and logs.
        source: The files of the repository.
        machines: The folder of the machines. Each new machine replaces the one before it.
        variables: The repository's variables, which expressions read as `vars`.
        environment: Environment variables of each machine, beside those that GitHub sets.
        home: The text of each file in a machine's home folder, by path.
        programs: The text of each program on a machine, by name, beside `gh` and `sudo`.
        disk: Bytes of each machine's disk; 0 for no limit.
        image: Bytes that GitHub's image occupies on the disk when a job starts.
        cache_limit: Bytes of all caches. Above it, the least recently used ones are removed.
        stops: For jobs that a test stops, by label: the point and the kind of the stop. The point
            is the name of a file in `hold`. The kind is "kill", "late" or "time", as `Machine.run`
            explains. At the points "cache" and "artifact", the machine is lost during the upload.
        seconds: Seconds that a minute of `timeout-minutes` takes.
        caches: The entries of the cache, oldest first.
        clock: The last result of `tick`.
        runs: The number of runs so far.
    """

    folder: Path
    source: Path
    machines: Path
    variables: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    disk: int = 0
    image: int = 0
    cache_limit: int = 10 << 30
    stops: dict[str, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 60.0
    caches: list[Cache] = field(default_factory=list)
    clock: int = 0
    runs: int = 0

    def __post_init__(self) -> None:
        for name in ("releases", "caches", "artifacts", "logs"):
            (self.folder / name).mkdir(parents=True)
        self.hold.mkdir(parents=True, exist_ok=True)

    @property
    def releases(self) -> Path:
        """Return the folder of the releases' files."""
        return self.folder / "releases"

    @property
    def hold(self) -> Path:
        """Return the folder whose files name the points at which scripts are stopped."""
        return self.machines / "hold"

    def machine(self) -> Machine:
        """Return a new machine for a job."""
        return Machine(self.machines / "machine", self.hold, self.disk)

    def furnish(self, machine: Machine) -> None:
        """Write the files of GitHub's image, and `home` and `programs`, to a machine."""
        sdk = machine.folder / "image/usr/local/lib/android/sdk"
        sdk.parent.mkdir(parents=True)
        sdk.write_bytes(bytes(self.image))
        for name, text in self.home.items():
            file = machine.folder / "home" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for name, text in self.programs.items():
            machine.program(name, text)

    def tick(self) -> int:
        """Return a number that is larger than in all earlier calls."""
        self.clock += 1
        return self.clock


@dataclass
class Use:
    """A step that uses an action.

    Attributes:
        hub: The repository.
        machine: The machine on which the step runs.
        artifacts: The folder of the run's artifacts.
        inputs: The inputs that the action has not read yet.
        log: Appends a line to the run's log.
    """

    hub: Hub
    machine: Machine
    artifacts: Path
    inputs: dict[str, str]
    log: Callable[[str], None]

    def take(self, name: str, default: str = "") -> str:
        """Remove an input and return it. use_action refuses the inputs that remain."""
        return str(self.inputs.pop(name, default))


def check_out(use: Use) -> None:
    """actions/checkout: copy the files of the repository to the machine."""
    if use.take("persist-credentials") not in ("False", "false"):
        raise Unsupported("a checkout that keeps its credentials on the machine")
    shutil.copytree(use.hub.source, use.machine.work, symlinks=True, dirs_exist_ok=True)


def set_up_pixi(use: Use) -> None:
    """prefix-dev/setup-pixi. Install nothing: a test that needs pixi gives the machine a mock."""
    use.take("pixi-version")


def set_up_python(use: Use) -> None:
    """actions/setup-python. Install nothing, because the machine has the Python of the tests."""
    use.take("python-version")


def count_bytes(folder: Path) -> int:
    """Count the bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def stop_at(use: Use, point: str) -> None:
    """Raise Lost if a test stops the machine at this point of an action."""
    hold = use.hub.hold / point
    if hold.exists():
        hold.unlink()
        raise Lost(f"lost at {point}")


def restore_cache(use: Use) -> None:
    """actions/cache/restore: restore the newest entry whose key starts with a given key.

    If several keys are given, the first one that matches an entry decides.
    """
    path, key = use.take("path"), use.take("key")
    prefixes = [key, *use.take("restore-keys").split()]
    for prefix in prefixes:
        matching = [cache for cache in use.hub.caches if cache.key.startswith(prefix)]
        if matching:
            cache = max(matching, key=lambda cache: use.hub.caches.index(cache))
            cache.used = use.hub.tick()
            shutil.copytree(
                cache.folder, use.machine.work / path, dirs_exist_ok=True, symlinks=True
            )
            use.log(f"cache restored from {cache.key}")
            return
    use.log(f"no cache for {', '.join(prefixes)}")


def save_cache(use: Use) -> None:
    """actions/cache/save. The step succeeds even if nothing can be saved.

    Nothing is saved if the path is missing, the key is in use or the entry is too large.
    """
    path, key = use.machine.work / use.take("path"), use.take("key")
    is_in_use = any(cache.key == key for cache in use.hub.caches)
    if not path.exists() or is_in_use or count_bytes(path) > use.hub.cache_limit:
        use.log(f"cache not saved: {key}")
        return
    stop_at(use, "cache")
    number = use.hub.tick()
    folder = use.hub.folder / "caches" / str(number)
    shutil.copytree(path, folder, symlinks=True)
    use.hub.caches.append(Cache(key, folder, count_bytes(folder), number))
    use.log(f"cache saved: {key}")
    while sum(cache.size for cache in use.hub.caches) > use.hub.cache_limit:
        oldest = min(use.hub.caches, key=lambda cache: cache.used)
        shutil.rmtree(oldest.folder)
        use.hub.caches.remove(oldest)
        use.log(f"cache evicted: {oldest.key}")


def upload(use: Use) -> None:
    """actions/upload-artifact with one folder. Hidden files are left out by default."""
    name, path = use.take("name"), use.take("path")
    missing = use.take("if-no-files-found", "warn")
    hidden = use.take("include-hidden-files") == "True"
    replace = use.take("overwrite") == "True"
    use.take("compression-level")
    source, target = use.machine.work / path, use.artifacts / name
    if any(sign in path for sign in "*?[!\n"):
        raise Unsupported(f"an artifact of several paths: {path!r}")
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    if not hidden:
        names = {file: file.relative_to(source).parts for file in files}
        files = [file for file in files if not any(part.startswith(".") for part in names[file])]
    if not files:
        use.log(f"no files for artifact {name}")
        if missing == "error":
            raise StepFailed(f"no files were found with the path {path}")
        return
    stop_at(use, "artifact")  # GitHub lists an artifact only after its upload is complete.
    if target.exists() and not replace:
        raise StepFailed(f"409: an artifact {name} exists already")
    shutil.rmtree(target, ignore_errors=True)
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def download(use: Use) -> None:
    """actions/download-artifact: one artifact by name, or all that match a pattern, merged."""
    name, pattern, path = use.take("name"), use.take("pattern"), use.take("path")
    merges = use.take("merge-multiple") == "True"
    if name:
        folders = [use.artifacts / name]
        if not folders[0].is_dir():
            raise StepFailed(f"artifact not found: {name}")
    else:
        if not merges:
            raise Unsupported("several artifacts that are not merged")
        if not re.fullmatch(r"[\w-]+\*?", pattern):
            raise Unsupported(f"the pattern {pattern!r}")
        folders = sorted(use.artifacts.glob(pattern))
    for folder in folders:
        use.log(f"artifact {folder.name}")
        for file in filter(Path.is_file, folder.rglob("*")):
            copy = use.machine.work / path / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


ACTIONS: dict[str, Callable[[Use], None]] = {
    "actions/checkout": check_out,
    "prefix-dev/setup-pixi": set_up_pixi,
    "actions/setup-python": set_up_python,
    "actions/cache/restore": restore_cache,
    "actions/cache/save": save_cache,
    "actions/upload-artifact": upload,
    "actions/download-artifact": download,
}


def use_action(reference: str, use: Use) -> None:
    """Do what an action does. Raises Unsupported for an unknown action or an unknown input."""
    name = reference.partition("@")[0]
    if name not in ACTIONS:
        raise Unsupported(f"the action {name}")
    ACTIONS[name](use)
    if use.inputs:
        raise Unsupported(f"{name} with {', '.join(use.inputs)}")
