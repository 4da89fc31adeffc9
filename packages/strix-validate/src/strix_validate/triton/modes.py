# SPDX-License-Identifier: BSD-3-Clause
"""Run Triton kernels: interpreted, compiled for gfx1151, under emulation, or on a GPU.

In each mode except "native", Triton is made to see a gfx1151 device. This change of Triton, and the
variable TRITON_INTERPRET, affect the whole process, so the calls run in a child process.
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
from typing import Literal

import torch
from torch import Tensor

from strix_validate.checks import CannotRun
from strix_validate.triton import interpreter, stand_in
from strix_validate.triton.call import Call

#: How the kernels of a call run:
#: - interpret: Triton's interpreter computes the results.
#: - compile: Kernels are compiled for gfx1151; nothing is computed.
#: - emulate: strix-emulate executes the compiled code objects.
#: - native: Kernels run on the GPU, also in a child process.
#: - look up: Kernels are compiled or read from the cache, for every configuration of an autotuner.
#:   The answer has their paths, and whether each one was compiled.
#: - ask: The answer lists the keys of the kernels that are needed; none is compiled.
Mode = Literal["interpret", "compile", "emulate", "native", "look up", "ask"]
#: Allowed seconds for all calls of a child process together.
_LIMIT = 3600


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel.

    Attributes:
        name: The kernel's name.
        elf: Its code object, an ELF file.
        assembly: Its assembly.
        launch_lds: Bytes of LDS that the launch requests.
    """

    name: str
    elf: bytes
    assembly: str
    launch_lds: int


@dataclass(frozen=True)
class ExecutedKernel:
    """A kernel that was executed under emulation.

    Attributes:
        name: The kernel's name.
        code: The first digits of the sha256 of its machine code.
        wave_instructions: Number of instructions that its waves executed.
        seconds: How long the emulation took.
        lost_wait: Message of a race in LDS that LLVM caused, or ""; see emulation.execute.
    """

    name: str
    code: str
    wave_instructions: int
    seconds: float
    lost_wait: str = ""


@dataclass(frozen=True)
class CallAnswer:
    """The outcome of a call.

    Attributes:
        tensors: The computed tensors, on the CPU. In the modes "compile", "look up" and "ask", no
            kernel fills them.
        error: Type name and message of the exception that the call raised, or None.
        kernels: The compiled kernels, in the mode "compile".
        executed: The executed kernels, in the mode "emulate".
        lookups: The kernels that Triton found in its cache or compiled.
        kernel_keys: The keys of the needed kernels, in the mode "ask".
        seconds: How long the call took.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    kernels: tuple[CompiledKernel, ...] = ()
    executed: tuple[ExecutedKernel, ...] = ()
    lookups: tuple[stand_in.Lookup, ...] = ()
    kernel_keys: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class CallAnswers:
    """The answers to several calls of one library.

    Attributes:
        backend: A description of the kernels that ran, from Call.prepare.
        calls: An answer for each call, in order.
    """

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

    Args:
        calls: Calls of one library.
        mode: How their kernels run.
        cache: The folder of Triton's cache, where compiled kernels are kept. Without a folder,
            every kernel is compiled, because a kernel from a cache or a package could hide that its
            source no longer compiles.
        variables: Environment variables of the child process, besides the inherited ones.

    Raises:
        ChildError: The child crashed, could not prepare the library, or exceeded _LIMIT.
        CannotRun: The mode is "emulate", and no disassembler for gfx1151 was found.
    """
    with tempfile.TemporaryDirectory() as folder:
        calls_file = Path(folder, "calls")
        answers_file = Path(folder, "answers")
        calls_file.write_bytes(pickle.dumps(list(calls)))
        environment = _build_environment(mode, folder, cache, variables or {})
        # Without -P, the child would import libraries from the current folder, such as a clone.
        command = [sys.executable, "-P", "-m", __name__, mode, str(calls_file), str(answers_file)]
        try:
            child = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_LIMIT,
            )
        except subprocess.TimeoutExpired as error:
            raise ChildError(f"no answer within {_LIMIT} s") from error
        if child.returncode:
            last_lines = child.stderr.strip().splitlines()[-3:]
            message = " | ".join(last_lines)
            raise ChildError(f"exit status {child.returncode}: {message}")
        answers = pickle.loads(answers_file.read_bytes())
    if isinstance(answers, CannotRun):
        raise answers
    return answers


def _build_environment(
    mode: Mode,
    folder: str,
    cache: Path | None,
    variables: Mapping[str, str],
) -> dict[str, str]:
    """Return the child's environment.

    Args:
        mode: How the kernels run.
        folder: The folder of Triton's cache if `cache` is None.
        cache: See run.
        variables: See run.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(cache or folder),
        "TRITON_ALWAYS_COMPILE": str(int(cache is None)),
        # The tensors are small, so threads would only wait for each other.
        "OMP_NUM_THREADS": "1",
    }
    environment.update(variables)
    environment.pop("TRITON_INTERPRET", None)
    if mode == "interpret":
        environment["TRITON_INTERPRET"] = "1"
    # By default, Triton multiplies float32 matrices in TF32 on NVIDIA, while gfx1151 computes in
    # float32. This setting makes NVIDIA compute in float32, too. It is part of a kernel's key, so
    # it is not used with a cache, whose kernels were compiled without it.
    if mode == "native" and cache is None:
        environment["TRITON_F32_DEFAULT"] = "ieee"
    return environment


def answer(call: Call, device: str) -> CallAnswer:
    """Make a call in this process.

    The results are copied to the CPU at once, because a GPU reports a kernel's fault at the next
    copy. With a later copy, the fault would be reported for another call.
    """
    begin = perf_counter()
    try:
        computed = call.execute(device)
        tensors = {name: x.cpu() for name, x in computed.items()}
        outcome = CallAnswer(tensors)
    except Exception as error:  # the caller judges an exception like any other result
        outcome = CallAnswer(error=(type(error).__name__, str(error)))
    return replace(outcome, seconds=perf_counter() - begin)


@dataclass
class _Records:
    """What the hooks recorded about the running call; the fields are those of CallAnswer."""

    kernels: list[CompiledKernel] = field(default_factory=list)
    executed: list[ExecutedKernel] = field(default_factory=list)
    lookups: list[stand_in.Lookup] = field(default_factory=list)
    kernel_keys: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the previous call."""
        self.kernels.clear()
        self.executed.clear()
        self.lookups.clear()
        self.kernel_keys.clear()

    def add_to(self, outcome: CallAnswer) -> CallAnswer:
        """Return the outcome with the recorded fields."""
        return replace(
            outcome,
            kernels=tuple(self.kernels),
            executed=tuple(self.executed),
            lookups=tuple(self.lookups),
            kernel_keys=tuple(self.kernel_keys),
        )


def _run_child(mode, calls_file: str, answers_file: str) -> None:
    answers = _answer_all(mode, Path(calls_file))
    Path(answers_file).write_bytes(pickle.dumps(answers))


def _answer_all(mode: Mode, calls_file: Path) -> CallAnswers | CannotRun:
    records = _Records()
    try:
        _install_hooks(mode, records)
    except CannotRun as error:
        return error
    # Unpickling is safe, because the parent process wrote this file.
    calls = pickle.loads(calls_file.read_bytes())
    backend = calls[0].prepare()
    device = "cuda" if mode == "native" else "cpu"
    answers = []
    for call in calls:
        records.clear()
        outcome = answer(call, device)
        answers.append(records.add_to(outcome))
    return CallAnswers(backend, answers)


def _install_hooks(mode: Mode, records: _Records) -> None:
    """Change Triton and torch in this process for a mode, and install hooks that fill the records.

    Raises:
        CannotRun: The mode is "emulate", and no disassembler for gfx1151 was found.
    """
    only_looks = mode in ("look up", "ask")
    if mode != "native":
        stand_in.install(all_candidates=only_looks)
    else:
        stand_in.take_first_candidate()
        if not torch.version.hip:
            stand_in.ignore_amd_options()
    stand_in.watch(records.lookups.append)
    if mode == "interpret":
        interpreter.complete()
    if only_looks:
        stand_in.intercept(lambda launch: None)
        stand_in.skip_products()
    if mode == "ask":
        stand_in.report_keys(records.kernel_keys.append)
    if mode == "compile":
        stand_in.intercept(lambda launch: records.kernels.append(_describe_compiled(launch)))
    if mode == "emulate":
        _emulate_launches(records)


def _emulate_launches(records: _Records) -> None:
    from strix_validate.triton import emulation

    try:
        emulation.emulator.find_disassembler()
    except emulation.emulator.DisassemblerError as error:
        raise CannotRun(str(error)) from error

    def execute(launch: stand_in.InterceptedLaunch) -> None:
        if launch.is_warmup:
            return
        emulated, lost_wait = emulation.execute(launch)
        records.executed.append(_describe_executed(emulated, lost_wait))

    stand_in.intercept(execute)


def _describe_compiled(launch: stand_in.InterceptedLaunch) -> CompiledKernel:
    asm = launch.compiled.asm
    return CompiledKernel(
        name=launch.function.__name__,
        elf=asm["hsaco"],
        assembly=asm["amdgcn"],
        launch_lds=launch.compiled.metadata.shared,
    )


def _describe_executed(launch, lost_wait: str) -> ExecutedKernel:
    digest = hashlib.sha256(launch.kernel.code).hexdigest()
    return ExecutedKernel(
        name=launch.kernel.name,
        code=digest[:12],
        wave_instructions=launch.executed,
        seconds=launch.seconds,
        lost_wait=lost_wait,
    )


if __name__ == "__main__":
    # Run the module under its importable name, because the parent cannot unpickle classes of
    # __main__.
    from strix_validate.triton import modes

    modes._run_child(*sys.argv[1:])
