# SPDX-License-Identifier: BSD-3-Clause
"""Compile libstrix-emulate with CC: python -m strix_emulate.native.generate FOLDER.

The libraries are written to FOLDER. There is one library for each of the levels 2 to 4 of x86-64
processors. library.py loads the one with the highest level that the machine supports. The libraries
do not depend on Python.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strix_emulate.arithmetic import mode_register, operations, scalars, subdword, translate
from strix_emulate.instructions import atomics
from strix_emulate.native import library

#: Compiler options: -O2 with the parts of -O3 that make the libraries fast. With all of -O3,
#: compilation takes 1.5 times as long.
_FAST = (
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model",
    "-funswitch-loops",
    "-fpeel-loops",
)
#: Compiler options by level of x86-64. Only processors without AVX2 need the library of level 2. So
#: it is compiled with -O1, which takes half the time.
LEVELS = {
    2: ("-O1",),
    3: _FAST,
    4: _FAST,
}
FLAGS = (
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-mprefer-vector-width=512",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wno-unused",
)


@dataclass(frozen=True)
class Entry:
    """A function of the tables in `arithmetic` and of `atomics`.

    Attributes:
        name: Its name in C.
        kind: Kind of its result, or "" if it returns only SCC or a mask.
        kinds: Kinds of its sources.
        function: The function in numpy.
        has_scc: Whether it also returns SCC.
    """

    name: str
    kind: str
    kinds: tuple[str, ...]
    function: Callable
    has_scc: bool = False


def dtype(kind: str) -> np.dtype:
    """Return numpy's type for a kind of operand. Masks and SCC are bool."""
    if kind in ("mask", "scc"):
        return np.dtype(bool)
    if kind == "lane":
        return np.dtype(np.uint32)
    letter = {"b": "u", "h": "f"}.get(kind[0], kind[0])
    return np.dtype(letter + str(int(kind[1:]) // 8))


def functions() -> Iterator[Entry]:
    """Yield the functions of the tables that C may execute."""
    yield from _plain_functions()
    for name in operations.EXTREMES:
        yield Entry(name, *operations.extreme(name, True))
        yield Entry(f"{name}.ieee0", *operations.extreme(name, False))
    for (kind, kinds), function in subdword.MIXED.items():
        yield Entry(subdword.mixed_name(kind, kinds), kind, kinds, function)
    for name in subdword.PACKED:
        for clamp in (False, True):
            yield Entry(subdword.packed_name(name, clamp), *subdword.packed(name, clamp))
    for name, entry in operations.MASKED.items():
        yield Entry(name, *entry)
    yield from _scalar_functions()


def _plain_functions() -> Iterator[Entry]:
    for table in (operations.TABLE, scalars.PLAIN, atomics.FUNCTIONS):
        for name, (kind, kinds, function) in table.items():
            if kind != "h16":
                yield Entry(name, kind, kinds, function)
            if name in operations.SATURATING:
                saturated = mode_register.saturated(function, kind)
                yield Entry(f"{name}.clamp", kind, kinds, saturated)


def _scalar_functions() -> Iterator[Entry]:
    for name, (kind, kinds, function) in scalars.WITH_SCC.items():
        yield Entry(name, kind, kinds, function, has_scc=True)
    for name, (kind, function) in scalars.COMPARES.items():
        second = "u32" if "bitcmp" in name else kind
        yield Entry(name, "", (kind, second), function, has_scc=True)
    for name, (kinds, function) in scalars.SELECTS.items():
        yield Entry(name, name[-3:], kinds, function)
    for name, (kinds, function) in scalars.CARRIES.items():
        yield Entry(name, "u32", kinds, function, has_scc=True)
    for name, function in scalars.SAVEEXEC.items():
        kind = name[-3:]
        yield Entry(name, kind, (kind, kind), function)


def source() -> str:
    """Return operations.inc: all functions that can be translated, and a list of their names."""
    bodies: dict[str, str] = {}
    listed = []
    lines = []
    for entry in functions():
        results = [dtype(entry.kind)] if entry.kind else []
        if entry.has_scc:
            results.append(np.dtype(bool))
        loop = "LANES" if entry.name.startswith("v_") else "EACH"
        kinds = [dtype(kind) for kind in entry.kinds]
        try:
            body = translate.loop("@", entry.function, results, kinds, loop)
        except translate.Untranslatable:
            continue
        if body not in bodies:
            bodies[body] = f"f_{entry.name.replace('.', '_')}"
            lines.append(body.replace("@", bodies[body], 1))
        listed.append(f'  {{"{entry.name}", {bodies[body]}}},')
    return "\n".join([*lines, "static const Named operations[] = {", *listed, "  {0, 0}\n};\n"])


def build(
    folder: Path,
    compiler: str,
    levels: Iterable[int] = LEVELS,
) -> list[Path]:
    """Compile the libraries into a folder, and return their paths.

    Raises:
        CalledProcessError: The compiler failed.
    """
    libraries = []
    running = []
    with tempfile.TemporaryDirectory() as scratch:
        folder.mkdir(parents=True, exist_ok=True)
        Path(scratch, "operations.inc").write_text(source())
        for level in levels:
            path = folder / f"libstrix-emulate-v{level}.so"
            libraries.append(path)
            command = _compiler_command(compiler, level, Path(scratch), path)
            running.append(subprocess.Popen(command))
        for process in running:
            process.wait()
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return libraries


def _compiler_command(
    compiler: str,
    level: int,
    include: Path,
    output: Path,
) -> list[str]:
    handlers = [f"-DHANDLER_{name.upper()}={number}" for name, number in library.HANDLERS.items()]
    return [
        *shlex.split(compiler),
        *FLAGS,
        *LEVELS[level],
        f"-march=x86-64-v{level}",
        f"-I{include}",
        f'-DDIGEST="{library.digest()}"',
        *handlers,
        str(Path(__file__).with_name("emulate.c")),
        "-o",
        str(output),
        "-lm",
    ]


if __name__ == "__main__":
    print(*build(Path(sys.argv[1]), os.environ.get("CC", "cc")), sep="\n")
