# SPDX-License-Identifier: BSD-3-Clause
"""Compares the machine with the oracle on random straight-line programs, assembled by LLVM.

The generator knows operands and modifiers. The assembler and disassembler stand between it and the
machine, so a misread operand is a disagreement as well. `python selftest.py 1000` compares 40,000
instructions and prints the result.
"""

import io
import random
import re
import sys
from dataclasses import dataclass, field
from fractions import Fraction

import exact
import numpy as np
import oracle
from elftools.elf.elffile import ELFFile
from strix_emulate import addressing, llvm, program
from strix_emulate.decode import EXEC, VCC, Instruction, decode
from strix_emulate.errors import EmulatorError
from strix_emulate.loader import Kernel
from strix_emulate.memory import Arena, Memory
from strix_emulate.waves import LANES, SCALARS, Waves

REGISTERS = 16
#: What goes wrong first: zeros, ones, denormals, largest, infinities, NaNs, integer limits.
EDGES = (
    0, 1, 0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000, 0xBF800000, 0x00000001, 0x807FFFFF,
    0x00800000,
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00000, 0x33800000, 0x4F000000,
    0xCF000001,
    0x3C003C00, 0x7C000001, 0xFBFF7BFF, 0x80000400, 0x03FF8001, 0x7E007D00, 0x4B800001, 0x3F000000,
    0x477FF000,
)  # fmt: skip
_INLINE = {"u32": ("0", "1", "-1", "64", "-16", "0x12345678"),
           "f32": ("0", "1.0", "-4.0", "0.5", "0x7f800000"),
           "u16": ("0", "1", "-1", "64", "0x1234"), "f16": ("0", "1.0", "-2.0", "0.5", "0x7c00"),
           "u64": ("0", "1", "-1"), "f64": ("0", "1.0", "-2.0", "0.5")}  # fmt: skip
_FORMS = {"f32": exact.F32, "f16": exact.F16, "f64": exact.F64}


@dataclass
class Source:
    """A generated operand: its text, and where its bits are."""

    text: str
    file: str = ""
    index: int = 0
    high: bool = False
    bits: int = 0
    neg: bool = False
    abs: bool = False


@dataclass
class Operation:
    """A generated instruction; the target is VCC or an SGPR where the result is a mask."""

    name: str
    kind: str
    target: Source
    sources: list[tuple[str, Source]]
    function: object
    modifiers: dict = field(default_factory=dict)

    @property
    def text(self) -> str:
        words = [s.text for _, s in self.sources]
        if self.target.text:
            words.insert(0, self.target.text)
        return f"{self.name} {', '.join(words)}" + "".join(f" {k}" for k in self.modifiers)


@dataclass
class Report:
    """instructions compared; disagreements as text, at most a few; names covered."""

    compared: int = 0
    disagreements: list[str] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)


def assembled(text: str) -> list[Instruction]:
    """LLVM's assembler and disassembler in one."""
    elf = ELFFile(io.BytesIO(llvm.assemble(text + "\ns_endpgm\n")))
    return decode(elf.get_section_by_name(".text").data())[:-1]


def real_mnemonics(names: set[str]) -> set[str]:
    """Those that gfx1151's assembler knows: it rejects their operands, not their names."""
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
    """One or more waves with these registers: V (registers, n, 32), S (128, n, 1)."""
    n = V.shape[1]
    identity = [
        np.zeros(n, np.int64),
        np.arange(n),
        np.arange(n),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
    ]
    return Waves(V.copy(), S.copy(), np.zeros((n, 1), bool), 0, identity, [[], [], []])


def spaces() -> addressing.Spaces:
    return addressing.Spaces(Arena(1 << 16, 1, False, False),
                       Memory("LDS", 4096, 1, False, False), 4096, 4096,
                       Memory("scratch", 4096, 1, False, False), 16)  # fmt: skip


def execute(text: str, g: Waves, **mode) -> Waves:
    """Runs straight-line assembly on waves."""
    kernel = Kernel("selftest", b"", **mode)
    with np.errstate(all="ignore"):
        for block in program.compile_blocks(assembled(text), kernel, spaces()).values():
            for step in block.steps:
                step.run(g)
    return g


def run(programs: int = 60, length: int = 40, seed: int = 1) -> Report:
    """Generates, runs and compares programs. Raises DisassemblerError without a libLLVM."""
    rng, report = random.Random(seed), Report()
    tables = [(n, "v", e) for n, e in oracle.vector_table().items()]
    tables += [(n, "s", e) for n, e in oracle.scalar_table().items()]
    # the same comparisons, with EXEC for a result
    tables += [(n.replace("v_cmp_", "v_cmpx_"), f, e) for n, f, e in tables if "v_cmp_" in n]
    real = real_mnemonics({name for name, _, _ in tables})
    tables = [entry for entry in tables if entry[0] in real]
    order: list = []
    with np.errstate(all="ignore"):
        for _ in range(programs):
            operations = []
            for _ in range(length):
                # each mnemonic in turn, in random order
                order = order or rng.sample(tables, len(tables))
                operations.append(_operation(rng, *order.pop()))
            _compare(rng, operations, report)
    return report


def _compare(rng: random.Random, operations: list[Operation], report: Report) -> None:
    V = np.array([[_bits(rng) for _ in range(LANES)] for _ in range(REGISTERS)], np.uint32)[:, None]
    S = np.array([[[_bits(rng)]] for _ in range(SCALARS)], np.uint32)
    S[EXEC] = 0xFFFFFFFF if rng.random() < 0.5 else rng.getrandbits(32) | 1
    steps = [
        step
        for block in program.compile_blocks(
            assembled("\n".join(o.text for o in operations)), Kernel("selftest", b""), spaces()
        ).values()
        for step in block.steps
    ]
    g = waves(V, S)
    for operation, step in zip(operations, steps, strict=True):
        before = waves(g.V, g.S)
        step.run(g)
        report.compared += 1
        report.covered.add(operation.name)
        after = waves(g.V, g.S)
        after.scc[...] = g.scc
        if "cmpx" in operation.name:
            g.S[EXEC] = before.S[EXEC]
            g.exec_changed()
        for lane in range(LANES):
            if (fault := _fault(operation, before, after, lane)) and len(report.disagreements) < 20:
                report.disagreements.append(f"{step.instruction.text}: lane {lane}: {fault}")
                break


def _fault(operation: Operation, before: Waves, after: Waves, lane: int) -> str:
    active = bool(int(before.S[EXEC, 0, 0]) >> lane & 1)
    bits = [_fetch(s, kind, before, lane) for kind, s in operation.sources]
    result = operation.function(*bits)
    if operation.name.startswith("s_"):
        result, scc = result
        if scc is not None and int(after.scc[0, 0]) != scc:
            return f"SCC {int(after.scc[0, 0])}, expected {scc}"
        if result is None:
            return ""
    elif operation.kind == "mask":
        got = int(after.S[operation.target.index, 0, 0]) >> lane & 1
        expected = result if active else 0
        return "" if got == expected else f"bit {got}, expected {expected}"
    elif not active:
        result = _fetch(operation.target, operation.kind, before, lane)
    else:
        result = _modified(result, operation)
    width = int(operation.kind[1:])
    result &= (1 << width) - 1
    got = _fetch(operation.target, operation.kind, after, lane)
    form = _FORMS.get(operation.kind)
    if got == result or (
        form and exact.value(got, form)[0] == exact.value(result, form)[0] == "nan"
    ):
        return ""
    return f"{got:#x}, expected {result:#x} from {', '.join(hex(b) for b in bits)}"


def _modified(result: int, operation: Operation) -> int:
    form = _FORMS.get(operation.kind)
    # omod has no effect in the mode that the programs run in: IEEE, with denormals
    if "clamp" in operation.modifiers:
        zero, one = 0, exact.encode(Fraction(1), form)
        if exact.value(result, form)[0] == "nan":
            return zero
        result = exact.extreme(exact.extreme(result, zero, form, True), one, form, False)
    return result


def _fetch(source: Source, kind: str, g: Waves, lane: int) -> int:
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
        if kind[-2:] == "16":
            bits = bits >> 16 if source.high else bits & 0xFFFF
    if kind in _FORMS:
        top = 1 << (_FORMS[kind][3] - 1)
        bits = bits & ~top if source.abs else bits
        bits = bits ^ top if source.neg else bits
    return bits


def _operation(rng: random.Random, name: str, file: str, entry) -> Operation:
    kind, kinds, function = entry
    encoded = name
    modifiers = {}
    if file == "v":
        encoded += "_e64"
        if kind == "mask" and "cmpx" in name:
            target = Source("", "s", EXEC)
        elif kind == "mask":
            target = Source("s9", "s", 9) if rng.random() < 0.5 else Source("vcc_lo", "s", VCC)
        else:
            target = _register(rng, "v", kind)
        floating = all(k in _FORMS for k in (kind, *kinds)) and kind != "mask"
        if floating and len(kinds) > 1 and rng.random() < 0.3:
            modifiers[rng.choice(["clamp", "mul:2", "mul:4", "div:2"])] = 1
    else:
        target = _register(rng, "s", kind) if kind else Source("")
    scalars = 0
    sources = []
    for k in kinds:
        source = _source(rng, file, k, allow_scalar=file == "s" or scalars == 0)
        scalars += file == "v" and source.file != "v"
        if file == "v" and k in _FORMS and rng.random() < 0.3 and source.file == "v":
            source.neg, source.abs = rng.random() < 0.5, rng.random() < 0.5
            text = f"|{source.text}|" if source.abs else source.text
            source.text = f"-{text}" if source.neg else text
        sources.append((k, source))
    return Operation(encoded, kind or "u32", target, sources, function, modifiers)


def _source(rng: random.Random, file: str, kind: str, allow_scalar: bool) -> Source:
    chance = rng.random()
    if chance < 0.2 and allow_scalar:
        text = rng.choice(_INLINE[kind])
        return Source(text, bits=_constant_bits(text, kind))
    return _register(rng, "s" if file == "s" or (chance < 0.35 and allow_scalar) else "v", kind)


def _constant_bits(text: str, kind: str) -> int:
    width = int(kind[1:])
    if "." in text:
        return exact.encode(Fraction(text), _FORMS[kind])
    return int(text, 0) & ((1 << width) - 1)


def _register(rng: random.Random, file: str, kind: str) -> Source:
    if kind.endswith("64"):
        index = rng.randrange(0, REGISTERS - 1, 2)
        return Source(f"{file}[{index}:{index + 1}]", file, index)
    index = rng.randrange(REGISTERS if file == "v" else 8)
    if kind.endswith("16") and file == "v":
        high = rng.random() < 0.5
        return Source(f"v{index}.{'h' if high else 'l'}", file, index, high)
    return Source(f"{file}{index}", file, index)


def _bits(rng: random.Random) -> int:
    chance = rng.random()
    if chance < 0.4:
        return rng.choice(EDGES)
    if chance < 0.7:
        # a number of ordinary size, so that sums do not only overflow
        return exact.float_bits(rng.uniform(-8, 8))
    return rng.getrandbits(32)


if __name__ == "__main__":
    report = run(int(sys.argv[1]))
    print(*report.disagreements, sep="\n")
    print(
        f"{llvm.version()}: {len(real_mnemonics(program.supported()))} mnemonics supported, "
        f"{len(report.covered)} compared in {report.compared} instructions of {LANES} lanes, "
        f"{len(report.disagreements)} disagreements"
    )
