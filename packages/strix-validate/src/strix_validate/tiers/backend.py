# SPDX-License-Identifier: BSD-3-Clause
"""Which attention backends this torch has, and whether each one runs.

On a ROCm build with a gfx1151 device only one set of answers is correct: AOTriton, flash attention
usable, and a forced flash call that executes. Elsewhere the tier reports what it can.
"""

import importlib.util
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from strix_validate import TARGET
from strix_validate.attention import flash, sdpa
from strix_validate.checks import (
    Body,
    CannotRun,
    Check,
    Result,
    RunOptions,
    Severity,
    State,
    described,
    is_emulated,
    named,
    need_gpu,
    require,
)
from strix_validate.doctor.host import shorten
from strix_validate.tiers import run_each

HARMFUL = {
    "HSA_OVERRIDE_GFX_VERSION": "makes the GPU pass for another chip: memory faults, slow code",
    "TORCH_ROCM_FA_PREFER_CK": "asks for CK's attention, which has no gfx11 kernels",
    "AMD_SERIALIZE_KERNEL": "waits after every kernel",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "allocates anew for every tensor",
}


def checks() -> dict[Check, Body]:
    """Return one check for each body."""
    return described("backend", BODIES)


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers."""
    yield from run_each(wanted, options, checks())


def _is_gfx1151(options: RunOptions) -> bool:
    if options.device != "cuda" or not torch.version.hip:
        return False
    return torch.cuda.get_device_properties("cuda").gcnArchName.split(":")[0] == TARGET


def _require_rocm(options: RunOptions) -> None:
    if not torch.version.hip:
        raise CannotRun("only a ROCm build of torch has this")
    need_gpu(options, "only a GPU shows this")


def versions(options: RunOptions) -> dict:
    """The build of torch fits the device. A torch for CUDA or the CPU, which a solver takes when
    nothing asks for ROCm, leaves the GPU idle: https://github.com/ROCm/TheRock/issues/1364"""
    found = {
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "device": options.device,
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties("cuda")
        found |= {"name": properties.name, "units": properties.multi_processor_count}
        if torch.version.hip:
            arch = properties.gcnArchName.split(":")[0]
            found |= {"arch": arch, "built_for": ",".join(torch.cuda.get_arch_list())}
            require(arch in torch.cuda.get_arch_list(), f"this torch has no kernels for {arch}")
    return found


def environment(options: RunOptions) -> Result:
    """No variable is set that harms. HSA_OVERRIDE_GFX_VERSION, from guides of older chips, gives
    memory faults with native kernels: https://github.com/ROCm/legacy-rocm-build/issues/5824"""
    del options
    harmful = [f"{name}: {why}" for name, why in HARMFUL.items() if os.environ.get(name)]
    prefixes = ("TORCH_ROCM_", "HSA_", "HIP_", "ROCR_", "PYTORCH_", "AOTRITON_", "FLASH_ATTENTION_")
    ours = {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)}
    # records contain no paths of the machine
    reported = {name: "a path" if "/" in value else value for name, value in ours.items()}
    # for a GPU of another vendor these variables mean nothing
    state = State.FAILED if harmful and torch.version.hip else State.PASSED
    return Result(
        Check(""), state, "; ".join(harmful), reported, Severity.WARNING if harmful else None
    )


def library(options: RunOptions) -> dict:
    """AOTriton is the attention library that is mapped, one version of it, with its images beside.
    Wheels came without it, or without images for the chip, and fell back to math in silence:
    https://github.com/ROCm/legacy-rocm-build/issues/5404"""
    _require_rocm(options)
    q = torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16)
    sdpa.call(sdpa.ROUTES["flash"], q, q, q)  # maps the library if it is not linked
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in lines if "libaotriton" in line}
    files = sorted({Path(path).resolve() for path in mapped})
    require(files, "no libaotriton_v2.so is mapped: this torch has no AOTriton")
    require(len(files) == 1, f"more than one AOTriton is mapped: {files}")
    images = files[0].parent / "aotriton.images"
    folders = sorted(folder.name for folder in images.glob("*") if folder.is_dir())
    require(folders, f"{images} has no images")
    if _is_gfx1151(options):
        require(any(name.startswith("amd-gfx11") for name in folders), f"images for {folders} only")
    return {"file": shorten(str(files[0])), "version": aotriton_version(files[0]),
            "images": ",".join(folders)}  # fmt: skip


def aotriton_version(file: Path) -> str:
    """Return the version in the library's .comment section, such as "0.13.0", or "unknown"."""
    from elftools.elf.elffile import ELFFile

    with file.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".comment")
        text = section.data().decode(errors="replace") if section else ""
    found = re.search(r"AOTriton (\d+\.\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def preferred(options: RunOptions) -> dict:
    """AOTriton is preferred to CK. CK's attention has no kernels for gfx11:
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/Context.cpp"""
    _require_rocm(options)
    name = str(torch.backends.cuda.preferred_rocm_fa_library()).rsplit(".", 1)[-1]
    if _is_gfx1151(options):
        require(name.lower() != "ck", "CK is preferred (TORCH_ROCM_FA_PREFER_CK?)")
    return {"library": name}


def compiled_in(options: RunOptions) -> dict:
    """This torch was built with flash attention. Builds without USE_FLASH_ATTENTION have only the
    math backend, up to 19 times slower: https://github.com/ROCm/legacy-rocm-build/issues/6034"""
    need_gpu(options, "only a GPU shows this")
    available = torch.backends.cuda.is_flash_attention_available()
    require(available, "built without flash attention")
    return {"available": available}


def _usable(options: RunOptions, ask) -> dict:
    need_gpu(options, "only a GPU shows this")
    q = torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = ask(parameters, debug=True)
    require(usable, sdpa.refusal("not usable.", said))
    return {"usable": usable}


def can_flash(options: RunOptions) -> dict:
    """torch would use flash attention for a plain fp16 call; if not it says why. Up to torch 2.12
    gfx1151 needed TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1:
    https://github.com/pytorch/pytorch/pull/184288"""
    return _usable(options, torch.backends.cuda.can_use_flash_attention)


def can_efficient(options: RunOptions) -> dict:
    """torch would use memory-efficient attention for a plain fp16 call; if not it says why. It
    serves fp32 and masks, which flash attention refuses:
    https://github.com/pytorch/pytorch/issues/166397"""
    return _usable(options, torch.backends.cuda.can_use_efficient_attention)


def _executes(route: str):
    def body(options: RunOptions) -> dict:
        device, dtype = options.device, torch.float16
        leaves = [
            torch.randn(2, 4, 200, 64, device=device, dtype=dtype).requires_grad_()
            for _ in range(3)
        ]
        if route == "cudnn":
            if device != "cuda" or torch.version.hip:
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

    body.__doc__ = EXECUTES[route]
    return body


def default_is_fused(options: RunOptions) -> dict:
    """A call that asks for nothing gets a fused backend, not math. A check that exits 0 whatever
    ran proves nothing: https://github.com/ROCm/TheRock/issues/1364"""
    q = torch.randn(1, 4, 256, 64, device=options.device, dtype=torch.float16)
    _, operators = sdpa.call(sdpa.ROUTES["default"], q, q, q, is_causal=True)
    ran = sdpa.kind_of(operators)
    require(ran != "math", "math ran")
    if _is_gfx1151(options):
        require(ran == "flash", f"{ran} ran")
    return {"operator": ran}


def kernel_name(options: RunOptions) -> dict:
    """The GPU kernel behind a forced flash call is one of attention. An operator can be named flash
    and launch a chain of matrix products; the profiler sees the launches. A gfx1151 kernel of
    AOTriton is attn_fwd: https://github.com/ROCm/TheRock/issues/1408"""
    need_gpu(options, "only a GPU has kernels to profile")
    from torch.profiler import ProfilerActivity, profile

    q = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.float16)
    sdpa.call(sdpa.ROUTES["flash"], q, q, q)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        sdpa.call(sdpa.ROUTES["flash"], q, q, q)
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    names = sorted({event.name for event in profiler.events() if event.device_type == kinds})
    if not names and is_emulated(options):
        raise CannotRun("the emulated device shows its launches to no profiler")
    named = [name for name in names if re.search(r"attn_fwd|flash|fmha", name, re.IGNORECASE)]
    require(named, f"no attention kernel was launched, but {names or 'none'}")
    if _is_gfx1151(options):
        require(any("attn_fwd" in name for name in named), f"launched {named}")
    return {"kernels": ", ".join(re.sub(r"[<(].*", "", name)[:80] for name in named)}


def limit_512(options: RunOptions) -> dict:
    """Head dim 512 is not offered as flash attention on gfx11, where no kernel exists for it; torch
    2.13 did, and gave garbage: https://github.com/pytorch/pytorch/issues/189849"""
    _require_rocm(options)
    q = torch.randn(1, 1, 128, 512, device="cuda", dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    usable = torch.backends.cuda.can_use_flash_attention(parameters)
    if _is_gfx1151(options):
        require(not usable, "flash attention is offered for head dim 512")
    return {"usable": usable}


def flash_attn(options: RunOptions) -> dict:
    """The flash-attn package imports and says which kernels it uses. Its wheels wanted an
    environment variable, or replaced Triton: https://github.com/Dao-AILab/flash-attention/issues/2799
    """
    del options
    if importlib.util.find_spec("flash_attn") is None:
        raise CannotRun("flash_attn is not installed")
    return {"backend": flash.backend()}


EXECUTES = {
    "flash": "Flash attention, forced alone, executes forward and backward. The known check prints "
    "that it failed and exits 0: https://github.com/lhl/strix-halo-testing",
    "efficient": "Memory-efficient attention, forced alone, executes forward and backward. Nightly "
    "builds had it broken: https://github.com/lhl/strix-halo-testing",
    "math": "The math backend, forced alone, executes: what the others are compared with must run "
    "on any device: https://github.com/ROCm/aotriton/issues/210",
    "default": "Attention as a user calls it executes and is not zero everywhere: "
    "https://github.com/ROCm/aotriton/issues/210",
    "cudnn": "cuDNN's attention, on NVIDIA only: https://docs.pytorch.org/docs/stable/backends.html",
}
BODIES = {
    **named(versions, environment, library, preferred, compiled_in, can_flash, can_efficient),
    **{f"executes-{name}": _executes(name) for name in EXECUTES},
    **named(default_is_fused, kernel_name, limit_512, flash_attn),
}
