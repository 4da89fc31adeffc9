# SPDX-License-Identifier: BSD-3-Clause
"""Find the Python of the examined environment, its folders of modules, and the distributions there.

The folders are in the order of Python's module ``site``:

1. the folders of PYTHONPATH
2. in a virtual environment, its own folder; without `include-system-site-packages` in pyvenv.cfg,
   the following folders are left out
3. the user's folder
4. the interpreter's folders

A folder that a .pth file names comes after the folder with that file. Python reads no .pth file in
a folder of PYTHONPATH.
"""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strix_validate.doctor.tree import Tree
from strix_validate.json_file import read_json_object, read_small_text

#: Conda packages of this repository's channel, by the name of the Python distribution in each.
CONDA_NAMES = {
    "torch": "pytorch",
    "triton": "triton",
    "torchvision": "torchvision",
}
_UNKNOWN_TOOL = "an unknown tool"
#: The maximum length of a path in a .pth file; longer lines are ignored.
_LONGEST_PATH = 1000


@dataclass(frozen=True)
class Place:
    """A folder of sys.path.

    Attributes:
        path: The folder.
        label: Where it comes from: "the environment", "PYTHONPATH", "the user's folder",
            "the system" or the name of a .pth file.
    """

    path: Path
    label: str

    @property
    def is_in_environment(self) -> bool:
        """Whether this is the environment's own folder."""
        return self.label == "the environment"


@dataclass(frozen=True)
class Distribution:
    """An installed distribution of Python.

    Attributes:
        name: Its name.
        version: Its version.
        installer: The program that installed it; "conda" for pixi's conda packages too.
        place: The folder that contains it. If several folders do, Python uses the first one.
        build: "rocm", "cuda", "cpu", "xpu", or "" if unknown.
        runtime: The version of ROCm, HIP or CUDA that it was built for, or "".
    """

    name: str
    version: str
    installer: str
    place: Place
    build: str = ""
    runtime: str = ""


@dataclass(frozen=True)
class Interpreter:
    """A Python.

    Attributes:
        prefix: The folder of its environment.
        kind: "conda", "venv" or "system".
        places: Its folders of modules, in the order of precedence.
        base: The prefix of the interpreter from which a virtual environment was created; for other
            kinds, the same as prefix.
    """

    prefix: Path
    kind: str
    places: tuple[Place, ...]
    base: Path

    def find_distributions(self, name: str) -> list[Distribution]:
        """Return the Python distributions of a name, in the order in which Python searches.

        If one distribution was installed over another in the same folder, both are returned, in
        the order of their names.
        """
        distributions: list[Distribution] = []
        for place in self.places:
            distributions += _read_distributions(place, name)
        return distributions

    def list_names(self) -> list[str]:
        """Return the names of Python distributions, as their dist-info folders spell them."""
        names = []
        for place in self.places:
            for folder in sorted(place.path.glob("*.dist-info")):
                names.append(folder.name.split("-")[0])
        return names


def find_interpreter(tree: Tree) -> Interpreter | None:
    """Return the Python of the active environment, or the first on PATH if none is active.

    If the tree is this machine, the environment of this process takes precedence, provided that it
    has torch. The validator then runs in the environment that it examines, active or not.
    """
    running = None
    if tree.is_live:
        running = _read_interpreter(tree, Path(sys.prefix))
    if running and running.find_distributions("torch"):
        return running
    for prefix in _list_prefixes(tree):
        # uvx and pixi exec create an environment for the validator alone. It is examined only if
        # there is no other one.
        if running and prefix == running.prefix:
            continue
        candidate = _read_interpreter(tree, prefix)
        if candidate:
            return candidate
    return running


def _list_prefixes(tree: Tree) -> Iterator[Path]:
    """Yield the active environments, then each prefix on PATH that has a Python, then /usr."""
    folders = tree.environ.get("PATH", "").split(":")
    active = []
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if tree.environ.get(name):
            active.append(tree.environ[name])
    # Of two active environments, the one that was activated last comes first on PATH.
    active.sort(key=lambda prefix: _find_position(f"{prefix}/bin", folders))
    yield from map(tree.path, active)
    for folder in folders:
        prefix = tree.path(folder).parent
        is_of_prefix = folder.endswith("/bin") and folder != "/bin"
        if is_of_prefix and _has_python(prefix):
            yield prefix
    yield tree.path("usr")


def _find_position(folder: str, folders: list[str]) -> int:
    return folders.index(folder) if folder in folders else len(folders)


def _has_python(prefix: Path) -> bool:
    names = ("python3", "python")
    return any(os.path.lexists(prefix / "bin" / name) for name in names)


def _is_folder(path: Path) -> bool:
    # Path.is_dir raises OSError for a name that is too long.
    return os.path.isdir(path)  # noqa: PTH112


def _read_interpreter(tree: Tree, prefix: Path) -> Interpreter | None:
    """Return the Python of a prefix, or None if there is none."""
    if not _is_folder(prefix):
        return None
    versions = sorted(prefix.glob("lib*/python3*"), key=_parse_minor)
    if not versions:
        return None
    version = versions[-1].name
    config = read_small_text(prefix / "pyvenv.cfg")
    if config is not None:
        base = _find_base(tree, config)
        places = _list_venv_places(tree, prefix, base, version, config)
        kind = "venv"
    elif (prefix / "conda-meta").is_dir():
        base = prefix
        places = _list_conda_places(tree, prefix, version)
        kind = "conda"
    else:
        base = prefix
        places = _list_system_places(tree, prefix, version)
        kind = "system"
    names = tree.environ.get("PYTHONPATH", "").split(":")
    first = [Place(tree.path(name), "PYTHONPATH") for name in names if name]
    return Interpreter(prefix, kind, tuple(_add_pth_folders(tree, first + places)), base)


def _parse_minor(folder: Path) -> int:
    """Return the minor version of a folder such as python3.12, or -1."""
    number = re.fullmatch(r"python3\.(\d{1,4})", folder.name)
    return int(number[1]) if number else -1


def _find_base(tree: Tree, config: str) -> Path:
    """Return the prefix of the interpreter that a virtual environment was made from."""
    home = re.search(r"(?m)^home\s*=\s*(\S+)", config)
    return tree.path(home[1]).parent if home else tree.path("usr")


def _list_venv_places(
    tree: Tree,
    prefix: Path,
    base: Path,
    version: str,
    config: str,
) -> list[Place]:
    places = [_get_environment_place(prefix, version)]
    if re.search(r"(?mi)^include-system-site-packages\s*=\s*true", config):
        places += _list_system_places(tree, base, version)
    return places


def _list_conda_places(tree: Tree, prefix: Path, version: str) -> list[Place]:
    return [*_list_user_places(tree, version), _get_environment_place(prefix, version)]


def _list_system_places(tree: Tree, prefix: Path, version: str) -> list[Place]:
    places = _list_user_places(tree, version)
    for name in (
        f"local/lib/{version}/dist-packages",
        f"lib64/{version}/site-packages",
        f"lib/{version}/site-packages",
        "lib/python3/dist-packages",
    ):
        folder = prefix / name
        # lib64 is often a link to lib.
        if not folder.parents[1].is_symlink():
            places.append(Place(folder, "the system"))
    return places


def _get_environment_place(prefix: Path, version: str) -> Place:
    return Place(prefix / "lib" / version / "site-packages", "the environment")


def _list_user_places(tree: Tree, version: str) -> list[Place]:
    if tree.environ.get("PYTHONNOUSERSITE"):
        return []
    folder = tree.home / ".local/lib" / version / "site-packages"
    return [Place(folder, "the user's folder")]


def _add_pth_folders(tree: Tree, places: list[Place]) -> Iterator[Place]:
    """Yield places, each followed by the folders that its .pth files name."""
    for place in places:
        yield place
        if place.label == "PYTHONPATH" or not place.path.is_dir():
            continue
        for file in sorted(place.path.glob("*.pth")):
            yield from _read_pth(tree, file)


def _read_pth(tree: Tree, file: Path) -> Iterator[Place]:
    """Yield the folders that a .pth file names."""
    for line in (read_small_text(file) or "").splitlines():
        name = line.strip()
        is_code = name.startswith(("#", "import ", "import\t"))
        if not name or is_code or len(name) > _LONGEST_PATH:
            continue
        folder = tree.path(name) if name.startswith("/") else file.parent / name
        if _is_folder(folder):
            yield Place(folder, file.name)


def _read_distributions(place: Place, name: str) -> Iterator[Distribution]:
    """Yield the distributions of a name in a folder; two if one was installed over the other."""
    facts = _read_torch_facts(place.path) if name == "torch" else {}
    folders = sorted(place.path.glob(f"{name}-*.dist-info"))
    # If there are two distributions, version.py does not show to which of them it belongs.
    facts_of_one = facts if len(folders) == 1 else {}
    for folder in folders:
        version = folder.name.removesuffix(".dist-info").removeprefix(f"{name}-")
        installer = read_small_text(folder / "INSTALLER") or _UNKNOWN_TOOL
        build, runtime = _find_build(version, facts_of_one)
        yield Distribution(name, version, installer, place, build, runtime)
    if facts and not folders:
        # Builds from source and packages of Linux distributions may have no dist-info folder.
        build, runtime = _find_build(facts.get("__version__", ""), facts)
        version = facts.get("__version__", "of an unknown version")
        yield Distribution(name, version, _UNKNOWN_TOOL, place, build, runtime)


def _read_torch_facts(folder: Path) -> dict[str, str]:
    """Return the values of __version__, cuda, hip and rocm in torch/version.py."""
    text = read_small_text(folder / "torch/version.py") or ""
    line = r"""(?m)^(__version__|cuda|hip|rocm)\b[^=\n]*= *(?:['"]([^'"]*)['"]|None)"""
    return dict(re.findall(line, text))


def _find_build(version: str, facts: dict[str, str]) -> tuple[str, str]:
    """Return the kind of a build and its runtime.

    Args:
        version: The version of the distribution. Its local part may contain the kind and the
            runtime.
        facts: The values of torch/version.py.
    """
    local = version.partition("+")[2]
    # examples: rocm10.0.0, rocmsdk20250801, rocm7.14.0a20260612, rocm7.1.0.lw.git351ff442
    rocm = re.match(r"rocm(?:sdk)?(\d+(?:\.\d+)*(?:a\d{8})?)", local)
    if rocm:
        return "rocm", rocm[1]
    if facts.get("hip"):
        return "rocm", facts.get("rocm") or facts["hip"]
    if facts.get("cuda") or local.startswith("cu"):
        return "cuda", facts.get("cuda", "") or local[2:]
    if local.startswith("xpu"):
        return "xpu", ""
    if facts or local.startswith("cpu"):
        return "cpu", ""
    return "", ""


def read_conda_record(prefix: Path, package: str) -> dict | None:
    """Return conda-meta's record of a package, or None."""
    for file in sorted(prefix.glob(f"conda-meta/{package}-*.json")):
        try:
            record = read_json_object(file)
        except ValueError:
            continue
        if record.get("name") == package:
            return record
    return None


def is_from_our_channel(record: dict | None) -> bool:
    """Return whether a conda record is that of a package from this repository's channel."""
    return record is not None and is_our_channel(str(record.get("channel", "")))


def is_our_channel(channel: str) -> bool:
    """Return whether a channel is a local folder, or its name contains this repository's."""
    return "strix-forge" in channel or channel.startswith(("file:", "/", "."))
