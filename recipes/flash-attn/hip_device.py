# SPDX-License-Identifier: BSD-3-Clause
"""Package test: run flash-attn with Triton's own AMD driver on an emulated gfx1151 device.

    strix-emulate device -- python hip_device.py

The driver, its C launcher and the HIP calls are the same as on a machine with a GPU. Only the HIP
runtime differs: it is that of the package strix-emulate-hip. Because torch may be a build without
ROCm, the tensors are CPU tensors. Their memory is allocated by HIP, so that the emulated device can
access it. The host can read this memory, too.
"""

import ctypes

import torch
import triton
from strix_validate import testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.backends.amd.driver import HIPDriver

hip = ctypes.CDLL("libamdhip64.so.7")
SHAPE = (1, 70, 2, 64)  # batch, tokens, heads, head_dim


class DeviceMemory(TorchDispatchMode):
    """A mode in which new tensors are in device memory, as kernels require.

    The memory is never freed.

    Attributes:
        buffers: The memory of the tensors.
        pointers: The addresses of that memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[ctypes.Array] = []
        self.pointers: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, self.to_device, result)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same content, in device memory."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage.data_ptr() in self.pointers or not size:
            return tensor
        pointer = ctypes.c_void_p()
        if hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)):
            raise MemoryError("hipMalloc")
        buffer = (ctypes.c_uint8 * size).from_address(pointer.value)
        self.buffers.append(buffer)
        self.pointers.add(pointer.value)
        content = torch.frombuffer(buffer, dtype=torch.uint8)
        content.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        return content.view(tensor.dtype).as_strided(
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
        )


def bypass_custom_operators(interface) -> None:
    """Make flash-attn's functions call each other without torch's dispatcher.

    Otherwise DeviceMemory would miss tensors that are allocated inside a custom operator.

    Args:
        interface: The module flash_attn_interface.
    """
    for name in ("forward", "backward"):
        function = getattr(interface, f"_flash_attn_{name}")._init_fn
        setattr(interface, f"_wrapped_flash_attn_{name}", function)


def use_tritons_driver() -> HIPDriver:
    """Activate Triton's HIP driver, without torch.cuda, which has no device here."""
    testing.stand_in()
    driver = HIPDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda _device=None: 0
    triton.runtime.driver.set_active(driver)
    return driver


def main() -> None:
    target = use_tritons_driver().get_current_target()
    # Imported only here, because the import queries the active driver for the device.
    from flash_attn import flash_attn_interface

    if (target.backend, target.arch) != ("hip", "gfx1151"):
        raise SystemExit(f"the device is {target}")
    bypass_custom_operators(flash_attn_interface)
    with DeviceMemory():
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(SHAPE, generator=generator).half() for _ in range(4)]
        call, expected = testing.flash_attention(*tensors, causal=True)
        results = call.execute("cpu")
    fault, measured = testing.find_flash_fault(call, results, expected)
    print(flash_attn_interface.BACKEND, measured)
    if fault:
        raise SystemExit(f"wrong on the emulated device: {fault}")


if __name__ == "__main__":
    main()
