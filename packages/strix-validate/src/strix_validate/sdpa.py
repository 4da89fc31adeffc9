# SPDX-License-Identifier: BSD-3-Clause
"""torch's scaled_dot_product_attention, one backend at a time: shapes and their comparison."""

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
    """The shape of a scaled_dot_product_attention call, and the bug that it would catch.

    attn_mask: "bool" or "additive", random, each query with at least one key. sink: see
    reference.with_sink. may_refuse: an error is also right. on_device: the reference is too large
    for the CPU.
    """

    name: str
    why: str
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 64
    causal: bool = False
    attn_mask: str = ""
    strided: bool = False
    sink: reference.Sink = None
    may_refuse: bool = False
    on_device: bool = False
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
    Shape(
        "strided", "(batch, seqlen, heads) memory taken for (batch, heads, seqlen)", strided=True
    ),
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
        )
        for sink in ("key", "query")
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
        if last != (shape, dtype):
            last, problem = (shape, dtype), Problem(shape, dtype, options.device)
        yield run_one(check, ROUTES[route], problem)


def size_of(check: Check) -> Size:
    return _sizes()[check.id]


@cache
def _sizes() -> dict[str, Size]:
    return {_check(*case).id: case[1].size for case in _cases()}


def _cases() -> Iterator[tuple[str, Shape, torch.dtype]]:
    for shape in SHAPES:
        for dtype in DTYPES:
            if shape.sink and dtype is torch.float32:
                continue  # it is for sums in 16 bits
            for route in ROUTES:
                yield route, shape, dtype


def _check(route: str, shape: Shape, dtype: torch.dtype) -> Check:
    name = str(dtype).removeprefix("torch.")
    title = f"torch SDPA {route}: {shape.name} {name}"
    return Check(f"sdpa/{route}/{shape.name}-{name}", title, shape.why)


class Problem:
    """The inputs of a shape, the same in every run, and what attention makes of them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(shape.name.encode()))

        def randn(heads: int, seqlen: int) -> Tensor:
            size = (shape.batch, heads, seqlen, shape.head_dim)
            if shape.strided:
                size = (shape.batch, seqlen, heads, shape.head_dim)
            x = torch.randn(size, generator=generator).to(dtype)
            return x.transpose(1, 2) if shape.strided else x

        self.shape, self.dtype, self.device = shape, dtype, device
        q, grad_out = (randn(shape.heads, shape.seqlen_q) for _ in range(2))
        k, v = (randn(shape.kv_heads, shape.seqlen_k) for _ in range(2))
        if shape.sink:
            found = reference.with_sink(q, k, v, grad_out, shape.sink)
            q, k, v, grad_out = (x.to(dtype) for x in found)
        scores = torch.randn(shape.seqlen_q, shape.seqlen_k, generator=generator)
        # every query sees key 0
        masks = {"bool": (scores > 0).index_fill(1, torch.tensor(0), True), "additive": scores}
        attn_mask = masks.get(shape.attn_mask)
        if shape.attn_mask == "additive":
            attn_mask = scores.to(dtype)
        self.inputs = tuple(x.to(device) for x in (q, k, v, grad_out))
        self.options = {
            "attn_mask": None if attn_mask is None else attn_mask.to(device),
            "is_causal": shape.causal,
            "enable_gqa": shape.heads != shape.kv_heads,
        }
        where = device if shape.on_device else "cpu"
        self._reference = [x.to(where) for x in (q, k, v, grad_out)]
        self._mask = None if attn_mask is None else attn_mask.to(where)
        self.expected = cache(self._expect)

    def _expect(self, dtype: reference.Precision) -> dict[str, Tensor]:
        causal = "top-left" if self.shape.causal else None
        # one sequence at a time: in float64 the scores of the largest shapes fill the memory
        parts = [
            reference.attention(
                *(x[i : i + 1] for x in self._reference),
                causal=causal,
                attn_mask=self._mask,
                dtype=dtype,
            )
            for i in range(self.shape.batch)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def run_one(check: Check, route: Route, problem: Problem) -> Result:
    """Compares a route's output and gradients; a refusal is a skip, or a pass where allowed."""
    *tensors, grad_out = problem.inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    try:
        out, operators = call(route, *leaves, **problem.options)
        grads = torch.autograd.grad(out, leaves, grad_out)
    except CannotRun as refusal:
        if problem.shape.may_refuse and not isinstance(refusal, NoBackend):
            return Result(check, State.PASSED, f"Refused, which is right: {refusal}")
        return Result(check, State.SKIPPED, str(refusal))
    except Exception as error:  # any other exception is a failure
        return Result(check, State.FAILED, f"{type(error).__name__}: {error}")
    actual = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    result = reference.compare(check, actual, problem.expected, problem.dtype)
    name = check.id.split("/")[1]
    fault = wrong_operator(name, operators)
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
