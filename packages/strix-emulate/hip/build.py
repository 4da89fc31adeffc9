# SPDX-License-Identifier: BSD-3-Clause
"""Compiles libamdhip64.so.7 from this folder, and tells what it serves.

Heeds $CC, $CFLAGS and $LDFLAGS.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = "libamdhip64.so"
#: HIP's functions have parameters that mean nothing here.
FLAGS = [
    "-std=gnu11",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
    "-pthread",
]
_DEFINED = re.compile(r"^(API|HINT|API_OF)\(\s*(?:[^,()]+,\s*)?(\w+)\)", re.M)
_STATES = {
    "served": "does what HIP does: each name of [hip.map](hip.map) that is not below",
    "hint": "accepted, without effect here",
    "absent": "returns hipErrorNotSupported, as AMD's runtime does",
    "refused": "returns hipErrorNotSupported and prints its name; all later calls fail",
}
#: Those that clr's sources refuse always.
_ABSENT = {
    "hipCtxGetApiVersion",
    "hipCtxGetCacheConfig",
    "hipCtxGetFlags",
    "hipCtxSetCacheConfig",
    "hipCtxSetSharedMemConfig",
    "hipMemMapArrayAsync",
}


def states() -> dict[str, str]:
    """The state of every exported name, from the sources and the version script."""
    exported = re.findall(r"^    (\w+);$", (HERE / "hip.map").read_text(), re.M)
    found = {name: "absent" if name in _ABSENT else "refused" for name in exported}
    for source in sorted(HERE.glob("*.c")):
        for kind, name in _DEFINED.findall(source.read_text()):
            found[name] = "hint" if kind == "HINT" else "served"
    return found | {name: found[plain] for name, plain in _per_thread(found).items()}


def _per_thread(found: dict[str, str]) -> dict[str, str]:
    """Names for programs whose default stream is each thread's own, and what does the same here,
    where no stream waits for another."""
    pairs = {name: name.removesuffix("_spt") for name in found if name.endswith("_spt")}
    return {name: plain for name, plain in pairs.items() if found.get(plain) in ("served", "hint")}


def table() -> str:
    """ENTRY_POINTS.md: how many names have each state, and which are not served."""
    found = states()
    lines = [
        "# Entry points of the stand-in libamdhip64.so.7",
        "",
        "Written by `python hip/build.py --table`; a test compares it with the sources.",
        "",
    ]
    for state, meaning in _STATES.items():
        names = sorted(name for name in found if found[name] == state)
        lines += [f"## {state}: {len(names)}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        if state != "served":
            text = " ".join(f"`{name}`" for name in names)
            lines += [*textwrap.wrap(text, 100, break_long_words=False), ""]
    return "\n".join(lines).rstrip() + "\n"


def targets() -> str:
    """The table of GPUs, as device.h declares it, from the emulator's own."""
    # in its source tree it need not be installed
    sys.path.append(str(HERE.parent / "src"))
    from strix_emulate.code.target import TARGETS

    rows = []
    for t in TARGETS.values():
        numbers = [
            *t.version,
            t.processors,
            t.registers,
            t.simds,
            t.waves,
            min(t.widths),
            t.threads,
            t.lds,
            t.lds_of_processor,
            t.stack,
            t.l2,
            t.clock,
            t.memory_clock,
            t.bus,
            int(t.integrated),
        ]
        rows.append(f'{{"{t.name}", "{t.product}", {", ".join(map(str, numbers))}}}')
    table = ",\n".join([*rows, "{.name = NULL}"])
    return f'#include "device.h"\nconst struct target targets[] = {{\n{table}\n}};\n'


def build(folder: Path) -> Path:
    """Raises CalledProcessError if the compiler fails."""
    folder.mkdir(parents=True, exist_ok=True)
    refusals = folder / "refusals.c"
    answers = {"refused": 'device_refuse("{0}")', "absent": "device_without()"}
    refusals.write_text(
        "int device_refuse(const char *), device_without(void);\n"
        + "".join(
            f'__attribute__((visibility("default"))) int {name}(void);\n'
            f"int {name}(void) {{ return {answers[state].format(name)}; }}\n"
            for name, state in sorted(states().items())
            if state in answers
        )
    )
    gpus = folder / "targets.c"
    gpus.write_text(targets())
    library = folder / f"{NAME}.7"
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), *FLAGS]
    aliases = [f"-Wl,--defsym,{name}={plain}" for name, plain in _per_thread(states()).items()]
    linking = [
        *aliases,
        f"-Wl,-soname,{NAME}.7",
        f"-Wl,--version-script,{HERE / 'hip.map'}",
        "-Wl,-z,defs",
        *shlex.split(os.environ.get("LDFLAGS", "")),
        "-ldl",
    ]
    sources = [str(path) for path in sorted(HERE.glob("*.c"))]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run(
        [
            *compiler,
            *flags,
            "-shared",
            "-o",
            str(library),
            f"-I{HERE}",
            *sources,
            str(gpus),
            str(refusals),
            *linking,
        ],
        check=True,
    )
    refusals.unlink()
    gpus.unlink()
    link = folder / NAME
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "folder", type=Path, nargs="?", help="gets the library and its link, libamdhip64.so"
    )
    wanted.add_argument("--table", action="store_true", help="print ENTRY_POINTS.md")
    options = parser.parse_args()
    print(table(), end="") if options.table else print(build(options.folder))


if __name__ == "__main__":
    main()
