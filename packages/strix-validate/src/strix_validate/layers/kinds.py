# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of layers that kernels are compiled for and checked with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """A layer of attention that stores keys and values, not latent vectors.

    Attributes:
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        window: Number of keys that a query sees; 0 is all.
        softcap: Limit of the scores, applied by tanh; 0 is none.
        sinks: Whether each head has a learned sink.
        block: Number of tokens in a block of the KV cache.
        causal: False if a decoder attends to an encoder's keys.
    """

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
        """Number of query heads that share a head of keys."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Experts:
    """A layer of experts.

    Attributes:
        experts: Number of experts.
        top_k: Number of experts that a token is sent to.
        hidden_size: Size of a token's vector.
        intermediate_size: Size between an expert's two products (config.json's
            moe_intermediate_size).
        group: Number of 4-bit weights that share a scale; 0 for other weights.
        zeros: Whether 4-bit weights have zero points, as in AWQ.
        block: Side of a square block of FP8 weights that share a scale; 0 for other weights.
        weights_input: Whether the router's weight multiplies an expert's input, not its result.
    """

    experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    group: int = 0
    zeros: bool = False
    block: int = 0
    weights_input: bool = False


@dataclass(frozen=True)
class Linear:
    """A layer of linear attention with the gated delta rule.

    Attributes:
        heads: Heads of keys.
        value_heads: Heads of values.
        size: Size of a head of keys or values.
        width: Number of tokens that the convolution before the attention spans.
    """

    heads: int
    value_heads: int
    size: int = 128
    width: int = 4


@dataclass(frozen=True)
class Latent:
    """A layer of multi-head latent attention (MLA).

    Attributes:
        heads: Query heads.
        rank: Size of the latent vector (config.json's kv_lora_rank).
        rope: Number of elements with rotary embedding, after the latent vector (qk_rope_head_dim).
    """

    heads: int
    rank: int
    rope: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of positions in time, height and width (mrope).

    Attributes:
        heads: Query heads of the layer.
        kv_heads: Heads of keys of the layer.
        head_dim: Size of a head.
        rotary: Number of elements of a head that are rotated.
        sections: Numbers of angles for time, for height and for width (mrope_section).
        interleaved: Whether the three sections alternate.
        has_adjacent_pairs: Whether neighbouring elements form a pair; otherwise elements i and
            i + rotary / 2 do.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    sections: tuple[int, int, int]
    interleaved: bool = False
    has_adjacent_pairs: bool = False
