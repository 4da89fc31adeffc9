# SPDX-License-Identifier: BSD-3-Clause
"""Small Triton kernels of many kinds, which test_zoo.py compares with numpy."""

from functools import cache

import fixtures
import numpy as np
import triton
import triton.language as tl
from strix_emulate import Buffer, Options, launch
from strix_emulate.code import loader
from strix_emulate.code.kernel import Kernel

TYPES = {
    "fp32": "f4",
    "fp16": "f2",
    "fp64": "f8",
    "i32": "i4",
    "i16": "i2",
    "i8": "i1",
    "i64": "i8",
    "u32": "u4",
    "u16": "u2",
    "u8": "u1",
}


@triton.jit
def unary(x, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=1)
    if OP == "neg":
        v = -v
    elif OP == "not":
        v = ~v
    else:
        v = getattr(tl, OP)(v)
    tl.store(out + i, v, mask=i < n)


@triton.jit
def binary(x, y, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=1)
    b = tl.load(y + i, mask=i < n, other=1)
    if OP == "shl":
        v = a << (b & 7)
    elif OP == "shr":
        v = a >> (b & 7)
    elif OP == "less":
        v = tl.where(a < b, a, b)
    elif OP == "maximum" or OP == "minimum":
        v = getattr(tl, OP)(a, b)
    else:
        v = getattr(a, OP)(b)
    tl.store(out + i, v, mask=i < n)


@triton.jit
def convert(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def reduce(x, out, n, OP: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce rows. PADDING is the value of the elements after a row's last one."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.where(i < n, tl.load(x + row * n + i, mask=i < n, other=0), PADDING)
    tl.store(out + row, getattr(tl, OP)(v, 0))


@triton.jit
def scan(x, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=0)
    if OP == "reverse":
        r = tl.cumsum(v, 0, reverse=True)
    elif OP == "sort":
        r = tl.sort(v)
    else:
        r = getattr(tl, OP)(v, 0)
    tl.store(out + row * n + i, r, mask=i < n)


@triton.jit
def atomics(x, where, out, old, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    v = tl.load(x + i, mask=inside, other=0)
    p = out + tl.load(where + i, mask=inside, other=0)
    tl.store(old + i, getattr(tl, OP)(p, v, mask=inside), mask=inside)


@triton.jit
def locked(lock, total, count, x, BLOCK: tl.constexpr):
    """A spin lock around a read-modify-write of plain memory."""
    v = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + v)
    tl.store(count, tl.load(count) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def locked_tensor(lock, out, LOCK: tl.constexpr, MIRROR: tl.constexpr, BLOCK: tl.constexpr):
    """A spin lock around an update of a tensor by all waves of a workgroup.

    With MIRROR, every second workgroup updates the tensor in reverse, so that the same
    element is updated by different waves of different workgroups.
    """
    index = tl.arange(0, BLOCK)
    if MIRROR:
        index = tl.where(tl.program_id(0) % 2 == 1, BLOCK - 1 - index, index)
    if LOCK:
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
    tl.store(out + index, tl.load(out + index) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def scalar_atomics(out):
    """Change the same two cells in each workgroup.

    LLVM expands atomics on floats into loops of compare-and-swaps, which begin with scalar loads.
    """
    number = tl.program_id(0).to(out.dtype.element_ty)
    tl.atomic_max(out, number)
    tl.atomic_add(out + 1, number)


@triton.jit
def in_place(x, y, n, SMALL: tl.constexpr, LARGE: tl.constexpr):
    """Double tensors in place.

    If a tensor is smaller than the workgroup, several waves load each element, and one stores it.
    """
    i = tl.arange(0, SMALL)
    j = tl.arange(0, LARGE)
    a = tl.load(x + i, mask=i < n, other=0)
    b = tl.load(y + j)
    tl.store(y + j, b + b)
    tl.store(x + i, a + a, mask=i < n)


@triton.jit
def reverse(x, N: tl.constexpr):
    """Reverse in place without a barrier, so that waves read elements that other waves write."""
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + N - 1 - i))


@triton.jit
def rotate(x, angle, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate a few heads in place."""
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    c = tl.cos(tl.load(angle + i))
    s = tl.sin(tl.load(angle + i))
    p = x + h * 2 * HALF + i
    a = tl.load(p)
    b = tl.load(p + HALF)
    tl.store(p, a * c - b * s)
    tl.store(p + HALF, b * c + a * s)


@triton.jit
def last_block(x, partial, counter, out, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Store a sum for each workgroup. The workgroup that counts last adds these sums up."""
    g = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(partial + g, tl.sum(tl.load(x + g * BLOCK + i), 0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == PARTS - 1:
        tl.store(out, tl.sum(tl.load(partial + tl.arange(0, PARTS)), 0))


@triton.jit
def dot(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, out_dtype=out.dtype.element_ty))


@triton.jit
def grouped(pointers, sizes, out, K: tl.constexpr, B: tl.constexpr):
    """Compute grouped matrix products. Each group has pointers to A, B and C."""
    g = tl.program_id(0)
    a = tl.load(pointers + 3 * g).to(tl.pointer_type(tl.float16))
    b = tl.load(pointers + 3 * g + 1).to(tl.pointer_type(tl.float16))
    c = tl.load(pointers + 3 * g + 2).to(tl.pointer_type(tl.float32))
    rows = tl.load(sizes + g)
    m = tl.arange(0, B)
    n = tl.arange(0, B)
    k = tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :], mask=(m < rows)[:, None], other=0.0)
    y = tl.load(b + k[:, None] * B + n[None, :])
    tl.store(c + m[:, None] * B + n[None, :], tl.dot(x, y), mask=(m < rows)[:, None])
    tl.store(out + g, rows)


@triton.jit
def gather(x, where, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0)
    tl.store(out + i, tl.gather(v, tl.load(where + i, mask=i < n, other=0), 0), mask=i < n)


@triton.jit
def transpose(x, out, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    v = tl.trans(tl.load(x + m[:, None] * N + n[None, :]))
    tl.store(out + n[:, None] * M + m[None, :], v)


@triton.jit
def histogram(x, out, BLOCK: tl.constexpr, BINS: tl.constexpr):
    v = tl.histogram(tl.load(x + tl.arange(0, BLOCK)), BINS)
    tl.store(out + tl.arange(0, BINS), v)


@triton.jit
def random(out, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.randint(seed, i))


@cache
def compile_kernel(function, signature: tuple, constants: tuple) -> Kernel:
    elf, lds = fixtures.compile_kernel(function, dict(signature), dict(constants))
    return loader.parse_elf(elf, function.__name__, lds)[0]


def run(function, grid, constants: dict, *arguments, types=(), **more):
    """Compile a kernel, unless it is cached, and launch it with every check.

    `types` are the types of the first arguments, if they differ from those of the arrays.
    """
    kinds = [*types, *map(_type, arguments[len(types) :])]
    signature = zip(function.arg_names, kinds, strict=False)
    kernel = compile_kernel(function, tuple(signature), tuple(constants.items()))
    more = {"options": Options(budget=5_000_000)} | more
    return launch(kernel, grid, list(arguments), threads=128, **more)


def _type(argument) -> str:
    if not isinstance(argument, Buffer):
        return "i32"
    return "*" + next(kind for kind, dtype in TYPES.items() if argument.data.dtype == dtype)


def numbers(kind: str, n: int, seed: int = 0, small: bool = False) -> np.ndarray:
    """Return random numbers of a type: floats from -4 to 4, or integers of the whole range.

    With `small`, integers are from -9 to 9, or from 0 to 9 if the type is unsigned.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(TYPES[kind])
    if dtype.kind == "f":
        return rng.uniform(-4, 4, n).astype(dtype)
    info = np.iinfo(dtype)
    low, high = (max(info.min, -9), 9) if small else (info.min, info.max)
    return rng.integers(low, high, n, dtype, endpoint=True)


def pointers(*arrays) -> tuple[np.ndarray, list[Buffer]]:
    """Return a table of the arrays' addresses, and buffers that make the arrays reachable."""
    table = np.array([a.ctypes.data for a in arrays], np.int64)
    return table, [Buffer(a, "inout", host=a.ctypes.data) for a in arrays]
