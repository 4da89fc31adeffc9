# SPDX-License-Identifier: BSD-3-Clause
"""Check ELF files of an installed package: the libraries they load, and the GPU they are for.

    python -m checks.binaries PREFIX FILE_OR_PACKAGE... [--least N] [--aotriton]

Each library that a file needs, directly or through others, must be found inside the prefix by
RPATHs that begin with $ORIGIN; only glibc comes from outside. Each device image must be a code
object for the GPU in checks.target.
"""

import argparse
import importlib.util
from itertools import filterfalse
from pathlib import Path

from checks import elf, offload
from checks.loaded_from import is_glibc
from checks.target import ARCH
from checks.verdict import CheckFailed, require

# Folders of packages that are only installed to build others.
BUILD_ONLY = ["opt/aotriton"]


def folder(text: str, path: Path, prefix: Path) -> Path:
    """The folder that an RPATH entry of `path` names. Raises CheckFailed for a forbidden one."""
    if not text.startswith("$ORIGIN"):
        raise CheckFailed(f"RPATH {text!r} is a path of the build machine")
    found = Path(text.replace("$ORIGIN", str(path.parent))).resolve()
    if not found.is_relative_to(prefix):
        raise CheckFailed(f"RPATH {text!r} leads out of the environment")
    for name in BUILD_ONLY:
        if found.is_relative_to(prefix / name):
            raise CheckFailed(f"RPATH {text!r} leads into {name}, which is only there in builds")
    return found


def searched(rpaths: list[str], path: Path, prefix: Path, strict: bool) -> list[Path]:
    """The folders that `path`'s RPATH entries name. If `strict`, raises as `folder` does."""
    found = []
    for text in rpaths:
        try:
            found.append(folder(text, path, prefix))
        except CheckFailed:
            if strict:
                raise
    return found


def check(files: list[Path], prefix: Path, least: int, aotriton: bool) -> list[str]:
    """What is wrong with `files`, one line each; together they need `least` device images.

    Their own RPATHs must be right. Libraries of other packages are only followed, and one that
    their RPATHs miss may have been loaded for another file: the loader knows libraries by name.
    """
    wrong, images = [], 0
    waiting = {path.resolve() for path in files}
    ours, seen = frozenset(waiting), set()
    found: dict[str, Path] = {}
    missing: list[tuple[Path, str]] = []
    while waiting:
        path = waiting.pop()
        seen.add(path)
        try:
            dynamic = elf.dynamic(path)
            if path in ours:
                images += offload.count_images(elf.section(path, offload.SECTION))
            folders = searched(dynamic.search_path, path, prefix, strict=path in ours)
        except CheckFailed as error:
            wrong.append(f"{path}: {error}")
            continue
        for name in filterfalse(is_glibc, dynamic.needed):
            hits = [place / name for place in folders if (place / name).exists()]
            if hits:
                found.setdefault(name, hits[0])
                waiting |= {hits[0].resolve()} - seen
            else:
                missing.append((path, name))
    wrong += [
        f"{path}: needs {name}, which its RPATH does not find"
        for path, name in missing
        if path in ours or name not in found
    ]
    if images < least and not wrong:
        wrong.append(f"{images} device images in all, expected at least {least}")
    libraries = [at for name, at in found.items() if name.startswith("libaotriton_v2.so.")]
    if aotriton and [at.parent for at in libraries] != [prefix / "lib"]:
        wrong.append(f"no file needs libaotriton_v2.so.VERSION of {prefix / 'lib'}")
    if not wrong:
        print(f"{len(ours)} files, {images} images for {ARCH}, {len(seen)} ELF files followed")
    return wrong


def files_of(name: str) -> list[Path]:
    """`name` itself if it has a slash, else the shared libraries of that installed package.

    The package is not imported. Raises CheckFailed if it is not installed.
    """
    if "/" in name:
        return [Path(name)]
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CheckFailed(f"{name} is neither a file nor an installed package")
    return sorted(f for d in spec.submodule_search_locations for f in Path(d).rglob("*.so*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("prefix", type=Path)
    parser.add_argument("files", nargs="+", help="paths with a slash, or names of packages")
    parser.add_argument("--least", type=int, default=0, help="minimum number of device images")
    parser.add_argument("--aotriton", action="store_true", help="a file must need libaotriton_v2")
    options = parser.parse_args()
    files = [file for name in options.files for file in files_of(name)]
    wrong = check(files, options.prefix.resolve(), options.least, options.aotriton)
    require(not wrong, "\n".join(wrong))


if __name__ == "__main__":
    main()
