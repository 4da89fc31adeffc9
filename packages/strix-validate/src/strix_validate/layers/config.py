# SPDX-License-Identifier: BSD-3-Clause
"""The layers that a model's config.json names."""

from dataclasses import dataclass, replace

import torch

from strix_validate.layers.table import MODELS, Attention, Experts, Latent, Linear
from strix_validate.models.parts import text_of

_DTYPES = {"float16": torch.float16}  # any other: bfloat16
#: Heads of a layer, and numbers of a head: more is no model.
_MOST = 4096


@dataclass(frozen=True)
class ModelLayers:
    """What a config.json says: layers of each kind, sizes of the vocabulary, and the dtype."""

    attention: list[Attention]
    experts: list[Experts]
    linear: list[Linear]
    latent: list[Latent]
    vocabularies: list[int]
    dtype: torch.dtype


def layers_in_table(name: str) -> ModelLayers | None:
    """Return the layers of a model of the table, None if it has none of this name.

    Args:
        name: Also with a format of its experts' weights, "Qwen3-30B-A3B, AWQ".
    """
    model, _, kind = name.partition(", ")
    row = MODELS.get(model)
    if row is None or kind not in row.mixture() | {"": None}:
        return None
    experts = [layer for name, layer in row.mixture().items() if name == kind]
    return ModelLayers(
        row.attention(), experts, row.recurrent(), row.compressed(), [row.words], torch.bfloat16
    )


def layers_of(config: dict) -> ModelLayers:
    """Return what a model's config.json for transformers says.

    Raises:
        ValueError: a number is missing, none, or none that a model has.
    """
    try:
        text = text_of(config)
        size = int(text.get("vocab_size") or 0)
        if not 0 <= size <= _MOST**2:
            raise ValueError(f"a vocabulary of {size} tokens")
        name = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype"))
        return ModelLayers(
            _attention(config, text), _experts(config, text), _linear(text), _latent(text),
            [size] if size else [], _DTYPES.get(name.removeprefix("torch."), torch.bfloat16),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"no layers can be read from it: {error!r:.200}") from error


def _attention(config: dict, text: dict) -> list[Attention]:
    """Return the kinds of attention layers with keys and values of their own."""
    if text.get("kv_lora_rank"):  # MLA has kernels of its own
        return []
    kind = str(text.get("model_type"))
    heads = int(text.get("num_attention_heads") or text["decoder_attention_heads"])
    size = int(text.get("head_dim") or (text.get("hidden_size") or text["d_model"]) // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    window = int(text.get("sliding_window") or 0) * bool(text.get("use_sliding_window", True))
    # gemma's own files name no kinds of layers: some see all
    both = {"sliding_attention", "full_attention"} if kind.startswith("gemma") else ()
    kinds = text.get("layer_types") or both or {"sliding_attention"}
    softcap = float(text.get("attn_logit_softcapping") or 0)
    if not (0 < kv_heads <= heads <= _MOST and 0 < size <= _MOST and 0 <= window < 1 << 31):
        raise ValueError(f"{heads} heads, {kv_heads} of keys, of {size} numbers")
    layer = Attention(
        heads, kv_heads, size, 0, softcap, kind == "gpt_oss", _block(text, kv_heads, size)
    )
    layers: list[Attention] = []
    if not window or set(kinds) - {"sliding_attention"}:
        layers.append(_global(text, layer))
    if window and "sliding_attention" in kinds:
        layers.append(replace(layer, window=window))
    if config.get("is_encoder_decoder"):
        layers.append(replace(layer, causal=False))
    return layers


def _global(text: dict, layer: Attention) -> Attention:
    """Return the layers without a window, which in gemma4 have wider heads, and fewer of them.

    Their blocks take as many bytes as those of the other layers.
    """
    if not (size := int(text.get("global_head_dim") or 0)):
        return layer
    kv_heads = int(text.get("num_global_key_value_heads") or layer.kv_heads)
    block = layer.block * layer.kv_heads * layer.head_dim // (kv_heads * size)
    return replace(layer, kv_heads=kv_heads, head_dim=size, block=max(block, layer.block))


def _block(text: dict, kv_heads: int, size: int) -> int:
    """Count the tokens of a block of the cache, in 16 bits.

    Beside layers of linear attention it takes at least the bytes of their state: of the
    convolution in 16 bits, and in float32 of each value head. Follow _align_hybrid_block_size of
    vllm/platforms/interface.py.
    """
    state = sum(
        2 * (x.width - 1) * (2 * x.heads + x.value_heads) * x.size + 4 * x.value_heads * x.size**2
        for x in _linear(text)
    )
    return 16 * max(1, -(-state // (16 * 4 * kv_heads * size)))


def _linear(text: dict) -> list[Linear]:
    """Return a model's layer of linear attention, whose keys are as wide as its values."""
    if not (values := int(text.get("linear_num_value_heads") or 0)):
        return []
    sizes = {int(text[f"linear_{name}_head_dim"]) for name in ("key", "value")}
    heads, width = int(text["linear_num_key_heads"]), int(text["linear_conv_kernel_dim"])
    if len(sizes) > 1 or not (0 < heads <= values <= _MOST and 0 < min(sizes) <= _MOST):
        raise ValueError(f"{heads} and {values} heads of linear attention, of {sizes} numbers")
    if not 2 <= width <= 4:  # what vLLM's convolution has
        raise ValueError(f"a convolution of {width} tokens")
    return [Linear(heads, values, sizes.pop(), width)]


def _latent(text: dict) -> list[Latent]:
    """Return a model's layer of MLA."""
    if not (rank := int(text.get("kv_lora_rank") or 0)):
        return []
    heads, rope = int(text["num_attention_heads"]), int(text["qk_rope_head_dim"])
    if not (0 < heads <= _MOST and 0 < rank <= _MOST and 0 < rope <= _MOST):
        raise ValueError(f"{heads} heads of MLA, of {rank} and {rope} numbers")
    return [Latent(heads, rank, rope)]


def _experts(config: dict, text: dict) -> list[Experts]:
    """Return a model's layer of experts, if vLLM multiplies them with its own Triton kernels.

    Those are for weights of 16 bits, of 4 in groups, and of FP8 in blocks; gpt-oss's have kernels
    of their own.
    """
    quantized = config.get("quantization_config") or {}
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(text[name]) for name in names if text.get(name)), 0)
    bits = int(quantized.get("bits") or 0)
    block = int((quantized.get("weight_block_size") or [0])[0])
    if not experts or bits != (4 if quantized and not block else 0):
        return []
    return [
        Experts(
            experts,
            int(text.get("top_k_experts") or text["num_experts_per_tok"]),
            int(text["hidden_size"]),
            int(text.get("moe_intermediate_size") or text["intermediate_size"]),
            group=int(quantized["group_size"]) if bits else 0,
            zeros=bool(quantized.get("zero_point", not quantized.get("sym", True))),
            block=block,
            first=str(text.get("model_type")).startswith("llama4"),
        )
    ]
