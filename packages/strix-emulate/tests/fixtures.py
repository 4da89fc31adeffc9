# SPDX-License-Identifier: BSD-3-Clause
"""Small Triton kernels, compiled for gfx1151 or another target. This needs no torch and no GPU."""

from functools import cache

import numpy as np
import triton
import triton.language as tl
from strix_emulate import Buffer, Options, launch
from strix_emulate.code import loader
from strix_emulate.code.kernel import Kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * n + i, v / tl.sum(v, 0), mask=i < n)


@triton.jit
def matmul(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(
            a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0
        )
        y = tl.load(
            b + k[:, None] * N + n[None, :], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0
        )
        total = tl.dot(x, y, total)
    tl.store(out + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def attention(
    q,
    k,
    v,
    out,
    lse,
    S,
    scale,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    base = tl.program_id(1) * S * D
    x = tl.load(q + base + m[:, None] * D + d[None, :], mask=(m < S)[:, None], other=0.0)
    total = tl.zeros((BM, D), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    end = min((tl.program_id(0) + 1) * BM, S) if CAUSAL else S
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        y = tl.load(k + base + n[None, :] * D + d[:, None], mask=(n < S)[None, :], other=0.0)
        z = tl.load(v + base + n[:, None] * D + d[None, :], mask=(n < S)[:, None], other=0.0)
        s = tl.dot(x, y) * (scale * 1.44269504)
        visible = (n < S)[None, :]
        if CAUSAL:
            visible = visible & (m[:, None] >= n[None, :])
        s = tl.where(visible, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.math.exp2(s - higher[:, None])
        fade = tl.math.exp2(top - higher)
        weight = weight * fade + tl.sum(p, 1)
        total = tl.dot(p.to(x.dtype), z, total * fade[:, None])
        top = higher
    total = total / weight[:, None]
    tl.store(lse + tl.program_id(1) * S + m, (top + tl.log2(weight)) / 1.44269504, mask=m < S)
    tl.store(
        out + base + m[:, None] * D + d[None, :],
        total.to(out.dtype.element_ty),
        mask=(m < S)[:, None],
    )


def compile_kernel(
    function, signature: dict[str, str], constants: dict, arch: str = "gfx1151", **options
):
    """Return the bytes of the ELF file, and the bytes of LDS that Triton requests at launch."""
    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants)
    compiled = triton.compile(source, target=GPUTarget("hip", arch, 32), options=options)
    return compiled.asm["hsaco"], compiled.metadata.shared


@cache
def code_object() -> bytes:
    """Return the code object of add(x, y, out, n), with 256 elements in each workgroup."""
    return compile_kernel(add, _ADD, {"BLOCK": 256})[0]


@cache
def kernel(name: str, arch: str = "gfx1151", **_) -> Kernel:
    """Return the kernel of the fixture with this name."""
    sources = {
        "add": (add, _ADD, {"BLOCK": 256}),
        "matmul": (
            matmul,
            {"a": "*fp16", "b": "*fp16", "out": "*fp32", "M": "i32", "N": "i32", "K": "i32"},
            {"BM": 32, "BN": 32, "BK": 32},
        ),
        "attention": (attention, _ATTENTION, {"CAUSAL": False, "D": 32, "BM": 32, "BN": 32}),
        "attention-causal": (attention, _ATTENTION, {"CAUSAL": True, "D": 32, "BM": 32, "BN": 32}),
    }[name]
    elf, lds = compile_kernel(*sources, arch)
    return loader.parse_elf(elf, name, lds)[0]


_ADD = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
_ATTENTION = {
    "q": "*fp16",
    "k": "*fp16",
    "v": "*fp16",
    "out": "*fp16",
    "lse": "*fp32",
    "S": "i32",
    "scale": "fp32",
}


def attention_case(
    causal: bool, size: int = 64, heads: int = 1, seed: int = 0, peaked: bool = False
):
    """Return q, k and v for the attention fixture, with the result and logsumexp in float64.

    With `peaked`, each query has one key whose logit exceeds all others by so much that float16
    cannot hold exp(difference). A maximum that misses this key leads to an overflow. The key's
    position differs between queries.
    """
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, heads, size, 32))
    if peaked:
        k = np.sign(k)
        chosen = rng.permutation(size)
        if causal:
            chosen = np.minimum(chosen, np.arange(size))
        q = 6 * k[:, chosen]
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    s = q.astype(float) @ k.astype(float).transpose(0, 2, 1) * 32**-0.5
    if causal:
        s = np.where(np.tri(size, dtype=bool), s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    weight = p.sum(-1, keepdims=True)
    return (q, k, v), (p / weight @ v.astype(float), (top + np.log(weight))[..., 0])


def run_attention(causal: bool, case, instructions=None, options=None, arch="gfx1151"):
    """Run attention on a case of attention_case; return (result, logsumexp) and the launch."""
    (q, k, v), _ = case
    out = np.zeros_like(q)
    lse = np.zeros(q.shape[:2], np.float32)
    chosen = kernel("attention-causal" if causal else "attention", arch)
    done = launch(
        chosen,
        (-(-q.shape[1] // 32), q.shape[0]),
        [
            Buffer(q, "in"),
            Buffer(k, "in"),
            Buffer(v, "in"),
            Buffer(out, "out"),
            Buffer(lse, "out"),
            q.shape[1],
            32**-0.5,
        ],
        threads=128,
        instructions=instructions,
        options=options or Options(budget=2_000_000),
    )
    return (out, lse), done


def mutation_cases(causal: bool) -> list:
    """Return the cases with which the results of faulty kernels are judged.

    The last blocks of the six cases have 31, 3, 1, 25, 1 and 1 keys. The second case has two heads.
    All keys of the fourth case are in one block, whose addresses cross 4 GiB. The fifth case has a
    single row. In the sixth case, the result depends on the maxima.
    """
    return [
        attention_case(causal, 127),
        attention_case(causal, 67, heads=2, seed=1),
        attention_case(causal, 33, seed=4),
        attention_case(causal, 25, seed=2),
        attention_case(causal, 1, seed=5),
        attention_case(causal, 97, seed=3, peaked=True),
    ]
