# SPDX-License-Identifier: BSD-3-Clause
"""Compare the operands and modifiers that the emulator reads from bytes with LLVM's text of them.

The test covers every opcode of every encoding that the emulator executes, with random bits in all
other fields. NAMED lists the expected differences and their causes.
"""

import random
import struct
from dataclasses import replace

import llvm_text
import numpy as np
import pytest
import selftest
from single import LANE, run
from strix_emulate.code import decode, encodings, llvm
from strix_emulate.code.decode import APERTURES, Instruction, Operand, Unknown, read
from strix_emulate.code.target import DEFAULT
from strix_emulate.run import program

#: For each encoding: its first 32 bits, the lowest bit and the number of bits of its opcode, and
#: its size in bytes without a literal.
ENCODINGS = {
    "SOP1": (0xBE800000, 8, 8, 4),
    "SOP2": (0x80000000, 23, 7, 4),
    "SOPC": (0xBF000000, 16, 7, 4),
    "SOPK": (0xB0000000, 23, 5, 4),
    "SOPP": (0xBF800000, 16, 7, 4),
    "VOP1": (0x7E000000, 9, 8, 4),
    "VOP2": (0x00000000, 25, 6, 4),
    "VOPC": (0x7C000000, 17, 8, 4),
    "VOP3": (0xD4000000, 16, 10, 8),
    "VOP3P": (0xCC000000, 16, 7, 8),
    "VOPD": (0xC8000000, 17, 9, 8),
    "SMEM": (0xF4000000, 18, 8, 8),
    "DS": (0xD8000000, 18, 8, 8),
    "MUBUF": (0xE0000000, 18, 8, 8),
    "FLAT": (0xDC000000, 18, 7, 8),
}
#: Mnemonics whose fields LLVM prints as names instead of numbers.
_VERBATIM = {
    "s_waitcnt",
    "s_delay_alu",
    "s_sendmsg",
    "s_waitcnt_depctr",
    "s_setreg_imm32_b32",
    "s_getreg_b32",
    "s_setreg_b32",
    "s_sendmsg_rtn_b64",
    "s_sendmsg_rtn_b32",
    "s_version",
    "s_sendmsghalt",
}
_SOURCES = (0, 5, 105, 106, 124, 125, 126, 128, 129, 192, 193, 208, 240, 248, 255)
_WITHOUT_OPERANDS = {
    "s_barrier",
    "s_code_end",
    "s_icache_inv",
    "s_ttracedata",
    "s_wait_idle",
    "s_wakeup",
}
#: Instructions that random fields seldom or never produce.
_REST = """
ds_append v0 offset:8
ds_consume v3
ds_gws_barrier v0 gds
flat_atomic_max_i64 v[0:1], v[2:3] offset:7
flat_atomic_or_b32 v5, v[0:1], v2 glc
flat_load_d16_i8 v5, v[0:1]
flat_load_i16 v5, v[0:1] offset:4095
s_buffer_load_b256 s[8:15], s[4:7], 0x10
v_cvt_pk_rtz_f16_f32 v0, -v1, |v2|
v_lshlrev_b64 v[0:1], s3, v[4:5]
v_permlane16_b32 v0, v1, s2, 0x12345678 op_sel:[1,1]
v_readlane_b32 s4, v1, s5
"""


def encoded(rng: random.Random, kind: str, opcode: int) -> bytes:
    """Return 16 bytes that begin with a random instruction of this opcode, if the opcode exists."""
    word, at, bits, size = ENCODINGS[kind]
    free = 0xFFFFFFFF & ~word & ~(((1 << bits) - 1) << at) & ((1 << at + bits) - 1)
    first = word | opcode << at | rng.getrandbits(32) & free
    second = rng.getrandbits(32)
    if size == 4 and kind not in ("SOPP", "SOPK"):
        vector = 256 * (kind[0] == "V" and rng.random() < 0.6)
        first = first & ~0xFF & ~(256 * (kind[0] == "V")) | rng.choice(_SOURCES) | vector
        if kind in ("SOP2", "SOPC"):
            first = first & ~0xFF00 | rng.choice(_SOURCES) << 8
        if kind[0] == "V" and rng.random() < 0.2:
            first = first & ~0x1FF | rng.choice((233, 234, 250))
    if kind[:3] == "VOP" and size == 8:
        a, b, c = (rng.choice((*_SOURCES, *[256 + rng.randrange(256)] * 20)) for _ in range(3))
        a = rng.choice((233, 250)) if kind != "VOPD" and rng.random() < 0.1 else a
        # The second sources of a VOPD instruction are always vector registers, and stay random.
        if kind == "VOPD":
            second = second & ~0x1FF | a
            first = first & ~0x1FF | rng.choice((a, 256 + rng.randrange(256)))
        else:
            second = second & ~0x7FFFFFF | a | b << 9 | c << 18
            if rng.random() < 0.5:
                # Like most instructions, this one has no modifiers.
                first = first & ~0x7F00
                second = second & 0x07FFFFFF
    if kind in ("DS", "MUBUF", "FLAT"):
        # Fields that an instruction does not use have to be 0.
        second &= rng.choice((0xFF, 0xFFFF, 0xFF00FFFF, 0xFF0000FF, 0xFFFFFF, 0xFFFFFFFF))
        if kind == "FLAT" and rng.random() < 0.5:
            second = second & ~0x7F0000 | 124 << 16
    third = rng.getrandbits(32)
    control = rng.choice((0xE4, 0x101, 0x11F, 0x128, 0x140, 0x141, 0x153, 0x16F)) << 8
    dpp = third & ~0x1FF00 & ~0x20000 | control
    at_second = kind[0] == "V" and size == 4 and first & 0x1FF == 250
    if at_second:
        second = dpp
    elif kind[:3] == "VOP" and size == 8 and second & 0x1FF == 250:
        third = dpp
    return struct.pack("<4I", first, second, third, 0)


def _plain(op: Operand, bits: int) -> Operand:
    """Return an operand as LLVM's text shows it: integers without a sign, and 1/2pi rounded."""
    value = op.value
    if isinstance(value, float):
        if bits == 16:
            # For some instructions, LLVM prints the bits of a float as an integer.
            value = int(np.float16(value).view(np.uint16))
        value = round(value, 3)
    elif value not in APERTURES.values():
        value &= (1 << bits) - 1
    return replace(op, value=value, literal=False)


def _is_short(name: str) -> bool:
    """Return whether LLVM prints constants with 16 bits."""
    return "16" in name.replace("x16", "") or name.startswith(("s_", "v_pk_", "v_align"))


_INTEGERS_TOO = ("ldexp", "class", "cvt_f", "cvt_pk_u8", "trig_preop")


def _signless(name: str) -> bool:
    """Return whether an operand is an integer.

    Instructions ignore the sign modifiers of integers, and LLVM does not print them.
    """
    numbers = ("_f16", "_f32", "_f64", "bf16", "cndmask")
    return not any(n in name for n in numbers) or any(n in name for n in _INTEGERS_TOO)


def difference(ins: Instruction) -> str:
    """Return the difference between LLVM's text and the bytes, or ""."""
    for part, text in zip(ins.pair or (ins,), ins.text.split(" :: "), strict=True):
        operands, modifiers = llvm_text.operands(text)
        for bits in (32, 16):
            mine = [_plain(op, bits) for op in part.operands]
            theirs = [_plain(op, bits) for op in operands]
            if _signless(part.name):
                mine, theirs = (
                    [replace(op, neg=False, abs=False) for op in ops] for ops in (mine, theirs)
                )
            if mine == theirs or bits == 16 or not _is_short(part.name):
                break
        if mine != theirs:
            pairs = [f"{a} / {b}" for a, b in zip(mine, theirs, strict=False) if a != b]
            return f"operands {pairs}"
        # For op_sel, the bytes have four bits, but LLVM prints only those that the instruction
        # uses.
        mods = [dict(x) for x in (part.modifiers, modifiers)]
        if part.name.startswith("v_wmma"):
            mods[1].pop("op_sel_hi", None)  # op_sel_hi has no meaning for WMMA
        my_picks = ()
        their_picks = ()
        if ins.code[3] >> 2 == 0x35:
            my_picks, their_picks = (x.pop("op_sel", (0,)) for x in mods)
        if mods[0] != mods[1] or sum(my_picks) < sum(their_picks):
            return f"modifiers {part.modifiers} / {modifiers}"
    return ""


#: Causes of known differences, by the start of the mnemonic and the start of the message.
NAMED = {
    ("flat_", "modifiers"): "ISA: FLAT's own offset has 12 bits; LLVM prints 13",
    ("v_fmac_f16", "operands"): "LLVM prints an inline constant's code for V_FMAC with DPP",
    ("ds_swizzle_b32", "modifiers"): "LLVM's pattern omits AND bits that the OR bits override",
    ("s_atc_probe", "operands"): "not executed: the first operand is a number",
    ("ds_ordered_count", "operands"): "not executed: the operand is not an address",
}


def sample(count: int, seed: int):
    """Yield `count` random instructions for each opcode, without those that LLVM does not know."""
    rng = random.Random(seed)
    for kind, (_, _, bits, _) in ENCODINGS.items():
        for opcode in range(1 << bits):
            for _ in range(count):
                raw = encoded(rng, kind, opcode)
                ((_, size, text),) = llvm.disassemble(raw, max_instructions=1)
                if text:
                    yield read(raw[:size], " ".join(text.split()))


def compare(count: int, seed: int) -> tuple[set[str], list[str]]:
    """Return the compared mnemonics, and the differences that are not in NAMED."""
    names = set()
    differences = []
    for ins in (*sample(count, seed), *selftest.assemble_and_decode(_REST)):
        if ins.unknown or ins.name in _VERBATIM:
            continue
        try:
            message = difference(ins)
        except Unknown:
            continue  # llvm_text does not know the operand or modifier
        names |= {half.name for half in ins.pair or (ins,)}
        is_named = any(ins.name.startswith(n) and message.startswith(m) for n, m in NAMED)
        if message and not is_named:
            differences.append(f"{ins.code.hex()} `{ins.text}`: {message}")
    return names, differences


def test_bytes_and_text_agree_in_every_encoding():
    names, differences = compare(count=24, seed=1)
    assert differences == []
    # `real` has the mnemonics of gfx1151 that the emulator executes.
    real = selftest.real_mnemonics(program.supported_mnemonics())
    # The alias is another name of v_cvt_pk_rtz_f16_f32.
    alias = {"v_cvt_pkrtz_f16_f32"}
    assert real - names - _VERBATIM - alias <= _WITHOUT_OPERANDS
    assert len(names) > 1000


def test_no_instruction_begins_another():
    """Instructions can be cached by their bytes, because the bytes after them change nothing."""
    rng = random.Random(2)
    _, texts = llvm._context(llvm.find_disassembler(), DEFAULT.name, 32)
    for ins in sample(count=1, seed=2):
        for length in range(4, len(ins.code) + 1, 4):
            raw = ins.code[:length] + rng.randbytes(20)
            texts.clear()
            ((at, size, text),) = llvm.disassemble(raw, max_instructions=1)
            if length == len(ins.code):
                assert (size, " ".join(text.split())) == (length, ins.text)
                # The second result comes from the cache.
                assert llvm.disassemble(raw, max_instructions=1) == [(at, size, text)]
            else:
                assert not text or size > length, ins


def test_code_that_ends_in_a_literal_is_refused():
    """LLVM 22.1.8 crashes on code that ends in a literal."""
    assert llvm.disassemble(bytes.fromhex("ff0280be")) == [(0, 4, "")]


def test_a_difference_is_found(monkeypatch):
    """The comparison finds differences if the lowest bit of each register's number is wrong."""
    correct = encodings._v
    monkeypatch.setattr(encodings, "_v", lambda number: correct(number ^ 1))
    # The cache is off, because it would give later tests wrong results for the same bytes.
    monkeypatch.setattr(decode, "_read", decode._read.__wrapped__)
    assert len(compare(count=1, seed=1)[1]) > 200


def test_literals_of_multiply_and_add_are_the_bytes():
    """LLVM 22.1.8 prints the literal 0xa8 of v_fmaak_f16 as 0x28: 0xa8 is the code of inline 40."""
    # The first range has every code that stands for an inline constant in an operand's field. The
    # second range is a sample of the other literals.
    for literal in (*range(512), *range(0, 1 << 16, 37)):
        raw = struct.pack("<2I", 0x70000100, literal)
        ins = read(raw, " ".join(llvm.disassemble(raw)[0][2].split()))
        assert ins.operands[-1] == Operand("const", value=literal, literal=True), ins
    # The emulator executes the instruction with the same literal.
    bits = int(np.float16(1e-5).view(np.uint16))
    g = run(f"v_fmaak_f16 v1.l, v0.l, v0.l, {bits:#x}", v0=LANE * 0)
    assert (g.V[1][0] & 0xFFFF == bits).all()


@pytest.mark.parametrize("raw", ["050180be", "ff4880beb87d2917"])
def test_what_llvm_finds_fault_with_is_refused(raw):
    """Code is refused if LLVM's text of it names an error.

    The first case has a pair of scalar registers that begins with an odd number. The second case
    jumps to a literal.
    """
    code = bytes.fromhex(raw)
    assert "LLVM" in read(code, llvm.disassemble(code)[0][2]).unknown
