# SPDX-License-Identifier: BSD-3-Clause
"""Any build of torch on the emulated device, for Triton's kernels.

In a program of `strix-emulate device`, :func:`install` places torch's tensors in the device's
memory, so that Triton's own driver can launch kernels on them. torch itself computes on the CPU.
The device "cuda" then means the CPU, whose tensors are in the emulated device's memory.

The module is also a plugin of pytest: ``python -m pytest -p strix_emulate.torch_device``. The first
use with a build of torch needs a C++ compiler (``CXX``). Later uses take the compiled allocator
from a cache.
"""

import ctypes
import functools
import hashlib
import inspect
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strix_emulate.device import launcher
from strix_emulate.errors import EmulatorError

_SOURCE = Path(__file__).with_name("allocator.cpp")
#: Functions of torch.cuda that do nothing.
_WITHOUT_EFFECT = (
    "set_device",
    "synchronize",
    "empty_cache",
    "init",
    "_lazy_init",
    "manual_seed",
    "manual_seed_all",
)
#: The stand-in runtime, which is loaded already.
_RUNTIME = "libamdhip64.so.7"
#: HIP_POINTER_ATTRIBUTE_DEVICE_POINTER
_DEVICE_POINTER = 3
#: Functions of torch.accelerator that do nothing.
_ACCELERATOR_WITHOUT_EFFECT = (
    "set_device_index",
    "set_device_idx",
    "set_stream",
    "synchronize",
    "empty_cache",
)
#: Objects that must live as long as the process: the allocator's library, and torch's mode.
_installed: list[Any] = []


def install() -> None:
    """Put torch's tensors into the device's memory, and give Triton its AMD driver.

    Raises:
        EmulatorError: `strix-emulate device` did not start the program, or the compiler failed.
    """
    if _installed:
        return
    import torch
    import triton

    if launcher.PYTHON_VARIABLE not in os.environ:
        raise EmulatorError(
            "torch_device needs the emulated device: start the program with "
            "`strix-emulate device -- PROGRAM`"
        )
    _installed.append(ctypes.CDLL(str(library(torch))))
    mode = _make_mode(torch)
    _patch(torch)
    _redirect_kernels(torch.library, mode)
    mode.__enter__()
    _installed.append(mode)
    from triton.backends.amd.driver import HIPDriver

    driver = HIPDriver()
    # Triton's own function makes a tensor of 256 MiB on the device. An autotuner clears the tensor
    # before each measurement, to empty caches. The emulator has no such caches. Our function must
    # not name the device, because an autotuner may run in a backward pass. There the mode is off:
    # torch turns a mode off while the mode handles Tensor.backward.
    driver.get_empty_cache_for_benchmark = lambda: torch.empty(1, dtype=torch.int)
    triton.runtime.driver.set_active(driver)


def pytest_addoption() -> None:
    """Install the device before pytest loads a conftest.py, which may use the device."""
    install()


def library(torch) -> Path:
    """Return the allocator's library for this torch. Compile it if that has not been done yet.

    Raises:
        EmulatorError: The compiler failed.
    """
    root = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    key = f"{torch.__version__} {abi} {root} {_SOURCE.read_text()}"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(cache, "strix-emulate", f"torch-{digest}.so")
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled = Path(folder, path.name)
        _compile(root, abi, compiled)
        compiled.replace(path)
    return path


def _compile(root: Path, abi: int, output: Path) -> None:
    """Compile the allocator for the torch in folder `root`.

    `abi` is the value of _GLIBCXX_USE_CXX11_ABI with which this torch was compiled.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [
        *compiler,
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{root / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        str(_SOURCE),
        "-o",
        str(output),
        f"-L{root / 'lib'}",
        "-lc10",
    ]
    # Remove these variables: the compiler must not load the stand-in runtime.
    variables = dict(os.environ)
    variables.pop("LD_PRELOAD", None)
    variables.pop("LD_LIBRARY_PATH", None)
    result = subprocess.run(
        command,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise EmulatorError(f"{compiler[0]} cannot compile the allocator:\n{result.stderr}")


def _patch(torch) -> None:
    """Let torch.cuda report one device, on which every call is complete when it returns."""
    from strix_emulate.code.target import DEFAULT, find_target

    stream = SimpleNamespace(
        cuda_stream=0,
        synchronize=_nothing,
        wait_stream=_nothing,
    )
    target = find_target(os.environ.get(launcher.TARGET_VARIABLE) or DEFAULT.name)
    properties = SimpleNamespace(
        name="AMD Radeon Graphics",
        gcnArchName=target.name,
        warp_size=32,
        major=target.version[0],
        minor=target.version[1],
        multi_processor_count=target.processors,
        total_memory=_measure_memory()[1],
        shared_memory_per_block=target.lds,
    )
    for name in _WITHOUT_EFFECT:
        # Each name needs a function object of its own, because torch.compile identifies a function
        # of torch by its object.
        setattr(torch.cuda, name, lambda *_args, **_options: None)
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda _device=None: (properties.major, properties.minor)
    torch.cuda.get_device_properties = lambda _device=None: properties
    torch.cuda.get_device_name = lambda _device=None: properties.name
    torch.cuda.mem_get_info = _measure_memory
    torch.cuda.current_stream = lambda _device=None: stream
    torch.cuda.device = type("device", (_OnlyOne,), {})
    torch.cuda.stream = type("stream", (_OnlyOne,), {})
    torch.cuda.Event = _Event
    _patch_accelerator(torch.accelerator, torch.device("cuda"), stream)
    torch.Generator = _make_generator(torch)
    # Triton calls this function to get the stream of a launch.
    torch._C._cuda_getCurrentRawStream = lambda _device: 0
    torch.version.hip = "7.2"
    torch.version.cuda = None
    # The attribute is set on the class, because a mode is not active inside custom operators.
    torch.Tensor.is_cuda = property(lambda _tensor: True)


def _patch_accelerator(accelerator, device, stream) -> None:
    """Let torch.accelerator, which names no kind of device, report the same device."""
    for name in _ACCELERATOR_WITHOUT_EFFECT:
        setattr(accelerator, name, lambda *_args, **_options: None)
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: 1
    accelerator.current_accelerator = lambda check_available=False: device
    accelerator.current_device_index = lambda: 0
    accelerator.current_device_idx = lambda: 0
    accelerator.current_stream = lambda _device=None: stream
    accelerator.device_index = type("device_index", (_OnlyOne,), {})


def _make_generator(torch):
    """Return a class that replaces torch.Generator and computes on the CPU."""
    base: Any = torch.Generator

    class Generator(base):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu")

    return Generator


def _redirect_kernels(library, mode) -> None:
    """Let operators call the kernels that are registered for CUDA, although torch sees CPU tensors.

    torch turns a mode off while the mode handles a call. So each kernel that is a Python function
    turns the mode on again.

    Args:
        library: torch.library. All ways to register a kernel in Python use its class Library.
        mode: The mode in which "cuda" means the CPU.
    """
    create, register = library.Library.__init__, library.Library.impl

    def on_cpu(key: str) -> str:
        return "CPU" if key == "CUDA" else key

    def in_mode(kernel):
        if kernel is library.fallthrough_kernel or not inspect.isfunction(kernel):
            return kernel

        @functools.wraps(kernel)
        def run(*args, **options):
            with mode:
                return kernel(*args, **options)

        return run

    def create_on_cpu(self, ns, kind, dispatch_key=""):
        create(self, ns, kind, on_cpu(dispatch_key))

    def register_on_cpu(self, op_name, fn, dispatch_key="", **options):
        return register(self, op_name, in_mode(fn), on_cpu(dispatch_key), **options)

    library.Library.__init__ = create_on_cpu
    library.Library.impl = register_on_cpu


def _measure_memory(_device=None) -> tuple[int, int]:
    """Return how many bytes of the device's memory are free, and how many there are."""
    free = ctypes.c_size_t()
    total = ctypes.c_size_t()
    ctypes.CDLL(_RUNTIME).hipMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _nothing(*_args, **_options) -> None:
    """Do nothing, because launches and copies are complete when their call returns."""


class _Event:
    """An event, which stores the time at which it is recorded.

    Triton's autotuner measures candidates with events. So it measures the emulation, not a GPU.
    """

    synchronize = wait = _nothing

    def __init__(self, *_args, **_options):
        self._time = 0.0

    def record(self, _stream=None) -> None:
        """Record the time."""
        self._time = time.perf_counter()

    def query(self) -> bool:
        """Return whether all work before the event is complete, which is always so."""
        return True

    def elapsed_time(self, end: "_Event") -> float:
        """Return the milliseconds from this event to another one."""
        return 1000 * (end._time - self._time)


class _OnlyOne:
    """A context manager for the only device or stream."""

    def __init__(self, *_args, **_options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None


def _make_mode(torch):
    """Return a mode in which the device "cuda" means the CPU, and no memory is pinned."""

    def on_cpu(value):
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            return "cpu"
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return value

    base: Any = torch.overrides.TorchFunctionMode

    class OnDevice(base):
        def __torch_function__(
            self,
            function,
            types,
            args=(),
            kwargs=None,
        ):
            if function == torch.Tensor.cuda:
                return _in_device_memory(torch, args[0])
            if function == torch.Tensor.pin_memory:
                return args[0]
            options = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
            # Pinning is not needed, because the device reads all tensors where they are. To pin
            # memory, torch would look for a GPU.
            if options.get("pin_memory"):
                options["pin_memory"] = False
            result = function(*map(on_cpu, args), **options)
            # The program may have got a torch.device from a tensor, whose device is the CPU here.
            if function == torch.Tensor.to or "device" in options:
                return _in_device_memory(torch, result)
            return result

    return OnDevice()


def _in_device_memory(torch, value):
    """Return a tensor, copied to the device's memory if needed, or any other value as it is.

    If torch did not allocate a tensor's memory, for example because numpy did, the tensor is not in
    the device's memory. A GPU gets a copy of such a tensor, and so does the emulated device.
    """
    if torch.compiler.is_compiling() or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value
    if value.device.type != "cpu" or value.layout != torch.strided or value.numel() == 0:
        return value
    hip = ctypes.CDLL(_RUNTIME)
    pointer = ctypes.c_void_p()
    address = ctypes.c_void_p(value.data_ptr())
    if hip.hipPointerGetAttribute(ctypes.byref(pointer), _DEVICE_POINTER, address) == 0:
        return value
    # Clear the error. Otherwise the program would see it.
    hip.hipGetLastError()
    return value.clone()
