# SPDX-License-Identifier: BSD-3-Clause
"""flash-linear-attention's kernels, as Qwen3-Next, Qwen3.5 and Kimi Linear call them.

Gated delta rule, KDA (its gates are of each key's lane) and gated linear attention: prefill and
training in chunks of 64 tokens with their gradients, and decoding token by token.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from strix_validate.checks import Size
from strix_validate.layers import table as layers
from strix_validate.numerics import reference
from strix_validate.numerics.comparison import rms
from strix_validate.numerics.reference import TERMS, Precision, stored
from strix_validate.triton.call import PackageCall, Shipped, differentiate
from strix_validate.triton.cases import Candidate, Case, Expected, Randn, choose

MODULE, PACKAGE = "fla", "fla-core"
#: Rule -> its functions: over chunks, and token by token.
_RULES = {
    "gdn": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("chunk_kda", "fused_recurrent_kda"),
    "gla": ("chunk_gla", "fused_recurrent_gla"),
}


def _attend(
    rule: str, decode: bool, lengths: tuple[int, ...], normal: bool, last: bool, **tensors: Tensor
) -> dict[str, Tensor]:
    from fla import ops

    function = getattr(ops, _RULES[rule][decode])
    asked = {name: tensors.pop(f"grad_{name}", None) for name in ("out", "last")}
    grads = {name: grad for name, grad in asked.items() if grad is not None}
    more: dict = {"use_qk_l2norm_in_kernel": True} if normal else {}
    if len(lengths) > 1:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        more["cu_seqlens"] = ends.to(tensors["q"].device)

    def attend(**inputs: Tensor) -> dict[str, Tensor]:
        gate = inputs.pop("gate")
        name = "gk" if rule == "gla" and decode else "g"
        state = inputs.pop("state", None)
        found = function(
            **inputs, **{name: gate}, initial_state=state, output_final_state=last, **more
        )
        return {name: x for name, x in zip(("out", "last"), found, strict=True) if x is not None}

    if not grads:
        with torch.no_grad():
            return attend(**tensors)
    return differentiate(attend, tensors, grads)


def attention(  # noqa: C901, PLR0913 (a case and what it should give)
    randn: Randn, *, rule="gdn", lengths=(100,), heads=2, value_heads=0, keys=64, values=64,
    decode=False, state=False, normal=False, last=True, train=True,
) -> tuple[PackageCall, Expected]:  # fmt: skip
    """Build a call of linear attention with forgetting, for one batch.

    Args:
        rule: gdn, kda or gla. lengths: tokens of each sequence; of several, packed.
        heads: of queries and keys. value_heads: of values, gates and states, 0 is as many.
        keys, values: lanes of a head's keys and values.
        decode: token by token, without gradients.
        state: sequences go on from a state. normal: the kernel normalizes q and k.
        last: the state that a sequence ends with is returned; training wants none.
        train: with gradients, if it does not decode.
    """
    tokens, value_heads = sum(lengths), value_heads or heads
    q, k = (randn(1, tokens, heads, keys) for _ in "qk")
    if normal:  # so short that another eps shows
        q, k = q / 16, k / 16
    else:
        q, k = (normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    gates = (1, tokens, value_heads, *((keys,) if rule != "gdn" else ()))
    tensors = {
        "q": q,
        "k": k,
        "v": randn(1, tokens, value_heads, values),
        "gate": logsigmoid(randn(*gates).float() + 2),
    }
    if rule != "gla":
        tensors["beta"] = torch.sigmoid(randn(1, tokens, value_heads).float()).to(q.dtype)
    if state:
        tensors["state"] = randn(len(lengths), value_heads, keys, values).float()
    grads = {"out": randn(1, tokens, value_heads, values)}
    if last:
        grads["last"] = randn(len(lengths), value_heads, keys, values).float()
    inputs = {f"grad_{name}": x for name, x in grads.items() if train and not decode}
    options = {"rule": rule, "decode": decode, "lengths": lengths, "normal": normal, "last": last}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        exact = torch.float64 if dtype == TERMS else dtype
        work = reference.working(exact)

        def attend(**inputs: Tensor) -> dict[str, Tensor]:
            if normal:
                inputs |= {n: normalize(inputs[n], dim=-1) for n in "qk"}
            inputs |= {n: inputs[n].repeat_interleave(value_heads // heads, 2) for n in "qk"}
            parts = {n: x[0].split(lengths) for n, x in inputs.items() if n != "state"}
            empty = torch.zeros(len(lengths), value_heads, keys, values)
            states = inputs.get("state", empty.to(work))
            store = partial(stored, dtype=exact)
            sequences = [{n: x[i] for n, x in parts.items()} for i in range(len(lengths))]
            both = [_recurrence(store, *x) for x in zip(states, sequences, strict=True)]
            out, ended = zip(*both, strict=True)
            ends = {"last": torch.stack(ended)} if last else {}
            return {"out": torch.cat(out)[None], **ends}

        wanted = {name: x.to(work) for name, x in tensors.items()}
        if not inputs:
            found = attend(**wanted)
        else:
            found = differentiate(attend, wanted, {n: x.to(work) for n, x in grads.items()})
        if "dgate" in found:
            found["dgate"] += _lost(wanted, found, exact, lengths)
        for name in found.keys() - {"last", "dgate", "dstate"}:
            found[name] = stored(found[name], exact)
        if dtype == TERMS:
            # sums cancel again and again, within a row and over later tokens
            sizes = {n: x.abs() for n, x in found.items()}
            found = {
                n: x + rms(x) + (x.max() if n in ("dgate", "dbeta") else x.amax(-1, True))
                for n, x in sizes.items()
            }
        return found

    call = PackageCall(_attend, tensors | inputs, options, 0 if decode else 4, package=PACKAGE)
    return call, expected


def _lost(
    inputs: dict[str, Tensor], found: dict[str, Tensor], dtype: Precision, lengths: tuple[int, ...]
) -> Tensor:
    """Return the error of a gate's gradient made of dq and dk as stored, over all later tokens."""
    errors = [inputs[n] * (stored(found[f"d{n}"], dtype) - found[f"d{n}"]) for n in "qk"]
    lost = errors[0] - errors[1]
    # each head of values has its own, of a gradient that is then summed
    lost = lost.repeat_interleave(inputs["v"].shape[2] // lost.shape[2], 2)
    lost = lost if lost.shape == inputs["gate"].shape else lost.sum(-1)
    return torch.cat([x.flip(1).cumsum(1).flip(1) for x in lost.split(lengths, 1)], 1)


def _recurrence(
    store: Callable[[Tensor], Tensor], state: Tensor, sequence: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Follow a sequence, token by token; store: rounds what a kernel keeps in the dtype under test.

    Args:
        state: (heads, keys, values).
        sequence: q, k: (tokens, heads, keys), v: (tokens, heads, values), gate, logarithms:
            (tokens, heads) or (tokens, heads, keys), beta: (tokens, heads), or none (gla).
    """
    q, k, v, gate = (sequence[name] for name in ("q", "k", "v", "gate"))
    beta, rows = sequence.get("beta"), []
    for i in range(len(q)):
        state = state * gate[i].exp().reshape(len(state), -1, 1)
        new = v[i]
        if beta is not None:  # what the state holds for this key gives way to the new value
            share = beta[i][..., None]
            held = store(share * k[i])[..., None] * store(state)
            new = store(share * new) - store(held.sum(-2))
        state = state + k[i][..., None] * store(new)[:, None]
        rows.append((store(state) * q[i][..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(rows), state


def gated_norm(randn: Randn, *, rows: int, columns: int) -> tuple[PackageCall, None]:
    """Build a call of the norm of each head, times silu of a gate; compiled only."""
    tensors = {name: randn(rows, columns) for name in ("x", "g", "grad")}
    return PackageCall(_norm, tensors | {"weight": randn(columns)}, package=PACKAGE), None


def _norm(grad: Tensor, **tensors: Tensor) -> dict[str, Tensor]:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    def norm(**inputs: Tensor) -> dict[str, Tensor]:
        return {"out": rms_norm_gated(**inputs, bias=None, activation="silu")}

    return differentiate(norm, tensors, {"out": grad})


_COMPILES = "a kernel that no longer compiles for gfx1151, or needs more LDS than the chip has"
_CHUNK = "a chunk's state handed on wrongly, or the last chunk, which is not full"
_STATE = "the state that a sequence goes on from left out, or its gradient"
_PACKED = "sequences of a batch that see each other's state"
_DECODE = "decoding that forgets, or that does not normalize keys as prefill does"
BF16 = torch.bfloat16
_LAYER: dict = {"lengths": (256,), "heads": 4, "keys": 128, "values": 128}  # Qwen3-Next, Kimi

COMPILED = {
    f"{rule}-{name}": Case(partial(attention, rule=rule, **_LAYER | more), _COMPILES, BF16)
    for rule in _RULES
    for name, more in (("chunk", {}), ("decode", {"decode": True, "lengths": (1,), "state": True}))
} | {"gdn-prefill": Case(partial(attention, train=False, **_LAYER), _COMPILES, BF16)}
_LANES = "a kernel that is correct for 64 lanes, or for as many heads of values as of keys"


def model_cases() -> dict[str, Case]:
    """Return prompts, training and decoding of each ratio of heads of values to heads of keys."""
    steps: dict[str, dict] = {
        # training wants no state
        "train": {"heads": 1, "lengths": (66,), "last": False},
        "prefill": {"heads": 1, "lengths": (33, 40), "train": False, "normal": True},
        "decode": {"heads": 2, "lengths": (2, 1), "decode": True, "state": True, "normal": True},
    }
    candidates: dict[tuple, tuple[str, partial]] = {}
    for model, row in layers.MODELS.items():
        for layer in row.recurrent():
            ratio = layer.value_heads // layer.heads
            for step, shape in steps.items():
                build = partial(
                    attention, value_heads=ratio * shape["heads"], keys=layer.size,
                    values=layer.size, **shape,
                )  # fmt: skip
                candidates.setdefault((ratio, step, layer.size), (f"gdn-{model}-{step}", build))
    # training takes longest: quick has that of one model
    dear = ("gdn-Qwen3.5-*-train", "gdn-Qwen3.6-*-train", "gdn-Qwen3.5-*-prefill")
    return choose(
        {name: Candidate(build, columns) for columns, (name, build) in candidates.items()},
        _LANES,
        dear,
    )


COMPUTED = {
    "gdn": Case(attention, _CHUNK),
    "gdn-state": Case(partial(attention, state=True, lengths=(70,)), _STATE),
    "gdn-packed": Case(partial(attention, lengths=(70, 30)), _PACKED),
    # whole chunks, between which a sequence ends
    "gdn-packed-state": Case(partial(attention, lengths=(64, 30, 128), heads=1, state=True,
        train=False), _PACKED),
    "gdn-decode": Case(partial(attention, decode=True, lengths=(3, 1), state=True, normal=True),
        _DECODE),
    "gdn-decode-new": Case(partial(attention, decode=True, lengths=(3,), last=False), _DECODE),
    "kda-packed-state": Case(partial(attention, rule="kda", lengths=(64, 30), state=True,
        normal=True, train=False), _PACKED),
    # the dearest of all
    "kda-packed-train": Case(partial(attention, rule="kda", lengths=(40, 30), keys=128, values=128,
        state=True), _PACKED, size=Size.FULL),
    "kda-decode-new": Case(partial(attention, rule="kda", decode=True, lengths=(3,), heads=1,
        last=False), _DECODE),
    "gla-packed": Case(partial(attention, rule="gla", lengths=(40, 30), heads=1, last=False),
        _PACKED),
    # Kimi Linear's lanes
    "kda": Case(partial(attention, rule="kda", lengths=(70,), heads=1, keys=128, values=128),
        _CHUNK),
    "kda-decode": Case(partial(attention, rule="kda", decode=True, lengths=(3, 1), state=True,
        normal=True, keys=128, values=128), _DECODE),
    "gla": Case(partial(attention, rule="gla", lengths=(70,)), _CHUNK),
    "gla-state": Case(partial(attention, rule="gla", lengths=(20,), state=True), _STATE),
    **model_cases(),
}  # fmt: skip
EMULATED = {
    "gdn": Case(partial(attention, lengths=(70,), heads=1), _CHUNK, BF16),
    "gdn-decode": Case(partial(attention, decode=True, lengths=(2, ), heads=1, state=True), _DECODE,
        BF16),
    "kda": Case(partial(attention, rule="kda", lengths=(70,), heads=1), _CHUNK, BF16),
    "gla": Case(partial(attention, rule="gla", lengths=(70,), heads=1), _CHUNK, BF16),
}  # fmt: skip

_BOTH = (False, True)


def _layer(rule: str, heads: int, keys: int, values: int, rows: tuple[int, ...]) -> list[Shipped]:
    """List prompts, training and decoding of a layer; rows: of its norm, by kinds of batches."""
    shape: dict = {"heads": heads, "keys": keys, "values": values, "normal": rule != "gla"}
    rule_of = partial(attention, rule=rule, **shape)
    return [
        *((partial(rule_of, state=state), BF16) for state in _BOTH),
        (partial(rule_of, last=False), BF16),
        *((partial(rule_of, decode=True, lengths=(1,), state=state), BF16) for state in _BOTH),
        *((partial(gated_norm, rows=n, columns=values), BF16) for n in rows),
    ]


_QWEN3_NEXT = _layer("gdn", 32, 128, 128, (32, 3200))  # and Qwen3.5-35B-A3B
SHIPPED: dict[str, list[Shipped]] = {
    "sample": [(build, dtype) for build, dtype in _QWEN3_NEXT if build.keywords.get("decode")],
    "full": [
        *_QWEN3_NEXT,
        *_layer("gdn", 48, 128, 128, ()),  # Qwen3.5-27B
        *_layer("kda", 32, 128, 128, ()),  # Kimi-Linear-48B-A3B
    ],
}
