# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios for tests of the stand-in runtime. Each runs in a process that prints JSON.

usage: python device_scenarios.py NAME [ARGUMENT...]
"""

import ctypes
import json
import signal
import sys
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

hip = ctypes.CDLL("libamdhip64.so.7")
hip.hipGetErrorName.restype = c_char_p
TO_DEVICE = 1
TO_HOST = 2
DEFAULT = 4


def name(error: int) -> str:
    return hip.hipGetErrorName(error).decode()


def call(function: str, *arguments) -> str:
    """Return the name of the error that an entry point returns."""
    return name(getattr(hip, function)(*arguments))


def allocate(size: int) -> c_void_p:
    pointer = c_void_p()
    assert hip.hipMalloc(byref(pointer), c_size_t(size)) == 0
    return pointer


def offset_pointer(pointer: c_void_p, offset: int) -> c_void_p:
    return c_void_p(pointer.value + offset)


def load(path: str, kernel: str) -> c_void_p:
    module = c_void_p()
    function = c_void_p()
    assert hip.hipModuleLoad(byref(module), path.encode()) == 0
    assert hip.hipModuleGetFunction(byref(function), module, kernel.encode()) == 0
    return function


def launch(function: c_void_p, grid: int, threads: int, *arguments) -> str:
    values = (c_void_p * (len(arguments) + 2))(*(ctypes.addressof(x) for x in arguments))
    null = c_void_p()
    values[-2] = ctypes.addressof(null)
    values[-1] = ctypes.addressof(null)
    return call("hipModuleLaunchKernel", function, grid, 1, 1, threads, 1, 1, 0, None, values, None)


class FillNode(ctypes.Structure):
    """hipMemsetParams."""

    _fields_ = [
        ("memory", c_void_p),
        ("element_size", ctypes.c_uint),
        ("height", c_size_t),
        ("pitch", c_size_t),
        ("value", ctypes.c_uint),
        ("width", c_size_t),
    ]


def add_fill_node(pointer: c_void_p, element_size: int, pitch: int) -> str:
    """Add to a new graph a node that fills two rows of four elements; return the error's name."""
    graph = c_void_p()
    assert hip.hipGraphCreate(byref(graph), 0) == 0
    node = FillNode(pointer, element_size, 2, pitch, 1, 4)
    return call("hipGraphAddMemsetNode", byref(c_void_p()), graph, None, c_size_t(0), byref(node))


def memory() -> dict:
    results = {}
    p = allocate(1000)
    host = ctypes.create_string_buffer(b"x" * 2000)
    results["readable on the host"] = ctypes.c_uint32.from_address(p.value).value
    results["copy"] = call("hipMemcpy", p, host, c_size_t(1000), TO_DEVICE)
    results["copied"] = ctypes.string_at(p.value, 3).decode()
    results["copy past the end"] = call("hipMemcpy", p, host, c_size_t(1001), TO_DEVICE)
    results["copy between allocations"] = call(
        "hipMemcpy", offset_pointer(p, 1004), host, c_size_t(4), TO_DEVICE
    )
    results["copy to the host as if to the device"] = call(
        "hipMemcpy", host, p, c_size_t(4), TO_DEVICE
    )
    results["fill past the end"] = call("hipMemset", offset_pointer(p, 999), 0, c_size_t(2))
    results["fill the host"] = call("hipMemset", host, 0, c_size_t(2))
    rows = (p, c_size_t(16), 0, c_size_t(20), c_size_t(2))
    results["rows wider than their pitch"] = call("hipMemset2D", *rows)
    results["fill nodes"] = [add_fill_node(p, *sizes) for sizes in ((4, 16), (8, 64), (4, 8))]
    width = c_size_t(2**64 - 1)
    results["absurd width"] = call("hipMallocPitch", byref(c_void_p()), byref(width), width, width)
    results["free the middle"] = call("hipFree", offset_pointer(p, 8))
    results["free the host's"] = call("hipFree", host)
    results["free as pinned"] = call("hipHostFree", p)
    results["free"] = call("hipFree", p)
    results["free again"] = call("hipFree", p)
    results["free nothing"] = call("hipFree", None)
    results["use after free"] = call("hipMemset", p, 0, c_size_t(4))
    second = allocate(1000)
    results["another place"] = second.value != p.value
    hip.hipFree(second)
    free = c_size_t()
    total = c_size_t()
    assert hip.hipMemGetInfo(byref(free), byref(total)) == 0
    results["all free"] = free.value == total.value
    results["too much"] = call("hipMalloc", byref(p), c_size_t(total.value + 1))
    results["absurd"] = call("hipMalloc", byref(p), c_size_t(2**64 - 1))
    results["remembered"] = call("hipPeekAtLastError")
    results["last"] = [call("hipGetLastError"), call("hipGetLastError")]
    pointers = [allocate(100) for _ in range(1000)]
    results["distinct"] = len({x.value for x in pointers})
    for pointer in pointers[::2] + pointers[1::2]:
        assert hip.hipFree(pointer) == 0
    results["first again"] = allocate(100).value == min(x.value for x in pointers)
    # Allocate nearly all memory twice. The second allocation succeeds only if it gets the freed
    # memory.
    nearly_all = c_size_t(total.value - (4 << 20))
    for _ in range(2):
        assert call("hipMalloc", byref(p), nearly_all) == "hipSuccess"
        assert hip.hipFree(p) == 0
    return results


class PointerAttributes(ctypes.Structure):
    """hipPointerAttribute_t."""

    _fields_ = [
        ("type", c_int),
        ("device", c_int),
        ("device_pointer", c_void_p),
        ("host_pointer", c_void_p),
        ("is_managed", c_int),
        ("flags", ctypes.c_uint),
    ]


def read_flags(pointer: c_void_p) -> list:
    """Return the flags of memory of the host from both of the functions that return them."""
    flags = ctypes.c_uint(77)
    attributes = PointerAttributes()
    error = call("hipHostGetFlags", byref(flags), pointer)
    assert call("hipPointerGetAttributes", byref(attributes), pointer) == "hipSuccess"
    return [error, flags.value, attributes.flags]


def host_memory() -> dict:
    results = {}
    p = c_void_p()
    size = c_size_t(1000)
    for function, flags in (("hipHostMalloc", 6), ("hipHostAlloc", 0x4000_0002)):
        assert call(function, byref(p), size, ctypes.c_uint(flags)) == "hipSuccess"
        results[function] = read_flags(offset_pointer(p, 100))
        assert hip.hipHostFree(p) == 0
    assert hip.hipMallocHost(byref(p), size) == 0
    results["hipMallocHost"] = read_flags(p)
    results["no pointer"] = call("hipHostMalloc", None, size, 0)
    memory = ctypes.create_string_buffer(10_000)
    place = c_void_p(ctypes.addressof(memory))
    for flags in (3, 0x8000_0000, 16):
        error = call("hipHostRegister", place, c_size_t(10_000), ctypes.c_uint(flags))
        results[f"register {flags:#x}"] = [error, *read_flags(place)]
        hip.hipHostUnregister(place)
    results["device"] = read_flags(allocate(1000))
    return results


def batch() -> dict:
    """Copy two words in a batch, in both directions, and then one that is out of bounds."""
    p = allocate(1000)
    words = (ctypes.c_uint32 * 4)(1, 2, 3, 4)
    host = ctypes.addressof(words)
    failed = c_size_t(77)

    def copy(to: list, sizes: list, attributes: int = 0) -> str:
        arrays = [(c_void_p * 2)(*to), (c_void_p * 2)(host, p.value), (c_size_t * 2)(*sizes)]
        counts = (c_size_t(2), None, None, c_size_t(attributes), byref(failed), None)
        return call("hipMemcpyBatchAsync", *arrays, *counts)

    results = {"copy": copy([p.value, host + 8], [8, 8]), "copied": list(words)}
    results["past the end"] = [copy([p.value, host], [4, 1001]), failed.value]
    results["with attributes"] = copy([p.value, host], [4, 4], 1)
    results["nothing"] = call("hipMemcpyBatchAsync", *[None] * 9)
    results["still usable"] = call("hipDeviceSynchronize")
    return results


def handles() -> dict:
    stream = c_void_p()
    event = c_void_p()
    milliseconds = ctypes.c_float()
    device = c_int(-1)
    results = {"create": call("hipStreamCreate", byref(stream))}
    results["device"] = [call("hipStreamGetDevice", stream, byref(device)), device.value]
    results["device of none"] = call("hipStreamGetDevice", None, byref(device))
    assert hip.hipEventCreate(byref(event)) == 0
    results["not recorded"] = call("hipEventElapsedTime", byref(milliseconds), event, event)
    results["record"] = call("hipEventRecord", event, stream)
    results["wait"] = call("hipStreamWaitEvent", stream, event, 0)
    results["elapsed"] = call("hipEventElapsedTime", byref(milliseconds), event, event)
    results["destroy"] = call("hipStreamDestroy", stream)
    results["destroyed"] = call("hipStreamSynchronize", stream)
    results["device of destroyed"] = call("hipStreamGetDevice", stream, byref(device))
    results["no event"] = call("hipEventRecord", c_void_p(12345), None)
    # Query the attributes for constant memory, for virtual memory management, and for the frequency
    # of wall_clock64 in kHz.
    value = c_int()
    results["attributes"] = []
    for attribute in (83, 89, 10017):
        assert hip.hipDeviceGetAttribute(byref(value), attribute, 0) == 0
        results["attributes"].append(value.value)
    address = c_void_p()
    results["address"] = call("hipGetProcAddress", b"hipMalloc", byref(address), 0, 0, None)
    results["no address"] = call("hipGetProcAddress", b"hipNothing", byref(address), 0, 0, None)
    return results


def capture() -> dict:
    """Capture a stream that forks and joins often, beside a stream that joins only at the end."""
    memory = allocate(64)
    streams = [c_void_p() for _ in range(3)]
    for stream in streams:
        assert hip.hipStreamCreate(byref(stream)) == 0
    main, side, last = streams

    def fill(stream: c_void_p) -> None:
        assert hip.hipMemsetAsync(memory, 0, c_size_t(64), stream) == 0

    def wait_for(stream: c_void_p, other: c_void_p) -> None:
        event = c_void_p()
        assert hip.hipEventCreate(byref(event)) == 0
        assert hip.hipEventRecord(event, other) == 0
        assert hip.hipStreamWaitEvent(stream, event, 0) == 0

    assert hip.hipStreamBeginCapture(main, 0) == 0
    fill(main)
    wait_for(last, main)
    fill(last)
    for _ in range(100):
        wait_for(side, main)
        fill(side)
        fill(main)
        wait_for(main, side)
    wait_for(main, last)
    return {"end": call("hipStreamEndCapture", main, byref(c_void_p()))}


def threads() -> dict:
    """Ask for a stream's device while another thread creates and destroys streams."""

    def create() -> c_void_p:
        stream = c_void_p()
        assert hip.hipStreamCreate(byref(stream)) == 0
        return stream

    def churn() -> None:
        while not ended.is_set():
            for stream in [create() for _ in range(200)]:
                hip.hipStreamDestroy(stream)

    ended = threading.Event()
    # The list of streams begins with the newest one, so a search for the oldest one visits them
    # all.
    oldest = create()
    other = threading.Thread(target=churn)
    other.start()
    devices = {hip.hipGetStreamDeviceId(oldest) for _ in range(300_000)}
    ended.set()
    other.join()
    return {"devices": sorted(devices)}


class LaunchConfig(ctypes.Structure):
    """HIP_LAUNCH_CONFIG with one attribute, which requests a cooperative launch."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", ctypes.c_uint),
    ]

    def __init__(self, grid: int, threads: int):
        self.attribute = (c_int * 18)(2, 0, 1)
        sizes = (ctypes.c_uint * 7)(grid, 1, 1, threads, 1, 1, 0)
        super().__init__(sizes, None, ctypes.addressof(self.attribute), 1)


def add(path: str) -> dict:
    """Launch the Triton kernel `add`: correctly, with wrong configurations, beyond its arrays."""
    function = load(path, "add")
    arrays = [allocate(4 * 1000) for _ in range(3)]
    for pointer, value in zip(arrays[:2], (1.5, 2.25), strict=True):
        (ctypes.c_float * 1000).from_address(pointer.value)[:] = [value] * 1000
    results = {"launch": launch(function, 4, 128, *arrays, c_int(1000))}
    results["sum"] = sum((ctypes.c_float * 1000).from_address(arrays[2].value))
    results["no kernel"] = launch(c_void_p(), 4, 128, *arrays, c_int(1000))
    results["too large a grid"] = launch(function, 2**31, 128, *arrays, c_int(1000))
    config = LaunchConfig(100_000, 128)
    arguments = [*arrays, c_int(1000), c_void_p(), c_void_p()]
    values = (c_void_p * 6)(*map(ctypes.addressof, arguments))
    results["too many cooperative waves"] = call(
        "hipDrvLaunchKernelEx", byref(config), function, values, None
    )
    results["too many threads"] = launch(function, 4, 2048, *arrays, c_int(1000))
    results["still usable"] = launch(function, 4, 128, *arrays, c_int(1000))
    results["too far"] = launch(function, 5, 128, *arrays, c_int(1280))
    results["after"] = [call("hipDeviceSynchronize"), call("hipMalloc", byref(c_void_p()), 4)]
    return results


def long(path: str) -> dict:
    """Launch a kernel that never ends."""
    function = load(path, "forever")
    array = allocate(4)
    hip.hipMemset(array, 0, c_size_t(4))
    print("launching", flush=True)
    return {"launch": launch(function, 1, 32, array), "then": call("hipDeviceSynchronize")}


def wait(path: str) -> dict:
    """Start the server, and wait for a signal before the launches."""
    function = load(path, "add")
    array = allocate(4000)
    # SIGUSR1 is blocked, because signal.pause() would miss a signal that comes before the call.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})
    values = [launch(function, 1, 128, array, array, array, c_int(100)) for _ in range(2)]
    return {"launch": values, "free": call("hipFree", array)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
