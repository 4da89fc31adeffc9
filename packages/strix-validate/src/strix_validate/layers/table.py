# SPDX-License-Identifier: BSD-3-Clause
"""Read the models of models.toml, each with its layers."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from strix_validate.layers.config import ModelLayers, has_experts, read_layers
from strix_validate.layers.kinds import Attention, Experts, Latent, Linear, Rope

__all__ = [
    "DIFFUSION_MODELS",
    "FORMATS",
    "GEMMA_3_WINDOW",
    "MODELS",
    "Attention",
    "Experts",
    "Latent",
    "Linear",
    "Model",
    "Rope",
    "layers_in_table",
    "plain_layers",
    "small_layers",
]

#: Fields of Experts by the name that publishers give to a format of weights; "" is 16 bits.
FORMATS: dict[str, dict] = {
    "": {},
    "GPTQ": {"group": 128},
    "AWQ": {"group": 128, "zeros": True},
    "FP8": {"block": 128},
}


@dataclass(frozen=True)
class Model:
    """An entry of models.toml.

    Attributes:
        layers: Its layers, read from config.json's keys.
        hidden_size: Size of a token's vector.
        intermediate_size: Size between the products of its MLP; 0 where experts replace the MLP.
        vocab_size: Number of tokens in the vocabulary.
        num_attention_heads: Query heads.
        formats: Other formats in which the experts' weights are published; keys of FORMATS.
        rope: Rotary embedding of several positions, if the model or one of its variants has it.
        liger: Norm that its training uses, "llama" or "gemma"; "" if no liger kernels are shipped
            for the model.
    """

    layers: ModelLayers
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    formats: tuple[str, ...] = ()
    rope: Rope | None = None
    liger: str = ""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values in the last kind of attention; 0 with latent attention."""
        return self.layers.attention[-1].kv_heads if self.layers.attention else 0

    @property
    def head_dim(self) -> int:
        """Size of a head of keys in the last kind of attention; 0 with latent attention."""
        return self.layers.attention[-1].head_dim if self.layers.attention else 0

    @property
    def softcap(self) -> float:
        """Limit of the scores in the last kind of attention; 0 is none."""
        return self.layers.attention[-1].softcap if self.layers.attention else 0.0

    def experts_by_format(self) -> dict[str, Experts]:
        """Return the layer of experts by format of its weights; "" is the model's own format."""
        layers: dict[str, Experts] = {}
        for layer in self.layers.experts:
            layers[""] = layer
            for name in self.formats:
                layers[name] = replace(layer, **FORMATS[name])
        return layers


def read_model(row: dict[str, Any]) -> Model:
    """Return the model that an entry describes. The entry may have further keys of config.json."""
    layers = read_layers(row)
    # Whisper's config.json has other names for the next three values.
    hidden_size = row.get("hidden_size") or row["d_model"]
    heads = row.get("num_attention_heads") or row["decoder_attention_heads"]
    intermediate_size = row.get("intermediate_size") or row.get("decoder_ffn_dim", 0)
    if has_experts(row):
        intermediate_size = 0
    return Model(
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=row["vocab_size"],
        num_attention_heads=heads,
        formats=tuple(row.get("formats", ())),
        rope=_read_rope(row, layers),
        liger=row.get("liger", ""),
    )


def _read_rope(row: dict[str, Any], layers: ModelLayers) -> Rope | None:
    parameters = row.get("rope_parameters", {})
    sections = parameters.get("mrope_section")
    if not sections:
        return None
    layer = layers.attention[-1]
    rotated_share = parameters.get("partial_rotary_factor", 1.0)
    return Rope(
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        rotary=int(layer.head_dim * rotated_share),
        sections=tuple(sections),
        interleaved=parameters.get("mrope_interleaved", False),
        has_adjacent_pairs=row.get("model_type") == "glm4",
    )


def _read_table() -> tuple[dict[str, Model], dict[str, tuple[int, int]]]:
    text = (files("strix_validate.layers") / "models.toml").read_text()
    table = tomllib.loads(text)
    models = {name: read_model(row) for name, row in table["text"].items()}
    diffusion_models = {
        name: (row["num_attention_heads"], row["attention_head_dim"])
        for name, row in table["diffusion"].items()
    }
    return models, diffusion_models


#: MODELS has text models by name. DIFFUSION_MODELS has the number and the size of heads by model.
MODELS, DIFFUSION_MODELS = _read_table()
#: The longest window that is checked unchanged: Gemma 3's, which vLLM handles in a separate branch.
GEMMA_3_WINDOW = 1024
#: The window that replaces a longer one, so that a check can have more keys than the window.
_SHORT_WINDOW = 256


def layers_in_table(name: str) -> ModelLayers | None:
    """Return the layers of a model of the table, or None if the table has no such model.

    Args:
        name: A model, or a model and a format of its experts' weights: "Qwen3-30B-A3B, AWQ".
    """
    model_name, _, weights = name.partition(", ")
    model = MODELS.get(model_name)
    if model is None:
        return None
    experts = model.experts_by_format()
    if weights and weights not in experts:
        return None
    return ModelLayers(
        attention=model.layers.attention,
        experts=[experts[weights]] if experts else [],
        linear=model.layers.linear,
        latent=model.layers.latent,
        vocabularies=[model.vocab_size],
        dtype=torch.bfloat16,
        lacks_experts=model.layers.lacks_experts,
    )


@cache
def small_layers() -> dict[str, Attention]:
    """Return the attention layers of all models, made small and each listed once.

    A small layer has at most two heads of keys. A window longer than GEMMA_3_WINDOW is replaced by
    a short one. The key of a layer is the name of the first model that has it, with "-window" for a
    layer with a window, and "-across" for one that attends to an encoder.
    """
    names: dict[Attention, str] = {}
    for model_name, model in MODELS.items():
        for layer in model.layers.attention:
            kv_heads = min(layer.kv_heads, 2)
            small = replace(
                layer,
                heads=layer.group * kv_heads,
                kv_heads=kv_heads,
                window=layer.window if layer.window <= GEMMA_3_WINDOW else _SHORT_WINDOW,
            )
            name = model_name
            if layer.window:
                name += "-window"
            if not layer.causal:
                name += "-across"
            names.setdefault(small, name)
    return {name: layer for layer, name in names.items()}


@cache
def plain_layers() -> dict[str, Attention]:
    """Return the small layers reduced to the features that all libraries support, each once.

    A reduced layer has only its numbers of heads and the size of a head. Layers with a head dim of
    more than 256 are left out.
    """
    names: dict[Attention, str] = {}
    for name, layer in small_layers().items():
        if layer.head_dim <= 256:
            plain = Attention(layer.heads, layer.kv_heads, layer.head_dim)
            names.setdefault(plain, name)
    return {name: layer for layer, name in names.items()}
