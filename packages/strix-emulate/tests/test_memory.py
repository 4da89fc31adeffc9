# SPDX-License-Identifier: BSD-3-Clause
"""Every mnemonic of loads, stores and atomics, against plain Python on bytes."""

import io
import struct

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from selftest import real_mnemonics
from strix_emulate import atomics, llvm, vmem
from strix_emulate.api import Buffer, Options, launch
from strix_emulate.loader import Argument, Kernel

HEAD = """
s_load_b128 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
v_mov_b32 v20, 0x55667788
s_waitcnt lgkmcnt(0)
global_load_b128 v[4:7], v1, s[4:5]
v_add_co_u32 v2, vcc_lo, s6, v1
v_add_co_ci_u32 v3, vcc_lo, s7, 0, vcc_lo
s_mov_b32 s8, s6
s_mov_b32 s9, s7
s_mov_b32 s10, 0x400
s_mov_b32 s11, 0x30000000
s_waitcnt vmcnt(0)
"""
#: the cell of each of 32 threads is 16 bytes of the output; what it found there is stored behind
TAIL = """
s_waitcnt vmcnt(0) lgkmcnt(0)
s_waitcnt_vscnt null, 0x0
global_store_b128 v1, v[20:23], s[6:7] offset:512
s_endpgm
"""
TO_LDS = "global_load_b128 v[8:11], v1, s[6:7]\ns_waitcnt vmcnt(0)\nds_store_b128 v1, v[8:11]\n"
FROM_LDS = "ds_load_b128 v[8:11], v1\ns_waitcnt lgkmcnt(0)\nglobal_store_b128 v1, v[8:11], s[6:7]\n"
TO_SCRATCH = TO_LDS.replace("ds_store_b128 v1,", "scratch_store_b128 off,").replace(
    "v[8:11]\n", "v[8:11], off\n", 2).replace("v[8:11], off, s", "v[8:11], s")  # fmt: skip


def execute(body: str, data: bytes, out: bytes) -> bytes:
    elf = ELFFile(io.BytesIO(llvm.assemble(HEAD + body + TAIL)))
    kernel = Kernel(
        "test", elf.get_section_by_name(".text").data(), lds=1024, kernarg=16, scratch=32,
        arguments=(Argument("", 0, 8, "global_buffer"), Argument("", 8, 8, "global_buffer")),
    )  # fmt: skip
    into = np.frombuffer(out, np.uint8).copy()
    launch(kernel, (1,), [Buffer(np.frombuffer(data, np.uint8), "in"), Buffer(into)],
           threads=32, options=Options(budget=10_000))  # fmt: skip
    return into.tobytes()


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def number(x: int, kind: str):
    if kind[0] == "f":
        size = int(kind[1:]) // 8
        return struct.unpack("<f" if size == 4 else "<d", x.to_bytes(size, "little"))[0]
    return signed(x, int(kind[1:])) if kind[0] == "i" else x


def updated(op: str, kind: str, old: int, a: int, b: int) -> int:
    """The ISA's pseudocode, on bit patterns; a and b are the data registers in order."""
    x, y, z = (number(v, kind) for v in (old, a, b))
    if kind == "f32" and op == "add":
        return int(np.array(np.float32(x) + np.float32(y)).view(np.uint32))
    return {
        "add": lambda: old + a, "sub": lambda: old - a, "rsub": lambda: a - old,
        "inc": lambda: 0 if old >= a else old + 1,
        "dec": lambda: a if old == 0 or old > a else old - 1,
        "csub": lambda: 0 if old < a else old - a,
        "and": lambda: old & a, "or": lambda: old | a, "xor": lambda: old ^ a,
        "min": lambda: a if y < x else old, "max": lambda: a if y > x else old,
        "swap": lambda: a, "storexchg": lambda: a,
        "cmpswap": lambda: a if x == z else old, "cmpstore": lambda: a if x == z else old,
        "mskor": lambda: old & ~a | b,
    }[op]() & ((1 << int(kind[1:])) - 1)  # fmt: skip


ATOMICS = sorted(real_mnemonics(set(atomics.NAMES)))


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("returns", [False, True])
def test_atomic(name, returns):
    space, op, kind, lds_returns = atomics.NAMES[name]
    if space == "ds" and returns != lds_returns:
        return
    size = int(kind[1:]) // 8
    rng = np.random.default_rng(len(name))
    data, cells = (bytearray(rng.integers(0, 256, 512, np.uint8).tobytes()) for _ in range(2))
    if kind[0] == "f":
        # ordinary numbers, no NaN
        for store in (data, cells):
            values = rng.normal(size=512 // size).astype(f"f{size}")
            store[:] = values.tobytes()
    for i in range(0, 512, 32):
        # every other lane finds what it compares with
        data[i + size : i + 2 * size] = cells[i : i + size]
    two = op in ("cmpswap", "cmpstore", "mskor")
    words = size // 4
    first = "v4" if size == 4 else "v[4:5]"
    both = f"v[4:{3 + words * (2 if two else 1)}]" if two or size == 8 else "v4"
    old = "v20" if size == 4 else "v[20:21]"
    if space == "ds":
        second = f", v{4 + words}" if size == 4 else f", v[{4 + words}:{5 + words}]"
        body = f"{name} {f'{old}, ' if returns else ''}v1, {first}{second if two else ''}\n"
        body = TO_LDS + body + "s_waitcnt lgkmcnt(0)\n" + FROM_LDS
    elif space == "buffer":
        glc = " glc" if returns else ""
        body = f"{name} {both}, v1, s[8:11], 0 offen{glc}\ns_waitcnt vmcnt(0)\n"
        body += "".join(f"v_mov_b32 v{20 + i}, v{4 + i}\n" for i in range(words) if returns)
    else:
        where = f"v1, {both}, s[6:7]" if space == "global" else f"v[2:3], {both}"
        body = f"{name} {f'{old}, ' if returns else ''}{where}{' glc' if returns else ''}\n"
    if not returns and op == "csub":
        return  # it always returns
    got = execute(body, bytes(data), bytes(cells) + bytes(512))
    for lane in range(32):
        at = 16 * lane
        a, b, held = (
            int.from_bytes(x[at + skip : at + skip + size], "little")
            for x, skip in ((data, 0), (data, size if two else 0), (cells, 0))
        )
        result = int.from_bytes(got[at : at + size], "little")
        assert result == updated(op, kind, held, a, b), (lane, hex(held), hex(a), hex(b))
        if returns:
            assert int.from_bytes(got[512 + at : 512 + at + size], "little") == held


PLAIN = sorted(
    name for name in real_mnemonics(vmem.names())
    if name.split("_")[0] in ("global", "flat", "buffer", "ds", "scratch")
    and name.split("_")[1] in ("load", "store") and "2addr" not in name
)  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_load_and_store(name):
    space, what, kind = name.split("_", 2)
    size, how = vmem.TYPES[kind]
    words = max(1, size // 4)
    rng = np.random.default_rng(len(name))
    data, cells = (rng.integers(0, 256, 512, np.uint8).tobytes() for _ in range(2))
    first = 4 if what == "store" else 20
    half = {"high": ".h", "low": ".l"}.get(how.split(" ")[0], "")
    half = "" if space == "ds" or "d16" in kind else half
    register = f"v{first}{half}" if words == 1 else f"v[{first}:{first + words - 1}]"
    address = {"global": "v1, {}, s[6:7]", "flat": "v[2:3], {}", "ds": "v1, {}",
               "buffer": "{}, v1, s[8:11], 0 offen", "scratch": "off, {}, off"}[space]  # fmt: skip
    if what == "load":
        address = {"global": "{}, v1, s[6:7]", "flat": "{}, v[2:3]", "ds": "{}, v1",
                   "scratch": "{}, off, off"}.get(space, address)  # fmt: skip
    body = f"{name} {address.format(register)}\ns_waitcnt vmcnt(0) lgkmcnt(0)\n"
    if space == "ds":
        body = TO_LDS + "s_waitcnt lgkmcnt(0)\n" + body + FROM_LDS
    if space == "scratch":
        through = "scratch_load_b128 v[8:11], off, off\ns_waitcnt vmcnt(0)\n"
        body = TO_SCRATCH + body + through + FROM_LDS.split("\n", 2)[2]
    body = "v_mov_b32 v21, 0\nv_mov_b32 v22, 0\nv_mov_b32 v23, 0\n" + body
    got = execute(body, data, cells + bytes(512))
    for lane in range(32):
        at = 16 * lane
        if what == "store":
            skip = 2 if "high" in how else 0
            expected = data[at + skip : at + skip + size] + cells[at + size : at + 16]
            assert got[at : at + 16] == expected, lane
            continue
        value = int.from_bytes(cells[at : at + size], "little")
        if size < 4:
            value = signed(value, 8 * size) if "sign" in how else value
            if "high" in how:
                value = (value & 0xFFFF) << 16 | 0x7788
            elif "low" in how:
                value = value & 0xFFFF | 0x55660000
        found = int.from_bytes(got[512 + at : 512 + at + 4 * words], "little")
        assert found == value & (1 << 32 * words) - 1, (lane, hex(found), hex(value))


def test_a_scalar_offset_lessens_a_buffer() -> None:
    """Threads whose own offset is below the number of records less the scalar offset load."""
    body = """
s_mov_b32 s10, 0x140
s_movk_i32 s12, 0x100
v_mov_b32 v20, 0
v_mov_b32 v21, 0
v_mov_b32 v22, 0
v_mov_b32 v23, 0
buffer_load_b32 v20, v1, s[8:11], s12 offen
"""
    out = bytes(256) + struct.pack("<192I", *range(1, 193))
    got = np.frombuffer(execute(body, bytes(512), out)[512:], np.uint32)[::4]
    # thread i loads at 256 + 16 i, which the buffer has up to 320
    assert got.tolist() == [1, 5, 9, 13, *[0] * 28]
