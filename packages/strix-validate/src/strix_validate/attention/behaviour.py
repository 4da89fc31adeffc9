# SPDX-License-Identifier: BSD-3-Clause
"""Properties of scaled_dot_product_attention that a single comparison cannot show."""

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from strix_validate.attention import sdpa
from strix_validate.attention.sdpa_shapes import Problem, SdpaShape
from strix_validate.checks import (
    ANY,
    CannotRun,
    Check,
    Result,
    RunOptions,
    Size,
    State,
    named,
    need_gpu,
    reason_of,
    require,
    seed_of,
)
from strix_validate.numerics import comparison, reference

HALF = torch.float16
#: Of float16's largest number, and of both dtypes.
OF_FLOAT16 = ("large", "finite")
_SUFFIX = "-bfloat16"


@cache
def checks() -> dict[Check, Callable[[RunOptions], dict | Result]]:
    """Return one check for each kind of behaviour and route, with its function.

    A route that refuses raises CannotRun.
    """
    found: dict[Check, Callable[[RunOptions], dict | Result]] = {}
    for name, body in BODIES.items():
        for route in LSE if name == "lse" else sdpa.ROUTES:
            for dtype in (HALF,) if name in OF_FLOAT16 else (HALF, torch.bfloat16):
                id_ = f"{name}{_SUFFIX * (dtype is torch.bfloat16)}"
                check = Check(f"sdpa/{route}/{id_}", f"torch SDPA {route}: {id_}", reason_of(body))
                found[check] = partial(_by_route, body, route, dtype)
    return found


def applies(check: Check, options: RunOptions) -> bool:
    """Return False without a GPU for bfloat16, whose kernels on a CPU are those of float16."""
    return options.device == "cuda" or not check.id.endswith(_SUFFIX)


def _by_route(body: Callable, route: str, dtype: torch.dtype, options: RunOptions) -> dict | Result:
    return body(Watched(route, dtype), options)


class Watched:
    """A route; refusals raise CannotRun, and another backend than the named one fails.

    Attributes:
        name: of the route.
        dtype: of the tensors that a check gives it.
        unwatched: the route itself.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype, self.unwatched = name, dtype, sdpa.ROUTES[name]

    def __call__(self, *args: Tensor, **options) -> Tensor:
        """Compute by the route. Raise CheckFailed if another backend ran."""
        out, operators = sdpa.call(self.unwatched, *args, **options)
        fault = sdpa.wrong_operator(self.name, operators)
        require(not fault, fault)
        return out


def _randn(*size: int, device: str, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed_of(str(seed)))).to(
        device, dtype
    )


def _draw_three(route: Watched, options: RunOptions, *size: int) -> list[Tensor]:
    """Return q, k and v of a size, of the dtype that is checked."""
    place: dict = {"device": options.device, "dtype": route.dtype}
    return [_randn(*size, **place, seed=i) for i in range(3)]


def large(route: sdpa.Route, options: RunOptions) -> dict:
    """Scores above 65504, the largest fp16 number: NaN if the kernel accumulates q k^T in fp16.
    Random data never gets there. https://github.com/ROCm/aotriton/pull/179"""
    batch, heads, seqlen = (4, 8, 4096) if options.size.holds(Size.FULL) else (1, 2, 512)
    q = torch.full((batch, heads, seqlen, 72), 260 / 72**0.5, dtype=HALF, device=options.device)
    v = _randn(batch, heads, seqlen, 72, device=options.device)
    leaves = [x.requires_grad_() for x in (q, q.clone(), v)]
    out = route(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    require(all(x.isfinite().all() for x in grads), "a gradient is not finite")
    # equal scores: every weight is 1/seqlen, and 1 bit of rounding of the scores moves none
    exact = v.double().mean(-2, keepdim=True).expand_as(v)
    error, bound = comparison.max_error(out, exact), 3 * 2**-11 * v.abs().max().item()
    require(error <= bound, f"error {error:.3g}, allowed {bound:.3g}")
    return {"out": {"error": error, "bound": bound}}


def deterministic(route: Watched, options: RunOptions) -> dict:
    """The same call gives the same bits; otherwise memory is read that nothing wrote, or there is
    a race. The gradients may differ: they are summed atomically by some kernels.
    https://github.com/ROCm/aotriton/issues/183"""
    repeats = {Size.QUICK: 5, Size.FULL: 100, Size.STRESS: 1000}[options.size]
    q, k, v = _draw_three(route, options, 1, 4, 257, 80)
    first = route(q, k, v, is_causal=True)
    differing = sum(
        not torch.equal(first, route(q, k, v, is_causal=True)) for _ in range(repeats - 1)
    )
    require(not differing, f"{differing} of {repeats - 1} repeats differ from the first call")
    return {"repeats": repeats}


def finite(route: sdpa.Route, options: RunOptions) -> dict:
    """No NaN or infinity in 100 calls with fresh inputs, forward and gradients: some races show in
    one call of hundreds. https://github.com/ROCm/aotriton/issues/183"""
    repeats = 1000 if options.size is Size.STRESS else 100
    generator = torch.Generator(options.device).manual_seed(seed_of("finite"))
    for i in range(repeats):
        size = (1, 2, 130, (72, 80)[i % 2])
        leaves = [
            torch.randn(size, generator=generator, device=options.device)
            .to((torch.float16, torch.bfloat16)[i // 2 % 2])
            .requires_grad_()
            for _ in range(3)
        ]
        out = route(*leaves, is_causal=i % 3 == 0)
        tensors = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
        require(all(x.isfinite().all() for x in tensors), f"not finite in call {i + 1}")
    return {"repeats": repeats}


def masked_row(route: Watched, options: RunOptions) -> dict:
    """A query that a Boolean mask shuts out of every key gives zeros, not NaN, which would spread
    from a padded position through the whole model: https://github.com/pytorch/pytorch/issues/41508
    """
    q, k, v = _draw_three(route, options, 1, 2, 70, 64)
    seen = torch.ones(70, 70, dtype=torch.bool, device=options.device)
    seen[13] = False
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = route(*leaves, attn_mask=seen)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    require(all(x.isfinite().all() for x in (out, *grads)), "not finite")
    shut_out = out[:, :, 13].abs().max().item()
    require(shut_out == 0, f"the shut-out query gives values up to {shut_out:.3g}, not zeros")
    return {"shut_out": shut_out}


def nan(route: Watched, options: RunOptions) -> dict:
    """NaN in q, k or v reaches the output and gradient of each query that uses it, and
    no other head or sequence. A maximum that drops NaN makes a broken layer look plausible:
    https://triton-lang.org/main/python-api/generated/triton.language.maximum.html"""
    for poisoned, causal in product(range(3), (False, True)):
        leaves = _draw_three(route, options, 2, 2, 130, 64)
        leaves[poisoned][1, 0, 70, 3] = float("nan")
        leaves = [x.requires_grad_() for x in leaves]
        out = route(*leaves, is_causal=causal)
        found = (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))
        # of a causal call only the queries that see the key: the others may get it times zero
        queries = slice(70, 71) if poisoned == 0 else slice(70 if causal else 0, None)
        columns = slice(3, 4) if poisoned == 2 else slice(None)
        name = "qkv"[poisoned] + ", causal" * causal
        # not dk and dv: CUDA's kernels take a row's logsumexp of NaN for that of no keys
        require(out[1, 0, queries, columns].isnan().all(), f"NaN in {name} does not reach out")
        require(found[1][1, 0, queries].isnan().all(), f"NaN in {name} does not reach dq")
        finite = all(x[0].isfinite().all() and x[1, 1].isfinite().all() for x in found)
        require(finite, f"NaN in {name} reaches another head or sequence")
    return {"poisoned": "q, k, v"}


def lse(route: Watched, options: RunOptions) -> Result:
    """The logarithm of the sum of exp(scores) that the operator returns, in base e. The backward
    pass undoes an error in it, and whoever merges partial results does not; it was off by ln 2:
    https://github.com/pytorch/pytorch/issues/181645"""
    if route.name == "efficient" and options.device == "cpu":
        raise CannotRun("No viable backend")
    q, k, v = _draw_three(route, options, 2, 2, 130, 64)
    found = LSE[route.name](q, k, v)[..., : q.shape[2]]

    def right(dtype: reference.Precision) -> dict[str, Tensor]:
        exact = reference.attention(q, k, v, q, causal="top-left", lse=True, dtype=dtype)
        return {"lse": exact["lse"]}

    return comparison.compare(ANY, {"lse": found}, right, route.dtype)


def _flash_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the logarithms of a causal call."""
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[1]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[1]


def _efficient_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(q, k, v, None, True, 0.0, True)[1]


#: The operators of torch that return it; the rows of the second are padded to a multiple of 32.
LSE = {"flash": _flash_lse, "efficient": _efficient_lse}


def dropout(route: Watched, options: RunOptions) -> dict:
    """Dropout keeps the stated share of weights and scales them up, another choice in each call,
    sequence, head, query and key, and the gradients follow the same choice, causal as well. aiter
    0.1.20.post1 has a constant seed: the same positions in every layer and step
    (patches/amd-aiter/0003-refuse-dropout.patch)"""
    torch.manual_seed(seed_of("dropout"))
    found: dict = {}
    for n, causal in ((256, False), (96, True)):
        found |= _dropped(route, n, causal, options.device)
    return found


def _dropped(route: Watched, n: int, causal: bool, device: str, p: float = 0.2) -> dict:
    """Check dropout in calls of n queries and keys."""
    # equal scores and v = 1: the output is the weights themselves
    q = torch.zeros(2, 4, n, n, dtype=route.dtype, device=device)
    k = _randn(2, 4, n, n, device=device, dtype=route.dtype, seed=1)
    v = torch.eye(n, dtype=route.dtype, device=device).expand(2, 4, n, n).contiguous()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = partial(route, *leaves, dropout_p=p, is_causal=causal)
    out = call()
    kept = out != 0
    seen = torch.ones(n, n, dtype=torch.bool, device=device)
    seen = seen.tril() if causal else seen
    keep = kept.double()
    share, expected = keep[..., seen].mean().item(), 1 - p
    spread = (p * (1 - p) / keep[..., seen].numel()) ** 0.5
    require(abs(share - expected) < 5 * spread, f"{share:.4f} of the weights kept, not {expected}")
    value = (out.double() * seen.sum(-1, keepdim=True) * expected)[kept]
    limit = 2.1 * torch.finfo(route.dtype).eps
    require((value - 1).abs().max() < limit, "kept weights are not scaled by 1 / (1 - p)")
    for axis, name in enumerate(("sequences", "heads", "queries", "keys") * (not causal)):
        for apart in (1 << i for i in range(8) if 1 << i < kept.shape[axis]):
            first, second = kept.narrow(axis, 0, apart), kept.narrow(axis, apart, apart)
            # by chance two of three are alike; a pattern of the tile repeats whole
            alike = (first == second).count_nonzero().item() / first.numel()
            require(alike < 0.8, f"{name} {apart} apart drop the same weights")
    grad_out = _randn(*out.shape, device=device, dtype=route.dtype, seed=2)
    grads = torch.autograd.grad(out, leaves, grad_out)
    actual = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    require(not torch.equal(call() != 0, out != 0), "two calls drop the same weights")

    def right(dtype: reference.Precision) -> dict[str, Tensor]:
        corner: reference.Causal = "top-left" if causal else None
        return reference.attention(
            q, k, v, grad_out, keep=keep / expected, causal=corner, dtype=dtype
        )

    found = comparison.compare(ANY, actual, right, route.dtype)
    require(found.state is State.PASSED, f"{found.reason}{', causal' * causal}")
    kind = "causal_" * causal
    return {f"{kind}{name}": x for name, x in found.measured.items()} | {f"{kind}kept": share}


def nested(route: Watched, options: RunOptions) -> dict | Result:
    """Sequences of several lengths in one nested tensor, q, k and v of one product: keys of a
    neighbour, or offsets of the padded length."""
    need_gpu(options, "only a GPU has fused attention of nested tensors")
    lengths = (70, 1, 133)
    place: dict = {"device": options.device, "dtype": route.dtype}
    rows = [_randn(n, 3 * 4 * 64, **place, seed=n) for n in lengths]
    whole = torch.nested.nested_tensor(rows, layout=torch.jagged)
    q, k, v = (x.unflatten(-1, (4, 64)).transpose(1, 2) for x in whole.chunk(3, -1))
    out = route(q, k, v, is_causal=True).transpose(1, 2).values()
    whole_rows = [row.view(-1, 3, 4, 64) for row in rows]

    def right(dtype: reference.Precision) -> dict[str, Tensor]:
        parts = [[x.transpose(0, 1)[None] for x in row.unbind(1)] for row in whole_rows]
        found = [
            reference.attention(q, k, v, q, causal="top-left", dtype=dtype)["out"]
            for q, k, v in parts
        ]
        return {"out": torch.cat([x[0].transpose(0, 1) for x in found])}

    return comparison.compare(ANY, {"out": out}, right, route.dtype)


def captured(route: Watched, options: RunOptions) -> dict | Result:
    """A captured graph computes with what its inputs hold when it is replayed: arguments of the
    captured call, or memory of its scratch, that another call has taken:
    https://github.com/vllm-project/vllm/issues/32180"""
    need_gpu(options, "only a GPU captures graphs")
    shape = SdpaShape("captured", "", causal=True, seqlen_q=113, seqlen_k=113)
    problem = Problem(shape, route.dtype, options.device)
    *tensors, _ = problem.inputs
    inputs = [torch.zeros_like(x) for x in tensors]
    route(*inputs, is_causal=True)  # a refusal shows without a graph already
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        route.unwatched(*inputs, is_causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph), torch.no_grad():
        out = route.unwatched(*inputs, is_causal=True)
    for mine, x in zip(inputs, tensors, strict=True):
        mine.copy_(x)
    graph.replay()
    found = {"out": out.clone()}
    return comparison.compare(
        ANY, found, lambda dtype: {"out": problem.expected(dtype)["out"]}, route.dtype
    )


def compiled(route: Watched, options: RunOptions) -> dict | Result:
    """torch.compile gives what eager mode gives: the shapes that an operator announces to the
    compiler were other ones than it returns, in flash-attn 2.8.3
    (patches/flash-attn/0002-register-op-outputs.patch)"""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if options.size.holds(Size.FULL) and options.device == "cpu" and not compiler:
        raise CannotRun("torch.compile needs a C++ compiler on the CPU")
    shape = SdpaShape("compiled", "", causal=True, seqlen_q=113, seqlen_k=113)
    problem = Problem(shape, route.dtype, options.device)
    backend = "inductor" if options.size.holds(Size.FULL) else "aot_eager"
    *tensors, grad_out = problem.inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    route(*leaves, is_causal=True)  # a refusal shows without the compiler already
    torch.compiler.reset()
    out = torch.compile(route.unwatched, backend=backend)(*leaves, is_causal=True)
    grads = torch.autograd.grad(out, leaves, grad_out)
    actual = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    return comparison.compare(ANY, actual, problem.expected, route.dtype)


BODIES = named(
    large, deterministic, finite, masked_row, nan, lse, dropout, compiled, nested, captured
)
