# SPDX-License-Identifier: BSD-3-Clause
"""Liger's kernels for fine-tuning, as its patched models call them, and their gradients.

RMS norm (Llama, Gemma), rotary embedding, SwiGLU, and the last layer fused with its loss.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.layers import table as layers
from strix_validate.numerics import reference
from strix_validate.numerics.reference import TERMS, Precision, stored
from strix_validate.triton.call import PackageCall, Shipped, differentiate
from strix_validate.triton.cases import Candidate, Case, Expected, Randn, choose

MODULE, PACKAGE = "liger_kernel", "liger-kernel"
#: A label that counts for nothing.
IGNORED = -100


def _inputs(dtype: Precision, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the working precision; for TERMS their magnitudes."""
    found = [x.to(reference.working(dtype)) for x in tensors]
    return [x.abs() for x in found] if dtype == TERMS else found


def _rms_norm(
    x: Tensor, weight: Tensor, grad: Tensor, *, eps: float, offset: float, casting: str
) -> dict[str, Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def norm(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"out": LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)}

    return differentiate(norm, {"x": x, "weight": weight}, {"out": grad})


def rms_norm(
    randn: Randn, *, rows=5, columns=300, eps=1e-6, offset=0.0, casting="llama"
) -> tuple[PackageCall, Expected]:
    """Build a call of RMS norm, forward and backward.

    Args:
        eps: large, it shows whether the kernel takes the one that it is given.
        offset: added to the weight (1 in Gemma).
        casting: what is rounded before the weight is applied: "llama" the row, "gemma" nothing.
    """
    x, weight, grad = randn(rows, columns), randn(columns), randn(rows, columns)
    tensors = {"x": x, "weight": weight, "grad": grad}
    options = {"eps": eps, "offset": offset, "casting": casting}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        a, w, d = _inputs(dtype, x, weight + offset, grad)
        sign = 1.0 if dtype == TERMS else -1.0
        inverse = (x.to(a.dtype).square().mean(-1, keepdim=True) + eps).rsqrt()
        row = stored(a * inverse, dtype) if casting == "llama" else a * inverse
        dot = (d * w * a).mean(-1, keepdim=True)
        found = {
            "out": row * w,
            "dx": inverse * (d * w + sign * inverse.square() * dot * a),
            "dweight": (d * row).sum(0),
        }
        return {name: stored(value, dtype) for name, value in found.items()}

    return PackageCall(_rms_norm, tensors, options, package=PACKAGE), expected


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> dict:
    from liger_kernel.ops.rope import LigerRopeFunction

    def turn(q: Tensor, k: Tensor) -> dict[str, Tensor]:
        # the kernel writes to what it is given
        turned = LigerRopeFunction.apply(q * 1, k * 1, cos, sin)
        return dict(zip(("q_out", "k_out"), turned, strict=True))

    return differentiate(turn, {"q": q, "k": k}, {"q_out": dq, "k_out": dk})


def rope(
    randn: Randn, *, batch=2, tokens=7, heads=6, kv_heads=2, head_dim=64, rotary=0, own=False
) -> tuple[PackageCall, Expected]:
    """Build a call of rotary embedding in halves, and of its inverse on the gradients.

    Args:
        rotary: lanes that are turned, 0 is all (GLM, Phi: a part).
        own: each sequence has positions of its own (packed training).
    """
    lanes = rotary or head_dim
    q, dq = randn(batch, heads, tokens, head_dim), randn(batch, heads, tokens, head_dim)
    k, dk = randn(batch, kv_heads, tokens, head_dim), randn(batch, kv_heads, tokens, head_dim)
    angle = (randn(batch if own else 1, tokens, lanes // 2).float() * 3).repeat(1, 1, 2)
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

    def turned(dtype: Precision, x: Tensor, back: bool) -> Tensor:
        c, s = (angle[:, None, :, : lanes // 2] for angle in (cos, sin))
        return stored(reference.rotated(x, c, -s if back else s, dtype), dtype)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        found = {name: turned(dtype, x, False) for name, x in (("q_out", q), ("k_out", k))}
        return found | {name: turned(dtype, x, True) for name, x in (("dq", dq), ("dk", dk))}

    tensors = {"q": q, "k": k, "cos": cos, "sin": sin, "dq": dq, "dk": dk}
    return PackageCall(_rope, tensors, package=PACKAGE), expected


def _swiglu(gate: Tensor, up: Tensor, grad: Tensor) -> dict[str, Tensor]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def product(gate: Tensor, up: Tensor) -> dict[str, Tensor]:
        # the backward pass writes over its inputs
        return {"out": LigerSiLUMulFunction.apply(gate * 1, up * 1)}

    return differentiate(product, {"gate": gate, "up": up}, {"out": grad})


def swiglu(randn: Randn, *, rows=5, columns=300, gain=1.0) -> tuple[PackageCall, Expected]:
    """Build a call of silu(gate) * up. gain: of gates; where they are large the slope is 1 or 0."""
    gate, up, grad = randn(rows, columns) * gain, randn(rows, columns), randn(rows, columns)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        a, u, d = _inputs(dtype, gate, up, grad)
        s = torch.sigmoid(gate.to(a.dtype))
        silu, slope = stored(a * s, dtype), s + a * s * (1 - s)
        found = {"out": silu * u, "dgate": d * u * slope, "dup": d * silu}
        return {name: stored(value, dtype) for name, value in found.items()}

    tensors = {"gate": gate, "up": up, "grad": grad}
    return PackageCall(_swiglu, tensors, package=PACKAGE), expected


def _geglu(gate: Tensor, up: Tensor, grad: Tensor) -> dict[str, Tensor]:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    def product(gate: Tensor, up: Tensor) -> dict[str, Tensor]:
        # the backward pass writes over its inputs
        return {"out": LigerGELUMulFunction.apply(gate * 1, up * 1)}

    return differentiate(product, {"gate": gate, "up": up}, {"out": grad})


def geglu(randn: Randn, *, rows=5, columns=300) -> tuple[PackageCall, Expected]:
    """Build a call of gelu(gate) * up, with tanh for gelu (Gemma)."""
    gate, up, grad = randn(rows, columns), randn(rows, columns), randn(rows, columns)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        a, u, d = _inputs(dtype, gate, up, grad)
        x, root = gate.to(a.dtype), (2 / torch.pi) ** 0.5
        t = torch.tanh(root * (x + 0.044715 * x**3))
        inner = x * (1 - t.square()) * root * (1 + 3 * 0.044715 * x.square())
        gelu, slope = stored(a * (1 + t) / 2, dtype), (1 + t) / 2 + inner / 2
        if dtype == TERMS:
            slope = (1 + t) / 2 + inner.abs() / 2
        found = {"out": gelu * u, "dgate": d * u * slope, "dup": d * gelu}
        return {name: stored(value, dtype) for name, value in found.items()}

    tensors = {"gate": gate, "up": up, "grad": grad}
    return PackageCall(_geglu, tensors, package=PACKAGE), expected


def _loss(x: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    bias = options.pop("bias", None)

    def loss(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        found = LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, labels, bias, None, IGNORED, 0.0, options["smoothing"],
            options["reduction"],
            options["softcap"], False, torch.float32,
        )  # fmt: skip
        return {"loss": found[0]}

    grad = torch.tensor(options["gain"], device=x.device, dtype=torch.float32)
    return differentiate(loss, {"x": x, "weight": weight}, {"loss": grad})


def loss(  # noqa: PLR0913 (a case's options)
    randn: Randn,
    *,
    tokens=9,
    size=64,
    words=200,
    smoothing=0.0,
    softcap=None,
    ignored=2,
    gain=2.0,
    low=0.0,
    reduction="mean",
) -> tuple[PackageCall, Expected]:
    """Build a call of the last layer and cross entropy in one, in float32.

    Args:
        size: of a token's vector. words: of the vocabulary.
        ignored: of the labels, how many count for nothing (padding, prompts).
        low: if not 0, the level of all logits, see reference.with_low_scores.
        reduction: "mean" or "sum" of the labels that count.
        gain: the gradient of the loss; 1 goes without a kernel that has a program for each word.
    """
    x, weight = randn(tokens, size), randn(words, size) / size**0.5
    if low:
        x, weight = reference.with_low_scores(x, weight, low, 1.0)
    labels = (torch.arange(tokens) * 37 + 11) % words
    labels[:ignored] = IGNORED
    options = {"smoothing": smoothing, "softcap": softcap, "gain": gain}
    options["reduction"] = reduction

    def expected(dtype: Precision) -> dict[str, Tensor]:
        plain = torch.float64 if dtype == TERMS else dtype
        logits = stored(reference.product(x, weight, plain), plain)
        slope = torch.ones_like(logits)
        if softcap:
            inner = torch.tanh(logits / softcap)
            logits, slope = softcap * inner, 1 - inner.square()
        counts = (labels != IGNORED)[:, None]
        right = torch.nn.functional.one_hot(labels.clamp(min=0), words).to(logits)
        wanted = right * (1 - smoothing) + smoothing / words
        log = logits.log_softmax(-1)
        n = counts.sum() if reduction == "mean" else 1
        weights, sign = log.exp(), -1.0
        if dtype == TERMS:
            # logits are stored: half an eps of a logit is as much of its weight, times its size
            weights, sign = weights * (1 + logits.abs()), 1.0
        errors = gain * (weights + sign * wanted) * slope * counts / n
        errors = stored(errors, dtype)
        a, w = _inputs(dtype, x, weight)
        size_of = (logits.abs() + logits.logsumexp(-1, keepdim=True).abs()) * wanted
        terms = (size_of if dtype == TERMS else -log * wanted) * counts
        return {
            "loss": terms.sum() / n,
            "dx": stored(errors @ w, dtype),
            "dweight": stored(errors.T @ a, dtype),
        }

    tensors = {"x": x, "weight": weight, "labels": labels}
    return PackageCall(_loss, tensors, options, package=PACKAGE), expected


#: A vocabulary: all beyond 32,768 tokens have one kernel. So have numbers of a token up to a power
#: of two; how many labels count is a kind of its own where 16 divides it.
WORDS = 32784
_COMPILES = "a kernel that no longer compiles for gfx1151, or needs more LDS than the chip has"
#: Of Gemma's norms.
_GEMMA_NORM: dict = {"offset": 1.0, "casting": "gemma"}
_TAIL = "the last block, which is not full, counted as full"
_GEMMA = "Gemma's 1 + weight, or its rounding, left out"
_EPS = "another eps than the model's"
_TURN = "the inverse turn of the gradient left out, or lanes turned that are not to be"
_SLOPE = "the slope of silu, of large gates as well"
_GELU = "another gelu than the model's, or its slope (Gemma)"
_LABELS = "labels that count for nothing counted: prompts and padding of fine-tuning"
_SMOOTH = "label smoothing or Gemma's softcap left out of the gradient"
BF16 = torch.bfloat16

COMPILED = {
    "rms-norm": Case(partial(rms_norm, columns=4096), _COMPILES, BF16),
    "rms-norm-gemma": Case(partial(rms_norm, columns=3584, offset=1.0, casting="gemma"), _COMPILES,
        BF16),
    "rope": Case(partial(rope, heads=32, kv_heads=8, head_dim=128), _COMPILES, BF16),
    "swiglu": Case(partial(swiglu, columns=14336), _COMPILES, BF16),
    "loss": Case(partial(loss, tokens=4, size=256, words=32000), _COMPILES, BF16),
}  # fmt: skip
_MODEL = "a size of a model whose last block differs, or its heads, which are no power of two"


def _block(size: int) -> tuple[int, bool]:
    """Return the power of two that holds a row, and whether the row fills it."""
    block = 1 << (size - 1).bit_length()
    return block, block == size


def model_cases() -> dict[str, Case]:
    """Return norms, angles, products and losses of the sizes of each model."""
    candidates = {}
    for name, row in layers.MODELS.items():
        norm = _GEMMA_NORM if row.softcap or name.startswith("Gemma") else {}
        candidates[f"rms-norm-{name}"] = Candidate(
            partial(rms_norm, rows=3, columns=row.hidden, **norm),
            ("norm", *_block(row.hidden), bool(norm)),
        )
        if row.kv_heads:
            shape: dict = {"heads": row.heads, "kv_heads": row.kv_heads, "head_dim": row.head_dim}
            candidates[f"rope-{name}"] = Candidate(
                partial(rope, batch=1, tokens=2, **shape), ("rope", *shape.values())
            )
        if row.inner:
            candidates[f"swiglu-{name}"] = Candidate(
                partial(swiglu, rows=2, columns=row.inner), ("swiglu", *_block(row.inner))
            )
        # rows begin at a multiple of so many numbers
        aligned = min(row.words & -row.words, 16)
        candidates[f"loss-{name}"] = Candidate(
            partial(
                loss, tokens=3, size=16, words=row.words, ignored=1, gain=1.0,
                softcap=row.softcap or None,
            ),
            ("loss", aligned, row.words > 1 << 17, row.softcap),
        )  # fmt: skip
    return choose(candidates, _MODEL)


COMPUTED = {
    "rms-norm": Case(rms_norm, _TAIL),
    "rms-norm-eps": Case(partial(rms_norm, eps=0.5), _EPS),
    "rms-norm-gemma": Case(partial(rms_norm, offset=1.0, casting="gemma"), _GEMMA),
    "rope": Case(rope, _TURN),
    "rope-partial": Case(partial(rope, rotary=32), _TURN),
    "swiglu": Case(swiglu, _SLOPE),
    "swiglu-large": Case(partial(swiglu, gain=8.0), _SLOPE),
    "rope-own": Case(partial(rope, own=True), "the first sequence's positions taken for each"),
    "geglu": Case(geglu, _GELU),
    "geglu-Gemma-2-9B": Case(partial(geglu, rows=2, columns=14336), _GELU),
    "loss": Case(loss, _LABELS),
    "loss-sum": Case(partial(loss, reduction="sum"), "a sum divided by the labels that count"),
    "loss-smoothed": Case(partial(loss, smoothing=0.1), _SMOOTH),
    # in float32, see FLOAT16_OR_32
    "loss-low": Case(partial(loss, low=-8.0), reference.WHY_LOW, torch.float32),
    "loss-softcap": Case(partial(loss, softcap=3.0), _SMOOTH),
    "loss-words": Case(partial(loss, tokens=3, size=32, words=40000, ignored=1, gain=1.0),
        "words behind the 32,768th, which are a second block, left out"),
    "rms-norm-rows": Case(partial(rms_norm, rows=(1 << 15) + 3, columns=32),
        "the kernel of 32,768 rows and more", size=Size.FULL),
    **model_cases(),
}  # fmt: skip
#: What a GPU does not compute in bfloat16 as well: in 16 bits, logits this low are too coarse to
#: judge what is made of them.
FLOAT16_OR_32 = ("loss-low",)
#: Of sizes that leave no thread without an element of its own. Otherwise Triton has threads repeat
#: those of others, and they read what these have overwritten: nobody uses it, but it is a race.
EMULATED = {
    "rms-norm": Case(rms_norm, _TAIL, BF16),
    "rms-norm-gemma": Case(partial(rms_norm, offset=1.0, casting="gemma"), _GEMMA, BF16),
    "rope": Case(partial(rope, heads=8, kv_heads=4), _TURN, BF16),
    "swiglu": Case(swiglu, _SLOPE, BF16),
    "loss": Case(partial(loss, tokens=5, size=1024, words=1000), _LABELS, BF16),
}

#: By kind of norm, of its models: numbers of a token, of its inner layer, heads, of keys, of each.
_TRAINED = {
    kind: {
        name: (x.hidden, x.inner, x.heads, x.kv_heads, x.head_dim)
        for name, x in layers.MODELS.items()
        if x.liger == kind
    }
    for kind in ("llama", "gemma")
}
MODELS = _TRAINED["llama"]


def _model(
    size: int, inner: int, heads: int, kv_heads: int, head_dim: int, **norm
) -> list[Shipped]:
    turn = partial(rope, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    shapes = [
        *(partial(rms_norm, rows=n, columns=size, **norm) for n in (1, 5, 32)),
        # of queries and keys; many rows have a kernel of their own
        *(partial(rms_norm, rows=n, columns=head_dim, **norm) for n in (8, 64, 1 << 15)),
        *(partial(turn, batch=n, tokens=m) for n in (1, 2, 4, 8) for m in (7, 16)),
        *(partial(swiglu, rows=n, columns=inner) for n in (1, 5)),
    ]
    return [(shape, BF16) for shape in shapes]


_LOSSES = [
    (partial(loss, tokens=n, size=size, words=WORDS), BF16)
    for size in (1024, 1040, 2064, 4112)
    for n in (4, 18)
]
SHIPPED: dict[str, list[Shipped]] = {
    "sample": [*_model(*MODELS["Llama-3.1-8B"]), *_LOSSES[4:6]],
    "full": [*_LOSSES, *(call for shape in MODELS.values() for call in _model(*shape)),
        *(call for shape in _TRAINED["gemma"].values() for call in _model(*shape, **_GEMMA_NORM))],
}  # fmt: skip
