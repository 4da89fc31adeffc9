# SPDX-License-Identifier: BSD-3-Clause
"""Compile the kernels of flash-attn, vLLM and other packages for gfx1151; check the ELF files."""

import io
from collections.abc import Iterator
from dataclasses import asdict

from elftools.elf.elffile import ELFFile
from strix_emulate import EM_AMDGPU, TARGETS, elf_metadata

from strix_validate import TARGET
from strix_validate.attention import flash
from strix_validate.checks import Check, Result, RunOptions, make_result
from strix_validate.precompiled.costs import measure
from strix_validate.tiers import Tier
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import PackageCall
from strix_validate.triton_packages import package_checks
from strix_validate.vllm.source import VllmCall

#: A kernel of flash-attn whose name contains one of these words multiplies no matrices.
_HELPERS = ("preprocess", "reduce")


def checks() -> list[Check]:
    """List one check for each call; it covers every kernel that the call launches."""
    return package_checks.checks("kernels")


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check.

    This needs triton, and the checked packages or vLLM's source. It needs no GPU.
    """
    yield from package_checks.run("kernels", selected, options, "compile", judge_products)


def judge_products(
    check: Check,
    call: VllmCall | PackageCall | flash.FlashCall,
    expected,
    answer: triton_modes.CallAnswer,
) -> Result:
    """Fail a call if a kernel has a fault, or if too few of its kernels use the matrix unit.

    A call fails too if it raised an exception, or if no kernel was compiled. The field `products`
    of a VllmCall or PackageCall is the minimum number of kernels that use the matrix unit. A call
    of flash-attn is judged by :func:`judge` instead.
    """
    del expected
    if isinstance(call, flash.FlashCall):
        return judge(check, answer)
    facts, faults = _inspect_all(answer)
    with_wmma = [name for name, fact in facts.items() if fact["wmma"]]
    has_too_few = not facts or len(with_wmma) < call.products
    if not answer.error and has_too_few:
        faults.append(
            f"{len(with_wmma)} of {len(facts)} kernels have WMMA, expected at least {call.products}"
        )
    return make_result(check, faults, facts)


def _inspect_all(answer: triton_modes.CallAnswer) -> tuple[dict[str, dict], list[str]]:
    """Return the facts of each kernel, and the faults of the kernels or of the call."""
    if answer.error:
        return {}, [": ".join(answer.error)]
    facts = {}
    faults = []
    for i, kernel in enumerate(answer.kernels):
        name = f"{i}-{kernel.name}"
        facts[name] = inspect(kernel)
        faults += [f"{name}: {fault}" for fault in find_faults(facts[name])]
    return facts, faults


def judge(check: Check, answer: triton_modes.CallAnswer) -> Result:
    """Judge a call of flash-attn.

    Each kernel must compile and fit gfx1151. The kernels that multiply matrices must use WMMA, and
    there must be at least one for each pass.
    """
    facts, faults = _inspect_all(answer)
    multiplying = {}
    for name, fact in facts.items():
        if any(helper in name for helper in _HELPERS):
            continue
        multiplying[name] = fact
        if not fact["wmma"]:
            faults.append(f"{name}: no WMMA")
    # Each call except "decode" has a backward pass. If only its forward kernel was compiled, the
    # backward pass was never reached.
    required = 1 if check.id.endswith("decode") else 2
    if not answer.error and len(multiplying) < required:
        faults.append(
            f"{len(multiplying)} attention kernels compiled, expected at least {required}"
        )
    return make_result(check, faults, facts)


def inspect(kernel: triton_modes.CompiledKernel) -> dict:
    """Return facts of a kernel, from the bytes of its ELF file and from its assembly.

    The facts "machine", "mach" and "target" name the GPU that the file is for. "mfma" counts the
    MFMA instructions, which gfx1151 does not have. The other facts are the fields of
    :class:`strix_validate.precompiled.costs.KernelCost`.

    Raises:
        elftools.common.exceptions.ELFError: The bytes are not an ELF file.
        strix_emulate.errors.LoadError: The file has no AMDGPU metadata note.
        ValueError: The metadata does not describe exactly one kernel.
    """
    elf = ELFFile(io.BytesIO(kernel.elf))
    cost = measure(
        kernel.elf,
        kernel.assembly,
        kernel.launch_lds,
        kernel.name,
    )
    return {
        "machine": elf["e_machine"],
        "mach": elf["e_flags"] & 0xFF,
        "target": elf_metadata(elf, kernel.name)["amdhsa.target"],
        "mfma": kernel.assembly.count("v_mfma_"),
        **asdict(cost),
    }


def find_faults(fact: dict) -> list[str]:
    """Return the faults of a kernel for gfx1151. Spilled registers only cost time: no fault."""
    target = TARGETS[TARGET]
    faults = []
    if fact["machine"] != EM_AMDGPU:
        faults.append(f"the ELF machine is {fact['machine']}, not {EM_AMDGPU}")
    if fact["mach"] != target.mach:
        faults.append(f"the ELF flags name chip {fact['mach']:#x}, not {target.mach:#x}")
    if fact["target"].split("-")[-1] != TARGET:
        faults.append(f"the target is {fact['target']}, not {TARGET}")
    if fact["lds"] > target.lds:
        faults.append(f"{fact['lds']} bytes of LDS, and the GPU has {target.lds}")
    if fact["mfma"]:
        faults.append(f"{fact['mfma']} MFMA instructions, which the GPU does not have")
    return faults


TIER = Tier(checks, run)
