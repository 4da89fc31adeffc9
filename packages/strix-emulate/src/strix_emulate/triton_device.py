# SPDX-License-Identifier: BSD-3-Clause
"""Triton without a GPU: every launch is compiled for gfx1151 and executed under emulation.

The real Python call path of a library runs, its own autotuning configurations included; only the
launch is replaced. Tensors lie in host memory. It changes the process, so use a process of its own.
"""

import contextlib
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strix_emulate import loader
from strix_emulate.api import Buffer, Launch, launch
from strix_emulate.errors import EmulatorError
from strix_emulate.machine import Options

TARGET = "gfx1151"
#: What Strix Halo reports: https://www.amd.com/en/products/processors (40 compute units)
COMPUTE_UNITS = 40


@dataclass
class Recorder:
    """What was launched, in order; with run False kernels are compiled and not executed."""

    options: Options = field(default_factory=Options)
    run: bool = True
    launches: list[Launch] = field(default_factory=list)
    kernels: list[tuple[str, bytes, int]] = field(default_factory=list)
    on_launch: Callable[[Launch], None] | None = None


class _Driver:
    """A Triton driver that knows its target but has no device."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", TARGET, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):  # noqa: ARG002
        return 0

    def get_device_interface(self):
        import torch

        return torch.cuda

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, type_name):
        return type_name


def install(recorder: Recorder) -> None:
    """Makes this process's Triton compile for gfx1151 and launch into the recorder.

    Needs triton and torch; libraries that assert GPU tensors need ``python -O``.
    """
    import torch
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_Driver())
    properties = types.SimpleNamespace(
        multi_processor_count=COMPUTE_UNITS, gcnArchName=TARGET, warp_size=32
    )
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_, **__: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda *_, **__: contextlib.nullcontext()
    compile_only = JITFunction.run

    def run(self, *args, grid=None, warmup=False, **options):
        compiled = compile_only(self, *args, grid=grid, warmup=True, **options)
        recorder.kernels.append((self.__name__, compiled.asm["hsaco"], compiled.metadata.shared))
        if recorder.run and not warmup:
            values = dict(zip(self.arg_names, args, strict=False)) | options
            for parameter in self.params:
                if parameter.has_default:
                    values.setdefault(parameter.name, parameter.default)
            size = grid(values) if callable(grid) else grid
            done = execute(compiled, values, tuple(int(x) for x in size), recorder.options)
            recorder.launches.append(done)
            if recorder.on_launch:
                recorder.on_launch(done)
        return compiled

    JITFunction.run = run


def execute(compiled, values: dict, grid: tuple[int, ...], options: Options) -> Launch:
    """Executes a compiled Triton kernel; values are its arguments by name, tensors on the CPU."""
    kernel = loader.parse_elf(compiled.asm["hsaco"], compiled.name, compiled.metadata.shared)[0]
    # the file's arguments are those of the signature that were not folded into constants
    signature = compiled.src.signature
    arguments, storages = [], {}
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        value = values[name]
        arguments.append(
            _pointer(value, storages) if hasattr(value, "data_ptr") else _number(value, kind)
        )
    threads = compiled.metadata.num_warps * 32
    return launch(kernel, grid, arguments, threads=threads, options=options)


def _number(value, kind: str):
    if value is None:
        return None
    return float(value) if kind.startswith("fp") else int(value)


def _pointer(tensor, storages: dict) -> Buffer:
    """The bytes of the tensor's storage, shared with the tensors that lie in the same storage."""
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu":
        raise EmulatorError(
            f"a tensor on {storage.device}: under emulation they lie in host memory"
        )
    key = storage.data_ptr()
    if key not in storages:
        storages[key] = np.frombuffer(_bytes(storage), np.uint8)
    return Buffer(storages[key], "inout", tensor.data_ptr() - key)


def _bytes(storage):
    import ctypes

    return (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
