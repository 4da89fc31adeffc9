# SPDX-License-Identifier: BSD-3-Clause
"""The cases of vLLM's Triton kernels that the tiers kernels, attention and emulated have."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from strix_validate.checks import CannotRun, RunOptions, Size
from strix_validate.layers.table import small_layers
from strix_validate.numerics.reference import WHY_LOW
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

#: What checks are called, in ids and titles.
PREFIX, MODULE = "vllm-", "vLLM"
_BF16 = torch.bfloat16
#: Each has a table of cases for the tier attention, and some have one for the tier kernels.
FAMILIES = (sampling, mla, linear_attention, quantized, lora, attention_modes, drafts)
_COMPILES = (
    "a kernel or a Triton that no longer compiles for gfx1151, uses no matrix unit, or needs more "
    "LDS than the chip has: https://github.com/vllm-project/vllm/issues/56021"
)
_SPILLS = "; its spills are measured: https://github.com/vllm-project/vllm/pull/56232"
_NO_KERNELS = "this source of vLLM has no vllm/third_party/triton_kernels: its build adds them"
_GENERATION = (
    "triton_kernels of another generation than Triton, which do not import, so that gpt-oss does "
    "not start: https://github.com/vllm-project/vllm/issues/49779"
)

#: Layers that are compiled, in 16 bits: by what is particular about each.
_COMPILED_LAYERS = {
    "d64-sinks": "gpt-oss-20b",
    "d128": "Llama-3.1-8B",
    "d128-gqa7": "Qwen2.5-7B",
    "d128-window": "Gemma-3-27B-window",
    "d256-softcap": "Gemma-2-9B-window",
    "d256-block1056": "Qwen3-Next-80B-A3B",
    "d512": "Gemma-4-31B",
}


def _compiled_layers(why: str) -> dict[str, Case]:
    """Return cases to compile: prefill and decoding, and with a cache in FP8."""
    rows = {name: (small_layers()[model], False) for name, model in _COMPILED_LAYERS.items()}
    rows["d128-fp8-kv"] = small_layers()["Llama-3.1-8B"], True
    steps = {"prefill": ((128, 128),), "decode": ((1, 300), (1, 70))}
    return {
        f"{kind}-{name}": Case(
            partial(paged_attention, lengths=lengths, fp8=fp8, **asdict(layer)), why, _BF16
        )
        for kind, lengths in steps.items()
        for name, (layer, fp8) in rows.items()
    }


#: Layers that are executed under emulation, with one head of keys: (model, lengths, dtype).
_EMULATED_LAYERS = {
    "prefill-gqa7": ("Qwen2.5-7B", ((20, 20),), torch.float16),
    "decode-sinks": ("gpt-oss-20b", ((1, 50), (1, 170)), torch.float16),
    "decode-d96": ("Phi-3-mini", ((1, 60),), torch.float16),
    "decode-block1056": ("Qwen3-Next-80B-A3B", ((1, 100),), torch.float16),
    "prefill-d256-bfloat16": ("Gemma-2-9B", ((8, 20),), _BF16),
    "prefill-d512-bfloat16": ("Gemma-4-31B", ((8, 20),), _BF16),
}


def _emulated_layers() -> dict[str, Case]:
    """Return cases to execute: groups, lanes, blocks and sinks as models have them."""
    found = {}
    for name, (model, lengths, dtype) in _EMULATED_LAYERS.items():
        layer = small_layers()[model]
        layer = replace(layer, heads=layer.group, kv_heads=1)
        build = partial(paged_attention, lengths=lengths, **asdict(layer))
        found[name] = Case(build, model_cases.LAYER, dtype)
    return found


#: The launches that are compiled only.
COMPILED = {
    **_compiled_layers(_COMPILES + _SPILLS),
    "reshape-and-cache": Case(partial(store_keys, heads=8), _COMPILES),
    "rms-norm": Case(partial(rms_norm, columns=4096), _COMPILES, _BF16),
    "rope": Case(partial(rope, heads=32, kv_heads=8), _COMPILES, _BF16),
    "rope-adjacent": Case(partial(rope, heads=32, kv_heads=8, head_dim=64, neox=False), _COMPILES),
    "moe-prefill": Case(partial(moe, tokens=1024, rows=256, columns=256), _COMPILES, _BF16),
    "moe-decode": Case(partial(moe, rows=256, columns=256), _COMPILES, _BF16),
    "moe-int4-prefill": Case(partial(moe, tokens=64, rows=256, columns=256, bits=4), _COMPILES,
        _BF16),
    "moe-int4-decode": Case(partial(moe, tokens=2, rows=256, columns=256, bits=4), _COMPILES),
    "moe-fp8-prefill": Case(partial(moe, tokens=99, rows=256, columns=256, bits=8),
        quantized.MINUTES, _BF16),
    # gpt-oss-20b has 32 experts of 2880 by 2880
    "mxfp4-prefill": Case(partial(mxfp4.mixture, tokens=1024, size=512, inner=512), _GENERATION,
        _BF16),
    "mxfp4-decode": Case(partial(mxfp4.mixture, tokens=2, size=512, inner=512), _GENERATION, _BF16),
    **mla.COMPILED,
    **quantized.COMPILED,
}  # fmt: skip

_MASK = "a wrong mask at the edge of a tile, or a key of a slot that belongs to no sequence"
_SPLIT = "segments of a split decode that are merged wrongly, or never written and still read"
_WINDOW = "a sliding window off by one: https://github.com/vllm-project/vllm/issues/28989"
_SINKS = "gpt-oss's sinks left out, or counted once per segment instead of once"
_CAP = "tanh's softcap that overflows or is left out (Gemma)"
_PAGES = "a block table read wrongly: blocks that are no power of two come with hybrid models"
_SCALE = "1 / sqrt(head_dim) instead of the model's scale (Gemma, Granite)"
_ALIBI = "slopes ignored, or of another head (Bloom, MPT)"
_FP8 = "a scale of keys or values left out, or one taken for the other"
_ACROSS = "a causal mask where there is none: a decoder over an encoder's keys (Whisper)"
_FAR = "keys or segments behind a limit of 512 or 2048 left out"
_EXPERT = "tokens sent to the wrong expert, or the padding of its block written"
_MODEL = (
    "kernels that are correct one by one, and a model that answers wrongly from its second token "
    "on: what one writes, the next does not read"
)
_INT4 = "a scale of the wrong group, or nibbles in the wrong order: the W4A16 of AWQ and GPTQ"


def _attend(
    why: str, *lengths: tuple[int, int], dtype=torch.float16, size=Size.QUICK, **shape
) -> Case:
    return Case(partial(paged_attention, lengths=lengths, **shape), why, dtype, size)


#: Computed in Triton's interpreter, or on a GPU.
COMPUTED = {
    "prefill": _attend(_MASK, (37, 37), (5, 80), heads=8),
    "decode": _attend(_SPLIT, (1, 37), (1, 200), heads=8),
    # two heads of keys would have a slot's stride in either layout
    "mixed": _attend(_MASK, (1, 90), (40, 60), (1, 1), heads=6, kv_heads=3),
    "prefill-window": _attend(_WINDOW, (40, 70), window=16),
    "decode-window": _attend(_WINDOW, (1, 200), window=16),
    "prefill-softcap": _attend(_CAP, (70, 70), softcap=3.0),
    "decode-softcap": _attend(_CAP, (1, 70), softcap=3.0),
    "prefill-sinks": _attend(_SINKS, (50, 70), heads=8, kv_heads=1, head_dim=64, sinks=True),
    "decode-sinks": _attend(
        _SINKS, (1, 50), (1, 170), heads=8, kv_heads=1, head_dim=64, sinks=True),
    "decode-d80-block1056": _attend(_PAGES, (1, 1200), head_dim=80, block=1056),
    "prefill-fp8-kv": _attend(_FP8, (40, 60), fp8=True),
    "prefill-scale": _attend(_SCALE, (40, 130), scale=0.3, head_dim=64, block=64),
    "decode-scale": _attend(_SCALE, (1, 130), scale=0.3, head_dim=64, block=64),
    "prefill-alibi": _attend(_ALIBI, (40, 70), alibi=True, head_dim=64),
    "decode-alibi": _attend(_ALIBI, (1, 70), alibi=True, head_dim=64),
    "decode-fp8-kv": _attend(_FP8, (1, 70), fp8=True),
    "prefill-window-600": _attend(_FAR, (20, 700), window=600, head_dim=64, heads=2, kv_heads=1),
    "decode-2100": _attend(_FAR, (1, 2100), head_dim=64, heads=2, kv_heads=1),
    "decode-batch6": _attend("sequences behind the fourth left out", *((1,
        9 + 7 * i) for i in range(6)), head_dim=64),
    "prefill-low": _attend(WHY_LOW, (37, 37), (5, 80), low=-120, head_dim=64),
    "decode-low": _attend(WHY_LOW, (1, 37), (1, 200), low=-1000, head_dim=64),
    "prefill-batch6": _attend("the sequence of a block of queries searched wrongly",
        *((9 - i, 9 + 7 * i) for i in range(6)), head_dim=64),
    # more than 128 sequences times heads of keys: not split
    "decode-batch-40": _attend("sequences behind the 32nd left out, or the kernel of large batches",
        *((1, 3 + 5 * i % 40) for i in range(40)), head_dim=64, heads=4, kv_heads=4),
    "prefill-batch-40": _attend("sequences behind the 32nd left out, or searched wrongly",
        *((1 + i % 9, 9 + 5 * i % 40) for i in range(40)), head_dim=64, heads=2, kv_heads=1),
    **{f"{kind}-{keys}": _attend("keys behind a limit of 4096 or 8192 left out", (queries, keys),
        head_dim=64, heads=2, kv_heads=1, block=64, size=size)
       for keys, size in ((4200, Size.QUICK), (8300, Size.FULL))
       for kind, queries in (("decode", 1), ("prefill", 9))},
    "verify": _attend(
        "split keys of a few queries, as speculative decoding has: a causal mask per segment",
        (4, 70), (8, 200), (1, 9), head_dim=64),
    "prefill-softcap-large": _attend(_CAP, (20, 40), softcap=3.0, gain=100.0, head_dim=64),
    "prefill-block-33000": _attend("ids of blocks in 16 bits", (20, 40), head_dim=64, heads=2,
        kv_heads=1, first_block=33000),
    "reshape-and-cache": Case(store_keys, "keys written to the wrong slot, or padding written"),
    "rms-norm-eps": Case(partial(rms_norm, eps=0.5), "another eps than the model's"),
    "rope-partial": Case(partial(rope, rotary=64), "lanes turned that are not to be (GLM, Phi)"),
    "rope-interleaved": Case(partial(rope, interleaved=True), "sections one after the other"),
    "moe-ragged": Case(partial(moe, tokens=4, rows=32, columns=104),
        "the last tile of columns counted whole (GLM-4.5-Air: 1408)"),
    "moe-unrouted": Case(partial(moe, routed=False, absent=1),
        "the router's weights applied twice, or an expert of another GPU computed"),
    "moe-bias": Case(partial(moe, bias=True), "an expert's bias left out, or not routed"),
    "moe-int4-zeros": Case(partial(moe, bits=4, zeros=True, absent=1),
        "zero points of the wrong row (AWQ), or an expert of another GPU computed"),
    "rms-norm": Case(rms_norm, "the last block, which is not full, counted as full"),
    "rope": Case(rope, "angles of the wrong section, or halves for neighbours"),
    "rope-adjacent": Case(partial(rope, neox=False, head_dim=64), "neighbours for halves"),
    "rope-slice": Case(partial(rope, whole=True),
        "rows of q and k taken as contiguous, where they are slices of one product"),
    "moe-padded": Case(partial(moe, tokens=3, padding=128, rows=40),
        "rows of weights that are padded taken as contiguous"),
    **{f"moe-fp8-{kind}": Case(partial(moe, tokens=5, rows=40, bits=8, scales=kind),
        "a scale of another token, row or expert, or that of a block taken")
       for kind in ("channels", "tensor")},
    "moe": Case(moe, _EXPERT),
    "moe-one-token": Case(partial(moe, tokens=1, experts=8, rows=32),
        "decoding, whose tokens are not sorted"),
    "moe-swizzle": Case(partial(moe, tokens=40, rows=160, columns=64, swizzle=3),
        "tiles of tokens that share weights, of which the last are fewer"),
    "moe-int4": Case(partial(moe, bits=4), _INT4),
    "moe-fp8": Case(partial(moe, tokens=3, rows=160, columns=256, bits=8), quantized.BLOCKS),
    "reshape-and-cache-fp8": Case(partial(store_keys, fp8=True, exact=True), _FP8),
    "far": _attend("offsets in 32 bits: a cache of more than 2^31 numbers", (9, 40), head_dim=64,
        far=True, size=Size.FULL),
    "prefill-not-causal": _attend(_ACROSS, (20, 60), causal=False, head_dim=64),
    "decode-not-causal": _attend(_ACROSS, (1, 60), causal=False, head_dim=64),
    **{name: case for family in model_cases.GENERATED.values() for name, case in family.items()},
    **{name: case for family in FAMILIES for name, case in family.COMPUTED.items()},
    # dear, and each one's kernels have quick checks of their own
    **{name: Case(build, _MODEL, size=Size.FULL) for name, build in (("model", vllm_model.decoding),
        ("model-window", partial(vllm_model.decoding, window=8)), ("model-experts",
        partial(vllm_model.decoding, experts=4)), ("model-hybrid", partial(vllm_model.decoding,
        linear=1)))},
}  # fmt: skip

#: What a GPU does not compute in bfloat16 as well: AWQ's kernel is for fp16 alone, logits are
#: float32, and `w4a16-packed` has what w4a16 computes in 16 bits.
FLOAT16_OR_32 = (
    "awq*", "w4a16", "w4a16-[!pz]*",
    *("top-*", "logprobs*", "penalties*", "temperature-*", "gumbel", "rejection"),
)  # fmt: skip

#: Executed as gfx1151 code; bfloat16, which the interpreter multiplies wrongly, included.
EMULATED = {
    "prefill": _attend(_MASK, (37, 37), (5, 60), head_dim=64),
    "prefill-bfloat16": _attend(_MASK, (37, 37), head_dim=64, dtype=_BF16),
    "prefill-window-softcap": _attend(_WINDOW, (50, 50), head_dim=64, window=16, softcap=3.0),
    "reshape-and-cache": COMPUTED["reshape-and-cache"],
    "rms-norm": COMPUTED["rms-norm"],
    "rope": COMPUTED["rope"],
    "moe": Case(partial(moe, tokens=3, rows=32), _EXPERT),
    "moe-int4": Case(partial(moe, tokens=3, rows=32, bits=4), _INT4),
    "moe-fp8": Case(partial(moe, tokens=3, rows=32, bits=8), quantized.BLOCKS, _BF16),
    "prefill-low": _attend(WHY_LOW, (20, 40), low=-120, head_dim=64),
    "decode-low-bfloat16": _attend(WHY_LOW, (1, 37), (1, 90), low=-1000, head_dim=64, dtype=_BF16),
    "decode-bfloat16": _attend(_SPLIT, (1, 37), (1, 90), head_dim=64, dtype=_BF16),
    "prefill-fp8-kv-bfloat16": _attend(_FP8, (20, 40), head_dim=64, fp8=True, dtype=_BF16),
    **_emulated_layers(),
    "reshape-and-cache-fp8": Case(partial(store_keys, fp8=True), _FP8),
    "rope-bfloat16": Case(rope, COMPUTED["rope"].catches, _BF16),
    "moe-bfloat16": Case(partial(moe, tokens=3, rows=32), _EXPERT, _BF16),
    "top-k-top-p": COMPUTED["top-k-top-p"],
    **quantized.EMULATED,
}


def suits(name: str, device: str) -> bool:
    """Return whether a case of COMPUTED is for this kind of device."""
    # an instruction of gfx1151, and an option of AMD's compiler
    ours = name.startswith(("w4a16-packed", "mla-decode"))
    return not ours or device != "cuda" or bool(torch.version.hip)


def source_for(name: str, options: RunOptions) -> Path:
    """Return the folder of vLLM for a case.

    Raises:
        CannotRun: there is none, or it lacks what the case needs. ValueError: see source.find.
    """
    found = vllm_source.find(options.vllm)
    if (
        name.startswith("mxfp4")
        and not (vllm_source.third_party(found) / "triton_kernels").is_dir()
    ):
        raise CannotRun(_NO_KERNELS)
    return found
