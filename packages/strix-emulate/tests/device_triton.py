# SPDX-License-Identifier: BSD-3-Clause
"""Run Triton's AMD driver on the emulated device; print the largest error of each kernel as JSON.

The driver, the C launcher and the packing of arguments are Triton's, unmodified. A mock of torch
gives the driver the current device and stream. The autotuner's benchmark uses the mock's events.
"""

import ctypes
import json
import sys
import types

import numpy as np

hip = ctypes.CDLL("libamdhip64.so.7")


class Event:
    """A mock of torch.cuda.Event that uses HIP's events."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.handle = ctypes.c_void_p()
        assert hip.hipEventCreate(ctypes.byref(self.handle)) == 0

    def record(self) -> None:
        assert hip.hipEventRecord(self.handle, None) == 0

    def elapsed_time(self, other: "Event") -> float:
        milliseconds = ctypes.c_float()
        assert hip.hipEventElapsedTime(ctypes.byref(milliseconds), self.handle, other.handle) == 0
        return milliseconds.value


class Tensor:
    """A numpy array in device memory."""

    def __init__(self, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        pointer = ctypes.c_void_p()
        assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(values.nbytes)) == 0
        raw = (ctypes.c_char * values.nbytes).from_address(pointer.value)
        self.array = np.frombuffer(raw, values.dtype).reshape(values.shape)
        self.array[...] = values
        self.address = pointer.value
        self.dtype = str(values.dtype)

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self):
        """Return a mock storage. By its size, Triton decides whether to use buffer instructions."""
        return types.SimpleNamespace(size=lambda: self.array.nbytes)


torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    current_device=lambda: 0,
    set_device=None,
    get_device_capability=None,
    Event=Event,
    current_stream=lambda _device=None: types.SimpleNamespace(cuda_stream=0),
    synchronize=lambda: hip.hipDeviceSynchronize(),
)
torch.Tensor = Tensor
torch.version = types.SimpleNamespace(hip="7.2")
sys.modules["torch"] = torch

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from fixtures import matmul, softmax  # noqa: E402
from triton.backends.amd.driver import HIPDriver  # noqa: E402

driver = HIPDriver()
triton.runtime.driver.set_active(driver)


@triton.jit
def through_pointers(pointers, out, N: tl.constexpr):
    g = tl.program_id(0)
    i = tl.arange(0, N)
    p = tl.load(pointers + g).to(tl.pointer_type(tl.float32))
    tl.store(out + g * N + i, 2 * tl.load(p + i))


def _benchmark(call, quantiles=None):
    """Time three calls for triton.autotune, whose own benchmark repeats calls for 100 ms."""
    start = Event()
    stop = Event()
    start.record()
    for _ in range(3):
        call()
    stop.record()
    return [start.elapsed_time(stop) / 3] * len(quantiles or (0.5,))


@triton.autotune(
    [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 256}, num_warps=4)],
    key=["n"],
    do_bench=_benchmark,
)
@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


def error(tensor: Tensor, expected: np.ndarray) -> float:
    return float(np.abs(tensor.array.astype(float) - expected).max())


def main() -> dict:
    rng = np.random.default_rng(0)
    results = {"target": [driver.get_current_target().arch, driver.get_current_target().warp_size]}
    values = rng.standard_normal((8, 200)).astype(np.float32)
    x = Tensor(values)
    out = Tensor(np.zeros_like(values))
    softmax[(8,)](x, out, 200, BLOCK=256)
    e = np.exp(values.astype(float) - values.max(-1, keepdims=True))
    results["softmax"] = error(out, e / e.sum(-1, keepdims=True))
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((50, 70), (70, 40)))
    out = Tensor(np.zeros((50, 40), np.float32))
    matmul[(2, 2)](Tensor(a), Tensor(b), out, 50, 40, 70, BM=32, BN=32, BK=32)
    results["matmul"] = error(out, a.astype(float) @ b.astype(float))
    rows = [Tensor(row[:64]) for row in values[:3]]
    out = Tensor(np.zeros((3, 64), np.float32))
    through_pointers[(3,)](Tensor(np.array([r.address for r in rows])), out, N=64)
    results["pointers"] = error(out, 2.0 * values[:3, :64])
    out = Tensor(np.zeros(1000, np.float32))
    grid = lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)  # noqa: E731
    scale[grid](Tensor(values.ravel()[:1000]), out, 1000, 2.5)
    results["autotuned"] = error(out, 2.5 * values.ravel()[:1000])
    results["configurations"] = len(scale.configs_timings)
    return results


if __name__ == "__main__":
    print(json.dumps(main()))
