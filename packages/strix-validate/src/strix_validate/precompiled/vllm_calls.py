# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's attention as its server launches it: the cache's layout, its scales and its padding.

With the recipe's patches, vLLM's kernels are compiled for what a layer's LAYERS row has but the
numbers of heads, of which only their ratio counts. Follows
vllm/v1/attention/backends/triton_attn.py.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from strix_validate.precompiled import vllm_layers
from strix_validate.precompiled.deferred import BF16, FP16, DeferredCall
from strix_validate.precompiled.vllm_layers import LINEAR, VOCABULARIES
from strix_validate.triton.call import Call
from strix_validate.vllm import experts as vllm_experts
from strix_validate.vllm import kernels as vllm_kernels
from strix_validate.vllm import quantized
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.kernels import SEGMENTS

#: Beyond this, Triton addresses a cache with 64 bits, in another kernel.
_GIB_2 = 2**31
#: Of sequences in a batch, for the kernels that are compiled anew for one and for multiples of 16.
_BATCHES = (1, 2, 16)
#: Tokens of a step, for each tile of a product with FP8 in blocks.
_FP8_TOKENS = (1, 5, 16, 17, 32)
#: Of a token: their blocks of 128 are a multiple of 16, and none.
_FP8_SIZES = (4096, 2560)


@dataclass(frozen=True)
class Attention:
    """A layer. window: keys that a query sees, 0 is all; block: tokens of a block of the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    block: int = 16
    causal: bool = True


@dataclass(frozen=True)
class AttentionCall:
    """A batch's step in a layer: its keys are written into the cache, and its queries attend.

    sequences: of the batch. queries: new tokens of each. keys: tokens of each, cached and new.
    huge: the layer's cache exceeds 2 GiB. The tensors hold no numbers.
    """

    name: str
    layer: Attention
    dtype: torch.dtype
    sequences: int
    queries: int
    keys: int = 300
    fp8: bool = False
    huge: bool = False
    source: Path = Path()

    def prepare(self) -> str:
        """Make vLLM importable from its source; return its version."""
        vllm_source.install(self.source)
        return vllm_source.version(self.source)

    def execute(self, device: str) -> dict[str, Tensor]:
        """Launch both kernels, on tensors that are made here; return nothing."""
        layer, count = self.layer, self.sequences
        empty = partial(torch.empty, dtype=self.dtype, device=device)
        q = empty(count * self.queries, layer.heads, layer.head_dim)
        k, v = (empty(count * self.queries, layer.kv_heads, layer.head_dim) for _ in "kv")
        cached = torch.uint8 if self.fp8 else self.dtype
        shape = (4, layer.kv_heads, layer.block, 2 * layer.head_dim)
        cache = torch.empty(shape, dtype=cached, device=device).transpose(1, 2)
        caches = cache.split(layer.head_dim, dim=-1)
        if self.fp8:
            caches = tuple(part.view(vllm_kernels.FP8) for part in caches)
        for part in caches:
            part.ptr_range = lambda: _GIB_2 if self.huge else cache.nbytes
        one = torch.ones((), device=device)
        importlib.import_module(vllm_source.KERNELS[1]).triton_reshape_and_cache_flash(
            k, v, *caches, torch.zeros(len(k), dtype=torch.int64, device=device),
            "fp8" if self.fp8 else "auto", one, one,
        )  # fmt: skip
        self._attend(q, caches, one.expand(count, layer.kv_heads))
        return {}

    def _attend(self, q: Tensor, caches: tuple[Tensor, ...], scale: Tensor) -> None:
        layer, place = self.layer, {"device": q.device}
        modes = sys.modules["vllm.v1.kv_cache_interface"].KVQuantMode
        rows = 128 // layer.kv_heads
        parts = (rows, layer.heads, SEGMENTS)
        padded = 1 << (layer.head_dim - 1).bit_length()
        importlib.import_module(vllm_source.KERNELS[0]).unified_attention(
            q=q,
            k=caches[0],
            v=caches[1],
            out=torch.empty_like(q),
            cu_seqlens_q=torch.zeros(self.sequences + 1, dtype=torch.int32, **place),
            max_seqlen_q=self.queries,
            seqused_k=torch.full((self.sequences,), self.keys, dtype=torch.int32, **place),
            max_seqlen_k=self.keys,
            softmax_scale=layer.head_dim**-0.5,
            causal=layer.causal,
            window_size=(layer.window - 1, 0) if layer.window else (-1, -1),
            # as wide as for the longest context: a multiple of 16
            block_table=torch.zeros(self.sequences, 256, dtype=torch.int32, **place),
            softcap=layer.softcap or 0,  # an integer where there is none: another type for Triton
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
            seq_threshold_3D=rows,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=torch.empty(*parts, padded, **place),
            softmax_segm_max=torch.empty(parts, **place),
            softmax_segm_expsum=torch.empty(parts, **place),
            sinks=torch.empty(layer.heads, dtype=q.dtype, **place) if layer.sinks else None,
            kv_quant_mode=modes.FP8_PER_TENSOR if self.fp8 else modes.NONE,
        )


#: Attention layers of common models, by a model that has them. The blocks of hybrid models are as
#: large as vLLM makes them for the state of the other layers, in float32.
LAYERS = {
    "Llama-3.1-8B": Attention(32, 8, 128),  # Qwen3-8B, Mistral-Small, Phi-4
    "Llama-3.2-1B": Attention(32, 8, 64),
    "Llama-3.2-3B": Attention(24, 8, 128),
    "Llama-3.3-70B": Attention(64, 8, 128),  # Qwen3-32B
    "Llama-4-Scout": Attention(40, 8, 128),
    "Qwen2.5-0.5B": Attention(14, 2, 64),
    "Qwen2.5-7B": Attention(28, 4, 128),  # Qwen2.5-VL
    "Qwen3-0.6B": Attention(16, 8, 128),
    "Qwen3-14B": Attention(40, 8, 128),
    "Qwen3-30B-A3B": Attention(32, 4, 128),
    "Qwen3-235B-A22B": Attention(64, 4, 128),
    "Qwen3-Next-80B-A3B": Attention(16, 2, 256, block=1056),
    "Qwen3.6-27B": Attention(24, 4, 256, block=784),
    "gpt-oss": Attention(64, 8, 64, sinks=True),
    "gpt-oss, windows": Attention(64, 8, 64, sinks=True, window=128),
    "Gemma-2-9B": Attention(16, 8, 256, softcap=50.0),
    "Gemma-2-9B, windows": Attention(16, 8, 256, softcap=50.0, window=4096),
    "Gemma-3-4B": Attention(8, 4, 256),
    "Gemma-3-4B, windows": Attention(8, 4, 256, window=1024),
    "Gemma-3-12B": Attention(16, 8, 256),
    "Gemma-3-12B, windows": Attention(16, 8, 256, window=1024),
    "Gemma-3-27B": Attention(32, 16, 128),
    "Gemma-3-27B, windows": Attention(32, 16, 128, window=1024),
    "Gemma-4-31B": Attention(32, 4, 512, block=32),
    "Mistral-7B": Attention(32, 8, 128, window=4096),
    "Phi-3-mini": Attention(32, 32, 96),
    "Phi-3-mini, windows": Attention(32, 32, 96, window=2047),
    "Phi-4-mini": Attention(24, 8, 128, window=262144),
    "GLM-4.5-Air": Attention(96, 8, 128),
    "Seed-OSS-36B": Attention(80, 8, 128),
    "MiniMax-M2": Attention(48, 8, 128),
    "Whisper-large-v3": Attention(20, 20, 64),
    "Whisper-large-v3, across": Attention(20, 20, 64, causal=False),
}
_SET_LAYERS = {"sample": ("Llama-3.1-8B",), "core": ("Llama-3.1-8B", "Llama-3.2-1B")}


def attention_calls(
    source: Path, layers: Iterable[Attention], dtypes: Iterable[torch.dtype],
    *, fp8: Iterable[bool] = (False, True), huge: Iterable[bool] = (False, True),
) -> Iterator[AttentionCall]:  # fmt: skip
    """Yield prefill and decoding of these layers."""
    for layer, dtype, is_fp8, is_huge, queries in product(layers, dtypes, fp8, huge, (1, 100)):
        cache = f"{' fp8' * is_fp8}{' huge' * is_huge}"
        name = f"{layer} {str(dtype).removeprefix('torch.')} 2x{queries}{cache}"
        yield AttentionCall(name, layer, dtype, 2, queries, fp8=is_fp8, huge=is_huge, source=source)


def _other_calls(source: Path) -> Iterator[DeferredCall]:
    """Yield rope in sections, batch-invariant RMS norm, and products with FP8 in blocks."""
    for dtype in (FP16, BF16):
        plans = [
            *(partial(vllm_kernels.rope, tokens=n, heads=32, kv_heads=8) for n in _BATCHES),
            partial(vllm_kernels.rms_norm, columns=4096),
            *(
                partial(quantized.fp8_blocks, tokens=n, size=size, rows=512)
                for n, size in product(_FP8_TOKENS, _FP8_SIZES)
            ),
        ]
        for build in plans:
            name = f"{build.func.__name__} {build.keywords} {dtype}"
            yield DeferredCall(name, build, dtype, source=source)


def vllm_set(name: str, folder: Path | None) -> list[Call]:
    """Return the calls of a set, from vLLM's source.

    Raises:
        CannotRun: vLLM is not installed, and no folder was given.
    """
    source = vllm_source.find(folder)
    if name in _SET_LAYERS:
        layers = [LAYERS[model] for model in _SET_LAYERS[name]]
        experts = [vllm_experts.LAYERS["Qwen3-30B-A3B"]]
        return [
            *attention_calls(source, layers, (BF16,), fp8=(False,), huge=(False,)),
            *vllm_experts.experts_calls(source, experts, (BF16,), tokens=(1, 2)),
            *vllm_layers.linear_calls(source, [LINEAR["Qwen3-Next-80B-A3B"]], (BF16,), prompts=()),
            *vllm_layers.sampling_calls(source, [VOCABULARIES["Llama-3.1-8B"]]),
        ]
    dtypes = (FP16, BF16)
    return [
        *attention_calls(source, LAYERS.values(), dtypes),
        *vllm_experts.experts_calls(source, vllm_experts.LAYERS.values(), dtypes),
        *vllm_layers.linear_calls(source, LINEAR.values(), (BF16,)),
        *vllm_layers.sampling_calls(source, VOCABULARIES.values()),
        *_other_calls(source),
    ]
