# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the stand-in runtime do in a process of its own: NAME ARGUMENTS, JSON out."""

import ctypes
import json
import signal
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

hip = ctypes.CDLL("libamdhip64.so.7")
hip.hipGetErrorName.restype = c_char_p
TO_DEVICE, TO_HOST, DEFAULT = 1, 2, 4


def name(error: int) -> str:
    return hip.hipGetErrorName(error).decode()


def call(function: str, *arguments) -> str:
    """The name of the error that an entry point returns."""
    return name(getattr(hip, function)(*arguments))


def allocate(size: int) -> c_void_p:
    pointer = c_void_p()
    assert hip.hipMalloc(byref(pointer), c_size_t(size)) == 0
    return pointer


def moved(pointer: c_void_p, by: int) -> c_void_p:
    return c_void_p(pointer.value + by)


def load(path: str, kernel: str) -> c_void_p:
    module, function = c_void_p(), c_void_p()
    assert hip.hipModuleLoad(byref(module), path.encode()) == 0
    assert hip.hipModuleGetFunction(byref(function), module, kernel.encode()) == 0
    return function


def launch(function: c_void_p, grid: int, threads: int, *arguments) -> str:
    values = (c_void_p * (len(arguments) + 2))(*(ctypes.addressof(x) for x in arguments))
    null = c_void_p()
    values[-2] = values[-1] = ctypes.addressof(null)
    return call("hipModuleLaunchKernel", function, grid, 1, 1, threads, 1, 1, 0, None, values, None)


def memory() -> dict:
    found, p = {}, allocate(1000)
    host = ctypes.create_string_buffer(b"x" * 2000)
    found["readable on the host"] = ctypes.c_uint32.from_address(p.value).value
    found["copy"] = call("hipMemcpy", p, host, c_size_t(1000), TO_DEVICE)
    found["copied"] = ctypes.string_at(p.value, 3).decode()
    found["copy past the end"] = call("hipMemcpy", p, host, c_size_t(1001), TO_DEVICE)
    found["copy between allocations"] = call(
        "hipMemcpy", moved(p, 1004), host, c_size_t(4), TO_DEVICE)  # fmt: skip
    found["copy to the host as to the device"] = call(
        "hipMemcpy", host, p, c_size_t(4), TO_DEVICE)  # fmt: skip
    found["fill past the end"] = call("hipMemset", moved(p, 999), 0, c_size_t(2))
    found["fill the host"] = call("hipMemset", host, 0, c_size_t(2))
    found["free the middle"] = call("hipFree", moved(p, 8))
    found["free the host's"] = call("hipFree", host)
    found["free as pinned"] = call("hipHostFree", p)
    found["free"] = call("hipFree", p)
    found["free again"] = call("hipFree", p)
    found["free nothing"] = call("hipFree", None)
    found["use after free"] = call("hipMemset", p, 0, c_size_t(4))
    other = allocate(1000)
    found["another place"] = other.value != p.value
    hip.hipFree(other)
    free, total = c_size_t(), c_size_t()
    assert hip.hipMemGetInfo(byref(free), byref(total)) == 0
    found["all free"] = free.value == total.value
    found["too much"] = call("hipMalloc", byref(p), c_size_t(total.value + 1))
    found["absurd"] = call("hipMalloc", byref(p), c_size_t(2**64 - 1))
    found["remembered"] = call("hipPeekAtLastError")
    found["last"] = [call("hipGetLastError"), call("hipGetLastError")]
    many = [allocate(100) for _ in range(1000)]
    found["distinct"] = len({x.value for x in many})
    for pointer in many[::2] + many[1::2]:
        assert hip.hipFree(pointer) == 0
    found["first again"] = allocate(100).value == min(x.value for x in many)
    # all of the memory but some pages, twice: what was freed is given out where there is no other
    most = c_size_t(total.value - (4 << 20))
    for _ in range(2):
        assert call("hipMalloc", byref(p), most) == "hipSuccess"
        assert hip.hipFree(p) == 0
    return found


def handles() -> dict:
    stream, event, milliseconds = c_void_p(), c_void_p(), ctypes.c_float()
    device = c_int(-1)
    found = {"create": call("hipStreamCreate", byref(stream))}
    found["device"] = [call("hipStreamGetDevice", stream, byref(device)), device.value]
    found["device of none"] = call("hipStreamGetDevice", None, byref(device))
    assert hip.hipEventCreate(byref(event)) == 0
    found["not recorded"] = call("hipEventElapsedTime", byref(milliseconds), event, event)
    found["record"] = call("hipEventRecord", event, stream)
    found["wait"] = call("hipStreamWaitEvent", stream, event, 0)
    found["elapsed"] = call("hipEventElapsedTime", byref(milliseconds), event, event)
    found["destroy"] = call("hipStreamDestroy", stream)
    found["destroyed"] = call("hipStreamSynchronize", stream)
    found["device of destroyed"] = call("hipStreamGetDevice", stream, byref(device))
    found["no event"] = call("hipEventRecord", c_void_p(12345), None)
    address = c_void_p()
    found["address"] = call("hipGetProcAddress", b"hipMalloc", byref(address), 0, 0, None)
    found["no address"] = call("hipGetProcAddress", b"hipNothing", byref(address), 0, 0, None)
    return found


def add(path: str) -> dict:
    """The Triton kernel add: right, then with too few elements in the last array."""
    function = load(path, "add")
    arrays = [allocate(4 * 1000) for _ in range(3)]
    for pointer, value in zip(arrays[:2], (1.5, 2.25), strict=True):
        (ctypes.c_float * 1000).from_address(pointer.value)[:] = [value] * 1000
    found = {"launch": launch(function, 4, 128, *arrays, c_int(1000))}
    found["sum"] = sum((ctypes.c_float * 1000).from_address(arrays[2].value))
    found["no kernel"] = launch(c_void_p(), 4, 128, *arrays, c_int(1000))
    found["too many threads"] = launch(function, 4, 2048, *arrays, c_int(1000))
    found["still usable"] = launch(function, 4, 128, *arrays, c_int(1000))
    found["too far"] = launch(function, 5, 128, *arrays, c_int(1280))
    found["after"] = [call("hipDeviceSynchronize"), call("hipMalloc", byref(c_void_p()), 4)]
    return found


def long(path: str) -> dict:
    """A kernel that never ends, until somebody ends a process."""
    function, array = load(path, "forever"), allocate(4)
    hip.hipMemset(array, 0, c_size_t(4))
    print("launching", flush=True)
    return {"launch": launch(function, 1, 32, array), "then": call("hipDeviceSynchronize")}


def wait(path: str) -> dict:
    """Starts the server, then waits for a signal before it launches again."""
    function, array = load(path, "add"), allocate(4000)
    # blocked: it may come before it is waited for, and signal.pause() would then wait for ever
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})
    values = [launch(function, 1, 128, array, array, array, c_int(100)) for _ in range(2)]
    return {"launch": values, "free": call("hipFree", array)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
