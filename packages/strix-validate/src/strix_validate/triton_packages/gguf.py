# SPDX-License-Identifier: BSD-3-Clause
"""vllm-gguf-plugin's kernels for weights in GGUF's types, and their correct answers.

A call runs a type's three kernels: weights to numbers, the product of a layer, that of experts.
What a block's bytes mean is what llama.cpp's own package gguf makes of them.
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
from strix_validate.triton.call import PackageCall
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.experts import by_expert

MODULE, PACKAGE = "vllm_gguf_plugin", "vllm-gguf-plugin"
EXPERTS, EACH = 3, 2


class BlockType(NamedTuple):
    """A type of GGUF: its number in files, weights and bytes of a block, where its halves are.

    The halves are the scale of the codes and, if there are two, that of the offsets.
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
    """A tensor in host memory that a check of its device lets through."""

    is_cuda = True


def _kernels(name: str):
    """Import a module of kernels; the package itself imports vLLM, which they do not need."""
    if MODULE not in sys.modules and (spec := importlib.util.find_spec(MODULE)):
        sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{MODULE}.triton.{name}")


def _multiply(
    x: Tensor, packed: Tensor, experts: Tensor, chosen: Tensor, *, number: int, size: int
) -> dict[str, Tensor]:
    block = _kernels("fused_moe.utils").get_triton_moe_block_m(number)
    x, packed, experts, *routed = (
        t if t.is_cuda else t.as_subclass(_OnTheGpu)
        for t in (x, packed, experts, *by_expert(chosen, EXPERTS, block))
    )
    rows = packed.shape[0]
    found = {
        "weights": _kernels("dequantize.interface").ggml_dequantize_triton(
            packed, number, rows, size, x.dtype
        ),
        "out": _kernels("gemm.interface").ggml_mul_mat_a8_triton(packed, x, number, rows),
        "experts": _kernels("fused_moe.interface").ggml_moe_a8_triton(
            x, experts, *routed, number, rows, EACH, x.shape[0]
        ),
    }
    return {name: value.as_subclass(Tensor) for name, value in found.items()}


def blocks_of(randn: Randn, name: str, count: int) -> np.ndarray:
    """Make blocks of random bytes, with scales that keep the weights near 1."""
    kind = TYPES[name]
    random = randn(count, kind.size + 1).double().abs().numpy() * 1e4
    blocks = (random[:, :-1].astype(np.int64) % 256).astype(np.uint8)
    scales = (random[:, -1:] % 1 * 0.02 + 0.01).astype(np.float16)
    for at in kind.halves:
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if name == "iq1_m":  # its scale is spread over the highest bits of four words
        words, bits = blocks[:, 48:56].copy().view(np.uint16), scales.view(np.uint16)
        fields = bits >> np.array([0, 4, 8, 12], np.uint16) & 15
        blocks[:, 48:56] = (words & 0xFFF | fields << 12).view(np.uint8)
    return blocks


def _numbers(blocks: np.ndarray, name: str) -> Tensor:
    """Return (blocks, weights) in float64."""
    if name == "q8_1":  # of products alone, which gguf does not decode: a scale, and codes
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float64)
        return torch.from_numpy(scales * blocks[:, 4:].copy().view(np.int8))
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType(TYPES[name].number)
    return torch.from_numpy(quants.dequantize(blocks, kind)).double()


def _decoded(blocks: np.ndarray, name: str, rows: int, dtype: Precision) -> tuple[Tensor, Tensor]:
    """Return (rows, size) weights as a kernel of the dtype stores them, and multiplies by them."""
    whole, offsets = _numbers(blocks, name), torch.zeros(1, dtype=torch.float64)
    if len(halves := TYPES[name].halves) > 1:  # what is left of a weight without its code's scale
        plain = blocks.copy()
        plain[:, halves[0] : halves[0] + 2] = 0
        offsets = _numbers(plain, name)
    scaled = whole - offsets
    if dtype == TERMS:
        whole = scaled.abs() + offsets.abs()
        return whole.view(rows, -1), whole.view(rows, -1)
    stored = partial(reference.stored, dtype=dtype)
    steps = stored(stored(scaled) + stored(offsets))
    return stored(whole).view(rows, -1), steps.view(rows, -1)


def product(
    randn: Randn, name: str, *, tokens=3, size=256, rows=24
) -> tuple[PackageCall, Expected]:
    """Build a call of a type's kernels.

    Args:
        name: of the type, as in :data:`TYPES`.
        size: of a token's vector. rows: of the answer's vector.
    """
    kind, x = TYPES[name], randn(tokens, size)
    made = [blocks_of(randn, name, rows * size // kind.weights) for _ in range(1 + EXPERTS)]
    chosen = torch.stack([torch.arange(EACH) + i for i in range(tokens)]) % EXPERTS
    packed = [torch.from_numpy(blocks.reshape(rows, -1)) for blocks in made]
    tensors = {"x": x, "packed": packed[0], "experts": torch.stack(packed[1:]), "chosen": chosen}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        (weights, steps), *experts = (_decoded(blocks, name, rows, dtype) for blocks in made)
        each = [
            reference.product(x[i : i + 1], experts[expert][1], dtype)
            for i, row in enumerate(chosen.tolist())
            for expert in row
        ]
        found = {"out": reference.product(x, steps, dtype), "experts": torch.cat(each)}
        return {n: reference.stored(v, dtype) for n, v in found.items()} | {"weights": weights}

    options = {"number": kind.number, "size": size}
    matrix = not name.startswith(("iq1", "iq2", "iq3"))  # those add up without it
    return PackageCall(_multiply, tensors, options, int(matrix), package=PACKAGE), expected


_COMPILES = "a kernel that no longer compiles for gfx1151, or uses no matrix unit where it can"
_DECODED = "a code, sign, scale or offset that is taken from other bits than the format has it in"
_BLOCKS = "the second block of a row read as the first, or with its scale"
_TILES = "a row past the last full tile left out, or written over its neighbour"

COMPILED = {name: Case(partial(product, name=name), _COMPILES, torch.bfloat16) for name in TYPES}
#: Tokens, numbers of a row, whose blocks hold 32 or 256, and rows. Of the first ones, types take
#: turns at quick, so that each kernel sees several blocks.
_SIZES = ((1, 512, 24), (3, 512, 24), (5, 512, 24), (1, 512, 40))
_FULL_SIZES = ((1, 768, 24), (5, 768, 130))


def model_cases() -> dict[str, Case]:
    """Return each type with rows of several blocks; full has each of the sizes."""
    return {
        f"{name}-{tokens}-{size}-{rows}": Case(
            partial(product, name=name, tokens=tokens, size=size, rows=rows),
            _BLOCKS,
            size=Size.QUICK if i % len(_SIZES) == j else Size.FULL,
        )
        for i, name in enumerate(TYPES)
        for j, (tokens, size, rows) in enumerate(_SIZES + _FULL_SIZES)
    }


COMPUTED = {
    # of more tokens and rows than a tile of any kernel has
    **{name: Case(partial(product, name=name, tokens=35, rows=130), _DECODED) for name in TYPES},
    **model_cases(),
    "q4_k-tiles": Case(partial(product, name="q4_k", tokens=35, size=512, rows=130), _TILES),
}
EMULATED = {name: Case(partial(product, name=name), _DECODED, torch.bfloat16) for name in TYPES}
