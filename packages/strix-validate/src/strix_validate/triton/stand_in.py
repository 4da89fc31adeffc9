# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for Triton's gfx1151 device on a machine without a GPU.

A library's real Python call path runs, including its tuned configurations. Kernels are compiled for
gfx1151, and each launch goes to a function of ours. Tensors stay in host memory. The stand-in
changes the whole process, so install it in a child process only.
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

#: Modules, with those below them, whose asserts want tensors on a GPU.
_ASSERTING = ("aiter", "flash_attn.flash_attn_triton_amd.utils", "sageattention")
_DIVISIBLE = ["tt.divisibility", 16]
#: What skip_products registers, while this process lives.
_PRODUCTS = torch.library.Library("aten", "IMPL")


@dataclass(frozen=True)
class InterceptedLaunch:
    """An intercepted launch: the JIT function, the compiled kernel, and the call's arguments."""

    function: Any
    compiled: Any
    args: tuple
    grid: Any
    options: dict
    is_warmup: bool

    def values(self) -> dict[str, Any]:
        """Return the kernel's arguments by name, including defaults."""
        values = dict(zip(self.function.arg_names, self.args, strict=False)) | self.options
        for parameter in self.function.params:
            if parameter.has_default:
                values.setdefault(parameter.name, parameter.default)
        return values

    def workgroups(self) -> tuple[int, ...]:
        """Return how many workgroups are launched in each direction."""
        size = self.grid(self.values()) if callable(self.grid) else self.grid
        return tuple(int(x) for x in size)


@dataclass(frozen=True)
class Lookup:
    """A kernel that a launch needed, found or compiled.

    key: the kernel's folder in Triton's cache. types: of the arguments by name, with ":16" where
    the value is a multiple of 16. constants: the arguments that are compiled in. files: by file
    name, where they are. compiled: no cache and no package had it.
    """

    name: str
    key: str
    types: dict[str, str]
    constants: dict[str, str]
    options: dict[str, Any]
    files: dict[str, str]
    compiled: bool


def _measure_nothing(calls: bool, call, quantiles=None) -> list[float]:
    if calls:
        call()
    return [0.0] * len(quantiles or (0.5,))


def first_candidate() -> None:
    """Make triton.autotune take its first configuration on the real device too.

    fla's kernels have dozens, which took an H100 minutes to compile; and which one wins is noise.
    """
    from triton.runtime import driver

    driver.active.get_benchmarker = lambda: partial(_measure_nothing, False)


def ignore_amd_options() -> None:
    """Have Triton ignore AMD's launch option waves_per_eu, which its compiler for CUDA refuses."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self, *args, waves_per_eu=None, **options):
        del waves_per_eu
        return original(self, *args, **options)

    JITFunction.run = run


def _driver(all_candidates: bool) -> types.SimpleNamespace:
    """Return a Triton driver that knows its target but has no device.

    triton.autotune measures nothing here, and its first configuration wins. all_candidates: the
    others are launched as well, once each.
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
    """Loads a module as ``python -O`` does, which would compile torch and sympy anew as well."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class KernelLibraries:
    """Finds those modules."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of a module whose asserts are left out, or None for any other."""
        asserts = any(f"{name}.".startswith(f"{known}.") for known in _ASSERTING)
        found = PathFinder.find_spec(name, path) if asserts else None
        if found and isinstance(found.loader, SourceFileLoader):
            found.loader = _WithoutAsserts(found.loader.name, found.loader.path)
        return found


def install(all_candidates: bool = False) -> None:
    """Make Triton and torch report a gfx1151 device, before the kernels' library is imported.

    all_candidates: of triton.autotune, not only the first.
    """
    import triton
    from triton.runtime import interpreter

    sys.meta_path.insert(0, KernelLibraries)
    # computed for each sum and product of integers, and then ignored without TRITON_DEBUG
    unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = unchecked
    triton.runtime.driver.set_active(_driver(all_candidates))
    properties = types.SimpleNamespace(
        multi_processor_count=GPUS[TARGET], gcnArchName=TARGET, warp_size=32
    )
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda device: contextlib.nullcontext()


def intercept(on_launch: Callable[[InterceptedLaunch], None]) -> None:
    """Make every launch compile its kernel and call on_launch instead of running."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self, *args, grid=None, warmup=False, **options):
        compiled = original(self, *args, grid=grid, warmup=True, **options)
        on_launch(InterceptedLaunch(self, compiled, args, grid, options, warmup))
        return compiled

    JITFunction.run = run


def watch(on_lookup: Callable[[Lookup], None]) -> None:
    """Report each kernel that Triton finds or compiles. It looks for each one once per process."""
    import triton
    from triton.runtime.cache import _base32

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        del times
        names = src.fn.arg_names
        constants = {
            ".".join([names[i], *map(str, rest)]): str(getattr(value, "cache_key", value))
            for (i, *rest), value in src.constants.items()
        }
        launch = ("num_warps", "num_stages", "waves_per_eu")  # the last one is AMD's
        options = {name: metadata[name] for name in launch if name in metadata}
        whole = {names[i] for (i, *_), found in src.attrs.items() if _DIVISIBLE in found}
        types = {
            name: f"{kind}:16" if name in whole else str(kind)
            for name, kind in src.signature.items()
            if kind != "constexpr"
        }
        key, files = _base32(metadata["hash"]), dict(metadata_group)
        on_lookup(Lookup(src.name, key, types, constants, options, files, not cache_hit))

    triton.knobs.compilation.listener = listen


def ask(on_key: Callable[[str], None]) -> None:
    """Report the key of each kernel that a launch needs, and have none compiled."""
    import triton

    def refuse(*, key, fn, **about) -> bool:
        on_key(f"{fn.module}.{fn.name} {key}")
        return True

    triton.knobs.runtime.jit_cache_hook = refuse


def skip_products() -> None:
    """Have torch multiply no matrices: without a GPU, zeros by a vocabulary, which nothing reads.

    liger-kernel's last layer does, with `out` or without.
    """
    _PRODUCTS.impl("mm", lambda a, b: a.new_zeros(a.shape[0], b.shape[1]), "CPU")
    for name in ("mm.out", "addmm.out"):
        _PRODUCTS.impl(name, lambda *_, out, **__: out, "CPU")


def accept_cpu_tensors() -> None:
    """Register flash-attn's ops for CPU tensors; upstream registers them for GPU tensors only,
    although their bodies take either.
    """
    interface = sys.modules["flash_attn.flash_attn_interface"]
    for name in ("forward", "varlen_forward", "backward", "varlen_backward"):
        op = getattr(interface, f"_flash_attn_{name}")
        op.register_kernel("cpu")(op._init_fn)
