# SPDX-License-Identifier: BSD-3-Clause
"""Import vLLM's Triton kernels from a folder of its source, without its compiled extension.

The modules that define kernels, the functions that launch them and some helpers are vLLM's own. The
other modules of vLLM that they import are replaced: vLLM's platform by one that describes the GPU
TARGET, vLLM's wrapper of Triton by Triton, and the others by mocks. The replacements affect the
whole process, so call :func:`install` in a child process only.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from strix_validate import GPUS, TARGET, VLLM_DEVICE_NAME
from strix_validate.checks import CannotRun
from strix_validate.triton.call import FunctionCall

ATTENTION_MODULE = "vllm.v1.attention.ops.triton_unified_attention"
CACHE_MODULE = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
MOE_MODULE = "vllm.model_executor.layers.fused_moe.fused_moe"
ROPE_MODULE = "vllm.model_executor.layers.rotary_embedding.mrope"
NORM_MODULE = "vllm.model_executor.determinism.batch_invariant"
MXFP4_MODULE = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
#: Modules with kernels, which are loaded from the source.
KERNELS = (
    ATTENTION_MODULE,
    CACHE_MODULE,
    MOE_MODULE,
    ROPE_MODULE,
    NORM_MODULE,
    MXFP4_MODULE,
)
#: Modules with functions that the kernels' modules use. They are loaded from the source as well.
_HELPERS = (
    "vllm.envs",
    "vllm.utils.math_utils",
    "vllm.v1.attention.ops.triton_attention_helpers",
    "vllm.v1.kv_cache_interface",
    "vllm.model_executor.layers.fused_moe.moe_align_block_size",
    "vllm.model_executor.layers.fused_moe.utils",
    "vllm.model_executor.layers.quantization.utils.quant_utils",
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
    "vllm.v1.spec_decode.fly",
    "vllm.v1.watermarking.prfs.base",
    "vllm.v1.watermarking.prfs.philox",
)
#: Modules and packages of sampling, attention, linear attention, quantized products and LoRA. The
#: modules, and those in the packages, are loaded from the source. A package itself is a mock.
_FAMILIES = (
    "vllm.v1.sample.ops.topk_topp_triton",
    "vllm.v1.worker.gpu.sample",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
    "vllm.v1.attention.ops.triton_decode_attention",
    "vllm.v1.attention.ops.triton_merge_attn_states",
    "vllm.v1.attention.ops.triton_prefill_attention",
    "vllm.v1.attention.ops.triton_unified_attention_diffkv",
    "vllm.third_party.flash_linear_attention.ops",
    "vllm.model_executor.layers.mamba.ops",
    "vllm.model_executor.layers.quantization.awq_triton",
    "vllm.model_executor.layers.quantization.utils.fp8_utils",
    "vllm.model_executor.kernels.linear.mixed_precision.rdna_hybrid_w4a16",
    "vllm.lora.ops.triton_ops",
)
_MOE = "vllm.model_executor.layers.fused_moe"
#: Base classes of vLLM's classes, by module. They are empty classes instead of mocks, because a
#: class cannot inherit from two MagicMocks.
_CLASSES = {
    f"{_MOE}.modular_kernel": ("FusedMoEExpertsModular", "FusedMoEExpertsMonolithic"),
    f"{_MOE}.experts.lora_experts_mixin": ("LoRAExpertsMixin",),
}
#: The module from which FLA's kernels import exp and log. These are aliases of Triton's functions.
_EXP = "vllm.third_party.flash_linear_attention.ops.op"
#: Functions of vllm.platforms.rocm that return True on the GPU TARGET, by default gfx1151.
_GPU_IS = ("on_gfx1x", "on_gfx11", f"on_{TARGET[:-1]}x", f"on_{TARGET}", "on_rdna")
#: The compute capability as vLLM counts it: 115 is (11, 5).
_CAPABILITY = int(TARGET[3:6])


def find(folder: Path | None) -> Path:
    """Return the folder that contains vllm/.

    Args:
        folder: A source tree of vLLM; None is the installed package.

    Raises:
        CannotRun: vLLM is not installed, and no folder was passed.
        ValueError: The folder is not a source tree of vLLM.
    """
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise CannotRun("vllm is not installed, and no source was passed with --vllm-source")
        return Path(spec.submodule_search_locations[0]).parent
    if not (folder / "vllm" / "platforms").is_dir():
        raise ValueError(f"{folder} has no vllm/platforms: it is not a source tree of vLLM")
    return folder.resolve()


def version(folder: Path) -> str:
    """Return vLLM's version from an sdist's PKG-INFO or the installed metadata, or "unknown"."""
    for file in (folder / "PKG-INFO", *folder.glob("vllm-*.dist-info/METADATA")):
        if not file.is_file():
            continue
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Version: "):
                return line.split()[1]
        return "unknown"
    return "unknown"


def install(folder: Path) -> None:
    """Make ``import vllm...`` load the modules of kernels from a folder, and mocks for others."""
    sys.meta_path.insert(0, Finder(folder))
    # If this module was not loaded first, ``from vllm import envs`` would return a mock, in which
    # every setting is true.
    importlib.import_module("vllm.envs")
    # vLLM imports its copy of triton_kernels as the top-level package triton_kernels.
    sys.path.append(str(third_party(folder)))


@dataclass(frozen=True)
class VllmCall(FunctionCall):
    """A call of vLLM's kernels by a function of this subpackage.

    Attributes:
        source: The folder that contains vllm/. It must be set before the call is made.
    """

    source: Path = Path()

    def prepare(self) -> str:
        """Make vLLM importable from its source; return its version."""
        install(self.source)
        return f"vLLM's kernels: {version(self.source)}"


def third_party(folder: Path) -> Path:
    """Return the folder in which vLLM's build puts triton_kernels, which the sdist lacks."""
    return folder / "vllm" / "third_party"


def generation() -> str:
    """Return the version of triton_kernels' interface, like vLLM's get_triton_kernels_version."""
    try:
        importlib.import_module("triton_kernels.matmul_ogs")
    except ImportError:
        return "3.8"
    tensor = importlib.import_module("triton_kernels.tensor")
    return "3.6" if hasattr(tensor, "SparseMatrix") else "3.5.1"


def device_name() -> str:
    """Return the GPU's name as it appears in the file names of vLLM's tuning tables.

    Without an NVIDIA GPU, return the name of gfx1151.
    """
    if torch.version.hip or not torch.cuda.is_available():
        return VLLM_DEVICE_NAME
    # The stand-in for a gfx1151 device has no attribute `name`, so the default is used.
    name = getattr(torch.cuda.get_device_properties(0), "name", VLLM_DEVICE_NAME)
    return re.sub(r"[\s/]+", "_", name)


class _Platform:
    """A stand-in for vllm.platforms.current_platform on gfx1151.

    Methods that are not defined here return False.
    """

    is_rocm = is_cuda_alike = staticmethod(lambda: True)
    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)

    def has_device_capability(self, capability, device_id: int = 0) -> bool:
        if isinstance(capability, tuple):
            capability = capability[0] * 10 + capability[1]
        return capability <= _CAPABILITY

    def __getattr__(self, name: str):
        return lambda *args, **options: False


class _StandIn(types.ModuleType):
    """A module in which names are mocks, except SparseMatrix, which is absent.

    Names that begin with two underscores are absent too, unless they were set. Only some versions
    of triton_kernels have SparseMatrix, so :func:`generation` looks for it.
    """

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "SparseMatrix":
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def mock(name: str) -> types.ModuleType:
    """Return a stand-in for a module of vLLM that is not loaded from the source."""
    module: Any = _StandIn(name)
    for class_name in _CLASSES.get(name, ()):
        setattr(module, class_name, type(class_name, (), {}))
    vars(module).update(_ANSWERS.get(name, {}))
    if name == "vllm.triton_utils":
        import triton
        from triton import language
        from triton.language.extra import libdevice

        module.triton = triton
        module.tl = language
        module.tldevice = libdevice
    if name == _EXP:
        # The interpreter replaces Triton's functions when a kernel starts. So a function is looked
        # up only when it is called.
        from triton import language

        module.exp = lambda x: language.exp(x)
        module.log = lambda x: language.log(x)
        module.exp2 = lambda x: language.exp2(x)
        module.log2 = lambda x: language.log2(x)
    return module


#: Functions of vllm.platforms.rocm that return False, unless _GPU_IS lists them.
_GPU_IS_NOT = (
    "on_mi3xx",
    "on_rdna4",
    "on_cdna",
    "on_gfx9",
    "on_gfx90a",
    "on_gfx942",
    "on_gfx950",
    "on_gfx12x",
    "on_gfx1250",
    "on_gfx1100",
    "on_gfx115x",
    "on_gfx1151",
)
#: Attributes that a mocked module has instead of mocks, by module.
_ANSWERS: dict[str, dict[str, Any]] = {
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.platforms.rocm": {
        **dict.fromkeys(_GPU_IS_NOT, lambda: False),
        **dict.fromkeys(_GPU_IS, lambda: True),
    },
    # Without a configuration, vLLM reads tiles from the tuning table for the device's name.
    _MOE: {"get_config": lambda: None},
    "vllm.utils.platform_utils": {
        "get_device_name_as_file_name": lambda *_: device_name(),
        "num_compute_units": lambda device=None: GPUS[TARGET],
    },
    "vllm.utils.torch_utils": {
        "async_tensor_h2d": lambda x, **place: torch.as_tensor(x).to(**place),
    },
    "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1, "NULL_BLOCK_ID": 0},
    # No plugin defines a cache dtype of its own, so no dtype has a handler.
    "vllm.config.cache": {"get_kv_cache_dtype_handler": lambda dtype: None},
    "vllm.utils.import_utils": {"get_triton_kernels_version": generation},
}


def _runs_as_is(name: str) -> bool:
    """Return whether a module of vLLM is loaded from the source instead of being mocked."""
    if name in KERNELS or name in _HELPERS:
        return True
    if name == _EXP and os.environ.get("TRITON_INTERPRET"):
        return False
    return any(f"{name}.".startswith(f"{family}.") for family in _FAMILIES)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find and load modules of vLLM, some from files in a folder and all others as mocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module of vLLM, either for its file or for a mock."""
        if name != "vllm" and not name.startswith("vllm."):
            return None
        file = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        if _runs_as_is(name) and file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        # Every mock is a package, so that anything can be imported from it.
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        """Return a mock."""
        return mock(spec.name)

    def exec_module(self, module):
        """Leave a mock as it is."""
