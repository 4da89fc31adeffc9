# SPDX-License-Identifier: BSD-3-Clause
"""flash-linear-attention's kernels, as Qwen3-Next, Qwen3.5 and Kimi Linear call them.

The rules are the gated delta rule, KDA (which has a gate for each element of a key) and gated
linear attention. Prefill and training compute chunks of 64 tokens. Training also computes
gradients. Decoding computes one token at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from strix_validate.checks import Size
from strix_validate.layers import table as layers
from strix_validate.numerics import reference
from strix_validate.numerics.comparison import rms
from strix_validate.numerics.reference import TERMS, Precision, store
from strix_validate.triton.call import BF16, PackageCall, Shipped, differentiate
from strix_validate.triton.cases import Candidate, Case, Expected, Randn, choose

MODULE = "fla"
PACKAGE = "fla-core"
#: The functions of each update rule: the first computes chunks, and the second single tokens.
_RULES = {
    "gdn": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("chunk_kda", "fused_recurrent_kda"),
    "gla": ("chunk_gla", "fused_recurrent_gla"),
}


def _attend(
    rule: str,
    decode: bool,
    lengths: tuple[int, ...],
    normal: bool,
    last: bool,
    **tensors: Tensor,
) -> dict[str, Tensor]:
    from fla import ops

    function = getattr(ops, _RULES[rule][decode])
    grads = {}
    for name in ("out", "last"):
        grad = tensors.pop(f"grad_{name}", None)
        if grad is not None:
            grads[name] = grad
    options: dict = {"output_final_state": last}
    if normal:
        options["use_qk_l2norm_in_kernel"] = True
    if len(lengths) > 1:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        options["cu_seqlens"] = ends.to(tensors["q"].device)
    gate_name = "gk" if rule == "gla" and decode else "g"

    def attend(**inputs: Tensor) -> dict[str, Tensor]:
        inputs[gate_name] = inputs.pop("g")
        state = inputs.pop("state", None)
        out, final_state = function(**inputs, initial_state=state, **options)
        results = {"out": out}
        if final_state is not None:
            results["last"] = final_state
        return results

    if not grads:
        with torch.no_grad():
            return attend(**tensors)
    return differentiate(attend, tensors, grads)


def attention(  # noqa: PLR0913 (the options of a case)
    randn: Randn,
    *,
    rule="gdn",
    lengths=(100,),
    heads=2,
    value_heads=0,
    keys=64,
    values=64,
    decode=False,
    state=False,
    normal=False,
    last=True,
    train=True,
) -> tuple[PackageCall, Expected]:
    """Build a call of linear attention with gates, for one batch.

    Args:
        randn: Draws the numbers.
        rule: "gdn", "kda" or "gla".
        lengths: Number of tokens of each sequence. Several sequences are packed into one tensor.
        heads: Heads of queries and keys.
        value_heads: Heads of values, gates and states; 0 is as many as heads.
        keys: Size of a head of keys.
        values: Size of a head of values.
        decode: Whether the call computes one token at a time, without gradients.
        state: Whether each sequence continues from a state.
        normal: Whether the kernel normalizes q and k.
        last: Whether the call returns each sequence's final state, which training does not need.
        train: Whether gradients are computed. They are never computed with `decode`.
    """
    tokens = sum(lengths)
    value_heads = value_heads or heads
    q = randn(1, tokens, heads, keys)
    k = randn(1, tokens, heads, keys)
    if normal:
        # The norms of the vectors are so small that a wrong eps in the normalization shows.
        q = q / 16
        k = k / 16
    else:
        q = normalize(q.float(), dim=-1).to(q.dtype)
        k = normalize(k.float(), dim=-1).to(k.dtype)
    gate_shape = [1, tokens, value_heads]
    if rule != "gdn":
        gate_shape.append(keys)
    tensors = {
        "q": q,
        "k": k,
        "v": randn(1, tokens, value_heads, values),
        "g": logsigmoid(randn(*gate_shape).float() + 2),
    }
    if rule != "gla":
        tensors["beta"] = torch.sigmoid(randn(1, tokens, value_heads).float()).to(q.dtype)
    if state:
        tensors["state"] = randn(len(lengths), value_heads, keys, values).float()
    grads = {"out": randn(1, tokens, value_heads, values)}
    if last:
        grads["last"] = randn(len(lengths), value_heads, keys, values).float()
    if decode or not train:
        grads = {}
    inputs = tensors | {f"grad_{name}": grad for name, grad in grads.items()}
    options = {
        "rule": rule,
        "decode": decode,
        "lengths": lengths,
        "normal": normal,
        "last": last,
    }
    products = 0 if decode else 4
    call = PackageCall(_attend, inputs, options, products, package=PACKAGE)
    return call, _Reference(tensors, grads, lengths, normal, last)


@dataclass(frozen=True)
class _Reference:
    """The expected results of a call of attention.

    Attributes:
        tensors: The inputs of the call; see _follow_recurrence.
        grads: Gradients of the results; empty if the call computes no gradients.
        lengths: Number of tokens of each sequence.
        normal: Whether q and k are normalized.
        last: Whether the final states are returned.
    """

    tensors: dict[str, Tensor]
    grads: dict[str, Tensor]
    lengths: tuple[int, ...]
    normal: bool
    last: bool

    def __call__(self, dtype: Precision) -> dict[str, Tensor]:
        """Compute the results, and the gradients of the inputs; see cases.Expected."""
        exact = torch.float64 if dtype == TERMS else dtype
        work = reference.working_dtype(exact)
        inputs = {name: x.to(work) for name, x in self.tensors.items()}
        attend = partial(self._attend, exact)
        if self.grads:
            grads = {name: x.to(work) for name, x in self.grads.items()}
            results = differentiate(attend, inputs, grads)
        else:
            results = attend(**inputs)
        if "dg" in results:
            results["dg"] += _compute_gate_error(inputs, results, exact, self.lengths)
        for name in results.keys() - {"last", "dg", "dstate"}:
            results[name] = store(results[name], exact)
        if dtype == TERMS:
            return {name: _sum_terms(name, x) for name, x in results.items()}
        return results

    def _attend(self, dtype: torch.dtype, **inputs: Tensor) -> dict[str, Tensor]:
        """Compute the results, rounded where a kernel that computes in `dtype` rounds them."""
        value_heads = inputs["v"].shape[2]
        for name in ("q", "k"):
            x = inputs[name]
            if self.normal:
                x = normalize(x, dim=-1)
            inputs[name] = x.repeat_interleave(value_heads // x.shape[2], 2)
        shape = (value_heads, inputs["k"].shape[-1], inputs["v"].shape[-1])
        empty = torch.zeros(len(self.lengths), *shape, dtype=inputs["q"].dtype)
        states = inputs.pop("state", empty)
        parts = {name: x[0].split(self.lengths) for name, x in inputs.items()}
        in_dtype = partial(store, dtype=dtype)
        outs = []
        final_states = []
        for i, state in enumerate(states):
            sequence = {name: x[i] for name, x in parts.items()}
            out, final_state = _follow_recurrence(in_dtype, state, sequence)
            outs.append(out)
            final_states.append(final_state)
        results = {"out": torch.cat(outs)[None]}
        if self.last:
            results["last"] = torch.stack(final_states)
        return results


def _sum_terms(name: str, x: Tensor) -> Tensor:
    """Return an estimate of the magnitude of a result's terms.

    It is larger than the magnitude of the result, because terms cancel repeatedly, within a row and
    over later tokens.
    """
    size = x.abs()
    largest = size.max() if name in ("dg", "dbeta") else size.amax(-1, True)
    return size + rms(size) + largest


def _compute_gate_error(
    inputs: dict[str, Tensor],
    results: dict[str, Tensor],
    dtype: Precision,
    lengths: tuple[int, ...],
) -> Tensor:
    """Return the error that rounding dq and dk causes in the gradient of the gates.

    A kernel computes this gradient from the stored dq and dk. The error of a token is a sum over
    this token and all later tokens of the sequence.
    """
    errors = {}
    for name in ("q", "k"):
        grad = results[f"d{name}"]
        errors[name] = inputs[name] * (store(grad, dtype) - grad)
    error = errors["q"] - errors["k"]
    # A kernel computes dq and dk for each value head, and then sums them for each key head. Here,
    # the error of the sum stands for the error of each value head.
    error = error.repeat_interleave(inputs["v"].shape[2] // error.shape[2], 2)
    if error.shape != inputs["g"].shape:
        error = error.sum(-1)
    sums = [x.flip(1).cumsum(1).flip(1) for x in error.split(lengths, 1)]
    return torch.cat(sums, 1)


def _follow_recurrence(
    store: Callable[[Tensor], Tensor],
    state: Tensor,
    sequence: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a sequence, token by token.

    Args:
        store: Rounds a tensor that a kernel stores in the dtype under test.
        state: (heads, keys, values).
        sequence: The inputs by name. q and k are (tokens, heads, keys), and v is (tokens, heads,
            values). g has the logarithms of the gates, (tokens, heads) or (tokens, heads, keys).
            beta is (tokens, heads); gla has none.

    Returns:
        The output, (tokens, heads, values), and the final state.
    """
    q = sequence["q"]
    k = sequence["k"]
    v = sequence["v"]
    gate = sequence["g"]
    beta = sequence.get("beta")
    rows = []
    for i in range(len(q)):
        state = state * gate[i].exp().reshape(len(state), -1, 1)
        new = v[i]
        if beta is not None:
            # The delta rule replaces the value that the state has for this key.
            share = beta[i][..., None]
            weighted_state = store(share * k[i])[..., None] * store(state)
            new = store(share * new) - store(weighted_state.sum(-2))
        state = state + k[i][..., None] * store(new)[:, None]
        row = (store(state) * q[i][..., None]).sum(-2)
        rows.append(row * q.shape[-1] ** -0.5)
    return torch.stack(rows), state


def gated_norm(randn: Randn, *, rows: int, columns: int) -> tuple[PackageCall, None]:
    """Build a call that normalizes each head and multiplies it by silu(gate).

    The call is only compiled, so nothing is expected of it.
    """
    tensors = {name: randn(rows, columns) for name in ("x", "g", "grad")}
    tensors["weight"] = randn(columns)
    return PackageCall(_norm, tensors, package=PACKAGE), None


def _norm(grad: Tensor, **tensors: Tensor) -> dict[str, Tensor]:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    def norm(**inputs: Tensor) -> dict[str, Tensor]:
        out = rms_norm_gated(**inputs, bias=None, activation="silu")
        return {"out": out}

    return differentiate(norm, tensors, {"out": grad})


_COMPILES = "a kernel that no longer compiles for gfx1151, or needs more LDS than the chip has"
_CHUNK = "a wrong state passed to the next chunk, or a fault in a last chunk that is not full"
_STATE = "an initial state that is ignored, or whose gradient is ignored"
_PACKED = "a sequence that sees the state of another sequence in its batch"
_DECODE = "decoding that loses the state, or does not normalize keys as prefill does"
_LANES = "a kernel that is correct only for head size 64, or for as many value heads as key heads"
#: A layer with the head sizes of Qwen3-Next and Kimi.
_LAYER: dict = {"lengths": (256,), "heads": 4, "keys": 128, "values": 128}
_DECODE_STEP: dict = {"decode": True, "lengths": (1,), "state": True}


def _compiled_cases() -> Iterator[tuple[str, Case]]:
    for rule in _RULES:
        layer = partial(attention, rule=rule, **_LAYER)
        yield f"{rule}-chunk", Case(layer, _COMPILES, BF16)
        yield f"{rule}-decode", Case(partial(layer, **_DECODE_STEP), _COMPILES, BF16)
    yield "gdn-prefill", Case(partial(attention, train=False, **_LAYER), _COMPILES, BF16)


COMPILED = dict(_compiled_cases())
#: Options of attention by step: training, prefill or decoding.
_MODEL_STEPS: dict[str, dict] = {
    "train": {
        "heads": 1,
        "lengths": (66,),
        "last": False,
    },
    "prefill": {
        "heads": 1,
        "lengths": (33, 40),
        "train": False,
        "normal": True,
    },
    "decode": {
        "heads": 2,
        "lengths": (2, 1),
        "decode": True,
        "state": True,
        "normal": True,
    },
}
#: Cases that take too long for a quick run. Training takes longest, so a quick run includes the
#: training of one model only.
_EXPENSIVE = (
    "gdn-Qwen3.5-*-train",
    "gdn-Qwen3.6-*-train",
    "gdn-Qwen3.5-*-prefill",
)


def model_cases() -> dict[str, Case]:
    """Return cases of prompts, training and decoding, for the models in models.toml.

    They cover each head size, and each ratio of value heads to key heads.
    """
    # Candidates by name. Of several models with the same columns, the first one is a candidate.
    candidates: dict[str, Candidate] = {}
    listed_columns = set()
    for model, row in layers.MODELS.items():
        for layer in row.layers.linear:
            ratio = layer.value_heads // layer.heads
            for step, shape in _MODEL_STEPS.items():
                columns = (ratio, step, layer.size)
                if columns in listed_columns:
                    continue
                listed_columns.add(columns)
                build = partial(
                    attention,
                    value_heads=ratio * shape["heads"],
                    keys=layer.size,
                    values=layer.size,
                    **shape,
                )
                candidates[f"gdn-{model}-{step}"] = Candidate(build, columns)
    return choose(candidates, _LANES, _EXPENSIVE)


_decode = partial(attention, decode=True)
_kda = partial(attention, rule="kda")
_gla = partial(attention, rule="gla")
COMPUTED = {
    "gdn": Case(attention, _CHUNK),
    "gdn-state": Case(partial(attention, state=True, lengths=(70,)), _STATE),
    "gdn-packed": Case(partial(attention, lengths=(70, 30)), _PACKED),
    # The first and the last sequence fill whole chunks; the sequence between them does not.
    "gdn-packed-state": Case(
        partial(attention, lengths=(64, 30, 128), heads=1, state=True, train=False),
        _PACKED,
    ),
    "gdn-decode": Case(partial(_decode, lengths=(3, 1), state=True, normal=True), _DECODE),
    "gdn-decode-new": Case(partial(_decode, lengths=(3,), last=False), _DECODE),
    "kda-packed-state": Case(
        partial(_kda, lengths=(64, 30), state=True, normal=True, train=False),
        _PACKED,
    ),
    # This case takes longer than all others, so only a full run includes it.
    "kda-packed-train": Case(
        partial(_kda, lengths=(40, 30), keys=128, values=128, state=True),
        _PACKED,
        size=Size.FULL,
    ),
    "kda-decode-new": Case(
        partial(_kda, decode=True, lengths=(3,), heads=1, last=False),
        _DECODE,
    ),
    "gla-packed": Case(partial(_gla, lengths=(40, 30), heads=1, last=False), _PACKED),
    # Kimi Linear has heads of this size.
    "kda": Case(partial(_kda, lengths=(70,), heads=1, keys=128, values=128), _CHUNK),
    "kda-decode": Case(
        partial(
            _kda,
            decode=True,
            lengths=(3, 1),
            state=True,
            normal=True,
            keys=128,
            values=128,
        ),
        _DECODE,
    ),
    "gla": Case(partial(_gla, lengths=(70,)), _CHUNK),
    "gla-state": Case(partial(_gla, lengths=(20,), state=True), _STATE),
    **model_cases(),
}
EMULATED = {
    "gdn": Case(partial(attention, lengths=(70,), heads=1), _CHUNK, BF16),
    "gdn-decode": Case(partial(_decode, lengths=(2,), heads=1, state=True), _DECODE, BF16),
    "kda": Case(partial(_kda, lengths=(70,), heads=1), _CHUNK, BF16),
    "gla": Case(partial(_gla, lengths=(70,), heads=1), _CHUNK, BF16),
}


def _list_layer_calls(
    rule: str,
    heads: int,
    keys: int,
    values: int,
    norm_rows: tuple[int, ...],
) -> list[Shipped]:
    """List calls for prompts, training and decoding of a layer.

    Args:
        rule: See attention.
        heads: See attention.
        keys: See attention.
        values: See attention.
        norm_rows: Numbers of rows of the layer's norm, one for each kind of batch.
    """
    layer = partial(
        attention,
        rule=rule,
        heads=heads,
        keys=keys,
        values=values,
        normal=rule != "gla",
    )
    builds: list[partial] = [
        partial(layer, state=False),
        partial(layer, state=True),
        partial(layer, last=False),
        partial(layer, decode=True, lengths=(1,), state=False),
        partial(layer, decode=True, lengths=(1,), state=True),
    ]
    for rows in norm_rows:
        builds.append(partial(gated_norm, rows=rows, columns=values))
    return [(build, BF16) for build in builds]


#: Calls of a layer of Qwen3-Next. Qwen3.5-35B-A3B has the same layers.
_QWEN3_NEXT = _list_layer_calls("gdn", 32, 128, 128, (32, 3200))
SHIPPED: dict[str, list[Shipped]] = {
    "sample": [(build, dtype) for build, dtype in _QWEN3_NEXT if build.keywords.get("decode")],
    "full": [
        *_QWEN3_NEXT,
        # Qwen3.5-27B
        *_list_layer_calls("gdn", 48, 128, 128, ()),
        # Kimi-Linear-48B-A3B
        *_list_layer_calls("kda", 32, 128, 128, ()),
    ],
}
