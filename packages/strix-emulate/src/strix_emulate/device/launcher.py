# SPDX-License-Identifier: BSD-3-Clause
"""Run a program on the emulated device: `strix-emulate device -- COMMAND`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from strix_emulate.code import llvm
from strix_emulate.code.target import DEFAULT, find_target
from strix_emulate.errors import EmulatorError

NAME = "libamdhip64.so"
#: Environment variable with the folder of the stand-in runtime. If it is not set, the installed one
#: is used.
VARIABLE = "STRIX_EMULATE_HIP"
#: Environment variables of a program on the device. The stand-in runtime reads some of them in C.
PYTHON_VARIABLE = "STRIX_EMULATE_PYTHON"
NO_CHECKS_VARIABLE = "STRIX_EMULATE_NO_CHECKS"
STRICT_VARIABLE = "STRIX_EMULATE_STRICT"
LOG_VARIABLE = "STRIX_EMULATE_LOG"
TARGET_VARIABLE = "STRIX_EMULATE_TARGET"
DEVICES_VARIABLE = "STRIX_EMULATE_DEVICES"
CORES_VARIABLE = "STRIX_EMULATE_CORES"
MEMORY_VARIABLE = "STRIX_EMULATE_MEMORY"
BUDGET_VARIABLE = "STRIX_EMULATE_BUDGET"
SECONDS_VARIABLE = "STRIX_EMULATE_SECONDS"


@dataclass(frozen=True)
class DeviceOptions:
    """Settings of the device.

    Attributes:
        disabled_checks: Checks that are not made.
        memory: Bytes of device memory, or None for the runtime's default.
        budget: Wave-instructions before a launch counts as hung, or None for the default.
        seconds: Seconds of wall-clock time before a launch counts as hung, or None for the default.
        cores: Maximum number of processor cores of a launch.
        log: Print a line for each launch.
        strict: Every finding ends a launch. Otherwise, findings in upstream libraries and headers,
            and those of some checks, are only noted.
        devices: Number of devices that the program sees.
        target: Name of the GPU.
    """

    disabled_checks: frozenset[str] = frozenset()
    memory: int | None = None
    budget: int | None = None
    seconds: float | None = None
    cores: int = 1
    log: bool = False
    strict: bool = False
    devices: int = 1
    target: str = DEFAULT.name


def folder() -> Path:
    """Return the folder with the stand-in runtime.

    Raises:
        EmulatorError: The stand-in runtime is missing.
    """
    path = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "lib/strix-emulate")
    if not (path / f"{NAME}.7").is_file():
        raise EmulatorError(
            f"no {NAME}.7 in {path}: install strix-emulate-hip, or set {VARIABLE} to the library's "
            "folder"
        )
    return path.resolve()


def environment(inherited: dict[str, str], options: DeviceOptions | None = None) -> dict[str, str]:
    """Return the environment variables of a program on the device.

    The folder of the stand-in runtime comes first in LD_LIBRARY_PATH. The stand-in is preloaded
    too, because a program or library with an RPATH (not RUNPATH) would otherwise load the runtime
    in that path. TRITON_LIBHIP_PATH is the first place where Triton looks for a runtime.

    Args:
        inherited: The environment to extend.
        options: Settings of the device.

    Raises:
        EmulatorError: The stand-in runtime is missing, or there is no such target.
    """
    options = options or DeviceOptions()
    path = folder()
    variables = dict(inherited)
    _prepend(variables, "LD_LIBRARY_PATH", ":", str(path))
    _prepend(variables, "LD_PRELOAD", " ", str(path / f"{NAME}.7"))
    variables |= {
        "TRITON_LIBHIP_PATH": str(path / NAME),
        PYTHON_VARIABLE: sys.executable,
        NO_CHECKS_VARIABLE: ",".join(sorted(options.disabled_checks)),
        STRICT_VARIABLE: str(int(options.strict)),
        LOG_VARIABLE: str(int(options.log)),
        TARGET_VARIABLE: find_target(options.target).name,
        DEVICES_VARIABLE: str(options.devices),
        CORES_VARIABLE: str(options.cores),
    }
    limits = {
        MEMORY_VARIABLE: options.memory,
        BUDGET_VARIABLE: options.budget,
        SECONDS_VARIABLE: options.seconds,
    }
    for name, number in limits.items():
        # An inherited variable comes from an outer `strix-emulate device`, and does not apply here.
        variables.pop(name, None)
        if number is not None:
            variables[name] = str(number)
    return variables


def _prepend(
    variables: dict[str, str],
    name: str,
    separator: str,
    value: str,
) -> None:
    values = [value, variables.get(name, "")]
    variables[name] = separator.join(filter(None, values))


def execute(command: list[str], options: DeviceOptions) -> None:
    """Replace this process by the program.

    Raises:
        EmulatorError: There is no such target, the program cannot be started, or the stand-in
            runtime is missing.
        DisassemblerError: There is no suitable libLLVM, so nothing could be executed.
    """
    llvm.find_disassembler()
    variables = environment(dict(os.environ), options)
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise EmulatorError(f"{command[0]}: {error.strerror}") from error
