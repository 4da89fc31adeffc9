# SPDX-License-Identifier: BSD-3-Clause
"""Copy files of Debian's packages to another tree, to the paths that a table states."""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from rehearsal import debian

MULTIARCH = "usr/lib/x86_64-linux-gnu"
# Patterns of paths, with targets. A file goes to the target of the first pattern that matches its
# whole path. If the target is None, the file is left out.
Moves = Sequence[tuple[str, str | None]]
# Matches code of a CMake file that goes up four folders, to the prefix. In the tree, the code must
# go up only three folders, because the tree has no folder for Debian's triple.
FOUR_STEPS = re.compile(r'(get_filename_component\((\w+) "\$\{\2\}" PATH\)\n)\1{3}')
# Matches a path with `../` four times. In hip-lang's file it has `../` five times, because the path
# begins at the file and not at the file's folder.
FOUR_UP = re.compile(r"\.\./(?:\.\./){3}")
# Matches code of a CMake file that compares the current prefix with the original one, /usr.
ORIGINAL = re.compile(r"get_filename_component\(_realCurr .*?unset\(_realCurr\)\n", re.DOTALL)
HOST_FOLDER = re.compile(r";?/usr/include(?:/libdrm)?(?=[;\"])")


def find_target(name: str, moves: Moves) -> str | None:
    """Return the target of a path, or None if the file is left out."""
    for pattern, target in moves:
        match = re.fullmatch(pattern, name)
        if match:
            return None if target is None else match.expand(target)
    return None


def lay_out(names: Iterable[str], moves: Moves, tree: Path) -> None:
    """Copy files of Debian's packages into a tree.

    A link stays a link if its target is copied, too. Other links are replaced by their targets.

    Args:
        names: The paths of the files, relative to `/`.
        moves: The targets of the files.
        tree: The tree.
    """
    placed = []
    for name in names:
        target = find_target(name, moves)
        if target is None or (tree / target).is_symlink() or (tree / target).exists():
            continue
        (tree / target).parent.mkdir(parents=True, exist_ok=True)
        _place(name, tree / target, moves, tree)
        placed.append(tree / target)
    # Remove links whose targets are not in the tree.
    for path in placed:
        if path.is_symlink() and not path.exists():
            path.unlink()


def _place(name: str, target: Path, moves: Moves, tree: Path) -> None:
    """Copy a file to its target, or make a link if the file is a link into the tree."""
    root = debian.ROOT
    path = root / name
    if path.is_symlink():
        final = Path(os.path.realpath(path))
        direct = Path(os.path.normpath(path.parent / path.readlink()))
        direct = Path(os.path.realpath(direct.parent)) / direct.name
        for destination in (direct, final):
            if not destination.is_relative_to(root):
                continue
            inside = find_target(os.path.relpath(destination, root), moves)
            if inside and tree / inside == target:
                # The link and the file behind it would become the same file of the tree. The file
                # is copied when its own path is laid out.
                return
            if inside and destination.exists():
                target.symlink_to(os.path.relpath(tree / inside, target.parent))
                return
        if not final.is_file():
            return
        path = final
    shutil.copy2(path, target)
    target.chmod(target.stat().st_mode | 0o200)


def mend_cmake(tree: Path) -> None:
    """Remove Debian's triple and /usr from the CMake and pkg-config files of a tree.

    The tree has no folder with the name of the triple.
    """
    for path in sorted({*tree.rglob("*.cmake"), *tree.rglob("*.pc")}):
        if path.is_symlink():
            continue
        text = new = path.read_text(errors="surrogateescape")
        if path.suffix == ".pc":
            up = "/".join([".."] * len(path.parent.relative_to(tree).parts))
            new = re.sub(r"^prefix=.*$", f"prefix=${{pcfiledir}}/{up}", new, flags=re.M)
            new = new.replace("/usr/", "${prefix}/")
        else:
            new = HOST_FOLDER.sub("", ORIGINAL.sub("", new))
            if path.is_relative_to(tree / "lib/cmake"):
                new = FOUR_UP.sub("../../../", FOUR_STEPS.sub(r"\1\1\1", new))
        new = new.replace("lib/x86_64-linux-gnu", "lib")
        if new != text:
            path.write_text(new, errors="surrogateescape")
