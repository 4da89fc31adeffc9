# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for Triton's gfx1151 device on a machine without a GPU.

With the stand-in, the real Python code of a library runs, including its tuned configurations. After
:func:`intercept`, each launch compiles its kernel for gfx1151, and calls a given function instead
of running the kernel. Tensors stay in host memory. The stand-in changes the whole process, so
install it in a child process only.
"""

import contextlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any

import torch

from strix_validate import GPUS, TARGET

#: Modules and packages whose asserts require tensors on a GPU.
_ASSERTING = (
    "aiter",
    "flash_attn.flash_attn_triton_amd.utils",
    "sageattention",
)
#: Triton's attribute of an argument whose value is a multiple of 16.
_DIVISIBLE = ["tt.divisibility", 16]
#: Compilation options that a lookup reports. Only Triton's backend for AMD has the last one.
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "waves_per_eu")
#: Holds the operators that skip_products registers. They last as long as this object.
_PRODUCTS = torch.library.Library("aten", "IMPL")


@dataclass(frozen=True)
class InterceptedLaunch:
    """An intercepted launch.

    Attributes:
        function: The JIT function.
        compiled: The compiled kernel.
        args: The positional arguments.
        grid: Number of workgroups in each direction, or a function of the arguments that returns
            these numbers.
        options: The keyword arguments.
        is_warmup: Whether the caller wanted the kernel compiled only, not launched.
    """

    function: Any
    compiled: Any
    args: tuple
    grid: Any
    options: dict
    is_warmup: bool

    def values(self) -> dict[str, Any]:
        """Return the kernel's arguments by name, including defaults, and the launch options."""
        values = dict(zip(self.function.arg_names, self.args, strict=False))
        values |= self.options
        for parameter in self.function.params:
            if parameter.has_default:
                values.setdefault(parameter.name, parameter.default)
        return values

    def workgroups(self) -> tuple[int, ...]:
        """Return the number of workgroups in each direction."""
        size = self.grid
        if callable(size):
            size = size(self.values())
        return tuple(int(x) for x in size)


@dataclass(frozen=True)
class Lookup:
    """A kernel that a launch needed, and that Triton found in its cache or compiled.

    Attributes:
        name: The kernel's name.
        key: The name of the kernel's folder in Triton's cache.
        types: Types of the arguments by name, with ":16" where the value is a multiple of 16.
        constants: The values of the compiled-in arguments, by name.
        options: The values of _LAUNCH_OPTIONS, by name.
        files: Paths of the kernel's files, by file name.
        compiled: Whether the kernel was compiled, not read from a cache or a package.
    """

    name: str
    key: str
    types: dict[str, str]
    constants: dict[str, str]
    options: dict[str, Any]
    files: dict[str, str]
    compiled: bool


def _measure_nothing(is_called: bool, call, quantiles=None) -> list[float]:
    """Return zeros instead of the times that triton.autotune would measure."""
    if is_called:
        call()
    return [0.0] * len(quantiles or (0.5,))


def take_first_candidate() -> None:
    """Make triton.autotune choose its first configuration on a real GPU, as the stand-in does.

    fla's kernels have dozens of configurations. Their compilation for an H100 took minutes, and
    noise in the measured times would decide which configuration is chosen.
    """
    from triton.runtime import driver

    driver.active.get_benchmarker = lambda: partial(_measure_nothing, False)


def ignore_amd_options() -> None:
    """Make Triton ignore AMD's launch option waves_per_eu, which its compiler for CUDA refuses."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self, *args, waves_per_eu=None, **options):
        del waves_per_eu
        return original(self, *args, **options)

    JITFunction.run = run


def _driver(all_candidates: bool) -> types.SimpleNamespace:
    """Return a Triton driver that has the target gfx1151, but no device.

    With it, triton.autotune measures nothing and chooses its first configuration.

    Args:
        all_candidates: Whether triton.autotune launches each of its configurations once.
    """
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("hip", TARGET, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_benchmarker=lambda: partial(_measure_nothing, all_candidates),
        map_python_to_cpp_type=lambda name: name,
    )


class _WithoutAsserts(SourceFileLoader):
    """Load a module without its asserts, as ``python -O`` does.

    ``python -O`` would affect all modules, and would compile torch and sympy anew.
    """

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class KernelLibraries:
    """Find the modules of _ASSERTING, and load them without their asserts."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of a module that is loaded without asserts; None for other modules."""
        if not any(f"{name}.".startswith(f"{module}.") for module in _ASSERTING):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _WithoutAsserts(spec.loader.name, spec.loader.path)
        return spec


def install(all_candidates: bool = False) -> None:
    """Make Triton and torch report a gfx1151 device.

    Call this function before the library that has the kernels is imported.

    Args:
        all_candidates: Whether triton.autotune launches all its configurations, not only the first.
    """
    import triton
    from triton.runtime import interpreter

    sys.meta_path.insert(0, KernelLibraries)
    # The interpreter checks each sum and product of integers for overflow. Without TRITON_DEBUG it
    # ignores the result, so the check only costs time.
    unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = unchecked
    triton.runtime.driver.set_active(_driver(all_candidates))
    properties = types.SimpleNamespace(
        multi_processor_count=GPUS[TARGET],
        gcnArchName=TARGET,
        warp_size=32,
    )
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda device: contextlib.nullcontext()


def intercept(on_launch: Callable[[InterceptedLaunch], None]) -> None:
    """Make each launch compile its kernel and call on_launch, instead of running the kernel."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self, *args, grid=None, warmup=False, **options):
        compiled = original(self, *args, grid=grid, warmup=True, **options)
        on_launch(InterceptedLaunch(self, compiled, args, grid, options, warmup))
        return compiled

    JITFunction.run = run


def watch(on_lookup: Callable[[Lookup], None]) -> None:
    """Call on_lookup once for each kernel that this process finds in a cache or compiles."""
    import triton
    from triton.runtime.cache import _base32

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        del times
        lookup = Lookup(
            name=src.name,
            key=_base32(metadata["hash"]),
            types=_describe_types(src),
            constants=_describe_constants(src),
            options={name: metadata[name] for name in _LAUNCH_OPTIONS if name in metadata},
            files=dict(metadata_group),
            compiled=not cache_hit,
        )
        on_lookup(lookup)

    triton.knobs.compilation.listener = listen


def _describe_types(src: Any) -> dict[str, str]:
    """Return the types of a kernel's arguments by name; see Lookup."""
    arg_names = src.fn.arg_names
    divisible_names = {arg_names[path[0]] for path, attr in src.attrs.items() if _DIVISIBLE in attr}
    types_by_name = {}
    for name, type_name in src.signature.items():
        if type_name == "constexpr":
            continue
        types_by_name[name] = f"{type_name}:16" if name in divisible_names else str(type_name)
    return types_by_name


def _describe_constants(src: Any) -> dict[str, str]:
    """Return a kernel's compiled-in arguments, by name.

    An element of a tuple has the tuple's name and its index, such as "args.0".
    """
    constants = {}
    for (index, *indices), value in src.constants.items():
        name = ".".join([src.fn.arg_names[index], *map(str, indices)])
        constants[name] = str(getattr(value, "cache_key", value))
    return constants


def report_keys(on_key: Callable[[str], None]) -> None:
    """Call on_key with the key of each kernel that a launch needs; do not compile the kernel."""
    import triton

    def refuse(*, key, fn, **_) -> bool:
        on_key(f"{fn.module}.{fn.name} {key}")
        return True

    triton.knobs.runtime.jit_cache_hook = refuse


def skip_products() -> None:
    """Make torch's mm, and addmm with `out`, return on the CPU without computing anything.

    The last layer of liger-kernel multiplies by the weights of a whole vocabulary, which takes long
    on a CPU. In the modes that use this function, nothing reads the result.
    """
    _PRODUCTS.impl("mm", lambda a, b: a.new_zeros(a.shape[0], b.shape[1]), "CPU")
    for name in ("mm.out", "addmm.out"):
        _PRODUCTS.impl(name, lambda *_, out, **__: out, "CPU")


def accept_cpu_tensors() -> None:
    """Register flash-attn's operators for CPU tensors.

    flash-attn registers them for GPU tensors only, although its functions also accept CPU tensors.
    """
    interface = sys.modules["flash_attn.flash_attn_interface"]
    for name in ("forward", "varlen_forward", "backward", "varlen_backward"):
        op = getattr(interface, f"_flash_attn_{name}")
        op.register_kernel("cpu")(op._init_fn)
