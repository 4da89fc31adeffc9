# SPDX-License-Identifier: BSD-3-Clause
"""torch's scaled_dot_product_attention, one backend at a time: shapes and their comparison."""

import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from strix_validate import reference
from strix_validate.checks import CannotRun, Check, Options, Result, Size, State

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
#: dv and dk: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention_backward.
_CPU_SUMS = "torch's flash attention on the CPU keeps the sums of dk and dv in 16 bits"
#: Part of the name of a fused backend's operator; everything else is math.
_FUSED = {
    "flash": "_flash_attention",
    "efficient": "_efficient_attention",
    "cudnn": "_cudnn_attention",
}
Route = Callable[..., Tensor]


def forced(backend: SDPBackend) -> Route:
    """scaled_dot_product_attention by one backend only; torch alone would fall back silently."""

    def route(*args, **options):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*args, **options)

    return route


#: By name; "default" is what a plain call gets.
ROUTES: dict[str, Route] = {
    **{name: forced(backend) for name, backend in BACKENDS.items()},
    "default": torch.nn.functional.scaled_dot_product_attention,
}


@dataclass(frozen=True)
class Shape:
    """The arguments of a scaled_dot_product_attention call, and the bug that it would catch.

    v_dim: of the values, 0 is head_dim. attn_mask: "bool" or "additive", random, each query with at
    least one key; "padding", by sequence; "least", causal and padded in front, with the smallest
    number of the dtype; "learned", additive by head, with a gradient. layout: "strided", "expanded"
    (one head of keys and values for all), "packed" (q, k and v in one tensor). gain: q times this.
    needs: the gradients that are computed. sink: see reference.with_sink. may_refuse: an error is
    also right. on_device: the reference is too large for the CPU. gib: memory it takes, where
    tensors exceed 2 GiB; then the first, middle and last sequences are compared.
    """

    name: str
    why: str
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 64
    v_dim: int = 0
    causal: bool = False
    scale: float | None = None
    attn_mask: str = ""
    layout: str = ""
    gain: float = 1.0
    needs: str = "qkv"
    sink: reference.Sink = None
    may_refuse: bool = False
    on_device: bool = False
    gib: int = 0
    dtypes: tuple[torch.dtype, ...] = DTYPES
    size: Size = Size.QUICK


_NAN_D72 = (
    "NaN in fp16 and bf16 at head dim 72 on gfx1151 (SAM 2.1): "
    "https://github.com/ROCm/aotriton/issues/54"
)
_RACE_D80 = (
    "kernels of another chip: NaN at head dim 80, causal: "
    "https://github.com/ROCm/aotriton/issues/183"
)
_D512 = (
    "values that are wrong without a word above head dim 256, of which AOTriton has no kernels on "
    "gfx11 (Stable Diffusion's VAE): https://github.com/pytorch/pytorch/issues/189849"
)
_PADDED = "padding of the head dim to the next power of two that leaks into the result"
_STRIDES = "(batch, seqlen, heads) memory taken for (batch, heads, seqlen)"
_MASK = "a mask read with the wrong strides, or inverted"
_BLOCKS = "the second block of 512 queries or keys left out, or the first sequence read for each"
_LENGTH = "keys read behind the last one, or rows of the last block not written"
SHAPES = (
    Shape("full", "a wrong scale or a head mixed up with another", batch=2),
    Shape("causal", "a mask off by one", causal=True),
    Shape("ragged", _LENGTH, seqlen_q=113, seqlen_k=113, causal=True),
    Shape("cross", "seqlen_q taken for seqlen_k", seqlen_q=70, seqlen_k=133),
    Shape(
        "cross-causal",
        "causal aligned bottom-right, as in flash-attn, where torch says top-left: "
        "https://github.com/pytorch/pytorch/issues/108108",
        seqlen_q=70,
        seqlen_k=133,
        causal=True,
    ),
    Shape("gqa", "a wrong key/value head", heads=8, kv_heads=2, causal=True),
    Shape("mqa", "a wrong key/value head, or gradients not summed over the group", kv_heads=1),
    Shape("one-query", "decoding: a block of queries with one row", seqlen_q=1, seqlen_k=133),
    Shape("one-key", "softmax over one key, which is 1 exactly", seqlen_q=37, seqlen_k=1),
    Shape("one-token", "both lengths below every block size", seqlen_q=1, seqlen_k=1, causal=True),
    Shape("strided", _STRIDES, layout="strided"),
    Shape("bool-mask", _MASK, attn_mask="bool", seqlen_k=133),
    Shape("additive-mask", _MASK, attn_mask="additive", seqlen_k=133),
    Shape("blocks", _BLOCKS, batch=2, heads=2, kv_heads=1, seqlen_q=577, seqlen_k=600, head_dim=32),
    Shape(
        "blocks-causal",
        _BLOCKS,
        batch=2,
        heads=1,
        kv_heads=1,
        seqlen_q=577,
        seqlen_k=577,
        head_dim=32,
        causal=True,
    ),
    *(
        Shape(
            f"sink-{sink}",
            reference.WHY_SINK,
            heads=2,
            kv_heads=2,
            seqlen_q=577,
            seqlen_k=577,
            head_dim=32,
            sink=sink,
            needs=needs,
            dtypes=HALVES,
        )
        # what the gradients of k and v sum is of one sign in "query" alone
        for sink, needs in (("key", "q"), ("query", "qkv"))
    ),
    Shape("scale", "a scale of 1 / sqrt(head_dim), whatever is passed", scale=0.3, causal=True),
    Shape(
        "padding-mask",
        "the mask of the first sequence read for each: batches of padded prompts",
        batch=3,
        seqlen_q=40,
        seqlen_k=133,
        attn_mask="padding",
        dtypes=HALVES,
    ),
    Shape(
        "least-mask",
        "NaN of a tile that a mask of the smallest number shuts out, in base 2 its infinity: "
        "https://github.com/pytorch/pytorch/issues/110213",
        batch=2,
        seqlen_q=40,
        seqlen_k=133,
        attn_mask="least",
        dtypes=HALVES,
    ),
    Shape(
        "learned-mask",
        "the gradient of a bias: scaled like q's, or one head's for all",
        batch=2,
        heads=2,
        kv_heads=2,
        seqlen_q=72,
        seqlen_k=136,
        head_dim=32,
        attn_mask="learned",
        dtypes=(torch.float32, torch.float16),
    ),
    *(
        Shape(
            f"value-dim-{v_dim}",
            "values read with the keys' head dim (DeepSeek's MLA has 192 and 128)",
            heads=2,
            kv_heads=2,
            seqlen_q=70,
            seqlen_k=70,
            head_dim=head_dim,
            v_dim=v_dim,
            causal=True,
            dtypes=HALVES,
        )
        for head_dim, v_dim in ((96, 64), (32, 72))
    ),
    *(
        Shape(
            f"gradient-{name}",
            "a gradient that is right only where the others are computed as well (LoRA, frozen "
            "layers)",
            heads=2,
            kv_heads=2,
            seqlen_q=70,
            seqlen_k=100,
            needs=name,
            dtypes=(torch.float16,),
        )
        for name in "qkv"
    ),
    *(
        Shape(
            layout,
            why,
            batch=2,
            heads=3,
            kv_heads=3,
            seqlen_q=70,
            seqlen_k=70,
            head_dim=32,
            layout=layout,
            dtypes=(torch.float16,),
        )
        for layout, why in (
            ("expanded", "a stride of 0 taken for the size (keys of one head for all)"),
            ("packed", "q, k and v of one tensor read as if each had its own"),
        )
    ),
    *(
        Shape(
            f"gqa-{group}",
            "a group of heads rounded up to a power of two",
            heads=2 * group,
            kv_heads=2,
            seqlen_q=40,
            seqlen_k=40,
            head_dim=32,
            causal=True,
            dtypes=(torch.bfloat16,),
        )
        for group in (3, 5, 7)
    ),
    Shape(
        "heads-40",
        "heads behind the 32nd left out (Qwen3-14B has 40)",
        heads=40,
        kv_heads=8,
        seqlen_q=20,
        seqlen_k=20,
        head_dim=32,
        dtypes=(torch.float16,),
    ),
    Shape(
        "heads-65568",
        "batch and heads in a dimension of the grid, of which there are 65535: "
        "https://github.com/pytorch/pytorch/issues/142228",
        batch=2049,
        heads=32,
        kv_heads=32,
        seqlen_q=1,
        seqlen_k=2,
        head_dim=16,
        dtypes=(torch.float16,),
    ),
    Shape(
        "batch-9",
        "sequences behind the fourth left out",
        batch=9,
        heads=2,
        kv_heads=2,
        seqlen_q=33,
        seqlen_k=33,
        head_dim=32,
        causal=True,
        dtypes=HALVES,
    ),
    Shape(
        "decode-4100",
        "a split over keys that are merged wrongly, or of no more than 2048",
        heads=2,
        kv_heads=2,
        seqlen_q=1,
        seqlen_k=4100,
        dtypes=HALVES,
    ),
    Shape(
        "cross-causal-long",
        "queries behind the last key left out, where causal is top-left: they see all keys",
        seqlen_q=133,
        seqlen_k=70,
        causal=True,
        dtypes=HALVES,
    ),
    Shape(
        "peaked",
        "exp of a score that no maximum was taken from, which overflows above 88, in the backward "
        "pass alone",
        heads=2,
        kv_heads=2,
        gain=30.0,
        dtypes=HALVES,
    ),
    Shape("d32", "tile sizes of the smallest usual head dim", head_dim=32, causal=True),
    Shape("d72", _NAN_D72, batch=2, head_dim=72),
    Shape("d80", _RACE_D80, head_dim=80, causal=True),
    Shape("d96", _PADDED, head_dim=96, causal=True),
    Shape("d128", "LDS or tile sizes of the largest usual head dim", head_dim=128, causal=True),
    Shape("d160", _PADDED, head_dim=160),
    Shape("d192", _PADDED, head_dim=192, causal=True),
    Shape("d256", "LDS of the largest head dim that gfx11 has kernels for", head_dim=256),
    Shape("d512", _D512, head_dim=512, heads=2, kv_heads=2, may_refuse=True),
    *(
        Shape(
            f"length-{length}",
            _LENGTH,
            seqlen_q=length,
            seqlen_k=length,
            causal=causal,
            size=Size.FULL,
        )
        for length, causal in (
            (2, True),
            (63, False),
            (64, True),
            (65, True),
            (127, False),
            (129, True),
            (511, False),
            (1000, True),
        )
    ),
    *(
        Shape(
            f"d{dim}-gqa",
            _PADDED,
            heads=8,
            kv_heads=2,
            head_dim=dim,
            seqlen_q=300,
            seqlen_k=300,
            causal=True,
            size=Size.FULL,
        )
        for dim in (64, 72, 80, 96, 128, 160, 192, 256)
    ),
    Shape(
        "sam2",
        _NAN_D72,
        batch=4,
        heads=8,
        kv_heads=8,
        seqlen_q=4096,
        seqlen_k=4096,
        head_dim=72,
        on_device=True,
        size=Size.FULL,
    ),
    Shape(
        "long",
        "an index that overflows, or an error that grows with the length",
        heads=2,
        kv_heads=2,
        seqlen_q=8192,
        seqlen_k=8192,
        head_dim=128,
        causal=True,
        on_device=True,
        size=Size.STRESS,
    ),
    Shape(
        "beyond-4-gib",
        "an offset of 32 bits: tensors of more than 2^31 numbers, in more than 2^32 bytes",
        batch=4100,
        heads=64,
        kv_heads=64,
        seqlen_q=64,
        seqlen_k=64,
        head_dim=128,
        causal=True,
        on_device=True,
        gib=48,
        dtypes=(torch.bfloat16,),
        size=Size.STRESS,
    ),
    *(
        Shape(
            f"random-{i}",
            "a combination of lengths, heads and head dim that no other check has",
            batch=1 + i % 3,
            heads=(1, 4, 6, 8)[i % 4] * (1, 2)[i % 2],
            kv_heads=(1, 4, 6, 8)[i % 4],
            seqlen_q=1 + i * 7919 % 701,
            seqlen_k=1 + i * 6271 % 977,
            head_dim=(32, 40, 64, 72, 80, 88, 96, 128, 160, 256)[i % 10],
            size=Size.STRESS,
        )
        for i in range(1, 41)
    ),
)


def checks() -> list[Check]:
    return [_check(*case) for case in _cases()]


def run(wanted: set[Check], options: Options) -> Iterator[Result]:
    """One result per wanted check; all routes get the same inputs."""
    last = problem = None
    for route, shape, dtype in _cases():
        check = _check(route, shape, dtype)
        if check not in wanted:
            continue
        if shape.sink == "query" and options.device == "cpu" and route in ("flash", "default"):
            yield Result(check, State.SKIPPED, _CPU_SUMS)
            continue
        if shape.gib > _free_gib(options.device):
            yield Result(check, State.SKIPPED, f"{shape.gib} GiB of memory are not free")
            continue
        if last != (shape, dtype):
            last, problem = (shape, dtype), Problem(shape, dtype, options.device)
        yield run_one(check, ROUTES[route], problem)


def _free_gib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def size_of(check: Check) -> Size:
    return _sizes()[check.id]


@cache
def _sizes() -> dict[str, Size]:
    return {_check(*case).id: case[1].size for case in _cases()}


def _cases() -> Iterator[tuple[str, Shape, torch.dtype]]:
    for shape in SHAPES:
        for dtype in shape.dtypes:
            for route in ROUTES:
                yield route, shape, dtype


def _check(route: str, shape: Shape, dtype: torch.dtype) -> Check:
    name = str(dtype).removeprefix("torch.")
    title = f"torch SDPA {route}: {shape.name} {name}"
    return Check(f"sdpa/{route}/{shape.name}-{name}", title, shape.why)


#: Sequences of other numbers where tensors exceed 2 GiB: a prime, so that an offset that wraps
#: around never meets the same numbers again.
_POOL = 61


class Problem:
    """The inputs of a shape, the same in every run, and what attention makes of them.

    compared: the sequences whose results are; all if it is None.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(shape.name.encode()))

        def randn(heads: int, seqlen: int, head_dim: int = shape.head_dim) -> Tensor:
            batch = min(shape.batch, _POOL) if shape.gib else shape.batch
            size = (batch, heads, seqlen, head_dim)
            if shape.layout == "strided":
                size = (batch, seqlen, heads, head_dim)
            x = torch.randn(size, generator=generator).to(dtype)
            return x.transpose(1, 2) if shape.layout == "strided" else x

        self.shape, self.dtype, self.device = shape, dtype, device
        v_dim, kv_heads = shape.v_dim or shape.head_dim, shape.kv_heads
        q = randn(shape.heads, shape.seqlen_q) * shape.gain
        grad_out = randn(shape.heads, shape.seqlen_q, v_dim)
        k = randn(1 if shape.layout == "expanded" else kv_heads, shape.seqlen_k)
        v = randn(k.shape[1], shape.seqlen_k, v_dim)
        if shape.sink:
            found = reference.with_sink(q, k, v, grad_out, shape.sink)
            q, k, v, grad_out = (x.to(dtype) for x in found)
        attn_mask = _attn_mask(shape, dtype, generator)
        where = device if shape.on_device else "cpu"
        all_heads = (x.expand(-1, kv_heads, -1, -1) for x in (k, v))
        self._reference = [x.to(where) for x in (q, *all_heads, grad_out)]
        self._mask = None if attn_mask is None else attn_mask.to(where)
        self.compared = None
        if shape.gib:
            last = shape.batch - 1
            self.compared = [0, 1, last // 2, last - 1, last]
        self.inputs = self._laid_out(*(x.to(device) for x in (q, k, v, grad_out)))
        self.options = {
            "attn_mask": None if attn_mask is None else attn_mask.to(device),
            "is_causal": shape.causal,
            "scale": shape.scale,
            "enable_gqa": shape.heads != shape.kv_heads,
        }
        self.expected = cache(self._expect)

    def _laid_out(self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        """In the shape's layout, on the device: a copy to it would change some."""
        if self.shape.layout == "expanded":
            k, v = (x.expand(-1, self.shape.kv_heads, -1, -1) for x in (k, v))
        if self.shape.layout == "packed":
            # (batch, seqlen, 3, heads, head_dim), as one linear layer gives them
            together = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
            q, k, v = (x.transpose(1, 2) for x in together.unbind(2))
        if self.shape.gib:
            chosen = torch.arange(self.shape.batch, device=q.device) % _POOL
            q, k, v, grad_out = (x[chosen] for x in (q, k, v, grad_out))
        return q, k, v, grad_out

    def _expect(self, dtype: reference.Precision) -> dict[str, Tensor]:
        causal = "top-left" if self.shape.causal else None
        # one sequence at a time: in float64 the scores of the largest shapes fill the memory
        length = self.shape.seqlen_q * self.shape.seqlen_k
        step = 1 if length > 4096 else max(1, 2**20 // (length * self.shape.heads))
        chosen = [slice(i, i + step) for i in range(0, self.shape.batch, step)]
        if self.compared:
            chosen = [slice(i % _POOL, i % _POOL + 1) for i in self.compared]
        masks = self._mask is not None and self._mask.dim() == 4
        parts = [
            reference.attention(
                *(x[rows] for x in self._reference),
                causal=causal,
                attn_mask=self._mask[rows] if masks else self._mask,
                scale=self.shape.scale,
                dtype=dtype,
            )
            for rows in chosen
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _attn_mask(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    """The shape's mask; of two dimensions where all sequences and heads share it."""
    scores = torch.randn(shape.seqlen_q, shape.seqlen_k, generator=generator)
    if shape.attn_mask == "bool":
        return (scores > 0).index_fill(1, torch.tensor(0), True)  # every query sees key 0
    if shape.attn_mask == "additive":
        return scores.to(dtype)
    if shape.attn_mask == "learned":
        size = (shape.batch, shape.heads, *scores.shape)
        return torch.randn(size, generator=generator).to(dtype)
    key, own = torch.arange(shape.seqlen_k), torch.arange(shape.seqlen_q)[:, None]
    sequence = torch.arange(shape.batch)[:, None, None, None]
    if shape.attn_mask == "padding":
        return key < shape.seqlen_k - 37 * sequence
    if shape.attn_mask == "least":
        # all of the first 64 keys of the second sequence are padding
        own = own + shape.seqlen_k - shape.seqlen_q
        seen = (key <= own) & (key >= 70 * sequence)
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return None


def run_one(check: Check, route: Route, problem: Problem) -> Result:
    """Compares a route's output with and without gradients, and the gradients.

    A refusal is a skip, or a pass where allowed.
    """
    *tensors, grad_out = problem.inputs
    needs, options = problem.shape.needs, dict(problem.options)
    tensors = [
        x.detach().requires_grad_(name in needs) for name, x in zip("qkv", tensors, strict=True)
    ]
    leaves = {f"d{name}": x for name, x in zip("qkv", tensors, strict=True) if name in needs}
    if problem.shape.attn_mask == "learned":
        leaves["dmask"] = options["attn_mask"] = options["attn_mask"].detach().requires_grad_()
    try:
        out, operators = call(route, *tensors, **options)
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
        with torch.no_grad():
            inference, without = call(route, *tensors, **options)
    except CannotRun as refusal:
        if problem.shape.may_refuse and not isinstance(refusal, NoBackend):
            return Result(check, State.PASSED, f"Refused, which is right: {refusal}")
        return Result(check, State.SKIPPED, str(refusal))
    except Exception as error:  # any other exception is a failure
        return Result(check, State.FAILED, f"{type(error).__name__}: {error}")
    actual = {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
    if not torch.equal(inference, out):
        actual["inference"] = inference
    if problem.compared:
        actual = {name: x[problem.compared] for name, x in actual.items()}

    def expected(dtype: reference.Precision) -> dict[str, Tensor]:
        found = problem.expected(dtype)
        return {name: found["out" if name == "inference" else name] for name in actual}

    result = reference.compare(check, actual, expected, problem.dtype)
    name = check.id.split("/")[1]
    fault = wrong_operator(name, operators) or wrong_operator(name, without)
    measured = result.measured | {"operator": kind_of(operators)}
    if fault:
        return Result(check, State.FAILED, f"{fault}. {result.reason}".strip(), measured)
    return Result(check, result.state, result.reason, measured)


def call(route: Route, *args: Tensor, **options) -> tuple[Tensor, list[str]]:
    """What a route returns, and the names of the operators that ran.

    Raises:
        CannotRun: torch has no such backend, or none that takes these arguments.
    """
    with warnings.catch_warnings(record=True) as said, _Operators() as operators:
        warnings.simplefilter("always")
        try:
            return route(*args, **options), operators.names
        except RuntimeError as error:
            message = str(error)
            if not message.startswith(("No available kernel", "No viable backend")):
                raise
            kind = NoBackend if message.startswith("No viable backend") else CannotRun
            raise kind(refusal(message, said)) from error


def refusal(message: str, said: list[warnings.WarningMessage]) -> str:
    """torch's refusal in one line. Its warnings give reasons, for other backends as well."""
    why = [re.sub(r"\(Triggered internally.*?\)", "", str(warning.message)) for warning in said]
    why = [text.strip() for text in why]
    why = [text for text in why if not text.endswith(("runtime disabled.", "not used because:"))]
    return " ".join(["refused by torch:", message, *dict.fromkeys(why)])


def kind_of(operators: list[str]) -> str:
    """The backend whose operator ran: "flash", "efficient", "cudnn", or else "math"."""
    for kind, part in _FUSED.items():
        if any(part in name for name in operators):
            return kind
    return "math"


def wrong_operator(route: str, operators: list[str]) -> str:
    """A description of the fault if another backend ran than the named one, or ""."""
    ran = kind_of(operators)
    if route in BACKENDS and ran != route:
        return f"{route} was asked for and {ran} ran"
    return ""


class NoBackend(CannotRun):
    """The backend does not exist for this device, whatever the arguments."""


class _Operators(TorchDispatchMode):
    """Collects the name of each operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})
