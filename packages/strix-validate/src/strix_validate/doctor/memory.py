# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the memory that the GPU may use."""

import re
from dataclasses import replace

from strix_validate.checks import Result, RunOptions
from strix_validate.doctor import _distribution, containers, parameters
from strix_validate.doctor._verdicts import (
    Fix,
    fine,
    known,
    need_gpu,
    remark,
    warning,
    worst,
)
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB, OVERHEAD, PAGE, SPARE, UTILIZATION, memory_of

#: Bytes reserved by the BIOS above which the memory is worth getting back first.
_LARGE_CARVE_OUT = 4 * GIB
#: Bytes of /dev/shm below which programs of several processes fail; Docker gives 64 MiB.
_SHARED_MEMORY = GIB
_GTTSIZE = "https://github.com/noamsto/nix-amd-ai/pull/96"
_TWO_MODULES = "https://github.com/ROCm/legacy-rocm-build/issues/5595"
#: Names that guides have for gttsize and pages_limit, and no driver, by module.
_MISSPELT = {
    "amdgpu": ("gtt_size", "ggtsize", "gtt"),
    "ttm": ("page_limit", "pages_limits", "page_limits"),
}


def carve_out(tree: Tree) -> Result:
    """The BIOS reserves little memory for the GPU. The GPU reaches all memory through GTT; what the
    BIOS carves out is lost to everything else:
    https://github.com/ROCm/legacy-rocm-build/issues/5444"""
    need_gpu(tree)
    name = known(tree.gpu_folder, "the GPU's memory")
    size = known(tree.number(f"{name}/mem_info_vram_total"), "the GPU's memory")
    measured = {"gib": round(size / GIB, 1)}
    if size > _LARGE_CARVE_OUT:
        fix = (
            "set the UMA frame buffer size to 512 MB in the BIOS, or to the least that it offers, "
            "and run doctor again: the limit of GTT depends on the memory that is there then"
        )
        message = f"the BIOS reserves {size / GIB:.0f} GiB for the GPU"
        return warning(message, Fix(fix, needs_reboot=True), **measured)
    return fine(**measured)


def _ttm_modules(tree: Tree) -> list[str]:
    """Return the modules that may limit GTT: a driver of DKMS brings amdttm beside ttm."""
    return ["amdttm", "ttm"] if tree.path("sys/module/amdttm").is_dir() else ["ttm"]


def _pages_limit(tree: Tree) -> int | None:
    """Return TTM's limit in pages, of the module that the loaded driver uses."""
    return tree.number(f"sys/module/{_ttm_modules(tree)[0]}/parameters/pages_limit")


def _raise_gtt(tree: Tree, memory: int) -> Fix:
    pages = (memory - SPARE) // PAGE
    modules = _ttm_modules(tree)
    limits = {"pages_limit": pages, "page_pool_size": pages}
    # what other files and the command line say would come after the file that is written here
    others = [
        each
        for module in modules
        for each in parameters.settings(tree, module)
        if each.name in limits and each.place != f"/etc/modprobe.d/{module}.conf"
    ]
    on_command_line = any(each.place == parameters.COMMAND_LINE for each in others)
    fix = _distribution.module_options(tree, modules, limits, on_command_line)
    if others:
        fix = replace(fix, text=f"{parameters.removal(tree, *others).text}; {fix.text}")
    if len(modules) > 1:
        text = f"{fix.text}; or remove the driver of DKMS: sudo amdgpu-install --uninstall"
        return replace(fix, text=text)
    return fix


def gtt(tree: Tree) -> Result:
    """The GPU may map most of the memory, but not all. The default limit is half of it, and models
    that would fit run out of memory: https://github.com/ROCm/TheRock/issues/519"""
    need_gpu(tree)
    memory = known(tree.memory, "the size of the memory")
    pages = _pages_limit(tree)
    size = tree.number(f"{tree.gpu_folder}/mem_info_gtt_total") if tree.gpu_folder else None
    limits = [pages * PAGE if pages else None, size]
    limit = known(min((x for x in limits if x), default=None), "the limit of GTT")
    measured = {"gtt_gib": round(limit / GIB, 1), "memory_gib": round(memory / GIB, 1)}
    if (tree.number(f"{tree.gpu_folder}/mem_info_vram_total") or 0) > _LARGE_CARVE_OUT:
        # a limit computed from what the BIOS left would be wrong once it is given back
        return remark("doctor/carve-out comes first", **measured)
    results = [_gttsize(tree, pages), _misspelt(tree)]
    if containers.kind(tree) == "lxc":
        # /proc/meminfo is then the container's share, and the limit the host's
        return worst(results, **measured)
    source = _TWO_MODULES if len(_ttm_modules(tree)) > 1 else ""
    if limit > memory - SPARE // 2:
        message = f"the GPU may take {limit / GIB:.0f} of {memory / GIB:.0f} GiB"
        results.append(warning(f"{message}: the system may swap", _raise_gtt(tree, memory), source))
    elif limit < 0.75 * memory and not _is_capped(tree, pages):
        message = f"the GPU may map {limit / GIB:.0f} of {memory / GIB:.0f} GiB"
        if limit < GIB:
            message += ": ttm.pages_limit is a number of pages, of 4 KiB each"
        if len(_ttm_modules(tree)) > 1:
            message += ": the driver of DKMS takes the limit of amdttm, not that of ttm"
        results.append(warning(message, _raise_gtt(tree, memory), source))
    return worst(results, **measured)


def _gttsize_mib(tree: Tree) -> int | None:
    value = parameters.value_of(tree, "amdgpu", "gttsize") or ""
    return int(value) if re.fullmatch(r"\d{1,9}", value) else None


def _is_capped(tree: Tree, pages: int | None) -> bool:
    """Return whether amdgpu.gttsize keeps GTT below what TTM's limit allows."""
    mib = _gttsize_mib(tree)
    return bool(mib is not None and pages and mib << 20 < pages * PAGE)


def _gttsize(tree: Tree, pages: int | None) -> Result:
    """Judge amdgpu.gttsize, which is deprecated and caps GTT whatever TTM's limit is."""
    mib, own = _gttsize_mib(tree), parameters.setting(tree, "amdgpu", "gttsize")
    if mib is None:
        return fine()
    fix: Fix | str = "find who sets it: grep -rn gttsize /etc/modprobe.d /proc/cmdline"
    if own:
        fix = parameters.removal(tree, own)
    if pages is None:
        return remark("amdgpu.gttsize is deprecated: TTM's pages_limit replaces it", fix, _GTTSIZE)
    allowed = f"ttm.pages_limit allows {pages * PAGE / GIB:.0f}"
    if mib << 20 < pages * PAGE:
        message = f"amdgpu.gttsize={mib} caps GTT at {mib / 1024:.0f} GiB, though {allowed}"
        return warning(message, fix, _GTTSIZE)
    message = f"amdgpu.gttsize={mib} is deprecated and adds nothing: {allowed} GiB"
    return remark(message, fix, _GTTSIZE)


def _misspelt(tree: Tree) -> Result:
    """Warn of an option that no driver has: the kernel ignores it without a word on the screen."""
    for module, names in _MISSPELT.items():
        for own in parameters.settings(tree, module):
            if own.name in names:
                message = f"{own.argument}: the driver has no such option, and ignores it"
                return warning(message, parameters.removal(tree, own), _TWO_MODULES)
    unused = parameters.settings(tree, "amdttm")
    if unused and not tree.path("sys/module/amdttm").is_dir():
        message = (
            "amdttm is not loaded, so that its options do nothing: the kernel's driver uses ttm"
        )
        return warning(message, parameters.removal(tree, *unused), _TWO_MODULES)
    return fine()


def container(tree: Tree) -> Result:
    """A container's control group leaves the memory that models need, and /dev/shm is large enough
    for programs of several processes: https://docs.vllm.ai/en/latest/deployment/docker.html"""
    kind, results = containers.kind(tree), []
    limit, total = containers.memory_limit(tree), tree.memory
    if limit is not None and (total is None or limit < 0.75 * total):
        message = f"the control group may use {limit / GIB:.0f} GiB"
        message += f" of {total / GIB:.0f}" if total else ""
        fix = "raise MemoryMax of the service or slice: systemctl show -p MemoryMax"
        if kind:
            fix = "start the container without --memory, or with more"
        results.append(warning(message, fix))
    shared = containers.shared_memory(tree)
    if kind and shared is not None and shared < _SHARED_MEMORY:
        message = f"/dev/shm has {shared >> 20} MiB: programs of several processes fail"
        results.append(warning(message, "recreate the container with --ipc=host or --shm-size 8g"))
    return worst(results, container=kind or "none")


def vllm_memory(tree: Tree, options: RunOptions) -> Result:
    """vLLM is told how much memory the GPU may use now. By default it takes 92 % of HIP's total,
    whatever the system uses of that: https://github.com/vllm-project/vllm/pull/54776"""
    need_gpu(tree)
    budget = known(memory_of(tree), "the GPU's memory or the system's available memory")
    measured = {
        "usable_gib": round(budget.usable / GIB, 1),
        "hip_total_gib": round(budget.total / GIB, 1),
        "utilization": budget.utilization,
    }
    flags = budget.flags(options.weights)
    if flags:
        return replace(fine(**measured), reason=f"vllm serve MODEL {flags}")
    usable = f"{budget.usable / GIB:.0f} GiB are usable"
    model = f"a model of {options.weights / GIB:.0f} GiB" if options.weights else "a model"
    message = f"{model} does not fit: {usable}"
    needed = (options.weights + OVERHEAD + GIB) / UTILIZATION + SPARE
    available = containers.available_memory(tree) or 0
    if budget.is_shared and tree.memory and needed < min(tree.memory, available):
        return warning(message, _raise_gtt(tree, tree.memory), **measured)
    fix = "free memory, or take a smaller or more strongly quantized model"
    return warning(message, fix, **measured)
