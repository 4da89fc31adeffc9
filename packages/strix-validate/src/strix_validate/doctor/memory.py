# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the memory that the GPU may use."""

import re
from dataclasses import replace

from strix_validate.checks import Result, RunOptions
from strix_validate.doctor import _distribution, containers, parameters
from strix_validate.doctor._verdicts import (
    Fix,
    combine,
    fine,
    need_gpu,
    need_value,
    remark,
    warning,
)
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import (
    GIB,
    OVERHEAD,
    PAGE,
    SPARE,
    UTILIZATION,
    read_memory_budget,
)

#: If the BIOS reserves more bytes than this for the GPU, the owner should reserve less before
#: changing the limit of GTT.
_LARGE_CARVE_OUT = 4 * GIB
#: The limit of GTT is low if it is below this share of the machine's memory.
_LOW_SHARE = 0.75
#: Minimum bytes of /dev/shm for programs with several processes. Docker's default is 64 MiB.
_SHARED_MEMORY = GIB
_GTTSIZE = "https://github.com/noamsto/nix-amd-ai/pull/96"
_TWO_MODULES = "https://github.com/ROCm/legacy-rocm-build/issues/5595"
#: Misspelt names of the options gttsize and pages_limit, by module. Guides advise these names, but
#: no driver has them.
_MISSPELT = {
    "amdgpu": ("gtt_size", "ggtsize", "gtt"),
    "ttm": ("page_limit", "pages_limits", "page_limits"),
}


def carve_out(tree: Tree) -> Result:
    """The BIOS reserves little memory for the GPU. The GPU can use other memory through GTT, and
    memory that the BIOS reserves is lost to all other programs:
    https://github.com/ROCm/legacy-rocm-build/issues/5444"""
    need_gpu(tree)
    need_value(tree.gpu_folder, "the GPU's memory")
    size = need_value(_read_carve_out(tree), "the GPU's memory")
    gib = size / GIB
    if size <= _LARGE_CARVE_OUT:
        return fine(gib=round(gib, 1))
    fix = (
        "set the UMA frame buffer size to 512 MB in the BIOS, or to the smallest size that it "
        "offers, and run doctor again: the limit of GTT depends on the memory that is then left"
    )
    message = f"the BIOS reserves {gib:.0f} GiB for the GPU"
    return warning(message, Fix(fix, needs_reboot=True), gib=round(gib, 1))


def _read_carve_out(tree: Tree) -> int | None:
    return tree.number(f"{tree.gpu_folder}/mem_info_vram_total")


def _suggest_gtt_limit(tree: Tree, memory: int) -> Fix:
    """Return the commands that let the GPU map all memory but SPARE.

    Args:
        tree: The machine.
        memory: Bytes of its memory.
    """
    pages = (memory - SPARE) // PAGE
    limits = {"pages_limit": pages, "page_pool_size": pages}
    modules = parameters.list_ttm_modules(tree)
    others = []
    for module in modules:
        file = f"/etc/modprobe.d/{module}.conf"
        for setting in parameters.read_settings(tree, module):
            # A setting in another place may override the one that the fix makes.
            if setting.name in limits and setting.place != file:
                others.append(setting)
    on_command_line = any(setting.place == parameters.COMMAND_LINE for setting in others)
    fix = _distribution.suggest_module_options(tree, modules, limits, on_command_line)
    if others:
        removal = parameters.suggest_removal(tree, *others)
        fix = replace(fix, text=f"{removal.text}; {fix.text}")
    if len(modules) > 1:
        text = f"{fix.text}; or remove the driver of DKMS: sudo amdgpu-install --uninstall"
        fix = replace(fix, text=text)
    return fix


def gtt(tree: Tree) -> Result:
    """The GPU may map most of the memory, but not all. The default limit is half of the memory.
    Models that need more than this do not load, although the memory has room for them:
    https://github.com/ROCm/TheRock/issues/519"""
    need_gpu(tree)
    memory = need_value(tree.memory, "the size of the memory")
    pages = parameters.read_pages_limit(tree)
    limit = need_value(_read_gtt_limit(tree, pages), "the limit of GTT")
    measured = {
        "gtt_gib": round(limit / GIB, 1),
        "memory_gib": round(memory / GIB, 1),
    }
    if (_read_carve_out(tree) or 0) > _LARGE_CARVE_OUT:
        # The fix of doctor/carve-out changes the size of the memory, and with it the right limit.
        message = "fix doctor/carve-out first: GTT's right limit depends on the BIOS carve-out"
        return remark(message, **measured)
    results = [_judge_gttsize(tree, pages), _judge_misspelt_options(tree)]
    # In LXC, /proc/meminfo shows the container's share of memory, but the limit of GTT is that of
    # the host.
    if containers.detect(tree) != "lxc":
        results.append(_judge_gtt_limit(tree, limit, memory, pages))
    return combine(results, **measured)


def _read_gtt_limit(tree: Tree, pages: int | None) -> int | None:
    """Return the bytes that the GPU may map: the smaller of TTM's limit and the driver's."""
    limits = []
    if pages:
        limits.append(pages * PAGE)
    if tree.gpu_folder:
        size = tree.number(f"{tree.gpu_folder}/mem_info_gtt_total")
        if size:
            limits.append(size)
    return min(limits, default=None)


def _judge_gtt_limit(tree: Tree, limit: int, memory: int, pages: int | None) -> Result:
    """Judge the limit of GTT by the size of the machine's memory."""
    has_two_modules = len(parameters.list_ttm_modules(tree)) > 1
    source = _TWO_MODULES if has_two_modules else ""
    sizes = f"{limit / GIB:.0f} of {memory / GIB:.0f} GiB"
    if limit > memory - SPARE // 2:
        message = f"the GPU may map {sizes}: the system may swap"
        return warning(message, _suggest_gtt_limit(tree, memory), source)
    if limit >= _LOW_SHARE * memory or _is_capped(tree, pages):
        return fine()
    message = f"the GPU may map {sizes}"
    if limit < GIB:
        message += ": ttm.pages_limit is a number of pages, of 4 KiB each"
    if has_two_modules:
        message += ": the driver of DKMS uses the limit of amdttm, not that of ttm"
    return warning(message, _suggest_gtt_limit(tree, memory), source)


def _read_gttsize(tree: Tree) -> int | None:
    """Return amdgpu.gttsize in MiB, or None if it is unknown or has its default, -1."""
    value = parameters.read_value(tree, "amdgpu", "gttsize") or ""
    return int(value) if re.fullmatch(r"\d{1,9}", value) else None


def _is_capped(tree: Tree, pages: int | None) -> bool:
    """Return whether amdgpu.gttsize limits GTT to less than TTM's limit allows."""
    mib = _read_gttsize(tree)
    if mib is None or not pages:
        return False
    return mib << 20 < pages * PAGE


def _judge_gttsize(tree: Tree, pages: int | None) -> Result:
    """Judge amdgpu.gttsize, which is deprecated, and caps GTT even if TTM's limit allows more."""
    mib = _read_gttsize(tree)
    if mib is None:
        return fine()
    fix = parameters.suggest_removal_of(tree, "amdgpu", "gttsize")
    if pages is None:
        return remark("amdgpu.gttsize is deprecated: TTM's pages_limit replaces it", fix, _GTTSIZE)
    allowed = f"ttm.pages_limit allows {pages * PAGE / GIB:.0f}"
    if mib << 20 < pages * PAGE:
        message = f"amdgpu.gttsize={mib} caps GTT at {mib / 1024:.0f} GiB, though {allowed}"
        return warning(message, fix, _GTTSIZE)
    message = f"amdgpu.gttsize={mib} is deprecated and adds nothing: {allowed} GiB"
    return remark(message, fix, _GTTSIZE)


def _judge_misspelt_options(tree: Tree) -> Result:
    """Warn of options without effect: misspelt ones, and those of amdttm if it is not loaded."""
    for module, names in _MISSPELT.items():
        for setting in parameters.read_settings(tree, module):
            if setting.name in names:
                message = f"{setting.argument}: the driver has no such option, and ignores it"
                fix = parameters.suggest_removal(tree, setting)
                return warning(message, fix, _TWO_MODULES)
    unused = parameters.read_settings(tree, "amdttm")
    if not unused or tree.path("sys/module/amdttm").is_dir():
        return fine()
    message = "amdttm is not loaded, so its options do nothing: the kernel's driver uses ttm"
    return warning(message, parameters.suggest_removal(tree, *unused), _TWO_MODULES)


def container(tree: Tree) -> Result:
    """The control group allows the memory that models need, and a container's /dev/shm is large
    enough for programs with several processes:
    https://docs.vllm.ai/en/latest/deployment/docker.html"""
    kind = containers.detect(tree)
    results = [_judge_group_limit(tree, kind)]
    if kind:
        results.append(_judge_shared_memory(tree))
    return combine(results, container=kind or "none")


def _judge_group_limit(tree: Tree, kind: str) -> Result:
    """Judge the memory that the control groups of this process allow."""
    limit = containers.read_memory_limit(tree)
    total = tree.memory
    if limit is None or (total is not None and limit >= _LOW_SHARE * total):
        return fine()
    message = f"the control group may use {limit / GIB:.0f} GiB"
    if total:
        message += f" of {total / GIB:.0f}"
    fix = "raise MemoryMax of the service or slice: systemctl show -p MemoryMax"
    if kind:
        fix = "start the container without --memory, or with more"
    return warning(message, fix)


def _judge_shared_memory(tree: Tree) -> Result:
    """Judge the size of a container's /dev/shm."""
    size = containers.read_shared_memory(tree)
    if size is None or size >= _SHARED_MEMORY:
        return fine()
    message = f"/dev/shm has {size >> 20} MiB: programs with several processes fail"
    return warning(message, "recreate the container with --ipc=host or --shm-size 8g")


def vllm_memory(tree: Tree, options: RunOptions) -> Result:
    """The memory that the GPU may use now is enough for vLLM, with the flags that are printed. By
    default, vLLM uses 92 % of the total that HIP reports, even if the system uses a part of it:
    https://github.com/vllm-project/vllm/pull/54776"""
    need_gpu(tree)
    budget = need_value(
        read_memory_budget(tree), "the GPU's memory or the system's available memory"
    )
    measured = {
        "usable_gib": round(budget.usable / GIB, 1),
        "hip_total_gib": round(budget.total / GIB, 1),
        "utilization": budget.utilization,
    }
    flags = budget.flags(options.weights)
    if flags:
        return replace(fine(**measured), reason=f"vllm serve MODEL {flags}")
    model = "a model"
    if options.weights:
        model = f"a model of {options.weights / GIB:.0f} GiB"
    message = f"{model} does not fit: {budget.usable / GIB:.0f} GiB are usable"
    needed = (options.weights + OVERHEAD + GIB) / UTILIZATION + SPARE
    available = containers.read_available_memory(tree) or 0
    if budget.is_shared and tree.memory and needed < min(tree.memory, available):
        return warning(message, _suggest_gtt_limit(tree, tree.memory), **measured)
    fix = "free memory, or use a smaller or more strongly quantized model"
    return warning(message, fix, **measured)
