# SPDX-License-Identifier: BSD-3-Clause
"""The models of models.toml, each with the layers that it has."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any


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

    @property
    def group(self) -> int:
        """Query heads of a head of keys."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Experts:
    """A layer. hidden: columns of a token; inner: of an expert; group: of int4 weights, 0 is none.

    zeros: the weights have zero points, as AWQ's do. block: rows and columns of FP8 weights that
    share a scale, 0 is none. first: the router weights what experts read, not what they answer.
    """

    experts: int
    top_k: int
    hidden: int
    inner: int
    group: int = 0
    zeros: bool = False
    block: int = 0
    first: bool = False


@dataclass(frozen=True)
class Linear:
    """A layer of gated delta rule: heads of keys and of values, lanes of each, convolved tokens."""

    heads: int
    value_heads: int
    size: int = 128
    width: int = 4


@dataclass(frozen=True)
class Rope:
    """Angles of a position in time, height and width (mrope).

    Attributes:
        heads, kv_heads, head_dim: of the layer.
        rotary: lanes that are turned.
        sections: how many angles are of each of the three positions.
        interleaved: the sections take turns.
        adjacent: pairs of lanes are neighbours, otherwise halves.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    sections: tuple[int, int, int]
    interleaved: bool = False
    adjacent: bool = False


@dataclass(frozen=True)
class Latent:
    """A layer of MLA: heads of queries, lanes of the latent vector, and of rope behind them."""

    heads: int
    rank: int
    rope: int


#: Of weights, by a name that their publishers use.
FORMATS: dict[str, dict] = {
    "": {},
    "GPTQ": {"group": 128},
    "AWQ": {"group": 128, "zeros": True},
    "FP8": {"block": 128},
}


@dataclass(frozen=True)
class Model:
    """A row of the table; see models.toml."""

    hidden: int
    heads: int
    words: int
    kv_heads: int = 0
    head_dim: int = 0
    inner: int = 0
    window: int = 0
    windows: int = 0
    wide: tuple[int, int, int] = (0, 0, 0)
    softcap: float = 0.0
    sinks: bool = False
    block: int = 16
    across: bool = False
    experts: tuple[int, int, int] = (0, 0, 0)
    formats: tuple[str, ...] = ()
    first: bool = False
    linear: tuple[int, int] = (0, 0)
    latent: tuple[int, int] = (0, 0)
    rotary: int = 0
    sections: tuple[int, int, int] = (0, 0, 0)
    interleaved: bool = False
    adjacent: bool = False
    liger: str = ""

    def attention(self) -> list[Attention]:
        """Return the kinds of attention layers with a cache of keys and values."""
        if not self.kv_heads:
            return []
        layer = Attention(
            self.heads, self.kv_heads, self.head_dim, self.window, self.softcap, self.sinks,
            self.block,
        )  # fmt: skip
        if not self.windows:
            return [layer, *([replace(layer, causal=False)] if self.across else [])]
        kv_heads, head_dim, block = self.wide
        wide = replace(layer, kv_heads=kv_heads, head_dim=head_dim, block=block)
        return [wide if kv_heads else layer, replace(layer, window=self.windows)]

    def mixture(self) -> dict[str, Experts]:
        """Return the layer of experts by the format of its weights, "" is the model's own."""
        if not self.experts[0]:
            return {}
        count, top_k, inner = self.experts
        layer = Experts(count, top_k, self.hidden, inner, first=self.first)
        if self.formats == ("FP8 alone",):
            return {"": replace(layer, **FORMATS["FP8"])}
        return {name: replace(layer, **FORMATS[name]) for name in ("", *self.formats)}

    def recurrent(self) -> list[Linear]:
        """Return the layer of linear attention."""
        return [Linear(*self.linear)] if self.linear[0] else []

    def angles(self) -> list[Rope]:
        """Return the layer's angles, where they are of several positions."""
        if not self.sections[0]:
            return []
        shape = (self.heads, self.kv_heads, self.head_dim, self.rotary or self.head_dim)
        return [Rope(*shape, self.sections, self.interleaved, self.adjacent)]

    def compressed(self) -> list[Latent]:
        """Return the layer of latent attention."""
        return [Latent(self.heads, *self.latent)] if self.latent[0] else []


def _read() -> tuple[dict[str, Model], dict[str, tuple[int, int]]]:
    text = (files("strix_validate.layers") / "models.toml").read_text()
    found = tomllib.loads(text)
    models = {}
    for name, row in found["text"].items():
        values: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in row.items()}
        models[name] = Model(**values)
    return models, {name: (x["heads"], x["head_dim"]) for name, x in found["pictures"].items()}


#: Text models; and of diffusion models heads and lanes of each. By a model that has them.
MODELS, PICTURES = _read()
#: vLLM asks for this window alone, which is Gemma 3's. Other long ones are checked as _LONG.
OWN_WINDOW, _LONG = 1024, 256


@cache
def small_layers() -> dict[str, Attention]:
    """Return the attention layers of all models, each once, by a model that has it.

    With two heads of keys at most, and a window that a check can fill.
    """
    found: dict[Attention, str] = {}
    for model, row in MODELS.items():
        for layer in row.attention():
            kv_heads = min(layer.kv_heads, 2)
            window = layer.window if layer.window <= OWN_WINDOW else _LONG
            few = replace(layer, heads=layer.group * kv_heads, kv_heads=kv_heads, window=window)
            name = model + "-window" * bool(layer.window) + "-across" * (not layer.causal)
            found.setdefault(few, name)
    return {name: layer for layer, name in found.items()}


@cache
def plain_layers() -> dict[str, Attention]:
    """Return of them what any library computes: heads and lanes, of 256 at most, and no more."""
    found: dict[Attention, str] = {}
    for name, layer in small_layers().items():
        if layer.head_dim <= 256:
            found.setdefault(Attention(layer.heads, layer.kv_heads, layer.head_dim), name)
    return {name: layer for layer, name in found.items()}
