# SPDX-License-Identifier: BSD-3-Clause
"""Run a program on the emulated device: `strix-emulate device -- COMMAND`."""

import os
import sys
from pathlib import Path

from strix_emulate.code import llvm
from strix_emulate.code.target import DEFAULT, named
from strix_emulate.errors import EmulatorError

NAME = "libamdhip64.so"
#: Names another folder with the library, such as one that hip/build.py filled.
VARIABLE = "STRIX_EMULATE_HIP"


def folder() -> Path:
    """Return the folder with the stand-in runtime. Raise EmulatorError if it is missing."""
    path = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "lib/strix-emulate")
    if not (path / f"{NAME}.7").is_file():
        raise EmulatorError(
            f"no {NAME}.7 in {path}: install strix-emulate-hip, or name a folder with {VARIABLE}"
        )
    return path.resolve()


def environment(  # noqa: PLR0913 (a device's settings)
    given: dict[str, str],
    off: frozenset[str] = frozenset(),
    memory: int | None = None,
    budget: int | None = None,
    cores: int = 1,
    log: bool = False,
    strict: bool = False,
    devices: int = 1,
    seconds: float | None = None,
    target: str = DEFAULT.name,
) -> dict[str, str]:
    """Return the environment of a program on the device. See :func:`execute`.

    The folder goes first in LD_LIBRARY_PATH, and the library is preloaded as well: a program or
    library with an RPATH (not RUNPATH) would otherwise take the runtime that this names. Triton
    looks for the library itself, in TRITON_LIBHIP_PATH before all else.
    """
    path = folder()
    found = dict(given)
    for name, separator, value in (
        ("LD_LIBRARY_PATH", ":", path),
        ("LD_PRELOAD", " ", path / f"{NAME}.7"),
    ):
        found[name] = separator.join(filter(None, [str(value), given.get(name)]))
    found |= {
        "TRITON_LIBHIP_PATH": str(path / NAME),
        "STRIX_EMULATE_PYTHON": sys.executable,
        "STRIX_EMULATE_NO_CHECKS": ",".join(sorted(off)),
        "STRIX_EMULATE_STRICT": str(int(strict)),
        "STRIX_EMULATE_LOG": str(int(log)),
        "STRIX_EMULATE_TARGET": named(target).name,
    }
    numbers = {"DEVICES": devices, "MEMORY": memory, "BUDGET": budget, "CORES": cores,
               "SECONDS": seconds}  # fmt: skip
    for name, number in numbers.items():
        if number is not None:
            found[f"STRIX_EMULATE_{name}"] = str(number)
    return found


def execute(command: list[str], **options) -> None:
    """Become the program.

    Options: off, checks that are not made; memory of the device in bytes; budget of a launch in
    wave-instructions, seconds of the clock for it; cores; log, a line for each launch; strict, what
    checks find in ROCm's and torch's libraries ends a launch as well; devices, how many the program
    sees; target, the name of the GPU that they are.

    Raises:
        EmulatorError: no such program, or the library is missing.
        DisassemblerError: nothing could be executed.
    """
    llvm.find_disassembler()
    variables = environment(dict(os.environ), **options)
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise EmulatorError(f"{command[0]}: {error.strerror}") from error
