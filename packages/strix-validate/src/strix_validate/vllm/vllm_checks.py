# SPDX-License-Identifier: BSD-3-Clause
"""Cases of vLLM's Triton kernels for the tiers "kernels", "attention" and "emulated"."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from strix_validate.checks import CannotRun, RunOptions, Size
from strix_validate.layers.table import small_layers
from strix_validate.numerics.reference import LOW_SCORES_FAULT
from strix_validate.triton.call import BF16, FP16
from strix_validate.triton.cases import Case
from strix_validate.vllm import (
    attention_modes,
    drafts,
    linear_attention,
    lora,
    mla,
    model_cases,
    mxfp4,
    quantized,
    sampling,
)
from strix_validate.vllm import model as vllm_model
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.attention import paged_attention, store_keys
from strix_validate.vllm.kernels import moe, rms_norm, rope

#: The prefix of the ids of vLLM's checks, and the library's name in their titles.
PREFIX = "vllm-"
MODULE = "vLLM"
#: Modules whose table COMPUTED has further cases for the tier "attention".
FAMILIES = (
    sampling,
    mla,
    linear_attention,
    quantized,
    lora,
    attention_modes,
    drafts,
)
_NO_KERNELS = "this source of vLLM has no vllm/third_party/triton_kernels, which vLLM's build adds"

_COMPILES = (
    "a kernel that no longer compiles for gfx1151, does not use the matrix unit, or needs more LDS "
    "than the chip has: https://github.com/vllm-project/vllm/issues/56021"
)
_SPILLS = "; its spills are measured: https://github.com/vllm-project/vllm/pull/56232"
_GENERATION = (
    "triton_kernels that do not fit the installed Triton and cannot be imported, so that gpt-oss "
    "does not start: https://github.com/vllm-project/vllm/issues/49779"
)
_MASK = "a wrong mask at the edge of a tile, or a key read from a slot that belongs to no sequence"
_SPLIT = (
    "segments of keys whose results decoding merges wrongly, or reads although nothing wrote them"
)
_WINDOW = "a sliding window that is off by one: https://github.com/vllm-project/vllm/issues/28989"
_SINKS = "gpt-oss's sinks left out, or counted in each segment of the keys instead of once"
_CAP = "a softcap that overflows or is left out (Gemma)"
_PAGES = "a block table read wrongly if the block size is no power of two, as in hybrid models"
_SCALE = "1 / sqrt(head_dim) used instead of the model's scale (Gemma, Granite)"
_ALIBI = "ALiBi slopes that are ignored, or those of another head (Bloom, MPT)"
_FP8 = "the scale of keys or values left out, or the two scales swapped"
_ACROSS = "a causal mask for a decoder that attends to an encoder's keys (Whisper)"
_FAR = "keys after the 512th or 2048th left out, or the segments that hold these keys"
_LIMIT = "keys after the 4096th or 8192nd left out"
_EXPERT = (
    "tokens multiplied by the wrong expert, or results written for the padding of an expert's block"
)
_MODEL = (
    "a kernel that does not read what the previous kernel wrote: each kernel alone is correct, but "
    "the model's answer is wrong from its second token on"
)
_INT4 = "the scale of the wrong group, or nibbles in the wrong order (W4A16 of AWQ and GPTQ)"
_FP8_SCALES = (
    "the scale of another token, row or expert, or scales that are read as if each block had one"
)

#: Layers that are compiled, in 16 bits. The key names a feature of the layer, and the value is a
#: model that has it.
_COMPILED_LAYERS = {
    "d64-sinks": "gpt-oss-20b",
    "d128": "Llama-3.1-8B",
    "d128-gqa7": "Qwen2.5-7B",
    "d128-window": "Gemma-3-27B-window",
    "d256-softcap": "Gemma-2-9B-window",
    "d256-block1056": "Qwen3-Next-80B-A3B",
    "d512": "Gemma-4-31B",
}
#: (queries, keys) of each sequence of a compiled step.
_COMPILED_STEPS = {
    "prefill": ((128, 128),),
    "decode": ((1, 300), (1, 70)),
}
#: Layers that are executed under emulation, with one head of keys: (model, lengths, dtype).
_EMULATED_LAYERS = {
    "prefill-gqa7": ("Qwen2.5-7B", ((20, 20),), FP16),
    "decode-sinks": ("gpt-oss-20b", ((1, 50), (1, 170)), FP16),
    "decode-d96": ("Phi-3-mini", ((1, 60),), FP16),
    "decode-block1056": ("Qwen3-Next-80B-A3B", ((1, 100),), FP16),
    "prefill-d256-bfloat16": ("Gemma-2-9B", ((8, 20),), BF16),
    "prefill-d512-bfloat16": ("Gemma-4-31B", ((8, 20),), BF16),
}


def _compiled_layers() -> Iterator[tuple[str, Case]]:
    """Yield prefill and decoding of each layer, and of a layer with an FP8 cache."""
    layers = {name: (small_layers()[model], False) for name, model in _COMPILED_LAYERS.items()}
    layers["d128-fp8-kv"] = (small_layers()["Llama-3.1-8B"], True)
    for (step, lengths), (name, (layer, fp8)) in product(_COMPILED_STEPS.items(), layers.items()):
        build = partial(paged_attention, lengths=lengths, fp8=fp8, **asdict(layer))
        yield f"{step}-{name}", Case(build, _COMPILES + _SPILLS, BF16)


def _emulated_layers() -> Iterator[tuple[str, Case]]:
    """Yield layers with the groups of heads, head dims, blocks and sinks of models."""
    for name, (model, lengths, dtype) in _EMULATED_LAYERS.items():
        layer = small_layers()[model]
        layer = replace(layer, heads=layer.group, kv_heads=1)
        build = partial(paged_attention, lengths=lengths, **asdict(layer))
        yield name, Case(build, model_cases.LAYER, dtype)


_small_moe = partial(moe, rows=256, columns=256)
_small_mxfp4 = partial(mxfp4.mixture, size=512, inner=512)
#: Cases whose kernels are only compiled.
COMPILED = {
    **dict(_compiled_layers()),
    "reshape-and-cache": Case(partial(store_keys, heads=8), _COMPILES),
    "rms-norm": Case(partial(rms_norm, columns=4096), _COMPILES, BF16),
    "rope": Case(partial(rope, heads=32, kv_heads=8), _COMPILES, BF16),
    "rope-adjacent": Case(partial(rope, heads=32, kv_heads=8, head_dim=64, neox=False), _COMPILES),
    "moe-prefill": Case(partial(_small_moe, tokens=1024), _COMPILES, BF16),
    "moe-decode": Case(_small_moe, _COMPILES, BF16),
    "moe-int4-prefill": Case(partial(_small_moe, tokens=64, bits=4), _COMPILES, BF16),
    "moe-int4-decode": Case(partial(_small_moe, tokens=2, bits=4), _COMPILES),
    "moe-fp8-prefill": Case(partial(_small_moe, tokens=99, bits=8), quantized.MINUTES, BF16),
    # These cases are smaller than a layer of gpt-oss-20b, which has 32 experts of 2880 by 2880.
    "mxfp4-prefill": Case(partial(_small_mxfp4, tokens=1024), _GENERATION, BF16),
    "mxfp4-decode": Case(partial(_small_mxfp4, tokens=2), _GENERATION, BF16),
    **mla.COMPILED,
    **quantized.COMPILED,
}


def _attend(
    catches: str,
    *lengths: tuple[int, int],
    dtype=FP16,
    size=Size.QUICK,
    **shape,
) -> Case:
    """Return a case of paged attention.

    Args:
        catches: See Case.
        lengths: (queries, keys) of each sequence.
        dtype: See Case.
        size: See Case.
        shape: Other options of paged_attention.
    """
    return Case(partial(paged_attention, lengths=lengths, **shape), catches, dtype, size)


_D64: dict = {"head_dim": 64}
#: A layer with one key head of size 64.
_ONE_HEAD: dict = {"head_dim": 64, "heads": 2, "kv_heads": 1}
_SINKS_SHAPE: dict = {"heads": 8, "kv_heads": 1, "head_dim": 64, "sinks": True}
_SCALE_SHAPE: dict = {"scale": 0.3, "head_dim": 64, "block": 64}
_ATTENTION = {
    "prefill": _attend(_MASK, (37, 37), (5, 80), heads=8),
    "decode": _attend(_SPLIT, (1, 37), (1, 200), heads=8),
    # A slot's stride is 2 * head_dim. With two key heads, it would also be kv_heads * head_dim, the
    # stride in a cache that does not interleave keys and values. A mix-up would then not show.
    "mixed": _attend(_MASK, (1, 90), (40, 60), (1, 1), heads=6, kv_heads=3),
    "prefill-window": _attend(_WINDOW, (40, 70), window=16),
    "decode-window": _attend(_WINDOW, (1, 200), window=16),
    "prefill-softcap": _attend(_CAP, (70, 70), softcap=3.0),
    "decode-softcap": _attend(_CAP, (1, 70), softcap=3.0),
    "prefill-sinks": _attend(_SINKS, (50, 70), **_SINKS_SHAPE),
    "decode-sinks": _attend(_SINKS, (1, 50), (1, 170), **_SINKS_SHAPE),
    "decode-d80-block1056": _attend(_PAGES, (1, 1200), head_dim=80, block=1056),
    "prefill-fp8-kv": _attend(_FP8, (40, 60), fp8=True),
    "prefill-scale": _attend(_SCALE, (40, 130), **_SCALE_SHAPE),
    "decode-scale": _attend(_SCALE, (1, 130), **_SCALE_SHAPE),
    "prefill-alibi": _attend(_ALIBI, (40, 70), alibi=True, **_D64),
    "decode-alibi": _attend(_ALIBI, (1, 70), alibi=True, **_D64),
    "decode-fp8-kv": _attend(_FP8, (1, 70), fp8=True),
    "prefill-window-600": _attend(_FAR, (20, 700), window=600, **_ONE_HEAD),
    "decode-2100": _attend(_FAR, (1, 2100), **_ONE_HEAD),
    "decode-batch6": _attend(
        "sequences after the fourth left out",
        *((1, 9 + 7 * i) for i in range(6)),
        **_D64,
    ),
    "prefill-low": _attend(LOW_SCORES_FAULT, (37, 37), (5, 80), low=-120, **_D64),
    "decode-low": _attend(LOW_SCORES_FAULT, (1, 37), (1, 200), low=-1000, **_D64),
    "prefill-batch6": _attend(
        "a search that finds the wrong sequence for a block of queries",
        *((9 - i, 9 + 7 * i) for i in range(6)),
        **_D64,
    ),
    # If sequences times key heads are more than 128, keys are not split.
    "decode-batch-40": _attend(
        "sequences after the 32nd left out, or a fault of the kernel for large batches",
        *((1, 3 + 5 * i % 40) for i in range(40)),
        heads=4,
        kv_heads=4,
        **_D64,
    ),
    "prefill-batch-40": _attend(
        "sequences after the 32nd left out, or a search that finds the wrong sequence for a query",
        *((1 + i % 9, 9 + 5 * i % 40) for i in range(40)),
        **_ONE_HEAD,
    ),
    "decode-4200": _attend(_LIMIT, (1, 4200), block=64, **_ONE_HEAD),
    "prefill-4200": _attend(_LIMIT, (9, 4200), block=64, **_ONE_HEAD),
    "decode-8300": _attend(_LIMIT, (1, 8300), block=64, size=Size.FULL, **_ONE_HEAD),
    "prefill-8300": _attend(_LIMIT, (9, 8300), block=64, size=Size.FULL, **_ONE_HEAD),
    "verify": _attend(
        "a wrong causal mask if a few queries are decoded at once, with keys split into segments "
        "(speculative decoding)",
        *((4, 70), (8, 200), (1, 9)),
        **_D64,
    ),
    "prefill-softcap-large": _attend(_CAP, (20, 40), softcap=3.0, gain=100.0, **_D64),
    "prefill-block-33000": _attend(
        "block numbers read as 16-bit integers",
        (20, 40),
        first_block=33000,
        **_ONE_HEAD,
    ),
}
_KERNELS = {
    "reshape-and-cache": Case(
        store_keys, "keys written to the wrong slot, or padding written to the cache"
    ),
    "rms-norm-eps": Case(partial(rms_norm, eps=0.5), "a wrong eps in the norm"),
    "rope-partial": Case(
        partial(rope, rotary=64),
        "a rotation of the whole head, of which only a part must be rotated (GLM, Phi)",
    ),
    "rope-interleaved": Case(
        partial(rope, interleaved=True),
        "interleaved rotary sections that are read as if each section was contiguous",
    ),
    "moe-ragged": Case(
        partial(moe, tokens=4, rows=32, columns=104),
        "a last tile of columns that is computed as if it was full (GLM-4.5-Air has 1408 columns)",
    ),
    "moe-unrouted": Case(
        partial(moe, routed=False, absent=1),
        "the router's weights applied to the result although the model applies them to the input "
        "(Llama 4), or a result for an expert that is on another GPU",
    ),
    "moe-bias": Case(
        partial(moe, bias=True),
        "an expert's bias left out, or not multiplied by the router's weight",
    ),
    "moe-int4-zeros": Case(
        partial(moe, bits=4, zeros=True, absent=1),
        "zero points of the wrong row (AWQ), or a result for an expert that is on another GPU",
    ),
    "rms-norm": Case(
        rms_norm, "a last block that is computed as if it was full, although it is not"
    ),
    "rope": Case(rope, "angles of the wrong rotary section, or wrong pairs of elements"),
    "rope-adjacent": Case(
        partial(rope, neox=False, head_dim=64),
        "elements i and i + rotary_dim / 2 rotated as a pair, instead of two neighbouring elements",
    ),
    "rope-slice": Case(
        partial(rope, packed=True),
        "q and k that are read as if they were contiguous, although they are slices of one tensor",
    ),
    "moe-padded": Case(
        partial(moe, tokens=3, padding=128, rows=40),
        "padded rows of weights that are read as if they were contiguous",
    ),
    "moe-fp8-channels": Case(
        partial(moe, tokens=5, rows=40, bits=8, scales="channels"),
        _FP8_SCALES,
    ),
    "moe-fp8-tensor": Case(
        partial(moe, tokens=5, rows=40, bits=8, scales="tensor"),
        _FP8_SCALES,
    ),
    "moe": Case(moe, _EXPERT),
    "moe-one-token": Case(
        partial(moe, tokens=1, experts=8, rows=32),
        "a fault with tokens that are not sorted by expert (decoding)",
    ),
    "moe-swizzle": Case(
        partial(moe, tokens=40, rows=160, columns=64, swizzle=3),
        "a fault in the last group of tiles that share weights, because that group is smaller",
    ),
    "moe-int4": Case(partial(moe, bits=4), _INT4),
    "moe-fp8": Case(partial(moe, tokens=3, rows=160, columns=256, bits=8), quantized.BLOCKS),
    "reshape-and-cache-fp8": Case(partial(store_keys, fp8=True, exact=True), _FP8),
    "far": _attend(
        "offsets of 32 bits, which overflow in a cache of more than 2^31 numbers",
        (9, 40),
        far=True,
        size=Size.FULL,
        **_D64,
    ),
    "prefill-not-causal": _attend(_ACROSS, (20, 60), causal=False, **_D64),
    "decode-not-causal": _attend(_ACROSS, (1, 60), causal=False, **_D64),
}
_decoding = vllm_model.decoding
#: Cases of whole models. They take too long for a quick run. A quick run checks the models' kernels
#: one by one.
_MODELS = {
    "model": Case(_decoding, _MODEL, size=Size.FULL),
    "model-window": Case(partial(_decoding, window=8), _MODEL, size=Size.FULL),
    "model-experts": Case(partial(_decoding, experts=4), _MODEL, size=Size.FULL),
    "model-hybrid": Case(partial(_decoding, linear=1), _MODEL, size=Size.FULL),
}


def _computed() -> dict[str, Case]:
    """Return all cases that the interpreter or a GPU computes."""
    cases = _ATTENTION | _KERNELS
    for family_cases in model_cases.GENERATED.values():
        cases |= family_cases
    for family in FAMILIES:
        cases |= family.COMPUTED
    return cases | _MODELS


#: Cases that Triton's interpreter or a GPU computes.
COMPUTED = _computed()
#: Patterns of cases that a GPU does not repeat in bfloat16. AWQ's kernel is only for fp16, logits
#: are float32, and `w4a16-packed` covers the 16-bit form of w4a16.
FLOAT16_OR_32 = (
    "awq*",
    "w4a16",
    "w4a16-[!pz]*",
    "top-*",
    "logprobs*",
    "penalties*",
    "temperature-*",
    "gumbel",
    "rejection",
)

_few_experts = partial(moe, tokens=3, rows=32)
#: Cases that are executed as gfx1151 code. Some are in bfloat16, whose products the interpreter
#: computes wrongly.
EMULATED = {
    "prefill": _attend(_MASK, (37, 37), (5, 60), **_D64),
    "prefill-bfloat16": _attend(_MASK, (37, 37), dtype=BF16, **_D64),
    "prefill-window-softcap": _attend(_WINDOW, (50, 50), window=16, softcap=3.0, **_D64),
    "reshape-and-cache": COMPUTED["reshape-and-cache"],
    "rms-norm": COMPUTED["rms-norm"],
    "rope": COMPUTED["rope"],
    "moe": Case(_few_experts, _EXPERT),
    "moe-int4": Case(partial(_few_experts, bits=4), _INT4),
    "moe-fp8": Case(partial(_few_experts, bits=8), quantized.BLOCKS, BF16),
    "prefill-low": _attend(LOW_SCORES_FAULT, (20, 40), low=-120, **_D64),
    "decode-low-bfloat16": _attend(
        LOW_SCORES_FAULT, (1, 37), (1, 90), low=-1000, dtype=BF16, **_D64
    ),
    "decode-bfloat16": _attend(_SPLIT, (1, 37), (1, 90), dtype=BF16, **_D64),
    "prefill-fp8-kv-bfloat16": _attend(_FP8, (20, 40), fp8=True, dtype=BF16, **_D64),
    **dict(_emulated_layers()),
    "reshape-and-cache-fp8": Case(partial(store_keys, fp8=True), _FP8),
    "rope-bfloat16": Case(rope, COMPUTED["rope"].catches, BF16),
    "moe-bfloat16": Case(_few_experts, _EXPERT, BF16),
    "top-k-top-p": COMPUTED["top-k-top-p"],
    **quantized.EMULATED,
}


def is_for_device(name: str, device: str) -> bool:
    """Return whether a case of COMPUTED is for this kind of device."""
    # NVIDIA's GPUs cannot run w4a16-packed, which uses an instruction of gfx1151, or mla-decode,
    # which uses an option of AMD's compiler.
    is_for_amd = name.startswith(("w4a16-packed", "mla-decode"))
    return not is_for_amd or device != "cuda" or bool(torch.version.hip)


def find_source(name: str, options: RunOptions) -> Path:
    """Return the folder of vLLM for a case.

    Raises:
        CannotRun: vLLM was not found, or its source lacks modules that the case needs.
        ValueError: See source.find.
    """
    folder = vllm_source.find(options.vllm)
    needs_triton_kernels = name.startswith("mxfp4")
    triton_kernels = vllm_source.third_party(folder) / "triton_kernels"
    if needs_triton_kernels and not triton_kernels.is_dir():
        raise CannotRun(_NO_KERNELS)
    return folder
