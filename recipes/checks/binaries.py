# SPDX-License-Identifier: BSD-3-Clause
"""Check the ELF files of an installed package: the libraries they load, and the GPU of their code.

    python -m checks.binaries PREFIX FILE_OR_PACKAGE... [--min-images N] [--aotriton]

PREFIX is the folder of the environment, and N is the minimum number of device images. With
--aotriton, one of the files must need AOTriton's library.

Each library that a file needs, directly or through other libraries, must be found inside the prefix
by RPATHs that begin with $ORIGIN. Only glibc may come from outside. Each device image must be a
code object for the GPU in checks.target.
"""

import argparse
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

from checks import elf, offload
from checks.loaded_from import is_glibc
from checks.target import ARCH
from checks.verdict import CheckFailed, require

# Folders of packages that are installed only to build other packages.
BUILD_ONLY = ["opt/aotriton"]
AOTRITON = "libaotriton_v2.so."


@dataclass
class Findings:
    """The facts that were read from ELF files and from the libraries that they need.

    Attributes:
        faults: One line for each fault of a checked file, and for each unreadable library.
        images: The number of device images in the checked files.
        followed: All files that were read.
        libraries: The path of each library that was found, by its name.
        missing: Pairs of a file and the name of a library that the file's RPATHs do not find.
    """

    faults: list[str] = field(default_factory=list)
    images: int = 0
    followed: set[Path] = field(default_factory=set)
    libraries: dict[str, Path] = field(default_factory=dict)
    missing: list[tuple[Path, str]] = field(default_factory=list)


def resolve_rpath(entry: str, path: Path, prefix: Path) -> Path:
    """Return the folder that an RPATH entry names.

    Args:
        entry: The entry.
        path: The file with the entry.
        prefix: The prefix of the environment.

    Raises:
        CheckFailed: Such an entry is not allowed in a package.
    """
    if not entry.startswith("$ORIGIN"):
        raise CheckFailed(f"RPATH {entry!r} does not begin with $ORIGIN")
    folder = Path(entry.replace("$ORIGIN", str(path.parent))).resolve()
    if not folder.is_relative_to(prefix):
        raise CheckFailed(f"RPATH {entry!r} leads out of the environment")
    for name in BUILD_ONLY:
        if folder.is_relative_to(prefix / name):
            raise CheckFailed(f"RPATH {entry!r} leads into {name}, which exists only in builds")
    return folder


def list_folders(entries: list[str], path: Path, prefix: Path, strict: bool) -> list[Path]:
    """Return the folders that the RPATH entries of a file name.

    Args:
        entries: The entries.
        path: The file with the entries.
        prefix: The prefix of the environment.
        strict: If true, raise CheckFailed for an entry that is not allowed. If false, leave such an
            entry out.
    """
    folders = []
    for entry in entries:
        try:
            folders.append(resolve_rpath(entry, path, prefix))
        except CheckFailed:
            if strict:
                raise
    return folders


def follow(files: set[Path], prefix: Path) -> Findings:
    """Read ELF files and the libraries that they need, directly or through other libraries.

    Args:
        files: The files to check. Images, and RPATHs that are not allowed, are recorded only for
            these files.
        prefix: The prefix of the environment.
    """
    findings = Findings()
    pending = set(files)
    while pending:
        path = pending.pop()
        findings.followed.add(path)
        is_checked = path in files
        try:
            dynamic = elf.dynamic(path)
            if is_checked:
                findings.images += offload.count_images(elf.section(path, offload.SECTION))
            folders = list_folders(dynamic.search_path, path, prefix, strict=is_checked)
        except CheckFailed as error:
            findings.faults.append(f"{path}: {error}")
            continue
        for name in dynamic.needed:
            if is_glibc(name):
                continue
            libraries = [folder / name for folder in folders if (folder / name).exists()]
            if not libraries:
                findings.missing.append((path, name))
                continue
            findings.libraries.setdefault(name, libraries[0])
            library = libraries[0].resolve()
            if library not in findings.followed:
                pending.add(library)
    return findings


def check(files: list[Path], prefix: Path, min_images: int, aotriton: bool) -> list[str]:
    """Return the faults of ELF files, one line each.

    The RPATHs of these files must find every library that the files need. A library that another
    package's file needs may be found by the RPATH of any file. The reason is that the loader first
    looks for the name among the libraries that it has already loaded.

    Args:
        files: The files.
        prefix: The prefix of the environment.
        min_images: The minimum number of device images in all files together.
        aotriton: Require that one of the files needs AOTriton's library.
    """
    checked = {path.resolve() for path in files}
    findings = follow(checked, prefix)
    faults = findings.faults
    for path, name in findings.missing:
        if path in checked or name not in findings.libraries:
            faults.append(f"{path}: needs {name}, which its RPATH does not find")
    images = findings.images
    if images < min_images and not faults:
        faults.append(f"{images} device images in all, expected at least {min_images}")
    folders = []
    for name, library in findings.libraries.items():
        if name.startswith(AOTRITON):
            folders.append(library.parent)
    if aotriton and folders != [prefix / "lib"]:
        faults.append(f"no file needs {AOTRITON}VERSION of {prefix / 'lib'}")
    if not faults:
        followed = len(findings.followed)
        print(f"{len(checked)} files, {images} images for {ARCH}, {followed} ELF files followed")
    return faults


def list_files(name: str) -> list[Path]:
    """Return the file at a path, or the shared libraries of an installed Python package.

    The package is not imported.

    Args:
        name: A path if it has a slash, else the name of a package.

    Raises:
        CheckFailed: The package is not installed.
    """
    if "/" in name:
        return [Path(name)]
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CheckFailed(f"no Python package {name} is installed (a file's path needs a slash)")
    files = []
    for folder in spec.submodule_search_locations:
        files += Path(folder).rglob("*.so*")
    return sorted(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("prefix", type=Path)
    parser.add_argument("files", nargs="+", help="paths with a slash, or names of packages")
    parser.add_argument("--min-images", type=int, default=0, help="minimum number of device images")
    parser.add_argument("--aotriton", action="store_true", help="a file must need libaotriton_v2")
    options = parser.parse_args()
    files = []
    for name in options.files:
        files += list_files(name)
    faults = check(files, options.prefix.resolve(), options.min_images, options.aotriton)
    require(not faults, "\n".join(faults))


if __name__ == "__main__":
    main()
