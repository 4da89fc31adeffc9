# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's Triton kernels from a folder of its source: no installation, no compiled extension.

The modules that define kernels, with the Python functions that launch them, are vLLM's own. What
else they import is replaced: the platform by gfx1151's answers, Triton's wrapper by Triton, and any
other module by mocks. That changes the process: do it in a child process only.
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

from strix_validate import GPUS, NAMED, TARGET
from strix_validate.checks import CannotRun
from strix_validate.triton.call import FunctionCall

#: The modules that run as they are in the source.
KERNELS = (
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.rotary_embedding.mrope",
    "vllm.model_executor.determinism.batch_invariant",
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe",
)
#: What they compute with.
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
#: Of sampling, MLA, linear attention, quantized products and LoRA: these, and what is below them.
_FAMILIES = (
    "vllm.v1.sample.ops.topk_topp_triton",
    "vllm.v1.worker.gpu.sample",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
    "vllm.v1.attention.ops.triton_decode_attention",
    "vllm.v1.attention.ops.triton_merge_attn_states",
    "vllm.v1.attention.ops.triton_prefill_attention",
    "vllm.third_party.flash_linear_attention.ops",
    "vllm.model_executor.layers.mamba.ops",
    "vllm.model_executor.layers.quantization.awq_triton",
    "vllm.model_executor.layers.quantization.utils.fp8_utils",
    "vllm.model_executor.kernels.linear.mixed_precision.rdna_hybrid_w4a16",
    "vllm.lora.ops.triton_ops",
)
#: Mocks that are base classes: of two MagicMocks nothing can inherit.
_MOE = "vllm.model_executor.layers.fused_moe"
_CLASSES = {
    f"{_MOE}.modular_kernel": ("FusedMoEExpertsModular", "FusedMoEExpertsMonolithic"),
    f"{_MOE}.experts.lora_experts_mixin": ("LoRAExpertsMixin",),
}
#: Where FLA's kernels have exp from, by another name.
_EXP = "vllm.third_party.flash_linear_attention.ops.op"
#: Of vllm.platforms.rocm, the questions whose answer is yes on the GPU.
_GPU_IS = ("on_gfx1x", "on_gfx11", f"on_{TARGET[:-1]}x", f"on_{TARGET}", "on_rdna")
#: As vLLM counts compute capabilities: 115 is (11, 5).
_CAPABILITY = int(TARGET[3:6])


def find(folder: Path | None) -> Path:
    """Return the folder that contains vllm/: the given one, or that of the installed package.

    Raises:
        CannotRun: vLLM is not installed, and no folder was given.
        ValueError: the given folder is not a source tree of vLLM.
    """
    if folder is None:
        found = importlib.util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            raise CannotRun("vllm is not installed, and --vllm-source names no source of it")
        return Path(found.submodule_search_locations[0]).parent
    if not (folder / "vllm" / "platforms").is_dir():
        raise ValueError(f"{folder} has no vllm/platforms: it is not a source tree of vLLM")
    return folder.resolve()


def version(folder: Path) -> str:
    """Return what the source calls itself: from PKG-INFO of an sdist or the installed metadata."""
    for file in (folder / "PKG-INFO", *folder.glob("vllm-*.dist-info/METADATA")):
        if file.is_file():
            lines = file.read_text(errors="replace").splitlines()
            return next((x.split()[1] for x in lines if x.startswith("Version: ")), "unknown")
    return "unknown"


def install(folder: Path) -> None:
    """Make ``import vllm...`` give modules of the folder and mocks."""
    sys.meta_path.insert(0, Finder(folder))
    # ``from vllm import envs`` would find a mock, whose every setting is true, until this is there
    importlib.import_module("vllm.envs")
    # vLLM gives its copy of triton_kernels that name
    sys.path.append(str(third_party(folder)))


@dataclass(frozen=True)
class VllmCall(FunctionCall):
    """A launch of vLLM's kernels by a function of this subpackage; source: vLLM's folder."""

    source: Path = Path()

    def prepare(self) -> str:
        """Make vLLM importable from its source; return its version."""
        install(self.source)
        return f"vLLM's kernels: {version(self.source)}"


def third_party(folder: Path) -> Path:
    """Return where vLLM's build puts triton_kernels, which are not in the sdist."""
    return folder / "vllm" / "third_party"


def generation() -> str:
    """Answer as vLLM's get_triton_kernels_version does: which interface triton_kernels have."""
    try:
        importlib.import_module("triton_kernels.matmul_ogs")
    except ImportError:
        return "3.8"
    tensor = importlib.import_module("triton_kernels.tensor")
    return "3.6" if hasattr(tensor, "SparseMatrix") else "3.5.1"


def device_name() -> str:
    """Return how vLLM names the GPU in files of tuned tiles: gfx1151, or NVIDIA's that is here."""
    if torch.version.hip or not torch.cuda.is_available():
        return NAMED
    # the stand-in for a gfx1151 has no name
    return re.sub(r"[\s/]+", "_", getattr(torch.cuda.get_device_properties(0), "name", NAMED))


class _Platform:
    """vllm.platforms.current_platform of a gfx1151; a question it does not know gets a no."""

    is_rocm = is_cuda_alike = staticmethod(lambda: True)
    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)

    def has_device_capability(self, capability, device_id: int = 0) -> bool:
        if isinstance(capability, tuple):
            capability = capability[0] * 10 + capability[1]
        return capability <= _CAPABILITY

    def __getattr__(self, name: str):
        return lambda *args, **options: False


class _StandIn(types.ModuleType):
    """A module whose every name is a mock, but that of a newer generation of triton_kernels."""

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "SparseMatrix":
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def mock(name: str) -> types.ModuleType:
    """Return what stands for a module of vLLM that kernels only import."""
    module: Any = _StandIn(name)
    for class_name in _CLASSES.get(name, ()):
        setattr(module, class_name, type(class_name, (), {}))
    vars(module).update(_ANSWERS.get(name, {}))
    if name == "vllm.triton_utils":
        import triton
        from triton import language
        from triton.language.extra import libdevice

        module.triton, module.tl = triton, language
        module.tldevice = libdevice
    if name == _EXP:
        # the interpreter replaces Triton's functions when a kernel starts: look each up then
        from triton import language

        module.exp, module.log = lambda x: language.exp(x), lambda x: language.log(x)
        module.exp2, module.log2 = lambda x: language.exp2(x), lambda x: language.log2(x)
    return module


#: Of vllm.platforms.rocm, the questions whose answer is no.
_GPU_IS_NOT = (
    *("on_mi3xx", "on_rdna4", "on_cdna"),
    *(f"on_gfx{n}" for n in ("9", "90a", "942", "950", "12x", "1250", "1100", "115x", "1151")),
)
#: What kernels and their functions take from mocks, by module.
_ANSWERS: dict[str, dict[str, Any]] = {
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.platforms.rocm": {
        **dict.fromkeys(_GPU_IS_NOT, lambda: False), **dict.fromkeys(_GPU_IS, lambda: True),
    },
    _MOE: {"get_config": lambda: None},  # no tiles but those of the tables, named after the device
    "vllm.utils.platform_utils": {
        "get_device_name_as_file_name": lambda *_: device_name(),
        "num_compute_units": lambda device=None: GPUS[TARGET],
    },
    "vllm.utils.torch_utils": {
        "async_tensor_h2d": lambda x, **place: torch.as_tensor(x).to(**place),
    },
    "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1, "NULL_BLOCK_ID": 0},
    "vllm.config.cache": {"get_kv_cache_dtype_handler": lambda kind: None},  # of no plugin
    "vllm.utils.import_utils": {"get_triton_kernels_version": generation},
}  # fmt: skip


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the whole of vllm: modules of a folder, and mocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        """Find the file of a module with kernels; any other is a mock."""
        if name != "vllm" and not name.startswith("vllm."):
            return None
        file = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        family = any(f"{name}.".startswith(f"{known}.") for known in _FAMILIES)
        family &= not (name == _EXP and os.environ.get("TRITON_INTERPRET"))
        if (family or name in (*KERNELS, *_HELPERS)) and file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        # every mock counts as a package, so that anything can be imported from it
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        """Return a mock."""
        return mock(spec.name)

    def exec_module(self, module):
        """Leave a mock as it is."""
