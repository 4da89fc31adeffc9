# SPDX-License-Identifier: BSD-3-Clause
"""The oracle for instructions of a whole wave: lane exchanges, indexed registers, and WMMA.

A case is a function of a random generator. It returns assembly, and a function in plain Python that
applies the assembly's effect to a state: the lists V[register][lane] and S[register]. S has EXEC,
too.
"""

import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from exact import B16, F16, F32, add, encode, multiply, signed, value
from strix_emulate.code.decode import EXEC, M0

Case = tuple[str, Callable[[list, list], None]]
LANES = range(32)
#: Scalar registers that instructions may read.
_SCALARS = range(2, 8)


def _active(S) -> list[int]:
    return [i for i in LANES if S[EXEC] >> i & 1]


def _registers(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8) for _ in range(count)]


def _readlane(rng: random.Random) -> Case:
    v = rng.randrange(8)
    s = rng.choice(_SCALARS)
    lane = rng.choice((rng.randrange(32), None))

    def run(V, S):
        S[9] = V[v][(S[s] if lane is None else lane) & 31]

    return f"v_readlane_b32 s9, v{v}, {f's{s}' if lane is None else lane}", run


def _readfirstlane(rng: random.Random) -> Case:
    v = rng.randrange(8)

    def run(V, S):
        # If no lane is active, the instruction reads lane 0.
        S[9] = V[v][next(iter(_active(S)), 0)]

    return f"v_readfirstlane_b32 s9, v{v}", run


def _writelane(rng: random.Random) -> Case:
    v = rng.randrange(8)
    s = rng.choice(_SCALARS)
    lane = rng.randrange(32)

    def run(V, S):
        V[v][lane] = S[s]

    return f"v_writelane_b32 v{v}, s{s}, {lane}", run


def _permlane(across: bool) -> Callable[[random.Random], Case]:
    def make(rng: random.Random) -> Case:
        d, v = _registers(rng, 2)
        low = rng.choice(_SCALARS)
        high = rng.choice(_SCALARS)
        inactive = rng.randrange(2)
        bound = rng.randrange(2)

        def run(V, S):
            old = list(V[v])
            pick = S[low] | S[high] << 32
            for i in _active(S):
                source = i // 16 * 16 + (pick >> i % 16 * 4 & 15) ^ (16 if across else 0)
                if inactive or S[EXEC] >> source & 1:
                    V[d][i] = old[source]
                elif bound:
                    V[d][i] = 0

        name = "v_permlanex16_b32" if across else "v_permlane16_b32"
        return f"{name} v{d}, v{v}, s{low}, s{high} op_sel:[{inactive},{bound}]", run

    return make


def _nothing(text: str) -> Callable[[random.Random], Case]:
    return lambda _rng: (text, lambda _V, _S: None)


def _swap(rng: random.Random) -> Case:
    a, b = rng.sample(range(8), 2)

    def run(V, S):
        for i in _active(S):
            V[a][i], V[b][i] = V[b][i], V[a][i]

    return f"v_swap_b32 v{a}, v{b}", run


def _swap_halves(rng: random.Random) -> Case:
    (a, x), (b, y) = rng.sample([(v, h) for v in range(8) for h in (0, 16)], 2)

    def run(V, S):
        for i in _active(S):
            p = V[a][i] >> x & 0xFFFF
            q = V[b][i] >> y & 0xFFFF
            V[a][i] += (q - p) << x
            V[b][i] += (p - q) << y

    halves = {0: "l", 16: "h"}
    return f"v_swap_b16 v{a}.{halves[x]}, v{b}.{halves[y]}", run


def _masked_sums(rng: random.Random) -> Case:
    """Test V_MQSAD_U32_U8 with four addends, and with zero bytes in the second source."""
    a = rng.randrange(2)
    byte_mask = rng.choice((0xFFFFFFFF, 0xFFFF00FF, 0x00FFFF00))

    def run(V, S):
        for i in _active(S):
            V[3][i] &= byte_mask
            window = (V[a][i] | V[a + 1][i] << 32).to_bytes(8, "little")
            reference = V[3][i].to_bytes(4, "little")
            for k in range(4):
                pairs = zip(window[k : k + 4], reference, strict=True)
                total = V[4 + k][i] + sum(abs(x - y) for x, y in pairs if y)
                V[4 + k][i] = total & 0xFFFFFFFF

    text = f"v_and_b32 v3, {byte_mask:#x}, v3\nv_mqsad_u32_u8 v[4:7], v[{a}:{a + 1}], v3, v[4:7]"
    return text, run


def _move_relative(name: str) -> Callable[[random.Random], Case]:
    def make(rng: random.Random) -> Case:
        d = rng.randrange(8)
        v = rng.randrange(8)
        low = rng.randrange(8)
        high = rng.randrange(8)
        m0 = low | high << 16 if "_2_" in name else low

        def run(V, S):
            S[M0] = m0
            source = v + low if "rels" in name else v
            target = d
            if "d_" in name:
                target += high if "_2_" in name else low
            old = list(V[source])
            for i in _active(S):
                V[target][i] = old[i]

        return f"s_mov_b32 m0, {m0:#x}\n{name} v{d}, v{v}", run

    return make


def _exchange(back: bool) -> Callable[[random.Random], Case]:
    """Return DS_BPERMUTE, which reads from a lane by number, or DS_PERMUTE, which writes to it."""

    def make(rng: random.Random) -> Case:
        d, index, v = _registers(rng, 3)
        offset = rng.choice((0, 0, 4, 60))

        def run(V, S):
            got = [0] * 32
            for i in LANES:
                named = (V[index][i] + offset & 0xFFFFFFFF) // 4 % 32
                source, target = (named, i) if back else (i, named)
                if S[EXEC] >> source & 1:
                    got[target] = V[v][source]
            for i in _active(S):
                V[d][i] = got[i]

        name = "ds_bpermute_b32" if back else "ds_permute_b32"
        return f"{name} v{d}, v{index}, v{v} offset:{offset}", run

    return make


def _swizzle(rng: random.Random) -> Case:
    d, v = _registers(rng, 2)
    keep, put, flip = (rng.randrange(32) for _ in range(3))
    quads = [rng.randrange(4) for _ in range(4)]
    by_mask = rng.random() < 0.6
    if by_mask:
        code = keep | put << 5 | flip << 10
    else:
        code = 0x8000 | sum(q << 2 * i for i, q in enumerate(quads))

    def run(V, S):
        old = list(V[v])
        for i in _active(S):
            source = (i & keep | put) ^ flip if by_mask else i & 28 | quads[i & 3]
            V[d][i] = old[source] if S[EXEC] >> source & 1 else 0

    return f"ds_swizzle_b32 v{d}, v{v} offset:{code}", run


#: Source lanes of DPP patterns, as functions of the lane. None if the row has no such lane.
_DPP: dict[str, Callable[[int, int], int | None]] = {
    "row_shl:{}": lambda i, n: i + n if i % 16 + n < 16 else None,
    "row_shr:{}": lambda i, n: i - n if i % 16 >= n else None,
    "row_ror:{}": lambda i, n: i // 16 * 16 + (i % 16 - n) % 16,
    "row_share:{}": lambda i, n: i // 16 * 16 + n,
    "row_xmask:{}": lambda i, n: i ^ n,
    "row_mirror": lambda i, _n: i ^ 15,
    "row_half_mirror": lambda i, _n: i ^ 7,
    "quad_perm:[3,1,0,2]": lambda i, _n: i // 4 * 4 + (3, 1, 0, 2)[i % 4],
    "dpp8:[5,4,7,6,1,0,3,2]": lambda i, _n: i // 8 * 8 + (5, 4, 7, 6, 1, 0, 3, 2)[i % 8],
}


def _dpp(rng: random.Random, pattern: str) -> Case:
    """Test V_ADD_NC_U32 with DPP.

    The first source is read from another lane. Its register may also be the destination.
    """
    a, b = _registers(rng, 2)
    d = rng.choice((a, rng.randrange(8)))
    n = rng.randrange(1, 16)
    rows = rng.choice((15, 1, 2))
    banks = rng.choice((15, 5, 10))
    zero = rng.random() < 0.5
    fetch = rng.random() < 0.5
    text = f"v_add_nc_u32_dpp v{d}, v{a}, v{b} {pattern.format(n)}"
    if "dpp8" in pattern:
        rows = 15
        banks = 15
        zero = False
        text += f" fi:{int(fetch)}" if fetch else ""
    else:
        text += f" row_mask:{rows:#x} bank_mask:{banks:#x}{' bound_ctrl:1' if zero else ''}"
        text += " fi:1" if fetch else ""

    def run(V, S):
        old = list(V[a])
        add_to = list(V[b])
        for i in _active(S):
            source = _DPP[pattern](i, n)
            if not rows >> i // 16 & 1 or not banks >> i % 16 // 4 & 1:
                continue
            if source is None or not (fetch or S[EXEC] >> source & 1):
                if not zero and "dpp8" not in pattern:
                    continue
                moved = 0
            else:
                moved = old[source]
            V[d][i] = moved + add_to[i] & 0xFFFFFFFF

    return text, run


_DUAL: dict[str, Callable] = {
    "v_dual_add_nc_u32": lambda a, b, _d: a + b,
    "v_dual_and_b32": lambda a, b, _d: a & b,
    "v_dual_lshlrev_b32": lambda a, b, _d: b << (a & 31),
    "v_dual_mul_f32": lambda a, b, _d: multiply(a, b, F32),
    "v_dual_add_f32": lambda a, b, _d: add(a, b, F32),
    "v_dual_sub_f32": lambda a, b, _d: add(a, b ^ 1 << 31, F32),
    "v_dual_mov_b32": lambda a, _b, _d: a,
}


def _dual(rng: random.Random) -> Case:
    """Test two operations in one instruction, which read their sources before either writes.

    The registers of the two operations are in different banks. Each operation reads the register
    that the other one writes, or neither does.
    """
    first = rng.choice([n for n in _DUAL if n.endswith("f32") or "mov" in n])
    second = rng.choice(list(_DUAL))
    # Target and sources of both operations.
    x, y = rng.choice(
        [
            ((0, 2, 4), (1, 3, 7)),
            ((0, 3, 4), (3, 0, 7)),
            ((0, 2, 3), (3, 1, 0)),
        ]
    )
    parts = []
    for name, (d, a, b) in ((first, x), (second, y)):
        parts.append(f"{name} v{d}, v{a}" + ("" if "mov" in name else f", v{b}"))

    def run(V, S):
        for i in _active(S):
            results = []
            for name, (d, a, b) in ((first, x), (second, y)):
                bits = _DUAL[name](V[a][i], V[b][i], V[d][i]) & 0xFFFFFFFF
                results.append(Between(F32, bits, bits, None, 0) if "f32" in name else bits)
            V[x[0]][i], V[y[0]][i] = results

    return " :: ".join(parts), run


def _elements(V, first: int, kind: str, sign: bool) -> list[list]:
    """Return the rows of A, or the columns of B: 16 numbers for each of 16 lanes."""
    bits = {"iu4": 4, "iu8": 8}.get(kind, 16)
    per = 32 // bits
    rows = []
    for lane in range(16):
        words = [V[first + k // per][lane] >> k % per * bits & (1 << bits) - 1 for k in range(16)]
        if bits == 16:
            form = F16 if kind == "f16" else B16
            words = [value(w, form)[0] for w in words]
        elif sign:
            words = [signed(w, bits) for w in words]
        rows.append(words)
    return rows


def _wmma(source: str, result: str) -> Callable[[random.Random], Case]:
    """Return the case of a WMMA instruction.

    Floating-point terms may be added in any order, with the error of 17 roundings.
    """
    form = {"f32": F32, "f16": F16, "bf16": B16}.get(result)
    unit = Fraction(1, 1 << 24)

    def make(rng: random.Random) -> Case:
        mods = ""
        signs = (False, False)
        high = 0
        clamp = False
        if result == "i32":
            signs = tuple(rng.random() < 0.5 for _ in range(2))
            clamp = rng.random() < 0.5
            mods = f" neg_lo:[{int(signs[0])},{int(signs[1])},0]{' clamp' if clamp else ''}"
        elif result != "f32":
            high = rng.randrange(2)
            mods = f" op_sel:[0,0,{high}]"
        count = {"iu4": 2, "iu8": 4}.get(source, 8)

        def run(V, S):
            a, b = (
                _elements(V, register, source, sign)
                for register, sign in zip((16, 24), signs, strict=True)
            )
            for row in range(16):
                for column in range(16):
                    register = 8 + (row >> 1)
                    lane = column + 16 * (row & 1)
                    old = V[register][lane]
                    terms = [x * y for x, y in zip(a[row], b[column], strict=True)]
                    if form is None:
                        total = sum(terms) + signed(old)
                        total = max(-(2**31), min(2**31 - 1, total)) if clamp else total
                        V[register][lane] = total & 0xFFFFFFFF
                        continue
                    c = value(old >> 16 * high & 0xFFFF if form[3] == 16 else old, form)[0]
                    terms.append(c)
                    error = sum(map(abs, terms)) * 17 * unit
                    ends = [encode(sum(terms) + e, form) for e in (-error, error)]
                    V[register][lane] = Between(form, *ends, high if form[3] == 16 else None, old)

        def span(first):
            return f"v[{first}:{first + count - 1}]"

        name = f"v_wmma_{result}_16x16x16_{source}"
        return f"{name} v[8:15], {span(16)}, {span(24)}, v[8:15]{mods}", run

    return make


class Between:
    """A value that compares equal to every number from `low` to `high`.

    With `half`, only this half of the register is compared, and the other half must be unchanged.
    If both bounds are NaN, the value equals any NaN.
    """

    def __init__(self, form: tuple, low: int, high: int, half: int | None, old: int):
        self.form = form
        self.half = half
        self.old = old
        self.ends = value(low, form)[0], value(high, form)[0]

    def __eq__(self, bits: object) -> bool:
        assert isinstance(bits, int)
        if self.half is not None:
            if (bits ^ self.old) >> 16 * (1 - self.half) & 0xFFFF:
                return False
            bits = bits >> 16 * self.half & 0xFFFF
        x = value(bits, self.form)[0]
        if isinstance(x, str) or isinstance(self.ends[0], str):
            return x == self.ends[0]
        return self.ends[0] <= x <= self.ends[1]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return " to ".join(str(end) for end in self.ends)


#: Cases by mnemonic. The cases in MATRICES need all lanes, and ordinary numbers in v8 to v31.
CASES: dict[str, Callable[[random.Random], Case]] = {
    "v_readlane_b32": _readlane,
    "v_readfirstlane_b32": _readfirstlane,
    "v_writelane_b32": _writelane,
    "v_permlane16_b32": _permlane(False),
    "v_permlanex16_b32": _permlane(True),
    "v_permlane64_b32": _nothing("v_permlane64_b32 v1, v2"),
    "v_mqsad_u32_u8": _masked_sums,
    "v_nop": _nothing("v_nop"),
    "v_swap_b32": _swap,
    "v_swap_b16": _swap_halves,
    **{
        name: _move_relative(name)
        for name in ("v_movrels_b32", "v_movreld_b32", "v_movrelsd_b32", "v_movrelsd_2_b32")
    },
    "ds_bpermute_b32": _exchange(True),
    "ds_permute_b32": _exchange(False),
    "ds_swizzle_b32": _swizzle,
    "v_dual": _dual,
    **{f"v_add_nc_u32_dpp {control}": partial(_dpp, pattern=control) for control in _DPP},
}
MATRICES: dict[str, Callable[[random.Random], Case]] = {
    f"v_wmma_{result}_16x16x16_{source}": _wmma(source, result)
    for source, result in (
        ("f16", "f32"),
        ("bf16", "f32"),
        ("f16", "f16"),
        ("bf16", "bf16"),
        ("iu8", "i32"),
        ("iu4", "i32"),
    )
}
