# SPDX-License-Identifier: BSD-3-Clause
"""Which attention backends this torch has, and whether each one runs.

On a ROCm build with a gfx1151 device only one set of answers is correct: AOTriton, flash attention
usable, and a forced flash call that executes. Elsewhere the tier reports what it can.
"""

import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from strix_validate import TARGET
from strix_validate.attention import flash, sdpa
from strix_validate.checks import (
    PLACEHOLDER,
    Body,
    CannotRun,
    Check,
    Result,
    RunOptions,
    Severity,
    State,
    index_by_name,
    is_emulated,
    make_checks,
    need_gpu,
    require,
)
from strix_validate.doctor.host import shorten
from strix_validate.tiers import Tier, check_from_reason, run_each

#: Environment variables that harm, with what each one does.
HARMFUL = {
    "HSA_OVERRIDE_GFX_VERSION": "makes the GPU pass for another chip: memory faults, slow code",
    "TORCH_ROCM_FA_PREFER_CK": "asks for CK's attention, which has no gfx11 kernels",
    "AMD_SERIALIZE_KERNEL": "waits after every kernel",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "allocates anew for every tensor",
}
#: Prefixes of the environment variables that are recorded.
_PREFIXES = (
    "TORCH_ROCM_",
    "HSA_",
    "HIP_",
    "ROCR_",
    "PYTORCH_",
    "AOTRITON_",
    "FLASH_ATTENTION_",
)
#: What the checks executes-NAME catch: the first sentence of each is the title of its check.
_EXECUTION_REASONS = {
    "flash": (
        "Flash attention, forced alone, executes forward and backward. The known check prints "
        "that it failed and exits 0: https://github.com/lhl/strix-halo-testing"
    ),
    "efficient": (
        "Memory-efficient attention, forced alone, executes forward and backward. Nightly "
        "builds had it broken: https://github.com/lhl/strix-halo-testing"
    ),
    "math": (
        "The math backend, forced alone, executes: what the others are compared with must run "
        "on any device: https://github.com/ROCm/aotriton/issues/210"
    ),
    "default": (
        "Attention as a user calls it executes and is not zero everywhere: "
        "https://github.com/ROCm/aotriton/issues/210"
    ),
    "cudnn": (
        "cuDNN's attention, on NVIDIA only: https://docs.pytorch.org/docs/stable/backends.html"
    ),
}


def checks() -> list[Check]:
    """List one check for each function."""
    return list(_bodies())


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check."""
    yield from run_each(selected, options, _bodies())


def _bodies() -> dict[Check, Body]:
    """Return the function of each check. Those with a docstring have their reason there."""
    before = index_by_name(
        versions,
        environment,
        library,
        preferred,
        compiled_in,
        can_flash,
        can_efficient,
    )
    after = index_by_name(default_is_fused, kernel_name, limit_512, flash_attn)
    bodies = make_checks("backend", before)
    for route, reason in _EXECUTION_REASONS.items():
        check = check_from_reason(f"backend/executes-{route}", reason)
        bodies[check] = partial(_execute, route)
    return bodies | make_checks("backend", after)


def _is_gfx1151(options: RunOptions) -> bool:
    if options.device != "cuda" or not torch.version.hip:
        return False
    properties = torch.cuda.get_device_properties("cuda")
    return properties.gcnArchName.split(":")[0] == TARGET


def _require_rocm(options: RunOptions) -> None:
    if not torch.version.hip:
        raise CannotRun("only a ROCm build of torch has this")
    need_gpu(options, "only a GPU shows this")


def versions(options: RunOptions) -> dict:
    """The build of torch fits the device.

    A torch for CUDA or the CPU, which a solver takes when nothing asks for ROCm, leaves the GPU
    idle: https://github.com/ROCm/TheRock/issues/1364
    """
    measured = {
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "device": options.device,
    }
    try:
        import triton

        measured["triton"] = triton.__version__
    except ImportError:
        measured["triton"] = None
    if options.device != "cuda":
        return measured
    properties = torch.cuda.get_device_properties("cuda")
    measured["name"] = properties.name
    measured["units"] = properties.multi_processor_count
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        built_for = torch.cuda.get_arch_list()
        measured["arch"] = arch
        measured["built_for"] = ",".join(built_for)
        require(arch in built_for, f"this torch has no kernels for {arch}")
    return measured


def environment(options: RunOptions) -> Result:
    """No variable is set that harms.

    HSA_OVERRIDE_GFX_VERSION, from guides of older chips, gives memory faults with native kernels:
    https://github.com/ROCm/legacy-rocm-build/issues/5824
    """
    del options
    harmful = [f"{name}: {effect}" for name, effect in HARMFUL.items() if os.environ.get(name)]
    reported = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            # records contain no paths of the machine
            reported[name] = "a path" if "/" in value else value
    # for a GPU of another vendor these variables mean nothing
    state = State.FAILED if harmful and torch.version.hip else State.PASSED
    severity = Severity.WARNING if harmful else None
    return Result(PLACEHOLDER, state, "; ".join(harmful), reported, severity)


def library(options: RunOptions) -> dict:
    """AOTriton is the attention library that is mapped, one version of it, with its images beside.

    Wheels came without it, or without images for the chip, and fell back to math in silence:
    https://github.com/ROCm/legacy-rocm-build/issues/5404
    """
    _require_rocm(options)
    q = torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16)
    sdpa.call(sdpa.ROUTES["flash"], q, q, q)  # maps the library if it is not linked
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in lines if "libaotriton" in line}
    files = sorted({Path(path).resolve() for path in mapped})
    require(files, "no libaotriton_v2.so is mapped: this torch has no AOTriton")
    require(len(files) == 1, f"more than one AOTriton is mapped: {files}")
    file = files[0]
    images = file.parent / "aotriton.images"
    folders = sorted(folder.name for folder in images.glob("*") if folder.is_dir())
    require(folders, f"{images} has no images")
    if _is_gfx1151(options):
        has_images = any(name.startswith("amd-gfx11") for name in folders)
        require(has_images, f"images for {folders} only")
    return {
        "file": shorten(str(file)),
        "version": aotriton_version(file),
        "images": ",".join(folders),
    }


def aotriton_version(file: Path) -> str:
    """Return the version in the library's .comment section, such as "0.13.0", or "unknown"."""
    from elftools.elf.elffile import ELFFile

    with file.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".comment")
        text = section.data().decode(errors="replace") if section else ""
    match = re.search(r"AOTriton (\d+\.\d+\.\d+)", text)
    return match.group(1) if match else "unknown"


def preferred(options: RunOptions) -> dict:
    """AOTriton is preferred to CK.

    CK's attention has no kernels for gfx11:
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/Context.cpp
    """
    _require_rocm(options)
    preference = torch.backends.cuda.preferred_rocm_fa_library()
    name = str(preference).rsplit(".", 1)[-1]
    if _is_gfx1151(options):
        require(name.lower() != "ck", "CK is preferred (TORCH_ROCM_FA_PREFER_CK?)")
    return {"library": name}


def compiled_in(options: RunOptions) -> dict:
    """This torch was built with flash attention.

    Builds without USE_FLASH_ATTENTION have only the math backend, up to 19 times slower:
    https://github.com/ROCm/legacy-rocm-build/issues/6034
    """
    need_gpu(options, "only a GPU shows this")
    available = torch.backends.cuda.is_flash_attention_available()
    require(available, "built without flash attention")
    return {"available": available}


def _require_usable(options: RunOptions, can_use: Callable) -> dict:
    """Require that torch would use a backend for a plain fp16 call; name its reason if not."""
    need_gpu(options, "only a GPU shows this")
    q = torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        usable = can_use(parameters, debug=True)
    require(usable, sdpa.refusal("not usable.", recorded))
    return {"usable": usable}


def can_flash(options: RunOptions) -> dict:
    """torch would use flash attention for a plain fp16 call; if not it says why.

    Up to torch 2.12 gfx1151 needed TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1:
    https://github.com/pytorch/pytorch/pull/184288
    """
    return _require_usable(options, torch.backends.cuda.can_use_flash_attention)


def can_efficient(options: RunOptions) -> dict:
    """torch would use memory-efficient attention for a plain fp16 call; if not it says why.

    It serves fp32 and masks, which flash attention refuses:
    https://github.com/pytorch/pytorch/issues/166397
    """
    return _require_usable(options, torch.backends.cuda.can_use_efficient_attention)


def _execute(route: str, options: RunOptions) -> dict:
    """Run one route forward and backward; require that it ran and that its output is not zero."""
    leaves = []
    for _ in range(3):
        leaf = torch.randn(2, 4, 200, 64, device=options.device, dtype=torch.float16)
        leaves.append(leaf.requires_grad_())
    if route == "cudnn":
        if options.device != "cuda" or torch.version.hip:
            raise CannotRun("only a GPU of NVIDIA has cuDNN")
        function = sdpa.forced(SDPBackend.CUDNN_ATTENTION)
    else:
        function = sdpa.ROUTES[route]
    out, operators = sdpa.call(function, *leaves, is_causal=True)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    ran = sdpa.kind_of(operators)
    require(route in (ran, "default"), f"{route} was asked for and {ran} ran")
    require(out.any(), "the output is zero everywhere")
    return {"operator": ran}


def default_is_fused(options: RunOptions) -> dict:
    """A call that asks for nothing gets a fused backend, not math.

    A check that exits 0 whatever ran proves nothing:
    https://github.com/ROCm/TheRock/issues/1364
    """
    q = torch.randn(1, 4, 256, 64, device=options.device, dtype=torch.float16)
    _, operators = sdpa.call(sdpa.ROUTES["default"], q, q, q, is_causal=True)
    ran = sdpa.kind_of(operators)
    require(ran != "math", "math ran")
    if _is_gfx1151(options):
        require(ran == "flash", f"{ran} ran")
    return {"operator": ran}


def kernel_name(options: RunOptions) -> dict:
    """The GPU kernel behind a forced flash call is one of attention.

    An operator can be named flash and launch a chain of matrix products; the profiler sees the
    launches. A gfx1151 kernel of AOTriton is attn_fwd:
    https://github.com/ROCm/TheRock/issues/1408
    """
    need_gpu(options, "only a GPU has kernels to profile")
    from torch.profiler import ProfilerActivity, profile

    q = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.float16)
    sdpa.call(sdpa.ROUTES["flash"], q, q, q)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        sdpa.call(sdpa.ROUTES["flash"], q, q, q)
        torch.cuda.synchronize()
    launched = set()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launched.add(event.name)
    if not launched and is_emulated(options):
        raise CannotRun("the emulated device shows its launches to no profiler")
    names = sorted(launched)
    pattern = re.compile(r"attn_fwd|flash|fmha", re.IGNORECASE)
    attention_kernels = [name for name in names if pattern.search(name)]
    require(attention_kernels, f"no attention kernel was launched, but {names or 'none'}")
    if _is_gfx1151(options):
        is_aotriton = any("attn_fwd" in name for name in attention_kernels)
        require(is_aotriton, f"launched {attention_kernels}")
    short_names = [re.sub(r"[<(].*", "", name)[:80] for name in attention_kernels]
    return {"kernels": ", ".join(short_names)}


def limit_512(options: RunOptions) -> dict:
    """Head dim 512 is not offered as flash attention on gfx11, which has no kernel for it.

    torch 2.13 offered it and gave garbage: https://github.com/pytorch/pytorch/issues/189849
    """
    _require_rocm(options)
    q = torch.randn(1, 1, 128, 512, device="cuda", dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    usable = torch.backends.cuda.can_use_flash_attention(parameters)
    if _is_gfx1151(options):
        require(not usable, "flash attention is offered for head dim 512")
    return {"usable": usable}


def flash_attn(options: RunOptions) -> dict:
    """The flash-attn package imports and says which kernels it uses.

    Its wheels wanted an environment variable, or replaced Triton:
    https://github.com/Dao-AILab/flash-attention/issues/2799
    """
    del options
    if importlib.util.find_spec("flash_attn") is None:
        raise CannotRun("flash_attn is not installed")
    return {"backend": flash.backend()}


TIER = Tier(checks, run)
