# SPDX-License-Identifier: BSD-3-Clause
"""Files of Debian's packages, laid out in another tree by a table of moves."""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from rehearsal import debian

MULTIARCH = "usr/lib/x86_64-linux-gnu"
# The first pattern that matches a whole path decides; None leaves a file out.
Moves = Sequence[tuple[str, str | None]]
# CMake's own words for a prefix: one folder less to go up, without Debian's triple, and no /usr.
STEP = re.compile(r'(get_filename_component\((\w+) "\$\{\2\}" PATH\)\n)\1{3}')
ORIGINAL = re.compile(r"get_filename_component\(_realCurr .*?unset\(_realCurr\)\n", re.DOTALL)
# hip-lang counts from its file and has five
FOUR_UP = re.compile(r"\.\./(?:\.\./){3}")
HOST_FOLDER = re.compile(r";?/usr/include(?:/libdrm)?(?=[;\"])")


def moved(name: str, moves: Moves) -> str | None:
    """Where a path goes, or None if nowhere."""
    for pattern, target in moves:
        if found := re.fullmatch(pattern, name):
            return None if target is None else found.expand(target)
    return None


def lay_out(names: Iterable[str], moves: Moves, tree: Path) -> None:
    """Copies files of Debian's into `tree` as `moves` says.

    A link to what moves too stays one; any other becomes the file.
    """
    placed = []
    for name in names:
        target = moved(name, moves)
        if target is None or (tree / target).is_symlink() or (tree / target).exists():
            continue
        (tree / target).parent.mkdir(parents=True, exist_ok=True)
        _place(name, tree / target, moves, tree)
        placed.append(tree / target)
    for path in placed:  # a folder that only links led to
        if path.is_symlink() and not path.exists():
            path.unlink()


def _place(name: str, target: Path, moves: Moves, tree: Path) -> None:
    root = debian.ROOT
    path = root / name
    if path.is_symlink():
        final = Path(os.path.realpath(path))
        direct = Path(os.path.normpath(path.parent / path.readlink()))
        direct = Path(os.path.realpath(direct.parent)) / direct.name
        for aim in (direct, final):
            inside = moved(os.path.relpath(aim, root), moves) if aim.is_relative_to(root) else None
            if inside and tree / inside == target:
                return  # both names in one: the file comes under its own
            if inside and aim.exists():
                target.symlink_to(os.path.relpath(tree / inside, target.parent))
                return
        if not final.is_file():
            return
        path = final
    shutil.copy2(path, target)
    target.chmod(target.stat().st_mode | 0o200)


def mend_cmake(tree: Path) -> None:
    """CMake and pkg-config files of a tree without Debian's triple name it, and /usr, no more."""
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
                new = FOUR_UP.sub("../../../", STEP.sub(r"\1\1\1", new))
        new = new.replace("lib/x86_64-linux-gnu", "lib")
        if new != text:
            path.write_text(new, errors="surrogateescape")
