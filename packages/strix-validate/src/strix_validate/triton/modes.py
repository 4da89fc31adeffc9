# SPDX-License-Identifier: BSD-3-Clause
"""Triton kernels without a GPU: interpreted, compiled for gfx1151, or executed under emulation.

All three need Triton to believe in a gfx1151 device. That, and TRITON_INTERPRET, would change the
rest of the process, so the calls run in a child process.
"""

import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from strix_validate.checks import CannotRun
from strix_validate.triton import interpreter, stand_in
from strix_validate.triton.call import Call

#: interpret: Triton's interpreter computes. compile: nothing is computed. emulate: the compiled
#: code objects are executed by strix-emulate. native: on the GPU, but in a child process as well.
#: look up: like compile, with every candidate of an autotuner, and where each kernel came from.
#: ask: which kernels those are, and none is compiled.
Mode = Literal["interpret", "compile", "emulate", "native", "look up", "ask"]
#: Seconds for all calls together.
_LIMIT = 3600


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel: its ELF file, its assembly, and the LDS bytes requested at launch."""

    name: str
    elf: bytes
    assembly: str
    launch_lds: int


@dataclass(frozen=True)
class ExecutedKernel:
    """A kernel executed under emulation; code: the start of its machine code's sha256.

    lost_wait: see emulation.execute.
    """

    name: str
    code: str
    wave_instructions: int
    seconds: float
    lost_wait: str = ""


@dataclass(frozen=True)
class CallAnswer:
    """The outcome of a call: its tensors, on the CPU, or the exception's type name and message.

    Modes "compile" and "look up" compute nothing; "compile" fills kernels, "emulate" executed.
    lookups: what Triton looked for. asked: in mode "ask", the keys of
    the kernels.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    kernels: tuple[CompiledKernel, ...] = ()
    executed: tuple[ExecutedKernel, ...] = ()
    lookups: tuple[stand_in.Lookup, ...] = ()
    asked: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class CallAnswers:
    """The answers to several calls, in order; backend: what Call.prepare says."""

    backend: str
    calls: list[CallAnswer]


class ChildError(RuntimeError):
    """The child process ended without an answer."""


def run(
    calls: Sequence[Call],
    mode: Mode,
    cache: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> CallAnswers:
    """Return answers to calls of one library, in order, from a child process.

    cache: Triton's cache, which keeps what is compiled. Without one, every kernel is compiled: one
    from a cache or a package could hide that it no longer does. variables: of the environment, for
    the child process.

    Raises:
        ChildError: the child crashed, could not import the library, or exceeded _LIMIT.
        CannotRun: mode "emulate" has no disassembler.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "calls"), Path(folder, "answers")
        asked.write_bytes(pickle.dumps(list(calls)))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TRITON_CACHE_DIR": str(cache or folder),
            "TRITON_ALWAYS_COMPILE": str(int(cache is None)),
            # tensors are small: threads would only wait for each other
            "OMP_NUM_THREADS": "1",
        }
        environment.update(variables or {})
        environment.pop("TRITON_INTERPRET", None)
        if mode == "interpret":
            environment["TRITON_INTERPRET"] = "1"
        # float32 as on gfx1151: NVIDIA's matrix unit would take TF32. It is part of a kernel's key.
        if mode == "native" and cache is None:
            environment["TRITON_F32_DEFAULT"] = "ieee"
        try:
            child = subprocess.run(
                [sys.executable, "-m", __name__, mode, asked, answered],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_LIMIT,
            )
        except subprocess.TimeoutExpired as error:
            raise ChildError(f"no answer within {_LIMIT} s") from error
        if child.returncode:
            last = child.stderr.strip().splitlines()[-3:]
            raise ChildError(f"exit status {child.returncode}: {' | '.join(last)}")
        found = pickle.loads(answered.read_bytes())
    if isinstance(found, CannotRun):
        raise found
    return found


def answer(call: Call, device: str) -> CallAnswer:
    """Make the call in this process.

    What it computed is read at once: a GPU reports a kernel's fault at the next read, which must
    not be that of another call.
    """
    begin = perf_counter()
    try:
        found = CallAnswer({name: x.cpu() for name, x in call.execute(device).items()})
    except Exception as error:  # a result like any other: the caller judges it
        found = CallAnswer(error=(type(error).__name__, str(error)))
    return replace(found, seconds=perf_counter() - begin)


def _child(mode, asked: str, answered: str) -> None:
    Path(answered).write_bytes(pickle.dumps(_answer_all(mode, Path(asked))))


def _answer_all(mode: Mode, asked: Path) -> CallAnswers | CannotRun:  # noqa: C901 (by mode)
    #: Of the call that runs, by the names of CallAnswer's fields.
    seen: dict[str, list] = {name: [] for name in ("kernels", "executed", "lookups", "asked")}
    if mode != "native":
        stand_in.install(all_candidates=mode in ("look up", "ask"))
    else:
        stand_in.first_candidate()
        if not torch.version.hip:
            stand_in.ignore_amd_options()
    stand_in.watch(seen["lookups"].append)
    if mode == "interpret":
        interpreter.complete()
    if mode in ("look up", "ask"):
        stand_in.intercept(lambda launch: None)
        stand_in.skip_products()
    if mode == "ask":
        stand_in.ask(seen["asked"].append)
    if mode == "compile":
        stand_in.intercept(lambda launch: seen["kernels"].append(_kernel(launch)))
    if mode == "emulate":
        from strix_validate.triton import emulation

        try:
            emulation.emulator.find_disassembler()
        except emulation.emulator.DisassemblerError as error:
            return CannotRun(str(error))

        def execute(launch: stand_in.InterceptedLaunch) -> None:
            if not launch.is_warmup:
                seen["executed"].append(_executed(*emulation.execute(launch)))

        stand_in.intercept(execute)
    # the parent process wrote this file
    calls = pickle.loads(asked.read_bytes())
    backend = calls[0].prepare()
    answers = []
    for call in calls:
        for part in seen.values():
            part.clear()
        found = answer(call, "cuda" if mode == "native" else "cpu")
        parts: dict[str, Any] = {name: tuple(part) for name, part in seen.items()}
        answers.append(replace(found, **parts))
    return CallAnswers(backend, answers)


def _kernel(launch: stand_in.InterceptedLaunch) -> CompiledKernel:
    asm, lds = launch.compiled.asm, launch.compiled.metadata.shared
    return CompiledKernel(launch.function.__name__, asm["hsaco"], asm["amdgcn"], lds)


def _executed(launch, lost_wait: str) -> ExecutedKernel:
    code = hashlib.sha256(launch.kernel.code).hexdigest()[:12]
    return ExecutedKernel(launch.kernel.name, code, launch.executed, launch.seconds, lost_wait)


if __name__ == "__main__":
    # under its importable name, so that the parent can unpickle the answers
    from strix_validate.triton import modes

    modes._child(*sys.argv[1:])
