# SPDX-License-Identifier: BSD-3-Clause
"""Liger's kernels for fine-tuning, with gradients, as the models that Liger patches call them.

The kernels are RMS norm (Llama, Gemma), rotary embedding, SwiGLU, GeGLU, and the last layer fused
with its loss.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.layers import table as layers
from strix_validate.numerics import reference
from strix_validate.numerics.reference import TERMS, Precision, store
from strix_validate.triton.call import BF16, PackageCall, Shipped, differentiate
from strix_validate.triton.cases import Build, Candidate, Case, Expected, Randn, choose

MODULE = "liger_kernel"
PACKAGE = "liger-kernel"
#: The label of a token that is left out of the loss.
IGNORED = -100


def _convert(dtype: Precision, *tensors: Tensor) -> list[Tensor]:
    """Return tensors in reference.working_dtype; if dtype is TERMS, return their magnitudes."""
    converted = [x.to(reference.working_dtype(dtype)) for x in tensors]
    if dtype == TERMS:
        return [x.abs() for x in converted]
    return converted


def _store_all(results: dict[str, Tensor], dtype: Precision) -> dict[str, Tensor]:
    return {name: store(value, dtype) for name, value in results.items()}


def _rms_norm(
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    *,
    eps: float,
    offset: float,
    casting: str,
) -> dict[str, Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def norm(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        out = LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)
        return {"out": out}

    return differentiate(norm, {"x": x, "weight": weight}, {"out": grad})


def rms_norm(
    randn: Randn,
    *,
    rows=5,
    columns=300,
    eps=1e-6,
    offset=0.0,
    casting="llama",
) -> tuple[PackageCall, Expected]:
    """Build a call of RMS norm, forward and backward.

    Args:
        randn: Draws the numbers.
        rows: Number of rows of the input.
        columns: Number of columns of the input.
        eps: The norm's eps. A large one shows whether the kernel uses it.
        offset: Number that is added to the weight (1 in Gemma).
        casting: With "llama", the normalized row is rounded before it is multiplied by the weight;
            with "gemma", it is not.
    """
    x = randn(rows, columns)
    weight = randn(columns)
    grad = randn(rows, columns)
    tensors = {"x": x, "weight": weight, "grad": grad}
    options = {"eps": eps, "offset": offset, "casting": casting}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        # The kernel adds the offset in float32. In 16 bits, the sum would be rounded.
        a, w, d = _convert(dtype, x, weight.float() + offset, grad)
        sign = 1.0 if dtype == TERMS else -1.0
        inverse = (x.to(a.dtype).square().mean(-1, keepdim=True) + eps).rsqrt()
        row = a * inverse
        if casting == "llama":
            row = store(row, dtype)
        dot = (d * w * a).mean(-1, keepdim=True)
        results = {
            "out": row * w,
            "dx": inverse * (d * w + sign * inverse.square() * dot * a),
            "dweight": (d * row).sum(0),
        }
        return _store_all(results, dtype)

    return PackageCall(_rms_norm, tensors, options, package=PACKAGE), expected


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> dict:
    from liger_kernel.ops.rope import LigerRopeFunction

    def rotate(q: Tensor, k: Tensor) -> dict[str, Tensor]:
        # The kernel overwrites its inputs, so it gets copies.
        q_out, k_out = LigerRopeFunction.apply(q * 1, k * 1, cos, sin)
        return {"q_out": q_out, "k_out": k_out}

    return differentiate(rotate, {"q": q, "k": k}, {"q_out": dq, "k_out": dk})


def rope(
    randn: Randn,
    *,
    batch=2,
    tokens=7,
    heads=6,
    kv_heads=2,
    head_dim=64,
    rotary=0,
    per_sequence=False,
) -> tuple[PackageCall, Expected]:
    """Build a call of rotary embedding, which rotates pairs of elements i and i + rotary / 2.

    The gradients are rotated back.

    Args:
        randn: Draws the numbers.
        batch: Number of sequences.
        tokens: Number of tokens of each sequence.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Size of a head.
        rotary: Number of elements that are rotated (in GLM and Phi not all); 0 is all.
        per_sequence: Whether each sequence has its own positions (packed training).
    """
    rotary_dim = rotary or head_dim
    q = randn(batch, heads, tokens, head_dim)
    dq = randn(batch, heads, tokens, head_dim)
    k = randn(batch, kv_heads, tokens, head_dim)
    dk = randn(batch, kv_heads, tokens, head_dim)
    lists = batch if per_sequence else 1
    angle = (randn(lists, tokens, rotary_dim // 2).float() * 3).repeat(1, 1, 2)
    cos = angle.cos().to(q.dtype)
    sin = angle.sin().to(q.dtype)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        half_cos = cos[:, None, :, : rotary_dim // 2]
        half_sin = sin[:, None, :, : rotary_dim // 2]
        results = {
            "q_out": reference.rotate(q, half_cos, half_sin, dtype),
            "k_out": reference.rotate(k, half_cos, half_sin, dtype),
            "dq": reference.rotate(dq, half_cos, -half_sin, dtype),
            "dk": reference.rotate(dk, half_cos, -half_sin, dtype),
        }
        return _store_all(results, dtype)

    tensors = {"q": q, "k": k, "cos": cos, "sin": sin, "dq": dq, "dk": dk}
    return PackageCall(_rope, tensors, package=PACKAGE), expected


def _swiglu(gate: Tensor, up: Tensor, grad: Tensor) -> dict[str, Tensor]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def multiply(gate: Tensor, up: Tensor) -> dict[str, Tensor]:
        # The backward pass overwrites the inputs, so the function gets copies.
        return {"out": LigerSiLUMulFunction.apply(gate * 1, up * 1)}

    return differentiate(multiply, {"gate": gate, "up": up}, {"out": grad})


def swiglu(
    randn: Randn,
    *,
    rows=5,
    columns=300,
    gain=1.0,
) -> tuple[PackageCall, Expected]:
    """Build a call of silu(gate) * up.

    Args:
        randn: Draws the numbers.
        rows: Number of rows of the inputs.
        columns: Number of columns of the inputs.
        gain: Factor of the gates. For large gates, the slope of silu is 1 or 0.
    """
    gate = randn(rows, columns) * gain
    up = randn(rows, columns)
    grad = randn(rows, columns)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        a, u, d = _convert(dtype, gate, up, grad)
        s = torch.sigmoid(gate.to(a.dtype))
        silu = store(a * s, dtype)
        slope = s + a * s * (1 - s)
        results = {"out": silu * u, "dgate": d * u * slope, "dup": d * silu}
        return _store_all(results, dtype)

    tensors = {"gate": gate, "up": up, "grad": grad}
    return PackageCall(_swiglu, tensors, package=PACKAGE), expected


def _geglu(gate: Tensor, up: Tensor, grad: Tensor) -> dict[str, Tensor]:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    def multiply(gate: Tensor, up: Tensor) -> dict[str, Tensor]:
        # The backward pass overwrites the inputs, so the function gets copies.
        return {"out": LigerGELUMulFunction.apply(gate * 1, up * 1)}

    return differentiate(multiply, {"gate": gate, "up": up}, {"out": grad})


def geglu(randn: Randn, *, rows=5, columns=300) -> tuple[PackageCall, Expected]:
    """Build a call of gelu(gate) * up, with the tanh form of gelu (Gemma)."""
    # For gates far below -4, 1 + tanh is smaller than its rounding error in float32.
    gate = randn(rows, columns).clamp(min=-4)
    up = randn(rows, columns)
    grad = randn(rows, columns)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        a, u, d = _convert(dtype, gate, up, grad)
        x = gate.to(a.dtype)
        root = (2 / torch.pi) ** 0.5
        t = torch.tanh(root * (x + 0.044715 * x**3))
        inner = x * (1 - t.square()) * root * (1 + 3 * 0.044715 * x.square())
        if dtype == TERMS:
            inner = inner.abs()
        gelu = store(a * (1 + t) / 2, dtype)
        slope = (1 + t) / 2 + inner / 2
        results = {"out": gelu * u, "dgate": d * u * slope, "dup": d * gelu}
        return _store_all(results, dtype)

    tensors = {"gate": gate, "up": up, "grad": grad}
    return PackageCall(_geglu, tensors, package=PACKAGE), expected


def _loss(x: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        results = LigerFusedLinearCrossEntropyFunction.apply(
            x,
            weight,
            labels,
            None,  # bias
            None,  # weights of the classes
            IGNORED,
            0.0,  # scale of the z-loss, the square of logsumexp
            options["smoothing"],
            options["reduction"],
            options["softcap"],
            False,  # do not return the z-loss
            torch.float32,
        )
        return {"loss": results[0]}

    grad = torch.tensor(options["gain"], device=x.device, dtype=torch.float32)
    return differentiate(loss, {"x": x, "weight": weight}, {"loss": grad})


def loss(  # noqa: PLR0913 (the options of a case)
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
    """Build a call of the last layer fused with cross entropy in float32.

    Args:
        randn: Draws the numbers.
        tokens: Number of rows of x.
        size: Number of columns of x.
        words: Size of the vocabulary.
        smoothing: Label smoothing.
        softcap: Softcap of the logits; None is off.
        ignored: Number of labels that are left out of the loss (padding, prompts).
        gain: Gradient of the loss. Unless it is 1, Liger multiplies the gradients by it in a
            separate kernel, which has a program for each token of the vocabulary.
        low: Level of all logits, see reference.with_low_scores; 0 for none.
        reduction: "mean" or "sum" over the labels that are not left out.
    """
    x = randn(tokens, size)
    weight = randn(words, size) / size**0.5
    if low:
        x, weight = reference.with_low_scores(x, weight, low, 1.0)
    labels = (torch.arange(tokens) * 37 + 11) % words
    labels[:ignored] = IGNORED
    options = {
        "smoothing": smoothing,
        "softcap": softcap,
        "gain": gain,
        "reduction": reduction,
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        plain = torch.float64 if dtype == TERMS else dtype
        logits = store(reference.product(x, weight, plain), plain)
        slope = torch.ones_like(logits)
        if softcap:
            inner = torch.tanh(logits / softcap)
            logits = softcap * inner
            slope = 1 - inner.square()
        counts = (labels != IGNORED)[:, None]
        one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), words).to(logits)
        targets = one_hot * (1 - smoothing) + smoothing / words
        log_weights = logits.log_softmax(-1)
        weights = log_weights.exp()
        n = counts.sum() if reduction == "mean" else 1
        if dtype == TERMS:
            # A kernel rounds each logit when it stores it. The relative error of a weight is the
            # relative error of its logit, times the logit's magnitude.
            weights = weights * (1 + logits.abs())
            errors = weights + targets
            log_sizes = logits.abs() + logits.logsumexp(-1, keepdim=True).abs()
            losses = log_sizes * targets
        else:
            errors = weights - targets
            losses = -log_weights * targets
        errors = store(gain * errors * slope * counts / n, dtype)
        a, w = _convert(dtype, x, weight)
        return {
            "loss": (losses * counts).sum() / n,
            "dx": store(errors @ w, dtype),
            "dweight": store(errors.T @ a, dtype),
        }

    tensors = {"x": x, "weight": weight, "labels": labels}
    return PackageCall(_loss, tensors, options, package=PACKAGE), expected


#: Size of a vocabulary. All vocabularies of more than 32,768 tokens whose size is a multiple of 16
#: share one kernel. All numbers of columns of x between two powers of two share one kernel, too. If
#: the number of labels in the loss is a multiple of 16, another kernel is compiled.
WORDS = 32784
_COMPILES = "a kernel that no longer compiles for gfx1151, or needs more LDS than the chip has"
#: The options of Gemma's norms.
_GEMMA_NORM: dict = {"offset": 1.0, "casting": "gemma"}
_TAIL = "a last block that is computed as if it was full, although it is not"
_GEMMA = "a norm that multiplies by weight, not by 1 + weight, or does not round where Gemma rounds"
_EPS = "a wrong eps in the norm"
_TURN = "a gradient that is not rotated back, or a rotation of elements that must stay as they are"
_SLOPE = "a wrong derivative of silu, also for large values of the gate"
_GELU = "the wrong form of gelu, or a wrong derivative of it (Gemma)"
_LABELS = "a loss that includes labels that must be ignored (prompts and padding)"
_SMOOTH = "label smoothing or Gemma's softcap left out of the gradient"
_MODEL = "a fault with a model's last block, or with a number of heads that is no power of two"

COMPILED = {
    "rms-norm": Case(partial(rms_norm, columns=4096), _COMPILES, BF16),
    "rms-norm-gemma": Case(partial(rms_norm, columns=3584, **_GEMMA_NORM), _COMPILES, BF16),
    "rope": Case(partial(rope, heads=32, kv_heads=8, head_dim=128), _COMPILES, BF16),
    "swiglu": Case(partial(swiglu, columns=14336), _COMPILES, BF16),
    "loss": Case(partial(loss, tokens=4, size=256, words=32000), _COMPILES, BF16),
}


def _describe_block(size: int) -> tuple[int, bool]:
    """Return the smallest power of two that is not below size, and whether it equals size."""
    block = 1 << (size - 1).bit_length()
    return block, block == size


def _model_candidates(name: str, row: layers.Model) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates for a model's norm, rotary embedding, SwiGLU and loss."""
    is_gemma = bool(row.softcap) or name.startswith("Gemma")
    norm = _GEMMA_NORM if is_gemma else {}
    yield (
        f"rms-norm-{name}",
        Candidate(
            partial(rms_norm, rows=3, columns=row.hidden_size, **norm),
            ("norm", *_describe_block(row.hidden_size), is_gemma),
        ),
    )
    if row.num_key_value_heads:
        heads: dict[str, Any] = {
            "heads": row.num_attention_heads,
            "kv_heads": row.num_key_value_heads,
            "head_dim": row.head_dim,
        }
        build: partial = partial(rope, batch=1, tokens=2, **heads)
        yield f"rope-{name}", Candidate(build, ("rope", *heads.values()))
    if row.intermediate_size:
        build = partial(swiglu, rows=2, columns=row.intermediate_size)
        yield (
            f"swiglu-{name}",
            Candidate(build, ("swiglu", *_describe_block(row.intermediate_size))),
        )
    # Each row of logits begins at a multiple of this number of elements.
    alignment = min(row.vocab_size & -row.vocab_size, 16)
    build = partial(
        loss,
        tokens=3,
        size=16,
        words=row.vocab_size,
        ignored=1,
        gain=1.0,
        softcap=row.softcap or None,
    )
    is_large = row.vocab_size > 1 << 17
    yield f"loss-{name}", Candidate(build, ("loss", alignment, is_large, row.softcap))


def model_cases() -> dict[str, Case]:
    """Return cases of norm, rotary embedding, SwiGLU and loss, with the sizes of each model."""
    candidates: dict[str, Candidate] = {}
    for name, row in layers.MODELS.items():
        candidates.update(_model_candidates(name, row))
    return choose(candidates, _MODEL)


COMPUTED = {
    "rms-norm": Case(rms_norm, _TAIL),
    "rms-norm-eps": Case(partial(rms_norm, eps=0.5), _EPS),
    "rms-norm-gemma": Case(partial(rms_norm, **_GEMMA_NORM), _GEMMA),
    "rope": Case(rope, _TURN),
    "rope-partial": Case(partial(rope, rotary=32), _TURN),
    "swiglu": Case(swiglu, _SLOPE),
    "swiglu-large": Case(partial(swiglu, gain=8.0), _SLOPE),
    "rope-own": Case(
        partial(rope, per_sequence=True),
        "the first sequence's positions used for all sequences",
    ),
    "geglu": Case(geglu, _GELU),
    "geglu-Gemma-2-9B": Case(partial(geglu, rows=2, columns=14336), _GELU),
    "loss": Case(loss, _LABELS),
    "loss-sum": Case(
        partial(loss, reduction="sum"), "a summed loss divided by the number of labels"
    ),
    "loss-smoothed": Case(partial(loss, smoothing=0.1), _SMOOTH),
    # This case is only in float32; see FLOAT16_OR_32.
    "loss-low": Case(partial(loss, low=-8.0), reference.LOW_SCORES_FAULT, torch.float32),
    "loss-softcap": Case(partial(loss, softcap=3.0), _SMOOTH),
    "loss-words": Case(
        partial(loss, tokens=3, size=32, words=40000, ignored=1, gain=1.0),
        "a second block of the vocabulary, the tokens after the 32,768th, left out",
    ),
    "rms-norm-rows": Case(
        partial(rms_norm, rows=(1 << 15) + 3, columns=32),
        "a fault of the kernel for 32,768 or more rows of at most 256 columns",
        size=Size.FULL,
    ),
    **model_cases(),
}
#: Cases that a GPU does not compute in bfloat16. In 16 bits, logits as low as those of loss-low are
#: too coarse for a judgement of the results.
FLOAT16_OR_32 = ("loss-low",)
#: The sizes of these cases give each thread at least one element. With smaller sizes, some threads
#: repeat the elements of other threads, and may read elements that the other threads have already
#: overwritten. Nothing uses the results of such threads, but the emulator reports a race.
EMULATED = {
    "rms-norm": Case(rms_norm, _TAIL, BF16),
    "rms-norm-gemma": Case(partial(rms_norm, **_GEMMA_NORM), _GEMMA, BF16),
    "rope": Case(partial(rope, heads=8, kv_heads=4), _TURN, BF16),
    "swiglu": Case(swiglu, _SLOPE, BF16),
    "loss": Case(partial(loss, tokens=5, size=1024, words=1000), _LABELS, BF16),
}

#: hidden_size, intermediate_size, query heads, key heads, head_dim.
_Shape = tuple[int, int, int, int, int]


def _list_trained(norm_style: str) -> dict[str, _Shape]:
    """Return the shapes of the models that Liger patches and that have this style of norm."""
    shapes = {}
    for name, model in layers.MODELS.items():
        if model.liger == norm_style:
            shapes[name] = (
                model.hidden_size,
                model.intermediate_size,
                model.num_attention_heads,
                model.num_key_value_heads,
                model.head_dim,
            )
    return shapes


MODELS = _list_trained("llama")
_GEMMA_MODELS = _list_trained("gemma")


def _list_model_calls(shape: _Shape, activation: Build, **norm) -> list[Shipped]:
    """List calls of a model's training.

    Args:
        shape: The sizes of the model.
        activation: swiglu or geglu, the activation of the model's MLP.
        norm: Options of rms_norm.
    """
    hidden, inner, heads, kv_heads, head_dim = shape
    builds: list[partial] = []
    for rows in (1, 5, 32):
        builds.append(partial(rms_norm, rows=rows, columns=hidden, **norm))
    # Queries and keys are normalized too. There is a separate kernel for many rows.
    for rows in (8, 64, 1 << 15):
        builds.append(partial(rms_norm, rows=rows, columns=head_dim, **norm))
    rotate = partial(rope, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    for batch, tokens in product((1, 2, 4, 8), (7, 16)):
        builds.append(partial(rotate, batch=batch, tokens=tokens))
    for rows in (1, 5):
        builds.append(partial(activation, rows=rows, columns=inner))
    return [(build, BF16) for build in builds]


_LOSSES = [
    (partial(loss, tokens=tokens, size=size, words=WORDS), BF16)
    for size, tokens in product((1024, 1040, 2064, 4112), (4, 18))
]


def _list_all_calls() -> list[Shipped]:
    calls: list[Shipped] = [*_LOSSES]
    for shape in MODELS.values():
        calls += _list_model_calls(shape, swiglu)
    for shape in _GEMMA_MODELS.values():
        calls += _list_model_calls(shape, geglu, **_GEMMA_NORM)
    return calls


SHIPPED: dict[str, list[Shipped]] = {
    "sample": [*_list_model_calls(MODELS["Llama-3.1-8B"], swiglu), *_LOSSES[4:6]],
    "full": _list_all_calls(),
}
