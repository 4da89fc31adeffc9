# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of flash-attn and vLLM compile for gfx1151, as their compiled files show."""

import io
from collections.abc import Iterator
from dataclasses import asdict

from elftools.elf.elffile import ELFFile
from strix_emulate import EM_AMDGPU, TARGETS, elf_metadata

from strix_validate import TARGET
from strix_validate.attention import flash
from strix_validate.checks import Check, Result, RunOptions, judged
from strix_validate.precompiled.costs import measure
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import PackageCall
from strix_validate.triton_packages import package_checks
from strix_validate.vllm.source import VllmCall

#: In the names of kernels that multiply no matrices.
_HELPERS = ("preprocess", "reduce")


def checks() -> list[Check]:
    """List one check for each call; it covers every kernel that the call launches."""
    return package_checks.checks("kernels")


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers. Needs triton, and a package or vLLM's source, and no GPU."""
    yield from package_checks.run("kernels", wanted, options, "compile", judge_products)


def judge_products(
    check: Check,
    call: VllmCall | PackageCall | flash.FlashCall,
    expected,
    answer: triton_modes.CallAnswer,
) -> Result:
    """Fail a call if too few of its kernels use the matrix unit.

    See products of VllmCall and PackageCall; flash-attn's are judged by :func:`judge`.
    """
    del expected
    if isinstance(call, flash.FlashCall):
        return judge(check, answer)
    facts, faults = _facts(answer)
    found = [name for name, fact in facts.items() if fact["wmma"]]
    if not answer.error and (not facts or len(found) < call.products):
        faults.append(f"{len(found)} of {len(facts)} kernels have WMMA, expected {call.products}")
    return judged(check, faults, facts)


def _facts(answer: triton_modes.CallAnswer) -> tuple[dict[str, dict], list[str]]:
    """Return the facts of each kernel, and what is wrong with them or with the call."""
    if answer.error:
        return {}, [": ".join(answer.error)]
    facts = {f"{i}-{kernel.name}": inspect(kernel) for i, kernel in enumerate(answer.kernels)}
    return facts, [f"{name}: {fault}" for name, f in facts.items() for fault in find_faults(f)]


def judge(check: Check, answer: triton_modes.CallAnswer) -> Result:
    """Fail if a kernel of flash-attn did not compile, or one of its facts is wrong for gfx1151."""
    facts, faults = _facts(answer)
    multiplying = {
        name: fact for name, fact in facts.items() if not any(word in name for word in _HELPERS)
    }
    faults += [f"{name}: no WMMA" for name, fact in multiplying.items() if not fact["wmma"]]
    # forward alone would hide a backward pass that was never reached
    least = 1 if check.id.endswith("decode") else 2
    if not answer.error and len(multiplying) < least:
        faults.append(f"{len(multiplying)} attention kernels compiled, expected at least {least}")
    return judged(check, faults, facts)


def inspect(kernel: triton_modes.CompiledKernel) -> dict:
    """Return facts of a kernel, from the bytes of its ELF file and from its assembly.

    machine, mach and target say which GPU the file is for; mfma counts instructions that gfx1151
    lacks. The others are those of :class:`strix_validate.precompiled.costs.KernelCost`.

    Raises:
        elftools.common.exceptions.ELFError: not an ELF file.
        strix_emulate.errors.LoadError: the file has no AMDGPU metadata note.
        ValueError: the metadata does not describe exactly one kernel.
    """
    elf = ELFFile(io.BytesIO(kernel.elf))
    return {
        "machine": elf["e_machine"],
        "mach": elf["e_flags"] & 0xFF,
        "target": elf_metadata(elf, kernel.name)["amdhsa.target"],
        "mfma": kernel.assembly.count("v_mfma_"),
        **asdict(measure(kernel.elf, kernel.assembly, kernel.launch_lds, kernel.name)),
    }


def find_faults(fact: dict) -> list[str]:
    """Say what is wrong with a kernel's facts for gfx1151; spills only cost time."""
    rules = {
        f"machine is {fact['machine']}": fact["machine"] == EM_AMDGPU,
        f"ELF flags say chip {fact['mach']:#x}": fact["mach"] == TARGETS[TARGET].mach,
        f"target is {fact['target']}": fact["target"].split("-")[-1] == TARGET,
        f"{fact['lds']} bytes of LDS": fact["lds"] <= TARGETS[TARGET].lds,
        f"{fact['mfma']} MFMA instructions": fact["mfma"] == 0,
    }
    return [fault for fault, holds in rules.items() if not holds]
