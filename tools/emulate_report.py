# SPDX-License-Identifier: BSD-3-Clause
"""Run a report's program on the emulated device, its Triton kernels compiled for that GPU.

    strix-emulate device -- python tools/emulate_report.py PROGRAM [ARGUMENT...]

Tensors of `cuda` are the CPU's, and registered with HIP while a kernel runs; Triton's driver and
launcher are its own. Where VLLM_SOURCE names a source tree of vLLM, its kernels are that tree's.
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


def registered(self, *arguments) -> None:
    """Launch a kernel, with the memory of its tensors known to the device."""
    storages = {a.untyped_storage().data_ptr(): a.untyped_storage().nbytes()
                for a in arguments if isinstance(a, torch.Tensor)}  # fmt: skip
    for address, size in storages.items():
        called(hip.hipHostRegister, ctypes.c_void_p(address), ctypes.c_size_t(size), 0)
    try:
        launch(self, *arguments)
        called(hip.hipDeviceSynchronize)
    finally:
        for address in storages:
            hip.hipHostUnregister(ctypes.c_void_p(address))


def called(function, *arguments) -> None:
    """Call HIP. Raises RuntimeError if it fails."""
    if code := function(*arguments):
        raise RuntimeError(f"{function.__name__}: HIP error {code}")


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on `cuda`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*args, **named)


def main(program: str) -> None:
    """Become the program."""
    torch.version.hip = "emulated"
    torch.Tensor.is_cuda = True  # some programs assert it
    driver = HIPDriver()
    driver.get_current_device = lambda: 0  # they ask a torch that is not HIP's
    driver.get_current_stream = lambda device: 0
    triton.runtime.driver.set_active(driver)
    HIPLauncher.__call__ = registered
    if tree := os.environ.get("VLLM_SOURCE"):
        from strix_validate.vllm import source

        source.install(Path(tree))
    with OnCpu():
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    main(sys.argv[0])
