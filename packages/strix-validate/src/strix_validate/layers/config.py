# SPDX-License-Identifier: BSD-3-Clause
"""Read the layers that a model's config.json describes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from strix_validate.layers.kinds import Attention, Experts, Latent, Linear
from strix_validate.layers.parts import find_text, list_layers
from strix_validate.layers.quantization import LayerQuantization

#: Data types by their names in config.json. Any other name is read as bfloat16.
_DTYPES = {"float16": torch.float16}
#: Largest number of heads, and largest size of a head or of a latent vector. The largest size of a
#: vocabulary is the square of this number. A larger value is a mistake in config.json.
_LIMIT = 4096
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Message about a model of which ModelLayers.lacks_experts is true.
EXPERTS_LEFT_OUT = (
    "the kernels of its experts are left out, because this command knows only those for weights of "
    "16 bits, of 4 bits in groups, and of FP8 in square blocks"
)


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model.

    Each list but the first two has at most one entry.

    Attributes:
        attention: Kinds of attention layers that store keys and values, not latent vectors.
        experts: Kinds of layers of experts for which vLLM has Triton kernels. They differ only in
            the format of their weights.
        linear: The layer of linear attention.
        latent: The layer of latent attention.
        vocabularies: The size of the vocabulary, if it is known.
        dtype: Data type of the model.
        lacks_experts: Whether the model has experts that are not in the list, because they have
            other kernels.
    """

    attention: list[Attention]
    experts: list[Experts]
    linear: list[Linear]
    latent: list[Latent]
    vocabularies: list[int]
    dtype: torch.dtype
    lacks_experts: bool = False


def read_layers(config: dict) -> ModelLayers:
    """Return the layers that a model's config.json for transformers describes.

    Args:
        config: The file's content, or an entry of models.toml, which has the same keys.

    Raises:
        ValueError: A value is missing, is not a number, or is a number that no model has.
    """
    try:
        text = find_text(config)
        vocab_size = int(text.get("vocab_size") or 0)
        if not 0 <= vocab_size <= _LIMIT**2:
            raise ValueError(f"a vocabulary of {vocab_size} tokens")
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
        name = str(dtype).removeprefix("torch.")
        experts = _read_experts(config, text)
        known_experts = [layer for layer in experts if layer]
        return ModelLayers(
            attention=_read_attention(config, text),
            experts=known_experts,
            linear=_read_linear(text),
            latent=_read_latent(text),
            vocabularies=[vocab_size] if vocab_size else [],
            dtype=_DTYPES.get(name, torch.bfloat16),
            lacks_experts=len(known_experts) < len(experts),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"no layers can be read from config.json: {error!r:.200}") from error


def has_experts(config: dict) -> bool:
    """Return whether the model has layers of experts, even if vLLM has no kernels for them."""
    return _count_experts(find_text(config)) > 0


def _count_experts(text: dict) -> int:
    for name in _EXPERT_COUNTS:
        if text.get(name):
            return int(text[name])
    return 0


def _read_attention(config: dict, text: dict) -> list[Attention]:
    if text.get("kv_lora_rank"):  # _read_latent reads this kind of attention
        return []
    model_type = str(text.get("model_type"))
    heads = int(text.get("num_attention_heads") or text["decoder_attention_heads"])
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or 0)
    if not head_dim:
        head_dim = int(text.get("hidden_size") or text["d_model"]) // heads
    window = _read_window(text)
    sizes_fit = 0 < kv_heads <= heads <= _LIMIT and 0 < head_dim <= _LIMIT
    if not (sizes_fit and 0 <= window < 1 << 31):
        sizes = f"{heads} heads, {kv_heads} key heads, head size {head_dim}, window {window}"
        raise ValueError(f"attention with {sizes}")
    layer = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        softcap=float(text.get("attn_logit_softcapping") or 0),
        sinks=model_type == "gpt_oss",
        block=_count_block_tokens(text, kv_heads, head_dim),
    )
    layer_types = _read_layer_types(text)
    layers: list[Attention] = []
    if not window or layer_types != {"sliding_attention"}:
        layers.append(_widen_global(text, layer))
    if window and "sliding_attention" in layer_types:
        layers.append(replace(layer, window=window))
    if config.get("is_encoder_decoder"):
        layers.append(replace(layer, causal=False))
    return layers


def _read_window(text: dict) -> int:
    if not text.get("use_sliding_window", True):
        return 0
    return int(text.get("sliding_window") or 0)


def _read_layer_types(text: dict) -> set[str]:
    """Return the kinds of layers.

    If config.json lists no kinds, all layers have the model's window, except in Gemma.
    """
    listed = text.get("layer_types")
    if listed:
        return set(listed)
    # Gemma's config.json lists no kinds, although some of its layers see all keys.
    if str(text.get("model_type")).startswith("gemma"):
        return {"sliding_attention", "full_attention"}
    return {"sliding_attention"}


def _widen_global(text: dict, layer: Attention) -> Attention:
    """Return the layer that sees all keys.

    In Gemma 4, this layer has wider heads than the layers with a window, and often fewer heads of
    keys. A block of its KV cache takes at least as many bytes as a block of their KV cache.
    """
    head_dim = int(text.get("global_head_dim") or 0)
    if not head_dim:
        return layer
    kv_heads = int(text.get("num_global_key_value_heads") or layer.kv_heads)
    block = layer.block * layer.kv_heads * layer.head_dim // (kv_heads * head_dim)
    return replace(
        layer,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block=max(block, layer.block),
    )


def _count_block_tokens(text: dict, kv_heads: int, head_dim: int) -> int:
    """Return the number of tokens in a block of a 16-bit KV cache.

    If the model also has layers of linear attention, a block takes at least as many bytes as the
    state of such a layer: the convolution's state in 16 bits, and a matrix in float32 for each
    value head. This follows _align_hybrid_block_size in vllm/platforms/interface.py.
    """
    state_bytes = 0
    for layer in _read_linear(text):
        channels = (2 * layer.heads + layer.value_heads) * layer.size
        state_bytes += 2 * (layer.width - 1) * channels
        state_bytes += 4 * layer.value_heads * layer.size**2
    # each element of a head has a key and a value of two bytes
    bytes_of_16_tokens = 16 * 4 * kv_heads * head_dim
    return 16 * max(1, -(-state_bytes // bytes_of_16_tokens))


def _read_linear(text: dict) -> list[Linear]:
    """Return the layer of linear attention, or an empty list if the model has none.

    Raises:
        ValueError: A size is out of range, or keys and values have different sizes.
    """
    value_heads = int(text.get("linear_num_value_heads") or 0)
    if not value_heads:
        return []
    heads = int(text["linear_num_key_heads"])
    width = int(text["linear_conv_kernel_dim"])
    key_size = int(text["linear_key_head_dim"])
    value_size = int(text["linear_value_head_dim"])
    heads_fit = 0 < heads <= value_heads <= _LIMIT
    if not (heads_fit and key_size == value_size and 0 < key_size <= _LIMIT):
        sizes = f"{heads} key heads of {key_size}, {value_heads} value heads of {value_size}"
        raise ValueError(f"linear attention with {sizes}")
    if not 2 <= width <= 4:  # vLLM's convolution supports no other width
        raise ValueError(f"a convolution of {width} tokens")
    return [Linear(heads, value_heads, key_size, width)]


def _read_latent(text: dict) -> list[Latent]:
    rank = int(text.get("kv_lora_rank") or 0)
    if not rank:
        return []
    heads = int(text["num_attention_heads"])
    rope = int(text["qk_rope_head_dim"])
    if not (0 < heads <= _LIMIT and 0 < rank <= _LIMIT and 0 < rope <= _LIMIT):
        raise ValueError(f"MLA with {heads} heads, kv_lora_rank {rank}, qk_rope_head_dim {rope}")
    return [Latent(heads, rank, rope)]


def _read_experts(config: dict, text: dict) -> list[Experts | None]:
    """Return the kinds of layers of experts; None for those without a general Triton kernel."""
    experts = _count_experts(text)
    if not experts:
        return []
    top_k = text.get("top_k_experts") or text["num_experts_per_tok"]
    inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    layer = Experts(
        experts=experts,
        top_k=int(top_k),
        hidden_size=int(text["hidden_size"]),
        intermediate_size=int(inner),
        weights_input=str(text.get("model_type")).startswith("llama4"),
    )
    layers: list[Experts | None] = []
    for quantized in _list_quantizations(config, text):
        weights = _read_expert_weights(quantized)
        layers.append(None if weights is None else replace(layer, **weights))
    return layers


def _list_quantizations(config: dict, text: dict) -> list[Mapping[str, Any]]:
    """Return the distinct quantization_configs of the experts; that of 16 bits is empty."""
    quantized = config.get("quantization_config") or text.get("quantization_config") or {}
    quantization = LayerQuantization(quantized)
    if not quantization.has_exceptions:
        return [quantized]
    layers = enumerate(list_layers(text))
    sparse = [number for number, layer in layers if layer.feed_forward == "sparse"]
    return quantization.list_distinct("experts", sparse)


def _read_expert_weights(quantized: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of Experts that depend on the format of the weights.

    vLLM's general kernels accept weights of 16 bits, of 4 bits in groups, and of FP8 in square
    blocks. For other formats, return None: they have other kernels, as that of gpt-oss has, or vLLM
    refuses them.
    """
    if not quantized:
        return {}
    groups = quantized.get("config_groups")
    if groups:
        first, *others = [_read_group(group) for group in groups.values()]
        return first if all(other == first for other in others) else None
    bits = int(quantized.get("bits") or 0)
    block_sizes = quantized.get("weight_block_size")
    if block_sizes:
        return None if bits else _read_block(block_sizes)
    # vLLM refuses GPTQ weights with desc_act.
    if bits != 4 or quantized.get("desc_act"):
        return None
    group_size = int(quantized["group_size"])
    if group_size <= 0:
        # Each row has one scale.
        return None
    is_symmetric = quantized.get("sym", True)
    return {
        "group": group_size,
        "zeros": bool(quantized.get("zero_point", not is_symmetric)),
    }


def _read_group(group: dict) -> dict[str, Any] | None:
    """Return the fields of Experts that a group of compressed-tensors describes; None for others.

    Weights that are sorted by the size of the activations ("actorder") have other kernels.
    """
    weights = group.get("weights") or {}
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    if kind == ("float", 8, "block"):
        return _read_block(weights["block_structure"])
    is_sorted = weights.get("actorder") in ("group", "dynamic")
    if kind != ("int", 4, "group") or group.get("input_activations") or is_sorted:
        return None
    return {
        "group": int(weights["group_size"]),
        "zeros": not weights.get("symmetric", True),
    }


def _read_block(sizes: list) -> dict[str, Any] | None:
    """Return the field of Experts for blocks of these sizes, or None if they are not square."""
    rows, columns = map(int, sizes)
    return {"block": rows} if rows == columns else None
