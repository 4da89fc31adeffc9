# SPDX-License-Identifier: BSD-3-Clause
"""Compare the emulator with the oracle on random straight-line programs, assembled by LLVM.

The generator knows the operands and modifiers of each instruction. The emulator reads them from the
code that LLVM assembles, so that a misread operand also leads to a disagreement.
`python selftest.py 1000` compares 40,000 instructions and prints the result.
"""

import io
import random
import re
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache

import exact
import numpy as np
import oracle
from elftools.elf.elffile import ELFFile
from operands import FORMS, REGISTERS, Operation, Source, operation, random_bits
from oracle_parts import limited
from strix_emulate.code import llvm
from strix_emulate.code.decode import EXEC, Instruction, decode
from strix_emulate.code.kernel import Argument, Kernel
from strix_emulate.code.target import DEFAULT, Target
from strix_emulate.errors import EmulatorError, Trap
from strix_emulate.instructions.steps import Step
from strix_emulate.memory import addressing
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.scratch import Scratch
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waits import Queues
from strix_emulate.memory.waves import LANES, SCALARS, Waves
from strix_emulate.run import program


@dataclass
class Report:
    """The result of a comparison.

    Attributes:
        compared: The number of compared instructions.
        disagreements: The first disagreements as text.
        covered: The compared mnemonics.
    """

    compared: int = 0
    disagreements: list[str] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)


@lru_cache(maxsize=1 << 12)
def code(text: str, width: int = LANES, target: Target = DEFAULT) -> bytes:
    """Return the code that LLVM's assembler makes of a text."""
    elf = ELFFile(io.BytesIO(llvm.assemble(text, width, target)))
    return elf.get_section_by_name(".text").data()


#: A kernel for tests, with simple values in place of those from a descriptor and metadata.
PLAIN = Kernel(
    "test",
    b"",
    lds=0,
    scratch=0,
    kernarg=0,
    vgprs=256,
    sgprs=106,
    denormals_32=True,
    denormals_16_64=True,
    ieee=True,
    clamp_nan=True,
    width=LANES,
    user_sgprs=(("kernarg", 2),),
    user_count=0,
    workgroup_ids=(True, False, False),
    max_threads=1024,
    vgpr_spills=0,
    sgpr_spills=0,
    arguments=(),
    finite_16=False,
    launch_lds=0,
    image=None,
    dynamic_stack=False,
    target=DEFAULT,
    two_units=True,
)


def kernel(text: str, pointers: int = 2, width: int = LANES, **facts) -> Kernel:
    """Return a kernel whose arguments are `pointers` arrays."""
    arguments = tuple(Argument("", 8 * i, 8, "global_buffer") for i in range(pointers))
    return replace(
        PLAIN,
        code=code(text, width),
        kernarg=8 * pointers,
        arguments=arguments,
        width=width,
        **facts,
    )


def assemble_and_decode(text: str, width: int = LANES) -> list[Instruction]:
    """Assemble a text, and disassemble and decode the code."""
    return decode(code(text + "\ns_endpgm\n", width), width=width)[:-1]


def real_mnemonics(names: set[str]) -> set[str]:
    """Return the names that gfx1151's assembler knows.

    The names are assembled without operands. For a known name, the assembler rejects only the
    operands.
    """
    lines = sorted(names)
    try:
        llvm.assemble("\n".join(lines) + "\n")
        return names
    except EmulatorError as error:
        unknown = re.findall(
            r"<inline asm>:(\d+):\d+: (?:invalid instruction|instruction not supported)", str(error)
        )
    return names - {lines[int(number) - 1] for number in unknown}


def waves(V, S) -> Waves:
    """Return waves with these registers: V (registers, n, lanes), S (128, n, 1)."""
    n = V.shape[1]
    identity = np.zeros((8, n), np.int64)
    identity[1:3] = np.arange(n)
    return Waves(V.copy(), S.copy(), np.zeros((n, 1), bool), 0, identity, Queues())


def spaces() -> addressing.Spaces:
    return addressing.Spaces(
        Arena(1 << 16, 1, False, False),
        Memory("LDS", 4096, 1, False, False),
        4096,
        4096,
        Scratch("scratch", 4096, 1, False, False),
        16,
    )


def steps(text: str, width: int = LANES, **mode) -> list[Step]:
    """Return the step of each instruction of straight-line assembly."""
    kernel = replace(PLAIN, width=width, **mode)
    blocks = program.compile_blocks(assemble_and_decode(text, width), kernel, spaces())
    return [step for block in blocks.values() for step in block.steps]


def execute(text: str, g: Waves, **mode) -> Waves:
    """Run straight-line assembly on waves."""
    with np.errstate(all="ignore"):
        for step in steps(text, **mode):
            step.run(g)
    return g


def tables() -> list[tuple[str, str, tuple]]:
    """For each instruction of gfx1151, return the mnemonic, "v" or "s", and the oracle's entry."""
    entries = [(n, "v", e) for n, e in oracle.vector_table().items()]
    entries += [(n, "s", e) for n, e in oracle.scalar_table().items()]
    # V_CMPX instructions compare like V_CMP instructions, but their result is EXEC.
    entries += [(n.replace("v_cmp_", "v_cmpx_"), f, e) for n, f, e in entries if "v_cmp_" in n]
    real = real_mnemonics({name for name, _, _ in entries})
    return [entry for entry in entries if entry[0] in real]


def entries() -> list[tuple[str, str, tuple]]:
    """Return the entries of one round.

    Scalar entries come ten times, because a scalar instruction tests one value, not one per lane.
    """
    entries = tables()
    return entries + 9 * [entry for entry in entries if entry[1] == "s"]


def run(programs: int = 60, length: int = 40, seed: int = 1) -> Report:
    """Generate, run and compare programs. Raises DisassemblerError without a libLLVM."""
    rng = random.Random(seed)
    report = Report()
    round_entries = entries()
    order: list = []
    with np.errstate(all="ignore"):
        for _ in range(programs):
            operations = []
            for _ in range(length):
                # Each entry comes once, in random order, before the next round of entries begins.
                order = order or rng.sample(round_entries, len(round_entries))
                operations.append(operation(rng, *order.pop()))
            _compare(rng, operations, report)
    return report


def _compare(rng: random.Random, operations: list[Operation], report: Report) -> None:
    V = np.array([[random_bits(rng) for _ in range(LANES)] for _ in range(REGISTERS)], np.uint32)
    S = np.array([[[random_bits(rng)]] for _ in range(SCALARS)], np.uint32)
    S[EXEC] = 0xFFFFFFFF if rng.random() < 0.5 else rng.getrandbits(32) | 1
    g = waves(V[:, None], S)
    compiled_steps = steps("\n".join(o.text for o in operations))
    for done, step in zip(operations, compiled_steps, strict=True):
        before = waves(g.V, g.S)
        before.scc[...] = g.scc
        report.compared += 1
        try:
            step.run(g)
        except Trap as trap:
            report.disagreements.append(str(trap))
            continue
        report.covered.add(done.mnemonic)
        after = waves(g.V, g.S)
        after.scc[...] = g.scc
        g.S[EXEC : EXEC + 2] = before.S[EXEC : EXEC + 2]
        g.exec_changed()
        fault = _stray(done, before, after)
        for lane in range(LANES if done.mnemonic.startswith("v_") else 1):
            fault = fault or _fault(done, before, after, lane)
        if fault and len(report.disagreements) < 200:
            report.disagreements.append(f"{step.instruction.text}: {fault}")


def _fault(done: Operation, before: Waves, after: Waves, lane: int) -> str:
    """Return how a lane's result differs from the oracle's, or ""."""
    active = bool(int(before.S[EXEC, 0, 0]) >> lane & 1)
    bits = [_fetch(s, kind, before, lane) for kind, s in done.sources]
    origin = f" from {', '.join(hex(b) for b in bits)}, lane {lane}"
    result = done.function(*bits)
    if done.mnemonic.startswith("s_"):
        result, scc, *mask = result
        scc = int(before.scc[0, 0]) if scc is None else scc
        if int(after.scc[0, 0]) != scc:
            return f"SCC {int(after.scc[0, 0])}, expected {scc}{origin}"
        exec_ = int(after.S[EXEC, 0, 0]) | (int(after.S[EXEC + 1, 0, 0]) << 32) * (
            done.kind == "u64"
        )
        if mask and exec_ != mask[0]:
            return f"EXEC {exec_:#x}, expected {mask[0]:#x}{origin}"
        if done.target is None:
            return ""
    elif done.flag is not None:
        result, flag = result if done.target else (None, result)
        got = int(after.S[done.flag, 0, 0]) >> lane & 1
        if got != (flag if active else 0):
            return f"bit {got}, expected {flag if active else 0}{origin}"
        if result is None:
            return ""
    if not active and done.mnemonic.startswith("v_"):
        result = _fetch(done.target, done.kind, before, lane)
    width = {"h2": 32, "z16": 32}.get(done.kind) or int(done.kind[-2:])
    allowed = {r & ((1 << width) - 1) for r in (result if isinstance(result, set) else {result})}
    if active and " clamp" in done.modifiers and done.kind in FORMS:
        allowed = {limited(r, FORMS[done.kind]) for r in allowed}
    got = _fetch(done.target, done.kind, after, lane)
    if any(_same(got, value, done.kind) for value in allowed):
        return ""
    return f"{got:#x}, expected {' or '.join(map(hex, sorted(allowed)))}{origin}"


def _same(a: int, b: int, kind: str) -> bool:
    """Return whether the bits are the same, or both values are NaN."""
    if kind == "h2":
        return all(_same(a >> s & 0xFFFF, b >> s & 0xFFFF, "f16") for s in (0, 16))
    form = FORMS.get(kind)
    nan = form and exact.value(a, form)[0] == exact.value(b, form)[0] == "nan"
    return a == b or bool(nan and not a >> form[3])


def _stray(done: Operation, before: Waves, after: Waves) -> str:
    """Return which register changed although the instruction must not write it, or ""."""
    V = before.V ^ after.V
    S = before.S ^ after.S
    S[EXEC] = 0
    if done.kind == "u64" and "exec_" in done.mnemonic:
        S[EXEC + 1] = 0
    if done.flag is not None:
        S[done.flag] = 0
    if target := done.target:
        file = V if target.file == "v" else S
        halves = target.file == "v" and done.kind[-2:] == "16"
        if halves:
            # The other half of the register must not change.
            file[target.index] &= 0xFFFF if target.high else 0xFFFF0000
        else:
            file[target.index] = 0
        if done.kind.endswith("64"):
            file[target.index + 1] = 0
    for name, changed in (("v", V), ("s", S)):
        if changed.any():
            return f"changes {name}{int(np.argwhere(changed)[0][0])}"
    return ""


def _fetch(source: Source, kind: str, g: Waves, lane: int) -> int:
    """Return the bits of an operand or of a result."""
    if source.file == "mask":
        return int(g.S[source.index, 0, 0]) >> lane & 1
    if source.file == "scc":
        return int(g.scc[0, 0])
    if source.file == "lane":
        return lane
    if not source.file:
        bits = source.bits
    else:
        read = (
            (lambda i: int(g.V[i, 0, lane]))
            if source.file == "v"
            else (lambda i: int(g.S[i, 0, 0]))
        )
        bits = read(source.index)
        if kind[-2:] == "64":
            bits |= read(source.index + 1) << 32
        if kind[-2:] == "16" and kind != "z16":
            bits = bits >> 16 if source.high else bits & 0xFFFF
    if kind in FORMS:
        top = 1 << (FORMS[kind][3] - 1)
        bits = bits & ~top if source.abs else bits
        bits = bits ^ top if source.neg else bits
    return bits


if __name__ == "__main__":
    report = run(int(sys.argv[1]))
    print(*report.disagreements, sep="\n")
    supported = real_mnemonics(program.supported_mnemonics())
    print(
        f"{llvm.version()}: {len(supported)} mnemonics supported, "
        f"{len(report.covered)} compared in {report.compared} instructions of {LANES} lanes, "
        f"{len(report.disagreements)} disagreements"
    )
