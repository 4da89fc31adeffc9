# SPDX-License-Identifier: BSD-3-Clause
"""vllm-gguf-plugin's kernels for weights in GGUF's types, and their expected results.

A call runs the three kernels of a type: dequantization, the product of a layer, and the product of
experts. For the reference, llama.cpp's own package gguf dequantizes the blocks of all types except
q8_1.
"""

import importlib
import importlib.util
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import TERMS, Precision
from strix_validate.triton.call import BF16, PackageCall
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.experts import sort_by_expert

MODULE = "vllm_gguf_plugin"
PACKAGE = "vllm-gguf-plugin"
EXPERTS = 3
#: Number of experts that each token is sent to.
EACH = 2


class BlockType(NamedTuple):
    """A type of quantized weights in GGUF.

    Attributes:
        number: The number of the type in GGUF files.
        weights: Number of weights in a block.
        size: Number of bytes in a block.
        halves: Offsets in bytes of the block's float16 numbers. The first is the scale of the
            codes. A second one is the offset (q4_1, q5_1), the scale of the offsets (q2_k, q4_k,
            q5_k), or a sum that dequantization does not use (q8_1). For iq1_m, the tuple is empty,
            because the bits of its scale are spread over the block.
    """

    number: int
    weights: int
    size: int
    halves: tuple[int, ...]


TYPES = {
    "q4_0": BlockType(2, 32, 18, (0,)),
    "q4_1": BlockType(3, 32, 20, (0, 2)),
    "q5_0": BlockType(6, 32, 22, (0,)),
    "q5_1": BlockType(7, 32, 24, (0, 2)),
    "q8_0": BlockType(8, 32, 34, (0,)),
    "q8_1": BlockType(9, 32, 36, (0, 2)),
    "q2_k": BlockType(10, 256, 84, (80, 82)),
    "q3_k": BlockType(11, 256, 110, (108,)),
    "q4_k": BlockType(12, 256, 144, (0, 2)),
    "q5_k": BlockType(13, 256, 176, (0, 2)),
    "q6_k": BlockType(14, 256, 210, (208,)),
    "iq2_xxs": BlockType(16, 256, 66, (0,)),
    "iq2_xs": BlockType(17, 256, 74, (0,)),
    "iq3_xxs": BlockType(18, 256, 98, (0,)),
    "iq1_s": BlockType(19, 256, 50, (0,)),
    "iq4_nl": BlockType(20, 32, 18, (0,)),
    "iq3_s": BlockType(21, 256, 110, (0,)),
    "iq2_s": BlockType(22, 256, 82, (0,)),
    "iq4_xs": BlockType(23, 256, 136, (0,)),
    "iq1_m": BlockType(29, 256, 56, ()),
}


class _OnTheGpu(Tensor):
    """A tensor in host memory that passes a test for being on a GPU."""

    is_cuda = True


def _kernels(name: str):
    """Import a module of kernels without the package itself, which imports vLLM."""
    if MODULE not in sys.modules:
        spec = importlib.util.find_spec(MODULE)
        if spec:
            sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{MODULE}.triton.{name}")


def _multiply(
    x: Tensor,
    packed: Tensor,
    experts: Tensor,
    chosen: Tensor,
    *,
    number: int,
    size: int,
) -> dict[str, Tensor]:
    block = _kernels("fused_moe.utils").get_triton_moe_block_m(number)
    routed = [_pass_as_cuda(tensor) for tensor in sort_by_expert(chosen, EXPERTS, block)]
    x = _pass_as_cuda(x)
    packed = _pass_as_cuda(packed)
    experts = _pass_as_cuda(experts)
    rows = packed.shape[0]
    dequantize = _kernels("dequantize.interface").ggml_dequantize_triton
    multiply = _kernels("gemm.interface").ggml_mul_mat_a8_triton
    multiply_experts = _kernels("fused_moe.interface").ggml_moe_a8_triton
    results = {
        "weights": dequantize(packed, number, rows, size, x.dtype),
        "out": multiply(packed, x, number, rows),
        "experts": multiply_experts(x, experts, *routed, number, rows, EACH, x.shape[0]),
    }
    return {name: value.as_subclass(Tensor) for name, value in results.items()}


def _pass_as_cuda(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.as_subclass(_OnTheGpu)


def draw_blocks(randn: Randn, name: str, count: int) -> np.ndarray:
    """Return blocks of random bytes, (count, size), whose scales give weights of about 1."""
    block_type = TYPES[name]
    random = randn(count, block_type.size + 1).double().abs().numpy() * 1e4
    blocks = (random[:, :-1].astype(np.int64) % 256).astype(np.uint8)
    scales = (random[:, -1:] % 1 * 0.02 + 0.01).astype(np.float16)
    for offset in block_type.halves:
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    if name == "iq1_m":
        # The 16 bits of iq1_m's scale are in four words, in the four highest bits of each.
        words = blocks[:, 48:56].copy().view(np.uint16)
        bits = scales.view(np.uint16)
        fields = bits >> np.array([0, 4, 8, 12], np.uint16) & 15
        blocks[:, 48:56] = (words & 0xFFF | fields << 12).view(np.uint8)
    return blocks


def _dequantize(blocks: np.ndarray, name: str) -> Tensor:
    """Return the weights of blocks, (blocks, weights) in float64."""
    if name == "q8_1":
        # The package gguf does not dequantize q8_1, which is only used in products. Each weight is
        # the block's scale times a code.
        scales: np.ndarray = blocks[:, :2].copy().view(np.float16).astype(np.float64)
        codes: np.ndarray = blocks[:, 4:].copy().view(np.int8)
        return torch.from_numpy(scales * codes)
    from gguf import GGMLQuantizationType, quants

    block_type = GGMLQuantizationType(TYPES[name].number)
    return torch.from_numpy(quants.dequantize(blocks, block_type)).double()


def _decode(
    blocks: np.ndarray,
    name: str,
    rows: int,
    dtype: Precision,
) -> tuple[Tensor, Tensor]:
    """Return the weights, (rows, size), twice: as dequantized, and as the products use them.

    Args:
        blocks: The blocks of a matrix.
        name: The name of their type.
        rows: Number of rows of the matrix.
        dtype: Precision of the results; see cases.Expected.
    """
    weights = _dequantize(blocks, name)
    offsets = torch.zeros(1, dtype=torch.float64)
    halves = TYPES[name].halves
    if len(halves) > 1:
        # With a scale of zero for the codes, only the offset of each weight remains.
        without_scale = blocks.copy()
        without_scale[:, halves[0] : halves[0] + 2] = 0
        offsets = _dequantize(without_scale, name)
    scaled = weights - offsets
    if dtype == TERMS:
        terms = (scaled.abs() + offsets.abs()).view(rows, -1)
        return terms, terms
    stored = partial(reference.store, dtype=dtype)
    factors = stored(stored(scaled) + stored(offsets))
    return stored(weights).view(rows, -1), factors.view(rows, -1)


def product(
    randn: Randn,
    name: str,
    *,
    tokens=3,
    size=256,
    rows=24,
) -> tuple[PackageCall, Expected]:
    """Build a call of a type's kernels.

    Args:
        randn: Draws the numbers.
        name: The name of the type, a key of :data:`TYPES`.
        tokens: Number of rows of x.
        size: Number of columns of x.
        rows: Number of rows of the weight, which are columns of the result.
    """
    block_type = TYPES[name]
    x = randn(tokens, size)
    count = rows * size // block_type.weights
    # The first matrix is the layer's. The other matrices are the experts'.
    matrices = [draw_blocks(randn, name, count) for _ in range(1 + EXPERTS)]
    packed = [torch.from_numpy(blocks.reshape(rows, -1)) for blocks in matrices]
    chosen = torch.stack([torch.arange(EACH) + i for i in range(tokens)]) % EXPERTS
    tensors = {
        "x": x,
        "packed": packed[0],
        "experts": torch.stack(packed[1:]),
        "chosen": chosen,
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        decoded = [_decode(blocks, name, rows, dtype) for blocks in matrices]
        weights, factors = decoded[0]
        expert_rows = []
        for i, experts in enumerate(chosen.tolist()):
            for expert in experts:
                _, expert_factors = decoded[1 + expert]
                expert_rows.append(reference.product(x[i : i + 1], expert_factors, dtype))
        out = reference.product(x, factors, dtype)
        return {
            "out": reference.store(out, dtype),
            "experts": reference.store(torch.cat(expert_rows), dtype),
            "weights": weights,
        }

    options = {"number": block_type.number, "size": size}
    # The kernels of these types do not use the matrix unit.
    uses_matrix_unit = not name.startswith(("iq1", "iq2", "iq3"))
    call = PackageCall(_multiply, tensors, options, int(uses_matrix_unit), package=PACKAGE)
    return call, expected


_COMPILES = "a kernel that no longer compiles for gfx1151, or does not use the matrix unit"
_DECODED = "a code, sign, scale or offset that is read from the wrong bits of a block"
_BLOCKS = "the first block or its scale read again for the second block of a row"
_TILES = "a row after the last full tile that is left out, or that overwrites the next row"

COMPILED = {name: Case(partial(product, name=name), _COMPILES, BF16) for name in TYPES}
#: Tokens, size and rows of a layer. Each row has several blocks, of 32 or 256 weights. A quick run
#: includes one of these sizes for each type, in turn.
_QUICK_SIZES = (
    (1, 512, 24),
    (3, 512, 24),
    (5, 512, 24),
    (1, 512, 40),
)
_FULL_SIZES = (
    (1, 768, 24),
    (5, 768, 130),
)


def model_cases() -> dict[str, Case]:
    """Return cases of each type with rows of several blocks. A full run includes every size."""
    cases = {}
    for i, name in enumerate(TYPES):
        for j, (tokens, size, rows) in enumerate(_QUICK_SIZES + _FULL_SIZES):
            build = partial(product, name=name, tokens=tokens, size=size, rows=rows)
            is_quick = i % len(_QUICK_SIZES) == j
            run_size = Size.QUICK if is_quick else Size.FULL
            cases[f"{name}-{tokens}-{size}-{rows}"] = Case(build, _BLOCKS, size=run_size)
    return cases


#: A call with more tokens and rows than a tile of any kernel.
_LARGE = partial(product, tokens=35, rows=130)
COMPUTED = {
    **{name: Case(partial(_LARGE, name=name), _DECODED) for name in TYPES},
    **model_cases(),
    "q4_k-tiles": Case(partial(_LARGE, name="q4_k", size=512), _TILES),
}
EMULATED = {name: Case(partial(product, name=name), _DECODED, BF16) for name in TYPES}
