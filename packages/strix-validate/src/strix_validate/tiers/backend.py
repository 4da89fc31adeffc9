# SPDX-License-Identifier: BSD-3-Clause
"""Check which attention backends this torch has, and whether each one runs.

On a ROCm build with a gfx1151 device, torch must use AOTriton, flash attention must be usable, and
a call that forces flash attention must execute. On other devices, some checks are skipped, and
others require less.
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
from strix_validate.doctor.virtual_packages import REQUIRED
from strix_validate.tiers import Tier, check_from_purpose, run_each

#: Harmful environment variables, with the effect of each.
HARMFUL = {
    "HSA_OVERRIDE_GFX_VERSION": (
        "makes the GPU report another chip, which causes memory faults and slow code"
    ),
    "TORCH_ROCM_FA_PREFER_CK": "selects CK's attention, which has no gfx11 kernels",
    "AMD_SERIALIZE_KERNEL": "makes the host wait for every kernel",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "makes torch allocate memory anew for every tensor",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "makes torch allocate memory anew for every tensor",
}
#: Values of these variables that change nothing: the GPU's own version, and 0, which turns a
#: setting off.
_HARMLESS = dict.fromkeys(HARMFUL, "0") | {
    "HSA_OVERRIDE_GFX_VERSION": REQUIRED["__amdgpu_arch"],
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
#: Purposes of the checks executes-NAME. The first sentence of a purpose is the title of its check.
_EXECUTION_PURPOSES = {
    "flash": (
        "Flash attention executes forward and backward if no other backend is allowed. A "
        "well-known test script prints that this failed, and still exits 0: "
        "https://github.com/lhl/strix-halo-testing"
    ),
    "efficient": (
        "Memory-efficient attention executes forward and backward if no other backend is allowed. "
        "It was broken in nightly builds: https://github.com/lhl/strix-halo-testing"
    ),
    "math": (
        "The math backend executes if no other backend is allowed. torch falls back to it, so it "
        "must run on any device: https://github.com/ROCm/aotriton/issues/210"
    ),
    "default": (
        "Attention with torch's own choice of backend executes, and its output is not zero "
        "everywhere: https://github.com/ROCm/aotriton/issues/210"
    ),
    "cudnn": (
        "cuDNN's attention executes, on NVIDIA only: "
        "https://docs.pytorch.org/docs/stable/backends.html"
    ),
}


def checks() -> list[Check]:
    """List one check for each function."""
    return list(_bodies())


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check."""
    yield from run_each(selected, options, _bodies())


def _bodies() -> dict[Check, Body]:
    """Return the function of each check.

    The purpose of a check is its function's docstring, or an entry of _EXECUTION_PURPOSES.
    """
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
    for route, purpose in _EXECUTION_PURPOSES.items():
        check = check_from_purpose(f"backend/executes-{route}", purpose)
        bodies[check] = partial(_execute, route)
    return bodies | make_checks("backend", after)


def _is_gfx1151(options: RunOptions) -> bool:
    if options.device != "cuda" or not torch.version.hip:
        return False
    properties = torch.cuda.get_device_properties("cuda")
    return properties.gcnArchName.split(":")[0] == TARGET


def _require_rocm(options: RunOptions) -> None:
    if not torch.version.hip:
        raise CannotRun("only a ROCm build of torch has AOTriton")
    need_gpu(options, "only a GPU's attention backends are checked")


def versions(options: RunOptions) -> dict:
    """The build of torch fits the device.

    If nothing requires ROCm, a solver may install a torch for CUDA or the CPU, which does not use
    the GPU: https://github.com/ROCm/TheRock/issues/1364
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
    """No harmful environment variable is set.

    Guides for older chips set HSA_OVERRIDE_GFX_VERSION. With kernels built for this chip, the
    variable causes memory faults: https://github.com/ROCm/legacy-rocm-build/issues/5824
    """
    del options
    harmful = []
    for name, effect in HARMFUL.items():
        value = os.environ.get(name)
        if value and value != _HARMLESS[name]:
            harmful.append(f"{name}: {effect}")
    reported = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            # a record must not contain a path of the machine
            reported[name] = "a path" if "/" in value else value
    # A torch that was not built for ROCm ignores these variables, except for those of memory
    # caching, which do not make results wrong.
    message = "; ".join(harmful)
    if harmful and torch.version.hip:
        return Result(PLACEHOLDER, State.FAILED, message, reported, Severity.ERROR)
    severity = Severity.WARNING if harmful else None
    return Result(PLACEHOLDER, State.PASSED, message, reported, severity)


def library(options: RunOptions) -> dict:
    """The process has loaded one AOTriton library, which has its kernel images beside it.

    Some wheels had no AOTriton, or no images for this chip. torch then silently used the math
    backend: https://github.com/ROCm/legacy-rocm-build/issues/5404
    """
    _require_rocm(options)
    q = torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16)
    sdpa.call(sdpa.ROUTES["flash"], q, q, q)  # this call loads the library if it is not yet loaded
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in lines if "libaotriton" in line}
    files = sorted({Path(path).resolve() for path in mapped})
    require(files, "no libaotriton_v2.so is loaded: this torch has no AOTriton")
    require(len(files) == 1, f"more than one AOTriton is loaded: {files}")
    file = files[0]
    images = file.parent / "aotriton.images"
    folders = sorted(folder.name for folder in images.glob("*") if folder.is_dir())
    require(folders, f"{images} contains no kernel images")
    if _is_gfx1151(options):
        has_images = any(name.startswith("amd-gfx11") for name in folders)
        require(has_images, f"AOTriton has kernel images for {folders} only")
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
        message = "torch prefers CK's attention: is TORCH_ROCM_FA_PREFER_CK set?"
        require(name.lower() != "ck", message)
    return {"library": name}


def compiled_in(options: RunOptions) -> dict:
    """This torch was built with flash attention.

    Builds without USE_FLASH_ATTENTION can fall back to math, which is up to 19 times slower:
    https://github.com/ROCm/legacy-rocm-build/issues/6034
    """
    need_gpu(options, "only a GPU's attention backends are checked")
    available = torch.backends.cuda.is_flash_attention_available()
    require(available, "this torch was built without flash attention")
    return {"available": available}


def _require_usable(options: RunOptions, can_use: Callable) -> dict:
    """Require that torch can use a backend for a plain fp16 call; a failure has torch's reason."""
    need_gpu(options, "only a GPU's attention backends are checked")
    q = torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        usable = can_use(parameters, debug=True)
    require(usable, sdpa.describe_refusal("not usable.", recorded))
    return {"usable": usable}


def can_flash(options: RunOptions) -> dict:
    """torch can use flash attention for a plain fp16 call.

    Up to torch 2.12, gfx1151 needed TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1:
    https://github.com/pytorch/pytorch/pull/184288
    """
    return _require_usable(options, torch.backends.cuda.can_use_flash_attention)


def can_efficient(options: RunOptions) -> dict:
    """torch can use memory-efficient attention for a plain fp16 call.

    This backend accepts fp32 and masks, which flash attention refuses:
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
        function = sdpa.force_backend(SDPBackend.CUDNN_ATTENTION)
    else:
        function = sdpa.ROUTES[route]
    out, operators = sdpa.call(function, *leaves, is_causal=True)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    ran = sdpa.find_backend(operators)
    require(route in (ran, "default"), f"{route} was requested, and {ran} ran")
    require(out.any(), "the output is zero everywhere")
    return {"operator": ran}


def default_is_fused(options: RunOptions) -> dict:
    """A call that forces no backend runs a fused backend, not math.

    A check that exits 0 whichever backend ran proves nothing:
    https://github.com/ROCm/TheRock/issues/1364
    """
    q = torch.randn(1, 4, 256, 64, device=options.device, dtype=torch.float16)
    _, operators = sdpa.call(sdpa.ROUTES["default"], q, q, q, is_causal=True)
    ran = sdpa.find_backend(operators)
    require(ran != "math", "the math backend ran")
    if _is_gfx1151(options):
        require(ran == "flash", f"the backend {ran} ran, not flash")
    return {"operator": ran}


def kernel_name(options: RunOptions) -> dict:
    """A forced flash call launches an attention kernel on the GPU.

    An operator that is named flash can launch a chain of matrix products instead, which the
    profiler shows. AOTriton's kernel for gfx1151 is attn_fwd:
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
        raise CannotRun("torch's profiler cannot record launches on the emulated device")
    names = sorted(launched)
    pattern = re.compile(r"attn_fwd|flash|fmha", re.IGNORECASE)
    attention_kernels = [name for name in names if pattern.search(name)]
    require(attention_kernels, f"no attention kernel among those launched: {names or 'none'}")
    if _is_gfx1151(options):
        is_aotriton = any("attn_fwd" in name for name in attention_kernels)
        require(is_aotriton, f"{attention_kernels} launched, not AOTriton's attn_fwd")
    short_names = [re.sub(r"[<(].*", "", name)[:80] for name in attention_kernels]
    return {"kernels": ", ".join(short_names)}


def limit_512(options: RunOptions) -> dict:
    """torch does not offer flash attention for head dim 512 on gfx11, which has no kernel for it.

    torch 2.13 offered it and returned garbage: https://github.com/pytorch/pytorch/issues/189849
    """
    _require_rocm(options)
    q = torch.randn(1, 1, 128, 512, device="cuda", dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    usable = torch.backends.cuda.can_use_flash_attention(parameters)
    if _is_gfx1151(options):
        require(not usable, "torch offers flash attention for head dim 512")
    return {"usable": usable}


def flash_attn(options: RunOptions) -> dict:
    """The flash-attn package can be imported and reports which kernels it uses.

    Its wheels required an environment variable, or replaced the installed Triton:
    https://github.com/Dao-AILab/flash-attention/issues/2799
    """
    del options
    if importlib.util.find_spec("flash_attn") is None:
        raise CannotRun("flash_attn is not installed")
    return {"backend": flash.backend()}


TIER = Tier(checks, run)
