# SPDX-License-Identifier: BSD-3-Clause
"""Compile libstrix-emulate with CC: python -m strix_emulate.native.generate FOLDER.

One library for each level of x86-64 processors: library.py loads the best one that this machine can
run. Nothing in them depends on Python.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from strix_emulate.arithmetic import mode_register, operations, scalars, subdword, translate
from strix_emulate.instructions import atomics
from strix_emulate.native import library

#: What of -O3 makes the libraries fast; the rest takes the compiler half as long again.
_FAST = ("-O2", "-ftree-vectorize", "-fvect-cost-model", "-funswitch-loops", "-fpeel-loops")
#: level of x86-64 -> optimisation. -O1 takes half the time: for processors of before 2013.
LEVELS = {2: ("-O1",), 3: _FAST, 4: _FAST}
FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
         "-fwrapv", "-fno-strict-aliasing", "-mprefer-vector-width=512", "-std=gnu11", "-shared",
         "-fPIC", "-Wall", "-Wno-unused")  # fmt: skip


def dtype(kind: str) -> np.dtype:
    """Return numpy's type of a kind of operand; bool for masks and SCC."""
    if kind in ("mask", "scc"):
        return np.dtype(bool)
    if kind == "lane":
        return np.dtype(np.uint32)
    return np.dtype({"b": "u", "h": "f"}.get(kind[0], kind[0]) + str(int(kind[1:]) // 8))


def functions() -> Iterator[tuple[str, str, tuple[str, ...], Callable, bool]]:
    """Yield what the tables hold: name, kind of the result, kinds of sources, function, flags."""
    for table in (operations.TABLE, scalars.PLAIN, atomics.FUNCTIONS):
        for name, (kind, kinds, function) in table.items():
            if kind != "h16":
                yield name, kind, kinds, function, False
            if name in operations.SATURATING:
                yield f"{name}.clamp", kind, kinds, mode_register.saturated(function, kind), False
    for name in operations.EXTREMES:
        yield (name, *operations.extreme(name, True), False)
        yield (f"{name}.ieee0", *operations.extreme(name, False), False)
    yield from ((subdword.mixed_name(kind, kinds), kind, kinds, function, False)
                for (kind, kinds), function in subdword.MIXED.items())  # fmt: skip
    yield from ((subdword.packed_name(name, clamp), *subdword.packed(name, clamp), False)
                for name in subdword.PACKED for clamp in (False, True))  # fmt: skip
    yield from ((name, *entry) for name, entry in operations.MASKED.items())
    yield from ((name, *entry, True) for name, entry in scalars.WITH_SCC.items())
    yield from ((name, "", (kind, "u32" if "bitcmp" in name else kind), function, True)
                for name, (kind, function) in scalars.COMPARES.items())  # fmt: skip
    yield from ((name, name[-3:], *entry, False) for name, entry in scalars.SELECTS.items())
    yield from ((name, "u32", *entry, True) for name, entry in scalars.CARRIES.items())
    yield from ((name, name[-3:], (name[-3:], name[-3:]), function, False)
                for name, function in scalars.SAVEEXEC.items())  # fmt: skip


def source() -> str:
    """Return operations.inc: every function that can be translated, and a list by name."""
    bodies: dict[str, str] = {}
    listed, lines = [], []
    for name, kind, kinds, function, flags in functions():
        results = [dtype(k) for k in (kind,) if k] + [np.dtype(bool)] * flags
        try:
            each = "LANES" if name.startswith("v_") else "EACH"
            body = translate.loop("@", function, results, [dtype(k) for k in kinds], each)
        except translate.Untranslatable:
            continue
        if body not in bodies:
            bodies[body] = f"f_{name.replace('.', '_')}"
            lines.append(body.replace("@", bodies[body], 1))
        listed.append(f'  {{"{name}", {bodies[body]}}},')
    return "\n".join([*lines, "static const Named operations[] = {", *listed, "  {0, 0}\n};\n"])


def build(folder: Path, compiler: str, levels: Iterable[int] = LEVELS) -> list[Path]:
    """Compile the libraries into the folder. Raise CalledProcessError."""
    made, running = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder.mkdir(parents=True, exist_ok=True)
        Path(scratch, "operations.inc").write_text(source())
        for level in levels:
            made.append(folder / f"libstrix-emulate-v{level}.so")
            running.append(subprocess.Popen(
                [*shlex.split(compiler), *FLAGS, *LEVELS[level], f"-march=x86-64-v{level}",
                 f"-I{scratch}", f'-DDIGEST="{library.digest()}"',
                 *(f"-DHANDLER_{x.upper()}={number}" for x, number in library.HANDLERS.items()),
                 str(Path(__file__).with_name("emulate.c")), "-o", str(made[-1]), "-lm"],
            ))  # fmt: skip
        ends = [(process.wait(), process.args) for process in running]
    for code, command in ends:
        if code:
            raise subprocess.CalledProcessError(code, command)
    return made


if __name__ == "__main__":
    print(*build(Path(sys.argv[1]), os.environ.get("CC", "cc")), sep="\n")
