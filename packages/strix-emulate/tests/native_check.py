# SPDX-License-Identifier: BSD-3-Clause
"""Compare C with numpy, bit for bit, on random instructions and on a list of rare instructions.

`python native_check.py 1000` compares 40,000 random instructions and prints the differences.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import operands
import selftest
from strix_emulate.arithmetic import operations, subdword
from strix_emulate.code.decode import EXEC
from strix_emulate.instructions.steps import Step
from strix_emulate.memory.waves import LANES, SCALARS, Waves
from strix_emulate.native import library as native
from strix_emulate.native.runs import Session, encode
from strix_emulate.run import program

WAVES = 3
#: Instructions that the random generator seldom or never produces, such as lane exchanges, matrix
#: products, and writes of EXEC.
RARE = """
v_permlane16_b32 v1, v2, s4, s5
v_permlanex16_b32 v1, v2, s4, 0x76543210
v_permlanex16_b32 v2, v2, s4, s5
v_readlane_b32 s4, v1, 5
v_readlane_b32 s4, v1, s5
v_readfirstlane_b32 s4, v1
v_readfirstlane_b32 exec_lo, v1
v_writelane_b32 v1, s4, 7
v_writelane_b32 v1, 9, s3
v_writelane_b32 v1, exec_lo, m0
v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[8:15], v[0:7]
v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[8:15], v[0:7]
v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[8:15], 0
v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[8:15], 1.0
v_wmma_f16_16x16x16_f16 v[0:7], v[8:15], v[8:15], v[0:7]
v_wmma_f16_16x16x16_f16 v[0:7], v[8:15], v[8:15], v[8:15] op_sel:[0,0,1]
v_wmma_f16_16x16x16_f16 v[0:7], v[8:15], v[8:15], 1.0
v_wmma_i32_16x16x16_iu8 v[0:7], v[8:11], v[10:13], v[0:7]
v_wmma_i32_16x16x16_iu8 v[0:7], v[8:11], v[10:13], v[8:15] neg_lo:[1,0,0]
v_wmma_i32_16x16x16_iu8 v[0:7], v[8:11], v[10:13], 7 neg_lo:[1,1,0]
v_wmma_i32_16x16x16_iu8 v[0:7], v[8:11], v[10:13], v[0:7] neg_lo:[0,1,0]
v_cndmask_b32 v1, 1.0, v3, exec_lo
v_cmp_gt_f32 null, v1, v2
v_add_co_ci_u32 v1, null, v2, v3, s10
v_mad_i64_i32 v[2:3], null, v2, s5, v[6:7]
ds_bpermute_b32 v1, v2, v3
ds_bpermute_b32 v1, v1, v1 offset:12
ds_permute_b32 v1, v2, v3
ds_permute_b32 v1, v2, v1 offset:8
ds_swizzle_b32 v1, v2 offset:swizzle(BITMASK_PERM,"01pip")
ds_swizzle_b32 v1, v1 offset:0x1f
s_and_saveexec_b32 s4, s5
s_or_saveexec_b32 s4, vcc_lo
s_and_not1_saveexec_b32 null, s4
s_mov_b32 exec_lo, s4
s_mov_b32 exec_hi, s4
s_mov_b64 exec, s[4:5]
s_and_saveexec_b64 s[4:5], s[6:7]
s_or_saveexec_b64 s[4:5], vcc
s_xor_saveexec_b64 null, s[4:5]
v_permlane64_b32 v1, v2
v_readlane_b32 s4, v1, 45
s_mov_b64 s[4:5], exec
s_add_u32 m0, s4, null
s_mov_b64 s[4:5], null
v_ashrrev_i64 v[2:3], v1, 0xffffff00
v_lshrrev_b64 v[2:3], 1, null
v_mov_b32 v1, m0
v_fma_mixlo_f16 v1, v2, s4, v4 op_sel:[1,0,1] op_sel_hi:[1,0,1]
v_fma_mixhi_f16 v1, -v2, |v3|, v1 op_sel:[0,1,1] op_sel_hi:[1,1,0]
v_fma_mixlo_f16 v1, v2, v3, 0 op_sel_hi:[0,0,0]
v_fma_mix_f32 v1, v2, v3, v4 clamp
v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1
v_dual_mul_f32 v0, v1, v2 :: v_dual_add_f32 v1, v0, v3
v_dual_fmac_f32 v0, v1, v2 :: v_dual_cndmask_b32 v3, v0, v5
v_dual_add_f32 v0, s4, v2 :: v_dual_mov_b32 v3, v0
""".strip().splitlines()
_DPP = (
    "quad_perm:[1,0,3,2]",
    "row_shl:1",
    "row_shr:3",
    "row_ror:5",
    "row_share:7",
    "row_xmask:9",
    "row_mirror",
    "row_half_mirror",
    "dpp8:[7,6,5,4,3,2,1,0]",
)
_DPP_ENDS = (
    "row_mask:0xf bank_mask:0xf",
    "row_mask:0xf bank_mask:0xf bound_ctrl:1",
    "row_mask:0x1 bank_mask:0xe fi:1",
)
_DPP_NAMES = (
    "v_add_f32_dpp v1, v2, v3",
    "v_mov_b32_dpp v2, v2",
    "v_max_f32_e64_dpp v1, -v2, v3",
    "v_add_nc_u32_dpp v1, v1, v2",
    "v_cmp_gt_f32_e64_dpp s12, v2, v3",
    "v_add_f16_dpp v1.l, v2.h, v3.l",
    "v_fma_mix_f32_e64_dpp v1, -v2, v3, v4",
    "v_fma_mixhi_f16_e64_dpp v1, v2, v3, v1 op_sel:[1,0,1] op_sel_hi:[1,0,1]",
)


def _list_dpp() -> Iterator[str]:
    for name, how in itertools.product(_DPP_NAMES, _DPP):
        for end in ("", "fi:1") if "dpp8" in how else _DPP_ENDS:
            yield f"{name} {how} {end}"


def _list_saturating() -> Iterator[str]:
    for name in sorted(operations.SATURATING & operations.TABLE.keys()):
        sources = operations.TABLE[name][1]
        half = ".l" if "16" in name else ""
        registers = ", ".join(f"v{i + 1}{half}" for i in range(1 + len(sources)))
        yield f"{name}_e64 {registers} clamp"


def _list_packed() -> Iterator[str]:
    for name in sorted(subdword.PACKED.keys() - {"v_pk_fmac_f16"}):
        count = len(subdword.PACKED[name][1])
        bits = ",".join(["1", "1", "0"][:count])
        last = "neg_lo" if name.endswith("f16") else "op_sel"
        for sources, modifier in (
            (("v2", "s3", "v4"), ""),
            (("v1", "v1", "v1"), f" op_sel:[{bits}]"),
            (("v3", "0x40003c00", "v1"), f" op_sel_hi:[{bits}]"),
            (("v2", "1.0", "v3"), " clamp"),
            (("v2", "v1", "v3"), f" {last}:[{bits}]"),
        ):
            yield f"{name} v1, {', '.join(sources[:count])}{modifier}"


RARE += [*_list_dpp(), *_list_saturating(), *_list_packed()]
RARE += ["v_pk_fmac_f16 v1, s2, v3", "v_pk_fmac_f16 v1, v1, v1"]
#: Modes in which kernels start.
MODES = (
    {},
    {"denormals_32": False, "denormals_16_64": False},
    {"ieee": False},
    {"ieee": False, "denormals_32": False},
)
_NUMBERS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


@dataclass
class Report:
    """The result of a comparison.

    Attributes:
        compared: The number of compared instructions by mnemonic.
        numpy_only: Mnemonics that C does not execute.
        differences: Differences as text.
    """

    compared: Counter = field(default_factory=Counter)
    numpy_only: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)


def random_instructions(rng: random.Random, count: int) -> list[str]:
    """Return random instructions. Each mnemonic comes once before any comes twice."""
    tables = selftest.tables()
    texts: list[str] = []
    while len(texts) < count:
        for entry in rng.sample(tables, min(len(tables), count - len(texts))):
            texts.append(operands.operation(rng, *entry).text)
    return texts


def registers(rng: random.Random, width: int = LANES) -> tuple[np.ndarray, np.ndarray]:
    """Return random vector and scalar registers of WAVES waves, most with all lanes active.

    From v8 on, every 16 lanes repeat the first 16 lanes, as WMMA requires.
    """
    draw = np.random.default_rng(rng.getrandbits(32))

    def bits(*shape):
        kind = draw.random(shape)
        ordinary = draw.uniform(-8, 8, shape).astype(np.float32).view(np.uint32)
        anything = draw.integers(1 << 32, size=shape, dtype=np.uint32)
        edges = draw.choice(np.array(operands.EDGES, np.uint32), shape)
        return np.where(kind < 0.4, edges, np.where(kind < 0.7, ordinary, anything))

    V = bits(operands.REGISTERS, WAVES, width)
    S = bits(SCALARS, WAVES, 1)
    V[8:] = np.tile(V[8:, :, :16], width // 16)
    S[EXEC : EXEC + 2] = 0xFFFFFFFF
    if rng.random() < 0.5:
        half = EXEC + rng.randrange(width // LANES)
        wave = rng.randrange(WAVES)
        S[half, wave] = rng.choice((0, 1, 0xFFFF0000, rng.getrandbits(32)))
    return V, S


def compare(
    texts: list[str], rng: random.Random, report: Report, width: int = LANES, **mode
) -> None:
    """Execute each instruction in C and numpy from the same random state; update `report`."""
    spaces = selftest.spaces()
    session = Session(native.load_library(), spaces, WAVES * width, operands.REGISTERS, False)
    kernel = replace(selftest.PLAIN, width=width, **mode)
    code = selftest.assemble_and_decode("\n".join(texts), width)
    blocks = program.compile_blocks(code, kernel, spaces)
    for step in (step for block in blocks.values() for step in block.steps):
        name = step.instruction.name
        ops = encode(step, session.compiled)
        if ops is False:
            report.numpy_only.add(name)
            continue
        V, S = registers(rng, width)
        by_numpy = selftest.waves(V, S)
        by_c = selftest.waves(V, S)
        scc = np.array([[rng.random() < 0.5] for _ in range(WAVES)])
        by_numpy.scc[...] = scc
        by_c.scc[...] = scc
        flat = (native.COp * len(ops))(*ops)
        with np.errstate(all="ignore"):
            if session.run(by_c, native.ctypes.addressof(flat), len(ops)) < len(ops):
                # With a partial EXEC, C leaves this instruction to numpy, so there is nothing to
                # compare.
                continue
            step.run(by_numpy)
        report.compared[name] += 1
        if fault := difference(step, by_numpy, by_c):
            report.differences.append(f"{step.instruction.text}: {fault}")


def difference(step: Step, expected: Waves, got: Waves) -> str:
    """Return which register differs, or "".

    In operations of several operands, all NaNs count as equal, because numpy's choice among the
    operands' NaNs varies.
    """
    numbers = set()
    for micro in step.traits.executable.micros or ():
        if micro.kind in _NUMBERS and len(micro.sources) > 1:
            numbers.add(_NUMBERS[micro.kind])
    for name in ("V", "S", "scc", "mask"):
        a, b = (np.ascontiguousarray(getattr(g, name)) for g in (expected, got))
        same = a == b
        for dtype in numbers if name in "VS" else ():
            if dtype is np.float64:
                both = [np.stack([x[:-1], x[1:]], -1).view(dtype)[..., 0] for x in (a, b)]
                nan = np.isnan(both[0]) & np.isnan(both[1])
                same[:-1] |= nan
                same[1:] |= nan
            else:
                bits = f"u{np.dtype(dtype).itemsize}"
                nan = np.isnan(a.view(dtype)) & np.isnan(b.view(dtype))
                equal = nan | (a.view(bits) == b.view(bits))
                same |= equal.reshape(*a.shape, -1).all(axis=-1)
        if not same.all():
            index = tuple(int(x) for x in np.argwhere(~same)[0])
            return f"{name}{list(index)} is {int(b[index]):#x} in C, {int(a[index]):#x} in numpy"
    return ""


def run(count: int, seed: int = 1, width: int = LANES) -> Report:
    rng = random.Random(seed)
    report = Report()
    for i, mode in enumerate(MODES):
        texts = random_instructions(rng, count // len(MODES))
        texts += RARE if i < 2 else []
        if width > LANES:
            texts = [text for text in map(operands.widen, texts) if text]
        compare(texts, rng, report, width, **mode)
    return report


if __name__ == "__main__":
    done = run(40 * int(sys.argv[1]))
    print(*done.differences[:60], sep="\n")
    print("numpy only:", ", ".join(sorted(done.numpy_only)))
    print(
        f"{native.describe()}: {len(done.compared)} mnemonics in {done.compared.total()} "
        f"instructions of {WAVES * LANES} lanes, {len(done.differences)} differ"
    )
