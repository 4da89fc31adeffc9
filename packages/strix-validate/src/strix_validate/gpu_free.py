# SPDX-License-Identifier: BSD-3-Clause
"""flash-attn's Triton kernels without a GPU: run by Triton's interpreter, or compiled for gfx1151.

Both need Triton to believe in a gfx1151 device. That, and TRITON_INTERPRET, would change the rest
of the process, so the calls go to a child process. It runs with ``python -O`` because aiter asserts
that tensors lie on the current GPU.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from strix_validate import flash

TARGET = "gfx1151"
Mode = Literal["interpret", "compile"]


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its ELF file, its assembly and the LDS bytes asked for at launch."""

    name: str
    elf: bytes
    assembly: str
    launch_lds: int


@dataclass(frozen=True)
class Answer:
    """What a call came to: its tensors, or the name of the exception's type and its message.

    In mode "compile" nothing is computed, and kernels holds what was compiled.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    kernels: tuple[Kernel, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Answers:
    """backend: see :func:`flash.backend`; calls: an answer for each call, in order."""

    backend: str
    calls: list[Answer]


class ChildError(RuntimeError):
    """The child process ended without answers."""


def run(calls: list[flash.Call], mode: Mode, timeout: float = 900) -> Answers:
    """Answers to calls, in their order, from a child process.

    Raises:
        ChildError: the child crashed, could not import flash_attn, or took over timeout seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "calls"), Path(folder, "answers")
        asked.write_bytes(pickle.dumps(calls))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # A cache would hide that a kernel no longer compiles.
            "TRITON_CACHE_DIR": folder,
            # small tensors: threads would only wait for each other
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        if mode == "interpret":
            environment["TRITON_INTERPRET"] = "1"
        try:
            child = subprocess.run(
                [sys.executable, "-O", "-m", __name__, mode, asked, answered],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise ChildError(f"no answer within {timeout:.0f} s") from error
        if child.returncode:
            last = child.stderr.strip().splitlines()[-3:]
            raise ChildError(f"exit status {child.returncode}: {' | '.join(last)}")
        return pickle.loads(answered.read_bytes())


class _Driver:
    """A Triton driver that knows its target but has no device."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", TARGET, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        return torch.cuda

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, type_name):
        return type_name


def _pretend_gpu() -> None:
    import triton

    triton.runtime.driver.set_active(_Driver())
    properties = types.SimpleNamespace(multi_processor_count=40, gcnArchName=TARGET, warp_size=32)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda device: contextlib.nullcontext()


def _accept_cpu_tensors() -> None:
    """flash-attn registers its ops for GPU tensors only; the bodies do not care."""
    interface = sys.modules["flash_attn.flash_attn_interface"]
    for name in ("forward", "varlen_forward", "backward", "varlen_backward"):
        op = getattr(interface, f"_flash_attn_{name}")
        op.register_kernel("cpu")(op._init_fn)


def _record_kernels() -> list[Kernel]:
    """Makes every launch compile only; returns the list that fills with what was compiled."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    compiled: list[Kernel] = []

    def compile_only(self, *args, grid=None, warmup=False, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        asm = kernel.asm
        compiled.append(Kernel(self.__name__, asm["hsaco"], asm["amdgcn"], kernel.metadata.shared))
        return kernel

    JITFunction.run = compile_only
    return compiled


def answer(call: flash.Call, device: str) -> Answer:
    """Does the call in this process."""
    begin = perf_counter()
    try:
        found = Answer(flash.execute(call, device))
    except Exception as error:  # any exception is a result: the caller judges it
        found = Answer(error=(type(error).__name__, str(error)))
    return replace(found, seconds=perf_counter() - begin)


def _child(mode: Mode, asked: str, answered: str) -> None:
    _pretend_gpu()
    compiled = _record_kernels() if mode == "compile" else []
    backend = flash.backend()
    _accept_cpu_tensors()
    # A file that this process's parent wrote.
    calls = pickle.loads(Path(asked).read_bytes())
    answers = []
    for call in calls:
        compiled.clear()
        answers.append(replace(answer(call, "cpu"), kernels=tuple(compiled)))
    Path(answered).write_bytes(pickle.dumps(Answers(backend, answers)))


if __name__ == "__main__":
    # Under its own name, so that the answers unpickle in the parent.
    from strix_validate import gpu_free

    gpu_free._child(*sys.argv[1:])
