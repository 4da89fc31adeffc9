# SPDX-License-Identifier: BSD-3-Clause
"""The Python of the environment that is examined: where it looks for modules, and what it finds.

The order is that of the module site: PYTHONPATH; in a virtual environment its own folder, and the
others only if pyvenv.cfg includes them; the user's folder; the interpreter's. Folders that .pth
files name come after the folder that the file is in.
"""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strix_validate.doctor.tree import Tree
from strix_validate.json_file import json_object, small_text

#: Distribution, as its dist-info folder is named, to our conda package.
CONDA_NAMES = {"torch": "pytorch", "triton": "triton", "torchvision": "torchvision"}


@dataclass(frozen=True)
class Place:
    """A folder of sys.path, and how it came there.

    Attributes:
        label: "the environment", "PYTHONPATH", "the user's folder", "the system" or a .pth file.
    """

    path: Path
    label: str


@dataclass(frozen=True)
class Distribution:
    """An installed distribution of Python.

    Attributes:
        by: The program that installed it; "conda" for pixi's conda packages too.
        place: Where it lies; the first place of sys.path that has it is loaded.
        build: "rocm", "cuda", "cpu", "xpu", or "" if nothing tells.
        runtime: The version of HIP or ROCm that it was built for, or "".
    """

    name: str
    version: str
    by: str
    place: Place
    build: str = ""
    runtime: str = ""


@dataclass(frozen=True)
class Interpreter:
    """A Python: its prefix, what kind of environment that is, and its places in order.

    Attributes:
        base: The prefix of the interpreter that a virtual environment was made from; else prefix.
    """

    prefix: Path
    kind: str
    places: tuple[Place, ...]
    base: Path

    def distributions(self, name: str) -> list[Distribution]:
        """Return the distributions of a name, the one that is loaded first."""
        return [each for place in self.places for each in _read(place, name)]

    def names(self) -> list[str]:
        """Return the names of all distributions."""
        folders = [f for place in self.places for f in sorted(place.path.glob("*.dist-info"))]
        return [folder.name.split("-")[0] for folder in folders]

    @property
    def program(self) -> Path:
        """The interpreter itself."""
        return self.prefix / "bin/python"


def interpreter(tree: Tree) -> Interpreter | None:
    """Return the Python of the active environment; without one, the first on PATH.

    On the machine itself this process' own environment comes first if it has torch: the validator
    may be installed beside it, without activation.
    """
    own = _at(tree, Path(sys.prefix)) if tree.is_live else None
    if own and own.distributions("torch"):
        return own
    environ = tree.environ
    active = [environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    folders = environ.get("PATH", "").split(":")
    # of two active environments, the one that was activated last comes first on PATH
    active.sort(key=lambda name: _position(f"{name}/bin", folders))
    for prefix in [*map(tree.path, active), *_prefixes(tree, folders), tree.path("usr")]:
        # the validator's own environment, as uvx and pixi exec make it, is not what is examined
        candidate = _at(tree, prefix) if own is None or prefix != own.prefix else None
        if candidate:
            return candidate
    return own


def _position(folder: str, folders: list[str]) -> int:
    return folders.index(folder) if folder in folders else len(folders)


def _prefixes(tree: Tree, folders: list[str]) -> Iterator[Path]:
    """Yield the prefixes of the folders of PATH that have a Python."""
    for folder in folders:
        prefix = tree.path(folder).parent
        has_python = any(os.path.lexists(prefix / "bin" / n) for n in ("python3", "python"))
        if folder.endswith("/bin") and folder != "/bin" and has_python:
            yield prefix


def _at(tree: Tree, prefix: Path) -> Interpreter | None:
    """Return the Python of a prefix, or None if there is none."""
    # Path.is_dir raises OSError for a name that is too long
    if not os.path.isdir(prefix):  # noqa: PTH112
        return None
    versions = sorted(prefix.glob("lib*/python3*"), key=_minor)
    if not versions:
        return None
    version, config = versions[-1].name, small_text(prefix / "pyvenv.cfg")
    kind = "system"
    if config is not None:
        kind = "venv"
    elif (prefix / "conda-meta").is_dir():
        kind = "conda"
    home = re.search(r"(?m)^home\s*=\s*(\S+)", config or "")
    base = prefix
    if kind == "venv":
        base = tree.path(home[1]).parent if home else tree.path("usr")
    places = [*_python_path(tree), *_own(tree, prefix, base, kind, config or "", version)]
    return Interpreter(prefix, kind, tuple(_with_pth(tree, places)), base)


def _minor(folder: Path) -> int:
    number = re.fullmatch(r"python3\.(\d{1,4})", folder.name)
    return int(number[1]) if number else -1


def _python_path(tree: Tree) -> list[Place]:
    names = tree.environ.get("PYTHONPATH", "").split(":")
    return [Place(tree.path(name), "PYTHONPATH") for name in names if name]


def _own(
    tree: Tree, prefix: Path, base: Path, kind: str, config: str, version: str
) -> Iterator[Place]:
    """Yield the places of an interpreter, without PYTHONPATH's."""
    user = Place(tree.home / ".local/lib" / version / "site-packages", "the user's folder")
    sees_user = not tree.environ.get("PYTHONNOUSERSITE")
    if kind == "venv":
        yield Place(prefix / "lib" / version / "site-packages", "the environment")
        if not re.search(r"(?mi)^include-system-site-packages\s*=\s*true", config):
            return
    if sees_user:
        yield user
    if kind == "conda":
        yield Place(prefix / "lib" / version / "site-packages", "the environment")
        return
    for folder in (
        f"local/lib/{version}/dist-packages",
        f"lib64/{version}/site-packages",
        f"lib/{version}/site-packages",
        "lib/python3/dist-packages",
    ):
        # lib64 is often a link to lib
        if not (base / folder).parents[1].is_symlink():
            yield Place(base / folder, "the system")


def _with_pth(tree: Tree, places: list[Place]) -> Iterator[Place]:
    """Yield places, each with the folders that its .pth files name."""
    for place in places:
        yield place
        if place.label == "PYTHONPATH" or not place.path.is_dir():
            continue
        for file in sorted(place.path.glob("*.pth")):
            for line in (small_text(file) or "").splitlines():
                name = line.strip()
                if not name or name.startswith(("#", "import ", "import\t")) or len(name) > 1000:
                    continue
                folder = tree.path(name) if name.startswith("/") else place.path / name
                if os.path.isdir(folder):  # noqa: PTH112
                    yield Place(folder, file.name)


def _read(place: Place, name: str) -> Iterator[Distribution]:
    """Yield the distributions of a name in a folder; two where one was put over the other."""
    facts = _torch_facts(place.path) if name == "torch" else {}
    folders = sorted(place.path.glob(f"{name}-*.dist-info"))
    for folder in folders:
        version = folder.name.removesuffix(".dist-info").removeprefix(f"{name}-")
        by = small_text(folder / "INSTALLER") or "an unknown tool"
        build, runtime = _build_of(version, facts if len(folders) == 1 else {})
        yield Distribution(name, version, by, place, build, runtime)
    if name == "torch" and facts and not folders:
        # a build from source, or a package of a distribution
        build, runtime = _build_of(facts.get("__version__", ""), facts)
        version = facts.get("__version__", "of an unknown version")
        yield Distribution(name, version, "an unknown tool", place, build, runtime)


def _torch_facts(folder: Path) -> dict[str, str]:
    """Return what torch/version.py says: __version__, cuda, hip, rocm."""
    text = small_text(folder / "torch/version.py") or ""
    line = r"""(?m)^(__version__|cuda|hip|rocm)\b[^=\n]*= *(?:['"]([^'"]*)['"]|None)"""
    return dict(re.findall(line, text))


def _build_of(version: str, facts: dict[str, str]) -> tuple[str, str]:
    """Return the kind of build and its runtime, by version.py or by the local version."""
    local = version.partition("+")[2]
    # rocm10.0.0, rocmsdk20250801, rocm7.14.0a20260612, rocm7.1.0.lw.git351ff442
    rocm = re.match(r"rocm(?:sdk)?(\d+(?:\.\d+)*(?:a\d{8})?)", local)
    if facts.get("hip"):
        return "rocm", rocm[1] if rocm else facts.get("rocm") or facts["hip"]
    if rocm:
        return "rocm", rocm[1]
    if facts.get("cuda") or local.startswith("cu"):
        return "cuda", facts.get("cuda", "") or local[2:]
    if local.startswith("xpu"):
        return "xpu", ""
    if facts or local.startswith("cpu"):
        return "cpu", ""
    return "", ""


def conda_record(prefix: Path, package: str) -> dict | None:
    """Return conda-meta's record of a package, or None."""
    for file in sorted(prefix.glob(f"conda-meta/{package}-*.json")):
        try:
            record = json_object(file)
        except ValueError:
            continue
        if record.get("name") == package:
            return record
    return None


def is_ours(record: dict | None) -> bool:
    """Return whether a record is of a package that this repository builds: of its channel, or of a
    channel that is a folder."""
    return is_our_channel(str((record or {}).get("channel", "")))


def is_our_channel(channel: str) -> bool:
    """Return whether a channel is this repository's: by its name, or as a folder."""
    return "strix-forge" in channel or channel.startswith(("file:", "/", "."))
