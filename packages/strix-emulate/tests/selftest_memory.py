# SPDX-License-Identifier: BSD-3-Clause
"""Compare every mnemonic of loads, stores and atomics with plain Python on bytes."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import selftest
from strix_emulate import Buffer, Options, launch
from strix_emulate.errors import EmulatorError
from strix_emulate.instructions import vmem

HEAD = """
s_load_b128 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
v_mov_b32 v20, 0x55667788
v_mov_b32 v21, 0
v_mov_b32 v22, 0
v_mov_b32 v23, 0
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
#: The output has a cell of 16 bytes for each of 32 threads. After all cells come the threads'
#: results, v20 to v23.
TAIL = """
s_waitcnt vmcnt(0) lgkmcnt(0)
s_waitcnt_vscnt null, 0x0
global_store_b128 v1, v[20:23], s[6:7] offset:512
s_endpgm
"""
_IN = "global_load_b128 v[8:11], v1, s[6:7]\ns_waitcnt vmcnt(0)\n"
_OUT = "s_waitcnt vmcnt(0) lgkmcnt(0)\nglobal_store_b128 v1, v[8:11], s[6:7]\n"
TO_LDS = _IN + "ds_store_b128 v1, v[8:11]\ns_waitcnt lgkmcnt(0)\n"
FROM_LDS = "s_waitcnt vmcnt(0) lgkmcnt(0)\nds_load_b128 v[8:11], v1\n" + _OUT
TO_SCRATCH = _IN + "scratch_store_b128 off, v[8:11], off\n"
FROM_SCRATCH = "s_waitcnt_vscnt null, 0x0\nscratch_load_b128 v[8:11], off, off\n" + _OUT
#: v[2:3] becomes the flat address of the thread's cell, in the aperture of LDS or of scratch.
IN_LDS = "s_mov_b64 s[12:13], src_shared_base\nv_mov_b32 v2, v1\nv_mov_b32 v3, s13\n"
IN_SCRATCH = "s_mov_b64 s[12:13], src_private_base\nv_mov_b32 v2, 0\nv_mov_b32 v3, s13\n"
PLACES = {
    "": ("", ""),
    "LDS": (TO_LDS + IN_LDS, FROM_LDS),
    "scratch": (TO_SCRATCH + IN_SCRATCH, FROM_SCRATCH),
}
#: A buffer of 32 records of 16 bytes, one for each thread.
RECORDS = "s_or_b32 s9, s9, 0x100000\ns_mov_b32 s10, 32\ns_mov_b32 s11, 0x10001000\n"

#: Despite their names, these instructions do not access LDS. oracle_waves tests them.
_EXCHANGES = ("permute", "bpermute", "swizzle")


@dataclass
class Case:
    """Assembly between HEAD and TAIL, and its expected effects.

    Attributes:
        mnemonic: The instruction that is tested.
        body: The assembly.
        data: 16 bytes for each of 32 threads, in v[4:7].
        cells: 16 bytes for each of 32 threads, in memory.
        result: Expected bytes of each thread's cell.
        returned: Expected bytes of each thread's registers from v20 on.
    """

    mnemonic: str
    body: str
    data: bytes
    cells: bytes
    result: list[bytes]
    returned: list[bytes]


def execute(body: str, data: bytes, out: bytes, native: bool = True, checks: bool = True) -> bytes:
    kernel = selftest.kernel(HEAD + body + TAIL, lds=1024, scratch=32)
    into = np.frombuffer(out, np.uint8).copy()
    launch(
        kernel,
        (1,),
        [Buffer(np.frombuffer(data, np.uint8), "in"), Buffer(into)],
        threads=32,
        options=Options(budget=10_000, native=native, checks=checks),
    )
    return into.tobytes()


def run(native: bool) -> selftest.Report:
    """Run all cases. With `native`, they run in C if C is installed."""
    report = selftest.Report()
    for case in cases():
        report.compared += 1
        report.covered.add(case.mnemonic)
        try:
            got = execute(case.body, case.data, case.cells + bytes(512), native)
        except EmulatorError as error:
            report.disagreements.append(f"{case.mnemonic}: {error}")
            continue
        for i, (result, returned) in enumerate(zip(case.result, case.returned, strict=True)):
            cell = got[16 * i : 16 * i + 16]
            behind = got[512 + 16 * i :][: len(returned)]
            if (cell, behind) != (result, returned):
                report.disagreements.append(
                    f"{case.mnemonic}: thread {i}: {cell.hex()} and {behind.hex()}, "
                    f"expected {result.hex()} and {returned.hex()} in\n{case.body}"
                )
                break
    return report


def cases() -> Iterator[Case]:
    """Yield cases of each mnemonic.

    There are also cases of flat instructions that access LDS or scratch, and of buffer loads and
    stores that access records.
    """
    for name in sorted(selftest.real_mnemonics(vmem.names())):
        space, *words, kind = name.split("_")
        places = PLACES if space == "flat" else ("",)
        if space == "buffer" and ("load" in words or "store" in words):
            places = ("", "records")
        if "2addr" in words:
            yield _two_addresses(name)
        elif space == "s" and "load" in words:
            yield from _scalar(name, int(kind[1:]) // 32)
        elif "load" in words or "store" in words:
            make = _load if "load" in words else _store
            kind = name.split("load_" if "load" in words else "store_")[1]
            yield from (make(name, space, kind, place) for place in places)
        elif name in ("ds_append", "ds_consume"):
            yield _counter_case(name)
        elif "atomic" in words or (space == "ds" and words[0] not in _EXCHANGES):
            op = next(word for word in words if word not in ("atomic", "rtn"))
            # An LDS atomic that returns the old value has a name of its own. A conditional
            # subtraction always returns the old value.
            always = (True,) if "rtn" in words or op == "csub" else (False,)
            for returns in always if space == "ds" or op == "csub" else (False, True):
                yield from (_atomic(name, space, op, kind, returns, p) for p in places)


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def number(x: int, kind: str):
    if kind[0] == "f":
        size = int(kind[1:]) // 8
        return struct.unpack("<f" if size == 4 else "<d", x.to_bytes(size, "little"))[0]
    return signed(x, int(kind[1:])) if kind[0] == "i" else x


def update(op: str, kind: str, old: int, a: int, b: int) -> int:
    """Return an atomic's result, by the ISA's pseudocode. a and b are values of data registers."""
    x, y, z = (number(v, kind) for v in (old, a, b))
    if kind == "f32" and op == "add":
        return struct.unpack("<I", struct.pack("<f", x + y))[0]
    return {
        "add": lambda: old + a,
        "sub": lambda: old - a,
        "rsub": lambda: a - old,
        "inc": lambda: 0 if old >= a else old + 1,
        "dec": lambda: a if old == 0 or old > a else old - 1,
        "csub": lambda: 0 if old < a else old - a,
        "and": lambda: old & a,
        "or": lambda: old | a,
        "xor": lambda: old ^ a,
        "min": lambda: a if y < x else old,
        "max": lambda: a if y > x else old,
        "swap": lambda: a,
        "storexchg": lambda: a,
        "cmpswap": lambda: a if x == z else old,
        "cmpstore": lambda: a if x == z else old,
        "mskor": lambda: old & ~a | b,
    }[op]() & ((1 << int(kind[1:])) - 1)


def _random(name: str) -> list[bytes]:
    draw = np.random.default_rng(len(name))
    return [draw.integers(0, 256, 512, np.uint8).tobytes() for _ in range(2)]


def _split_cells(data: bytes) -> list[bytes]:
    return [data[i : i + 16] for i in range(0, 512, 16)]


def _atomic(name: str, space: str, op: str, kind: str, returns: bool, place: str) -> Case:
    size = int(kind[1:]) // 8
    data, cells = map(bytearray, _random(name))
    if kind[0] == "f":
        # Floating-point atomics get ordinary numbers, because random bits could be NaN.
        draw = np.random.default_rng(len(name))
        for store in (data, cells):
            store[:] = draw.normal(size=512 // size).astype(f"f{size}").tobytes()
    for i in range(0, 512, 32):
        # In every other lane, memory has the value with which the atomic compares it.
        data[i + size : i + 2 * size] = cells[i : i + size]
    two = op in ("cmpswap", "cmpstore", "mskor")
    words = size // 4
    first = "v4" if size == 4 else "v[4:5]"
    data_words = 2 * words if two else words
    both = "v4" if data_words == 1 else f"v[4:{3 + data_words}]"
    old = "v20" if size == 4 else "v[20:21]"
    before, after = PLACES[place]
    if space == "ds":
        second = f", v{4 + words}" if size == 4 else f", v[{4 + words}:{5 + words}]"
        body = f"{name} {f'{old}, ' if returns else ''}v1, {first}{second if two else ''}\n"
        before = TO_LDS
        after = FROM_LDS
    elif space == "buffer":
        glc = " glc" if returns else ""
        body = f"{name} {both}, v1, s[8:11], 0 offen{glc}\ns_waitcnt vmcnt(0)\n"
        body += "".join(f"v_mov_b32 v{20 + i}, v{4 + i}\n" for i in range(words) if returns)
    else:
        address = f"v1, {both}, s[6:7]" if space == "global" else f"v[2:3], {both}"
        body = f"{name} {f'{old}, ' if returns else ''}{address}{' glc' if returns else ''}\n"
    result = []
    returned = []
    for a, held in zip(_split_cells(bytes(data)), _split_cells(bytes(cells)), strict=True):
        x, y, z = (
            int.from_bytes(part, "little")
            for part in (held[:size], a[:size], a[size : 2 * size] if two else a[:size])
        )
        result.append(update(op, kind, x, y, z).to_bytes(size, "little") + held[size:])
        returned.append(held[:size] if returns else b"")
    return Case(name, before + body + after, bytes(data), bytes(cells), result, returned)


def _move_code(space: str, place: str) -> tuple[str, str]:
    if space == "ds":
        return TO_LDS, FROM_LDS
    if place == "records":
        return RECORDS, ""
    return (TO_SCRATCH, FROM_SCRATCH) if space == "scratch" else PLACES[place]


def _in_buffer(place: str) -> str:
    return "v0, s[8:11], 0 idxen" if place == "records" else "v1, s[8:11], 0 offen"


def _type(kind: str) -> tuple[int, bool, str]:
    """Return an access's number of bytes, whether the sign is extended, and the register's half.

    The half is "low", "high", or "" if the whole register is accessed.
    """
    letter, bits = re.search(r"(?:^|_)([bui])(\d+)", kind).groups()
    half = ""
    if "hi" in kind:
        half = "high"
    elif "d16" in kind:
        half = "low"
    return int(bits) // 8, letter == "i", half


def _register(size: int, first: int) -> str:
    return f"v{first}" if size <= 4 else f"v[{first}:{first + size // 4 - 1}]"


def _load(name: str, space: str, kind: str, place: str) -> Case:
    size, sign, half = _type(kind)
    data, cells = _random(name)
    address = {
        "global": "v1, s[6:7]",
        "flat": "v[2:3]",
        "ds": "v1",
        "scratch": "off, off",
        "buffer": _in_buffer(place),
    }[space]
    before, after = _move_code(space, place)
    body = f"{before}{name} {_register(size, 20)}, {address}\n{after}"
    returned = []
    for held in _split_cells(cells):
        value = int.from_bytes(held[:size], "little")
        if size < 4:
            value = signed(value, 8 * size) if sign else value
            if half == "high":
                value = (value & 0xFFFF) << 16 | 0x7788
            elif half == "low":
                value = value & 0xFFFF | 0x55660000
        width = max(4, size)
        returned.append((value & (1 << 8 * width) - 1).to_bytes(width, "little"))
    return Case(name, body, data, cells, _split_cells(cells), returned)


def _store(name: str, space: str, kind: str, place: str) -> Case:
    size, _, half = _type(kind)
    data, cells = _random(name)
    address = {
        "global": "v1, {}, s[6:7]",
        "flat": "v[2:3], {}",
        "ds": "v1, {}",
        "buffer": "{}, " + _in_buffer(place),
        "scratch": "off, {}, off",
    }[space]
    before, after = _move_code(space, place)
    body = f"{before}{name} {address.format(_register(size, 4))}\n{after}"
    skip = 2 if half == "high" else 0
    result = [
        a[skip : skip + size] + held[size:]
        for a, held in zip(_split_cells(data), _split_cells(cells), strict=True)
    ]
    return Case(name, body, data, cells, result, [b""] * 32)


def _two_addresses(name: str) -> Case:
    """Return a case of an LDS instruction with two addresses.

    A copy of v[4:7] is 512 bytes after the thread's cell, where STRIDE64 accesses it.
    """
    data, cells = _random(name)
    size = int(name[-2:]) // 8
    far = "stride64" in name
    offsets = f"offset0:0 offset1:{512 // (64 * size) if far else 1}"
    first, second = ("v4", "v5") if size == 4 else ("v[4:5]", "v[6:7]")
    result_register = "v20" if size == 4 else "v[20:21]"
    body = TO_LDS + "ds_store_b128 v1, v[4:7] offset:512\ns_waitcnt lgkmcnt(0)\n"
    pairs = list(zip(_split_cells(data), _split_cells(cells), strict=True))
    if "load" in name:
        body += f"{name} v[20:{19 + size // 2}], v1 {offsets}\n" + FROM_LDS
        loaded = [held[: 2 * size] for _, held in pairs]
        if far:
            loaded = [held[:size] + a[:size] for a, held in pairs]
        return Case(name, body, data, cells, _split_cells(cells), loaded)
    body += f"{name} v1, {first}, {second} {offsets}\n{FROM_LDS}"
    body += f"ds_load_b{8 * size} {result_register}, v1 offset:512\n"
    stored = size if far else 2 * size
    result = [a[:stored] + held[stored:] for a, held in pairs]
    start = size if far else 0
    returned = [a[start : start + size] for a, _ in pairs]
    return Case(name, body, data, cells, result, returned)


def _scalar(name: str, words: int) -> Iterator[Case]:
    """Yield cases of loads to s16 and the registers after it, with constant and register offsets.

    The loaded data is divided into quarters. v20 to v23 get the first word of each quarter, or all
    words if there are fewer than four.
    """
    data, cells = _random(name)
    base = "s[8:11]" if "buffer" in name else "s[6:7]"
    for offset, start in (("0x40", 64), ("m0", 32), ("m0 offset:0x20", 64)):
        last = "s16" if words == 1 else f"s[16:{15 + words}]"
        body = f"s_mov_b32 m0, 32\n{name} {last}, {base}, {offset}\ns_waitcnt lgkmcnt(0)\n"
        step = max(1, words // 4)
        body += "".join(f"v_mov_b32 v{20 + i}, s{16 + i * step}\n" for i in range(min(4, words)))
        got = cells[start : start + 4 * words]
        returned = b"".join(got[4 * i * step :][:4] for i in range(min(4, words)))
        yield Case(name, body, data, cells, _split_cells(cells), [returned] * 32)


def _counter_case(name: str) -> Case:
    """Return a case in which DS_APPEND or DS_CONSUME counts 20 lanes, and then all lanes.

    M0 and the offset place the counter in the cell of thread 2.
    """
    data, cells = _random(name)
    body = (
        TO_LDS
        + f"""
s_mov_b32 m0, 0x10
s_mov_b32 exec_lo, 0xfffff
{name} v20 offset:16
s_mov_b32 exec_lo, -1
{name} v21 offset:16
"""
        + FROM_LDS
    )
    sign = 1 if name == "ds_append" else -1
    start = int.from_bytes(cells[32:36], "little")
    values = [(start + sign * n).to_bytes(4, "little", signed=False) for n in (0, 20, 52)]
    result = _split_cells(cells)
    result[2] = values[2] + result[2][4:]
    untouched = (0x55667788).to_bytes(4, "little")
    returned = 20 * [values[0] + values[1]] + 12 * [untouched + values[1]]
    return Case(name, body, data, cells, result, returned)
