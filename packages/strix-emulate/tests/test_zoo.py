# SPDX-License-Identifier: BSD-3-Clause
"""Compare the kernels of zoo.py with numpy. `pytest -m ""` also runs tests that are marked slow."""

import numpy as np
import pytest
import triton
import zoo
from strix_emulate import Buffer, Options
from strix_emulate.errors import Trap
from zoo import TYPES, numbers

N = 200
FLOATS = ("fp32", "fp16", "fp64")
INTEGERS = ("i32", "i64", "i16", "i8", "u32", "u16", "u8")
UNARY = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt_rn": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "neg": np.negative,
    "not": np.invert,
}
BINARY = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__truediv__": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "less": lambda a, b: np.where(a < b, a, b),
    # As in C, quotients are rounded towards zero.
    "__floordiv__": lambda a, b: _divide_truncated(a, b)[0],
    "__mod__": lambda a, b: _divide_truncated(a, b)[1],
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "shl": lambda a, b: np.left_shift(a, b & 7),
    "shr": lambda a, b: np.right_shift(a, b & 7),
}
#: numpy's reductions, and the values that pad a row after its last element.
REDUCE = {
    "sum": (np.sum, 0),
    "max": (np.max, -100),
    "min": (np.min, 100),
    "argmax": (np.argmax, -100),
    "argmin": (np.argmin, 100),
    "xor_sum": (np.bitwise_xor.reduce, 0),
}
SCAN = {
    "cumsum": np.cumsum,
    "reverse": lambda x: np.cumsum(x[::-1])[::-1],
    "cumprod": np.cumprod,
    "sort": np.sort,
    "flip": lambda x: x[::-1],
}
ATOMIC = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": lambda _a, b: b,
}


def _divide_truncated(a, b):
    quotients = []
    remainders = []
    for x, y in zip(map(int, a), map(int, b), strict=True):
        quotient = abs(x) // abs(y)
        if (x < 0) != (y < 0):
            quotient = -quotient
        quotients.append(quotient)
        remainders.append(x - quotient * y)
    return np.array(quotients).astype(a.dtype), np.array(remainders).astype(a.dtype)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_close(got, expected, ulps: float = 0):
    """Check that results differ by at most `ulps` units in the last place."""
    expected = np.asarray(expected)
    if got.dtype.kind != "f":
        assert (got == expected.astype(got.dtype)).all(), (got, expected)
        return
    unit = np.spacing(np.abs(expected).astype(got.dtype)).astype(float)
    error = np.abs(got.astype(float) - expected.astype(float))
    assert (error <= ulps * unit).all(), (error / unit).max()


UNARY_CASES = [(op, "fp32") for op in UNARY if op != "not"]
UNARY_CASES += [(op, kind) for kind in ("fp16", "fp64") for op in ("abs", "neg")]
UNARY_CASES += [(op, "fp64") for op in ("floor", "ceil")]
UNARY_CASES += [(op, k) for op in ("neg", "not", "abs") for k in ("i32", "i64", "i16", "i8")]


@pytest.mark.parametrize(("op", "kind"), UNARY_CASES)
def test_unary(op, kind):
    x = numbers(kind, N)
    if op in ("log", "log2", "sqrt_rn", "rsqrt"):
        x = np.abs(x)
    out = np.zeros_like(x)
    zoo.run(zoo.unary, (1,), {"OP": op, "BLOCK": 256}, Buffer(x, "in"), Buffer(out, "out"), N)
    wide = x.astype(float) if x.dtype.kind == "f" else x
    with np.errstate(over="ignore"):
        assert_close(out, UNARY[op](wide), {"exp": 4, "log": 3, "sigmoid": 4}.get(op, 1))


BINARY_CASES = [(op, k) for k in FLOATS for op in list(BINARY)[:7]]
_ON_INTEGERS = [op for op in BINARY if op != "__truediv__"]
BINARY_CASES += [(op, k) for k in ("i32", "i64", "u32", "i8") for op in _ON_INTEGERS]
BINARY_CASES += [slow(op, k) for k in ("i16", "u16", "u8") for op in _ON_INTEGERS]


@pytest.mark.parametrize(("op", "kind"), BINARY_CASES)
def test_binary(op, kind):
    x = numbers(kind, N, 1)
    y = numbers(kind, N, 2, small=True)
    y = np.where(y == 0, np.array(3, y.dtype), y)
    out = np.zeros_like(x)
    zoo.run(
        zoo.binary,
        (1,),
        {"OP": op, "BLOCK": 256},
        Buffer(x, "in"),
        Buffer(y, "in"),
        Buffer(out, "out"),
        N,
    )
    with np.errstate(all="ignore"):
        expected = BINARY[op](x, y)
    assert_close(out, expected, 2 if op == "__truediv__" else 0)


CONVERT_TYPES = ("fp32", "fp16", "fp64", "i32", "i8", "i64")


@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a in CONVERT_TYPES for b in CONVERT_TYPES if a != b],
)
def test_convert(source, target):
    x = numbers(source, N, 3, small=True)
    out = np.zeros(N, TYPES[target])
    zoo.run(zoo.convert, (1,), {"BLOCK": 256}, Buffer(x, "in"), Buffer(out, "out"), N)
    assert_close(out, x.astype(TYPES[target]))


def fp8e5(bits):
    """Return the float16 numbers whose high bytes are these E5M2 numbers."""
    return (bits.astype(np.uint16) << 8).view(np.float16)


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_fp8_loads_and_stores(kind):
    all_bytes = np.arange(256, dtype=np.uint8)
    out = np.zeros(256, TYPES[kind])
    zoo.run(
        zoo.convert,
        (1,),
        {"BLOCK": 256},
        Buffer(all_bytes, "in"),
        Buffer(out, "out"),
        256,
        types=["*fp8e5"],
    )
    expected = fp8e5(all_bytes)
    assert np.array_equal(out.astype(float), expected.astype(float), equal_nan=True)
    finite = all_bytes[np.isfinite(expected)]
    x = fp8e5(finite).astype(TYPES[kind])
    back = np.zeros(len(x), np.uint8)
    zoo.run(
        zoo.convert,
        (1,),
        {"BLOCK": 256},
        Buffer(x, "in"),
        Buffer(back, "out"),
        len(x),
        types=[f"*{kind}", "*fp8e5"],
    )
    assert (back == finite).all()


REDUCE_CASES = [(op, k) for k in ("fp32", "i32") for op in REDUCE if (op, k) != ("xor_sum", "fp32")]
REDUCE_CASES += [(op, k) for k in ("fp16", "fp64", "i64") for op in ("sum", "max", "min")]


@pytest.mark.parametrize("n", [N, 3])
@pytest.mark.parametrize(("op", "kind"), REDUCE_CASES)
def test_reduce(op, kind, n):
    x = numbers(kind, 2 * n, 4, small=True).reshape(2, n)
    target = "i32" if "arg" in op else kind
    out = np.zeros(2, TYPES[target])
    function, padding = REDUCE[op]
    zoo.run(
        zoo.reduce,
        (2,),
        {"OP": op, "PADDING": padding, "BLOCK": 256},
        Buffer(x, "in"),
        Buffer(out, "out"),
        n,
    )
    exact = [function(row.astype(float) if "fp" in kind else row) for row in x]
    if op == "sum" and "fp" in kind:
        assert np.abs(out - exact).max() <= n * 4 * np.finfo(out.dtype).eps
    else:
        assert_close(out, exact)


SCAN_CASES = [(op, k) for op in SCAN for k in ("fp32", "i32")] + [("sort", "i16"), ("flip", "fp64")]


@pytest.mark.parametrize(("op", "kind"), SCAN_CASES)
def test_scan(op, kind):
    x = numbers(kind, 2 * 64, 5, small=True).reshape(2, 64)
    if op == "cumprod":
        x = np.sign(x) + (x == 0).astype(x.dtype)
    out = np.zeros_like(x)
    zoo.run(zoo.scan, (2,), {"OP": op, "BLOCK": 64}, Buffer(x, "in"), Buffer(out, "out"), 64)
    for got, row in zip(out, x, strict=True):
        if kind == "fp32" and op in ("cumsum", "reverse"):
            assert np.abs(got - SCAN[op](row.astype(float))).max() < 1e-4
        else:
            assert_close(got, SCAN[op](row))


ATOMIC_CASES = [("add", k) for k in ("i32", "fp32", "fp16", "i64", "fp64")]
ATOMIC_CASES += [(op, k) for op in ("max", "min") for k in ("i32", "u32", "i64", "fp32")]
ATOMIC_CASES += [(op, "i32") for op in ("and", "or", "xor")]
ATOMIC_CASES += [("xchg", "i32"), ("xchg", "fp32")]


@pytest.mark.parametrize("cells", [7, 1])
@pytest.mark.parametrize(("op", "kind"), ATOMIC_CASES)
def test_atomics(op, kind, cells):
    """Atomics may run in any order. Sums of small integers are exact in each order.

    The old values that atomics return depend on the order. But each value that a cell has had was
    returned once, except the last one, which is still there.
    """
    n = 100
    x = np.arange(1, n + 1).astype(TYPES[kind])
    if op != "xchg":
        x = (x * 7 % 11 - (4 if "u" not in kind else 0)).astype(TYPES[kind])
    where = np.random.default_rng(7).integers(0, cells, n).astype(np.int32)
    start = np.full(cells, 1, TYPES[kind])
    out = start.copy()
    old = np.zeros(n, TYPES[kind])
    zoo.run(
        zoo.atomics,
        (2,),
        {"OP": f"atomic_{op}", "BLOCK": 64},
        Buffer(x, "in"),
        Buffer(where, "in"),
        Buffer(out),
        Buffer(old, "out"),
        n,
    )
    for cell in range(cells):
        here = where == cell
        new = ATOMIC[op](old[here], x[here])
        assert sorted([*old[here], out[cell]]) == sorted([start[cell], *new])
    if op == "xchg":
        return
    expected = start.copy()
    for place, value in zip(where, x, strict=True):
        expected[place] = ATOMIC[op](expected[place], value)
    assert_close(out, expected)


@pytest.mark.parametrize("kind", ["i32", "u32", "i64", "fp32", "fp64"])
def test_atomics_of_one_cell(kind):
    out = np.zeros(2, TYPES[kind])
    zoo.run(zoo.scalar_atomics, (64,), {}, Buffer(out))
    assert out.tolist() == [63, 63 * 32]


@pytest.mark.parametrize("small", [2, 16, 32, 64])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "fp64", "i32", "i64", "i8", "u16"])
def test_small_tensors_are_changed_in_place(kind, small):
    """Several waves load each element of a small tensor, and only one wave stores it.

    Races of the other waves' loads are only noted, because the loaded values are not used.
    """
    x = np.arange(small).astype(TYPES[kind])
    y = np.arange(128).astype(TYPES[kind])
    a = Buffer(x.copy())
    b = Buffer(y.copy())
    done = zoo.run(zoo.in_place, (1,), {"SMALL": small, "LARGE": 128}, a, b, small)
    assert (a.data == x + x).all()
    assert (b.data == y + y).all()
    assert {note.check for note in done.notes} <= {"race"}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "i8"])
def test_waves_that_store_what_others_change_are_a_race(kind, native):
    """64 or more elements are stored by several waves, but 16 elements by only one wave."""
    options = Options(budget=100_000, native=native)
    for n in (64, 128):
        with pytest.raises(Trap, match="race: global memory"):
            zoo.run(zoo.reverse, (1,), {"N": n}, Buffer(numbers(kind, n)), options=options)
    x = numbers(kind, 16)
    out = x.copy()
    zoo.run(zoo.reverse, (1,), {"N": 16}, Buffer(out), options=options)
    assert (out == x[::-1]).all()


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("half", [8, 16, 32])
def test_rotations_in_place(heads, half):
    x = numbers("fp32", heads * 2 * half)
    angle = numbers("fp32", half)
    out = x.copy()
    zoo.run(zoo.rotate, (1,), {"HEADS": heads, "HALF": half}, Buffer(out), Buffer(angle, "in"))
    a, b = x.reshape(heads, 2, half).swapaxes(0, 1)
    c = np.cos(angle)
    s = np.sin(angle)
    expected = np.stack([a * c - b * s, b * c + a * s], axis=1).ravel()
    assert np.abs(out - expected).max() < 1e-4


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_spin_lock(parts):
    x = numbers("fp32", 64 * parts)
    lock = np.zeros(1, np.int32)
    count = np.zeros(1, np.int32)
    total = np.zeros(1, np.float32)
    zoo.run(
        zoo.locked,
        (parts,),
        {"BLOCK": 64},
        Buffer(lock),
        Buffer(total),
        Buffer(count),
        Buffer(x, "in"),
    )
    assert count[0] == parts
    assert lock[0] == 0
    assert abs(total[0] - x.sum(dtype=float)) < 1e-4


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_last_block(parts):
    x = numbers("fp32", 64 * parts)
    partial = np.zeros(parts, "f4")
    counter = np.zeros(1, np.int32)
    out = np.zeros(1, "f4")
    zoo.run(
        zoo.last_block,
        (parts,),
        {"BLOCK": 64, "PARTS": parts},
        Buffer(x, "in"),
        Buffer(partial, "out"),
        Buffer(counter),
        Buffer(out, "out"),
    )
    assert abs(out[0] - x.sum(dtype=float)) < 1e-4


@pytest.mark.parametrize(("source", "target"), [("fp16", "fp32"), ("i8", "i32"), ("fp32", "fp32")])
@pytest.mark.parametrize("shape", [(16, 16, 16), (32, 16, 64)])
def test_dot(source, target, shape):
    m, n, k = shape
    a = numbers(source, m * k, 8).reshape(m, k)
    b = numbers(source, k * n, 9).reshape(k, n)
    out = np.zeros((m, n), TYPES[target])
    zoo.run(
        zoo.dot,
        (1,),
        {"M": m, "N": n, "K": k},
        Buffer(a, "in"),
        Buffer(b, "in"),
        Buffer(out, "out"),
    )
    exact = a.astype(float) @ b.astype(float)
    assert np.abs(out - exact).max() <= (0 if target == "i32" else 1e-4)


@pytest.mark.parametrize("rows", [(16,), (16, 16, 16, 16)])
def test_grouped_gemm_with_pointers_in_tensors(rows):
    k = 32
    b = 16
    groups = [
        (
            numbers("fp16", r * k, i).reshape(r, k),
            numbers("fp16", k * b, i + 9).reshape(k, b),
            np.zeros((r, b), np.float32),
        )
        for i, r in enumerate(rows)
    ]
    table, reachable = zoo.pointers(*(x for group in groups for x in group))
    sizes = np.array(rows, np.int32)
    out = np.zeros(len(rows), np.int32)
    zoo.run(
        zoo.grouped,
        (len(rows),),
        {"K": k, "B": b},
        Buffer(table, "in"),
        Buffer(sizes, "in"),
        Buffer(out, "out"),
        reachable=reachable,
    )
    for x, y, z in groups:
        assert np.abs(z - x.astype(float) @ y.astype(float)).max() < 1e-4


@pytest.mark.parametrize(("kind", "n"), [("fp32", 64), ("i32", 50), ("fp16", 128)])
def test_gather(kind, n):
    x = numbers(kind, n)
    where = np.random.default_rng(1).permutation(n).astype(np.int32)
    out = np.zeros_like(x)
    zoo.run(
        zoo.gather,
        (1,),
        {"BLOCK": triton.next_power_of_2(n)},
        Buffer(x, "in"),
        Buffer(where, "in"),
        Buffer(out, "out"),
        n,
    )
    assert (out == x[where]).all()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("fp32", (16, 32)),
        ("fp16", (16, 16)),
        ("fp16", (64, 32)),
        ("i8", (32, 32)),
        ("i64", (8, 16)),
    ],
)
def test_transpose(kind, shape):
    x = numbers(kind, shape[0] * shape[1]).reshape(shape)
    out = np.zeros(shape[::-1], x.dtype)
    zoo.run(
        zoo.transpose, (1,), {"M": shape[0], "N": shape[1]}, Buffer(x, "in"), Buffer(out, "out")
    )
    assert (out == x.T).all()


@pytest.mark.parametrize("bins", [16, 64])
def test_histogram(bins):
    x = np.random.default_rng(2).integers(0, bins, 256).astype(np.int32)
    out = np.zeros(bins, np.int32)
    zoo.run(zoo.histogram, (1,), {"BLOCK": 256, "BINS": bins}, Buffer(x, "in"), Buffer(out, "out"))
    assert (out == np.bincount(x, minlength=bins)).all()


def test_what_the_machine_refuses():
    """This code of Triton 3.7.1 may be right on hardware, but traps here (see docs/emulator.md)."""
    with pytest.raises(Trap, match="wmma: EXEC is not all ones"):
        test_grouped_gemm_with_pointers_in_tensors((3,))


def philox(counter: int, seed: int) -> int:
    """Return the first word of Philox4x32-10 (Salmon et al., 2011)."""
    c = [counter, 0, 0, 0]
    key = [seed, 0]
    for _ in range(10):
        a = 0xD2511F53 * c[0]
        b = 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


@pytest.mark.parametrize("seed", [0, 123456])
def test_random(seed):
    out = np.zeros(64, np.uint32)
    zoo.run(zoo.random, (1,), {"BLOCK": 64}, Buffer(out, "out"), seed)
    assert out.tolist() == [philox(i, seed) for i in range(64)]
