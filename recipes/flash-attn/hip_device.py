# SPDX-License-Identifier: BSD-3-Clause
"""Package test: flash-attn through Triton's own AMD driver, on an emulated gfx1151 device.

`strix-emulate device -- python hip_device.py`. The driver, its C launcher and the HIP calls are
those of a machine with a GPU; the runtime behind them is strix-emulate-hip. torch has no ROCm here:
its CPU tensors are put into device memory, which the host can read.
"""

import ctypes

import torch
import triton
from strix_validate import testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.backends.amd.driver import HIPDriver

hip = ctypes.CDLL("libamdhip64.so.7")
TOKENS, HEADS, HEAD_DIM = 70, 2, 64


class DeviceMemory(TorchDispatchMode):
    """New tensors get device memory, which is never freed: pointers of others would be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[ctypes.Array] = []
        self.places: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return tree_map_only(torch.Tensor, self.place, func(*args, **(kwargs or {})))

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.places or not storage.nbytes():
            return tensor
        pointer = ctypes.c_void_p()
        if hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(storage.nbytes())):
            raise MemoryError("hipMalloc")
        raw = (ctypes.c_uint8 * storage.nbytes()).from_address(pointer.value)
        self.kept.append(raw)
        self.places.add(pointer.value)
        whole = torch.frombuffer(raw, dtype=torch.uint8)
        whole.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        return whole.view(tensor.dtype).as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )


def without_custom_operators(interface) -> None:
    """flash-attn's functions call each other without torch's dispatcher: no mode sees what is
    allocated inside of a custom operator."""
    for name in ("forward", "backward"):
        function = getattr(interface, f"_flash_attn_{name}")._init_fn
        setattr(interface, f"_wrapped_flash_attn_{name}", function)


def use_tritons_driver() -> HIPDriver:
    """Makes Triton's driver the active one; torch.cuda, which has no device, only names it."""
    testing.stand_in()
    driver = HIPDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda _device=None: 0
    triton.runtime.driver.set_active(driver)
    return driver


def main() -> None:
    target = use_tritons_driver().get_current_target()
    # asks for the device when it is imported
    from flash_attn import flash_attn_interface

    if (target.backend, target.arch) != ("hip", "gfx1151"):
        raise SystemExit(f"the device is {target}")
    without_custom_operators(flash_attn_interface)
    with DeviceMemory():
        generator = torch.Generator().manual_seed(1)
        tensors = [
            torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator).half() for _ in range(4)
        ]
        call, expected = testing.flash_attention(*tensors, causal=True)
        found = call.execute("cpu")
    fault, measured = testing.flash_fault(call, found, expected)
    print(flash_attn_interface.BACKEND, measured)
    if fault:
        raise SystemExit(f"wrong on the emulated device: {fault}")


if __name__ == "__main__":
    main()
