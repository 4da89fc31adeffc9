# SPDX-License-Identifier: BSD-3-Clause
"""What GitHub keeps of a repository between jobs, and the actions of others that our steps use."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.expressions import Unsupported
from support.machine import Lost, Machine


class StepFailed(Exception):
    """An action failed."""


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
        folder: Where all of this is kept.
        source: The files of the repository.
        machines: Where each machine is, one after the other, at the same path.
        variables: Of the repository, for `vars`.
        environment: Variables of each machine, beside those of GitHub.
        home: Files in each machine's home folder.
        programs: Programs that each machine has, by name; `gh` and `sudo` are there.
        disk, image: Bytes of each machine's disk, and of what GitHub's image has on it at first.
        cache_limit: Bytes of all caches; beyond it, those go whose last use is longest ago.
        stops: By the label of a job, the point of Machine.hold at which it ends, and how: "kill",
            "late" or "time", as Machine.run has it.
            At the points "cache" and "artifact" the machine is lost while it hands that on.
        seconds: What a minute of `timeout-minutes` takes.
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
        """What users download."""
        return self.folder / "releases"

    @property
    def hold(self) -> Path:
        """Where scripts see at which point they are stopped."""
        return self.machines / "hold"

    def machine(self) -> Machine:
        """A new machine for a job."""
        return Machine(self.machines / "machine", self.hold, self.disk)

    def furnish(self, machine: Machine) -> None:
        """Put on a machine what GitHub's image and the test want there."""
        brought = machine.folder / "image/usr/local/lib/android/sdk"
        brought.parent.mkdir(parents=True)
        brought.write_bytes(bytes(self.image))
        for name, text in self.home.items():
            file = machine.folder / "home" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for name, text in self.programs.items():
            machine.program(name, text)

    def tick(self) -> int:
        """Return a number that is larger than all before."""
        self.clock += 1
        return self.clock


@dataclass
class Use:
    """A step that uses an action: its inputs, where it runs, and what came of it."""

    hub: Hub
    machine: Machine
    artifacts: Path
    inputs: dict[str, str]
    log: Callable[[str], None]

    def take(self, name: str, default: str = "") -> str:
        """Take an input out; what is left at the end is unknown to this runner."""
        return str(self.inputs.pop(name, default))


def check_out(use: Use) -> None:
    """actions/checkout."""
    if use.take("persist-credentials") not in ("False", "false"):
        raise Unsupported("a checkout whose credentials stay")
    shutil.copytree(use.hub.source, use.machine.work, symlinks=True, dirs_exist_ok=True)


def set_up_pixi(use: Use) -> None:
    """prefix-dev/setup-pixi: this machine has what the test gave it."""
    use.take("pixi-version")


def set_up_python(use: Use) -> None:
    """actions/setup-python: this machine has the tests' Python."""
    use.take("python-version")


def count_bytes(folder: Path) -> int:
    """Count the bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def stop_at(use: Use, point: str) -> None:
    """Lose the machine before an action has ended, if the test asks for it."""
    hold = use.hub.hold / point
    if hold.exists():
        hold.unlink()
        raise Lost(f"lost at {point}")


def restore_cache(use: Use) -> None:
    """actions/cache/restore: of all entries whose key begins with a restore key, the newest."""
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
    """actions/cache/save: a missing path, a taken key or an entry too large fails no step."""
    path, key = use.machine.work / use.take("path"), use.take("key")
    is_taken = any(cache.key == key for cache in use.hub.caches)
    if not path.exists() or is_taken or count_bytes(path) > use.hub.cache_limit:
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
    """actions/upload-artifact, of one folder; hidden files are left out unless asked for."""
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
    stop_at(use, "artifact")  # GitHub lists none before it is whole
    if target.exists() and not replace:
        raise StepFailed(f"409: an artifact {name} exists already")
    shutil.rmtree(target, ignore_errors=True)
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def download(use: Use) -> None:
    """actions/download-artifact: one by its name, or all of a pattern, merged."""
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
    """Do what an action does. Raises Unsupported for one, or an input, that is not known here."""
    name = reference.partition("@")[0]
    if name not in ACTIONS:
        raise Unsupported(f"the action {name}")
    ACTIONS[name](use)
    if use.inputs:
        raise Unsupported(f"{name} with {', '.join(use.inputs)}")
