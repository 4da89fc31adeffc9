# SPDX-License-Identifier: BSD-3-Clause
"""Compile libamdhip64.so.7 from this folder, or print the state of its entry points.

The environment variables CC, CFLAGS and LDFLAGS are used as in other builds.
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
#: Unused parameters are allowed, because some parameters of HIP's functions have no effect here.
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
    "served": "these entry points do what HIP does: all names in [hip.map](hip.map) that are not "
    "listed below",
    "hint": "these entry points return hipSuccess and have no effect",
    "absent": "these entry points return hipErrorNotSupported, as in AMD's runtime",
    "refused": "these entry points print their names and return hipErrorNotSupported. All later "
    "calls then fail",
}
#: Entry points that always return hipErrorNotSupported in the sources of clr, AMD's HIP runtime.
_ABSENT = {
    "hipCtxGetApiVersion",
    "hipCtxGetCacheConfig",
    "hipCtxGetFlags",
    "hipCtxSetCacheConfig",
    "hipCtxSetSharedMemConfig",
    "hipMemMapArrayAsync",
}


def states() -> dict[str, str]:
    """Return the state of each entry point that hip.map exports, according to the C sources."""
    exported = re.findall(r"^    (\w+);$", (HERE / "hip.map").read_text(), re.M)
    state_by_name = {name: "absent" if name in _ABSENT else "refused" for name in exported}
    for source in sorted(HERE.glob("*.c")):
        for kind, name in _DEFINED.findall(source.read_text()):
            state_by_name[name] = "hint" if kind == "HINT" else "served"
    for name, plain in _per_thread(state_by_name).items():
        state_by_name[name] = state_by_name[plain]
    return state_by_name


def _per_thread(state_by_name: dict[str, str]) -> dict[str, str]:
    """Return the aliases, each with the name of the entry point that it stands for.

    Names that end in `_spt` are for programs in which each thread has a default stream of its own.
    This makes no difference here, because no stream waits for another. So a name with `_spt` is an
    alias of the same name without `_spt`, if the state of the latter is `served` or `hint`.
    """
    aliases = {}
    for name in state_by_name:
        plain = name.removesuffix("_spt")
        if plain != name and state_by_name.get(plain) in ("served", "hint"):
            aliases[name] = plain
    return aliases


def table() -> str:
    """Return the text of ENTRY_POINTS.md: number and names of the entry points in each state.

    For the state `served`, the names are left out.
    """
    state_by_name = states()
    lines = [
        "# Entry points of the stand-in libamdhip64.so.7",
        "",
        "`python hip/build.py --table` prints this page. A test compares it with the sources.",
        "",
    ]
    for state, meaning in _STATES.items():
        names = sorted(name for name in state_by_name if state_by_name[name] == state)
        lines += [f"## {state}: {len(names)}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        if state != "served":
            text = " ".join(f"`{name}`" for name in names)
            lines += [*textwrap.wrap(text, 100, break_long_words=False), ""]
    return "\n".join(lines).rstrip() + "\n"


def targets() -> str:
    """Return a C file with the table of GPUs that device.h declares."""
    # The emulator's sources in this checkout have the table. An installed emulator may be older.
    sys.path.insert(0, str(HERE.parent / "src"))
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
    """Compile the library into a folder, and return its path.

    Raises:
        CalledProcessError: The compiler failed.
    """
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
    outputs = parser.add_mutually_exclusive_group(required=True)
    outputs.add_argument(
        "folder", type=Path, nargs="?", help="folder for the library and its link libamdhip64.so"
    )
    outputs.add_argument("--table", action="store_true", help="print ENTRY_POINTS.md")
    options = parser.parse_args()
    if options.table:
        print(table(), end="")
    else:
        print(build(options.folder))


if __name__ == "__main__":
    main()
