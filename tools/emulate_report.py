# SPDX-License-Identifier: BSD-3-Clause
"""Run the program of a report (patches/*/*.report.md) on the emulated device.

    strix-emulate device -- python tools/emulate_report.py PROGRAM [ARGUMENT...]

The program's Triton kernels are compiled for the emulated GPU, with Triton's own driver and
launcher. Tensors on `cuda` are made on the CPU instead, and their memory is registered with HIP
while a kernel runs. If VLLM_SOURCE names a source tree of vLLM, vLLM's kernels come from that tree.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.amd.driver import HIPDriver, HIPLauncher

hip = ctypes.CDLL("libamdhip64.so.7")
launch = HIPLauncher.__call__


def launch_registered(self, *arguments) -> None:
    """Register the memory of the tensors among the arguments, and launch a kernel.

    This function replaces HIPLauncher.__call__.
    """
    sizes = {}
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    for address, size in sizes.items():
        call_hip(
            hip.hipHostRegister,
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            0,
        )
    try:
        launch(self, *arguments)
        call_hip(hip.hipDeviceSynchronize)
    finally:
        for address in sizes:
            hip.hipHostUnregister(ctypes.c_void_p(address))


def call_hip(function, *arguments) -> None:
    """Call a function of HIP. Raise RuntimeError if it fails."""
    code = function(*arguments)
    if code:
        raise RuntimeError(f"{function.__name__}: HIP error {code}")


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU if they are requested on `cuda`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*args, **named)


def main(program: str) -> None:
    """Run the program in this process."""
    torch.version.hip = "emulated"
    torch.Tensor.is_cuda = True  # some programs assert this
    driver = HIPDriver()
    # Triton's own functions would call torch, but this torch is not built for HIP.
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: 0
    triton.runtime.driver.set_active(driver)
    HIPLauncher.__call__ = launch_registered
    tree = os.environ.get("VLLM_SOURCE")
    if tree:
        from strix_validate.vllm import source

        source.install(Path(tree))
    with OnCpu():
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    main(sys.argv[0])
