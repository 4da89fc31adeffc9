# SPDX-License-Identifier: BSD-3-Clause
"""Check what a comparison of one call of scaled_dot_product_attention does not show.

Reports print the docstring of a check's function as the purpose of the check.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from strix_validate.attention import sdpa
from strix_validate.attention.sdpa_cases import SdpaCase
from strix_validate.attention.sdpa_problem import Problem
from strix_validate.checks import (
    PLACEHOLDER,
    CannotRun,
    Check,
    Result,
    RunOptions,
    Size,
    State,
    derive_seed,
    index_by_name,
    need_gpu,
    read_purpose,
    require,
)
from strix_validate.numerics import comparison, reference

HALF = torch.float16
#: Checks that are listed in float16 only. The check "large" tests products above float16's largest
#: number, and the check "finite" tests both dtypes itself.
_FLOAT16_ONLY = ("large", "finite")
_SUFFIX = "-bfloat16"


@cache
def checks() -> dict[Check, Callable[[RunOptions], dict | Result]]:
    """Return one check for each behaviour, route and data type, with its function.

    The behaviour "lse" has only the routes in LSE. The behaviours in _FLOAT16_ONLY have only
    float16. A function raises CannotRun if torch refuses the call.
    """
    functions: dict[Check, Callable[[RunOptions], dict | Result]] = {}
    for name, body in BODIES.items():
        routes = LSE if name == "lse" else sdpa.ROUTES
        dtypes = (HALF,) if name in _FLOAT16_ONLY else (HALF, torch.bfloat16)
        for route, dtype in product(routes, dtypes):
            suffix = _SUFFIX if dtype is torch.bfloat16 else ""
            id_ = f"{name}{suffix}"
            check = Check(f"sdpa/{route}/{id_}", f"torch SDPA {route}: {id_}", read_purpose(body))
            functions[check] = partial(_check_route, body, route, dtype)
    return functions


def applies(check: Check, options: RunOptions) -> bool:
    """Return False for a check in bfloat16 if the run uses no GPU, and True for other checks.

    On a CPU, bfloat16 and float16 have the same kernels.
    """
    return options.device == "cuda" or not check.id.endswith(_SUFFIX)


def _check_route(
    body: Callable,
    route: str,
    dtype: torch.dtype,
    options: RunOptions,
) -> dict | Result:
    return body(Watched(route, dtype), options)


class Watched:
    """A route that fails if it names a backend and another backend runs.

    Attributes:
        name: Name of the route, a key of sdpa.ROUTES.
        dtype: Dtype of the tensors that a check passes. The checks in _FLOAT16_ONLY do not use it.
        unwatched: The route, without a test of which backend ran.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.unwatched = sdpa.ROUTES[name]

    def __call__(self, *args: Tensor, **options) -> Tensor:
        """Compute attention by the route.

        Raises:
            CannotRun: torch refuses the call.
            CheckFailed: The route names a backend, and another backend ran.
        """
        out, operators = sdpa.call(self.unwatched, *args, **options)
        fault = sdpa.describe_wrong_operator(self.name, operators)
        require(not fault, fault)
        return out


def _randn(*size: int, device: str, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(str(seed)))
    return torch.randn(size, generator=generator).to(device, dtype)


def _draw_inputs(route: Watched, options: RunOptions, *size: int) -> list[Tensor]:
    """Draw q, k and v, each with the given size and the route's dtype."""
    device = options.device
    return [_randn(*size, device=device, dtype=route.dtype, seed=seed) for seed in range(3)]


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def _differentiate(out: Tensor, leaves: list[Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """Return out and the gradients of q, k and v, by name."""
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def large(route: sdpa.Route, options: RunOptions) -> dict:
    """Check products q k^T above 65504, fp16's largest number.

    The random inputs of other checks give no such products. A kernel that accumulates q k^T in fp16
    gives NaN: https://github.com/ROCm/aotriton/pull/179
    """
    size = (1, 2, 512, 72)
    if options.size.includes(Size.FULL):
        size = (4, 8, 4096, 72)
    q = torch.full(size, 260 / 72**0.5, dtype=HALF, device=options.device)
    v = _randn(*size, device=options.device)
    leaves = [x.requires_grad_() for x in (q, q.clone(), v)]
    out = route(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    require(_are_finite(grads), "a gradient is not finite")
    # All scores are equal, so each weight is 1/seqlen, however the scores are rounded.
    exact = v.double().mean(-2, keepdim=True).expand_as(v)
    error = comparison.max_error(out, exact)
    bound = 3 * 2**-11 * v.abs().max().item()
    require(error <= bound, f"error {error:.3g}, allowed {bound:.3g}")
    return {"out": {"error": error, "bound": bound}}


def deterministic(route: Watched, options: RunOptions) -> dict:
    """Check that the same call gives the same bits.

    If the bits differ, there is a race, or the kernel reads memory that nothing wrote:
    https://github.com/ROCm/aotriton/issues/183
    Gradients are not compared: some kernels sum them with atomics, so that their bits may differ.
    """
    repeats = {Size.QUICK: 5, Size.FULL: 100, Size.STRESS: 1000}[options.size]
    q, k, v = _draw_inputs(route, options, 1, 4, 257, 80)
    first = route(q, k, v, is_causal=True)
    differing = 0
    for _ in range(repeats - 1):
        differing += not torch.equal(first, route(q, k, v, is_causal=True))
    repeated = repeats - 1
    require(not differing, f"{differing} of {repeated} repeats differ from the first call")
    return {"repeats": repeats}


def finite(route: sdpa.Route, options: RunOptions) -> dict:
    """Check that 100 calls with new inputs give no NaN or infinity, forward and in the gradients.

    A stress run makes 1000 calls. Races show in only some of the calls:
    https://github.com/ROCm/aotriton/issues/183
    """
    repeats = 1000 if options.size is Size.STRESS else 100
    generator = torch.Generator(options.device).manual_seed(derive_seed("finite"))
    for i in range(repeats):
        head_dim = (72, 80)[i % 2]
        dtype = (torch.float16, torch.bfloat16)[i // 2 % 2]
        leaves = []
        for _ in range(3):
            x = torch.randn((1, 2, 130, head_dim), generator=generator, device=options.device)
            leaves.append(x.to(dtype).requires_grad_())
        out = route(*leaves, is_causal=i % 3 == 0)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        require(_are_finite([out, *grads]), f"a result of call {i + 1} is not finite")
    return {"repeats": repeats}


def masked_row(route: Watched, options: RunOptions) -> dict:
    """Check that a query gives zeros if a Boolean mask hides every key from it.

    The output and the gradients must be finite. NaN would spread from a padded position through the
    whole model:
    https://github.com/pytorch/pytorch/issues/41508
    """
    q, k, v = _draw_inputs(route, options, 1, 2, 70, 64)
    visible = torch.ones(70, 70, dtype=torch.bool, device=options.device)
    visible[13] = False
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = route(*leaves, attn_mask=visible)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    require(_are_finite([out, *grads]), "the output or a gradient is not finite")
    shut_out = out[:, :, 13].abs().max().item()
    require(
        shut_out == 0,
        f"the query whose keys are all hidden gives values up to {shut_out:.3g}, not zeros",
    )
    return {"shut_out": shut_out}


def nan(route: Watched, options: RunOptions) -> dict:
    """Check that NaN in q, k or v reaches the output and dq of each query that uses it.

    The NaN must not reach another head or sequence. If a kernel's maximum drops NaN, a broken layer
    gives plausible numbers:
    https://triton-lang.org/main/python-api/generated/triton.language.maximum.html
    """
    for poisoned, causal in product(range(3), (False, True)):
        leaves = _draw_inputs(route, options, 2, 2, 130, 64)
        leaves[poisoned][1, 0, 70, 3] = float("nan")
        leaves = [x.requires_grad_() for x in leaves]
        out = route(*leaves, is_causal=causal)
        results = _differentiate(out, leaves, torch.ones_like(out))
        # In a causal call, only queries that see the key are judged. For other queries, a kernel
        # may or may not multiply the key's value by a weight of zero.
        queries = slice(70 if causal else 0, None)
        if poisoned == 0:
            queries = slice(70, 71)
        columns = slice(3, 4) if poisoned == 2 else slice(None)
        name = "qkv"[poisoned] + (" of a causal call" if causal else "")
        # NaN need not reach dk and dv, because CUDA's kernels treat a row whose logsumexp is NaN as
        # a row without keys.
        reaches_out = out[1, 0, queries, columns].isnan().all()
        require(reaches_out, f"NaN in {name} does not reach the output")
        reaches_dq = results["dq"][1, 0, queries].isnan().all()
        require(reaches_dq, f"NaN in {name} does not reach dq")
        others = []
        for x in results.values():
            others += [x[0], x[1, 1]]
        require(_are_finite(others), f"NaN in {name} reaches another head or sequence")
    return {"poisoned": "q, k, v"}


def lse(route: Watched, options: RunOptions) -> Result:
    """Check the logsumexp that the operator returns, the natural logarithm of sum(exp(scores)).

    An error in the logsumexp cancels in the backward pass, but makes merged partial results wrong.
    In flex_attention, the logsumexp was wrong by a factor of ln 2:
    https://github.com/pytorch/pytorch/issues/181645
    """
    q, k, v = _draw_inputs(route, options, 2, 2, 130, 64)
    route(q, k, v, is_causal=True)  # this raises CannotRun if torch refuses
    actual = LSE[route.name](q, k, v)[..., : q.shape[2]]

    def expected(dtype: reference.Precision) -> dict[str, Tensor]:
        results = reference.attention(q, k, v, q, causal="top-left", lse=True, dtype=dtype)
        return {"lse": results["lse"]}

    return comparison.compare(PLACEHOLDER, {"lse": actual}, expected, route.dtype)


def _flash_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the logsumexp of a causal call of flash attention."""
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[1]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[1]


def _efficient_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the logsumexp of a causal call of efficient attention.

    On NVIDIA GPUs, the logsumexp is padded along its last dimension, from the number of queries to
    a multiple of 32.
    """
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(q, k, v, None, True, 0.0, True)[1]


#: Functions that return torch's logsumexp, by route.
LSE = {"flash": _flash_lse, "efficient": _efficient_lse}


def dropout(route: Watched, options: RunOptions) -> dict:
    """Check that dropout keeps the stated share of weights, and scales the kept weights up.

    The dropped weights must differ between calls, sequences, heads, queries and keys. The gradients
    must be those of the kept weights, with and without a causal mask. aiter 0.1.20.post1 has a
    constant seed, so that its dropout drops the same positions in every layer and step
    (patches/amd-aiter/0003-refuse-dropout.patch)
    """
    torch.manual_seed(derive_seed("dropout"))
    measured = _check_dropout(route, 256, causal=False, device=options.device)
    return measured | _check_dropout(route, 96, causal=True, device=options.device)


def _check_dropout(
    route: Watched,
    n: int,
    *,
    causal: bool,
    device: str,
    p: float = 0.2,
) -> dict:
    """Check dropout with probability p in calls of n queries and keys."""
    # all scores are equal and v is the identity matrix, so the output equals the weights after
    # dropout
    q = torch.zeros(2, 4, n, n, dtype=route.dtype, device=device)
    k = _randn(2, 4, n, n, device=device, dtype=route.dtype, seed=1)
    v = torch.eye(n, dtype=route.dtype, device=device).expand(2, 4, n, n).contiguous()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = partial(route, *leaves, dropout_p=p, is_causal=causal)
    out = call()
    visible = torch.ones(n, n, dtype=torch.bool, device=device)
    if causal:
        visible = visible.tril()
    share = _check_kept_weights(out, visible, p)
    if not causal:
        _check_patterns(out != 0)
    grad_out = _randn(*out.shape, device=device, dtype=route.dtype, seed=2)
    actual = _differentiate(out, leaves, grad_out)
    require(not torch.equal(call() != 0, out != 0), "two calls drop the same weights")
    keep = (out != 0).double() / (1 - p)
    corner: reference.Causal = "top-left" if causal else None

    def expected(dtype: reference.Precision) -> dict[str, Tensor]:
        return reference.attention(q, k, v, grad_out, keep=keep, causal=corner, dtype=dtype)

    result = comparison.compare(PLACEHOLDER, actual, expected, route.dtype)
    where = ", in a causal call" if causal else ""
    require(result.state is State.PASSED, f"{result.reason}{where}")
    prefix = "causal_" if causal else ""
    measured = {f"{prefix}{name}": x for name, x in result.measured.items()}
    return measured | {f"{prefix}kept": share}


def _check_kept_weights(out: Tensor, visible: Tensor, p: float) -> float:
    """Check the number and the size of the weights that dropout kept; return their share."""
    is_kept = out != 0
    visible_kept = is_kept.double()[..., visible]
    share = visible_kept.mean().item()
    expected = 1 - p
    deviation = (p * (1 - p) / visible_kept.numel()) ** 0.5
    is_expected = abs(share - expected) < 5 * deviation
    require(is_expected, f"dropout kept {share:.4f} of the weights, expected {expected}")
    # a kept weight is 1 / (number of visible keys) / (1 - p), so each of these values is about 1
    value = (out.double() * visible.sum(-1, keepdim=True) * expected)[is_kept]
    limit = 2.1 * torch.finfo(out.dtype).eps
    require((value - 1).abs().max() < limit, "kept weights are not scaled by 1 / (1 - p)")
    return share


def _check_patterns(is_kept: Tensor) -> None:
    """Check that on each axis, the first n entries and the next n drop different weights.

    n is each power of two up to 128 that is less than the axis's length.
    """
    for axis, name in enumerate(("sequences", "heads", "queries", "keys")):
        for distance in (1, 2, 4, 8, 16, 32, 64, 128):
            if distance >= is_kept.shape[axis]:
                break
            first = is_kept.narrow(axis, 0, distance)
            second = is_kept.narrow(axis, distance, distance)
            # By chance, about two thirds of the entries are equal. If a kernel repeats its pattern
            # in each tile, all entries are equal.
            equal = (first == second).count_nonzero().item() / first.numel()
            require(equal < 0.8, f"{name} {distance} apart drop the same weights")


def nested(route: Watched, options: RunOptions) -> dict | Result:
    """Check sequences of several lengths in one nested tensor, with q, k and v packed in it.

    The check catches keys read from a neighbouring sequence, and offsets computed from the padded
    length.
    """
    need_gpu(options, "only a GPU has fused attention of nested tensors")
    rows = []
    for length in (70, 1, 133):
        row = _randn(length, 3 * 4 * 64, device=options.device, dtype=route.dtype, seed=length)
        rows.append(row)
    packed = torch.nested.nested_tensor(rows, layout=torch.jagged)
    q, k, v = (x.unflatten(-1, (4, 64)).transpose(1, 2) for x in packed.chunk(3, -1))
    out = route(q, k, v, is_causal=True).transpose(1, 2).values()

    def expected(dtype: reference.Precision) -> dict[str, Tensor]:
        outs = []
        for row in rows:
            # each of q, k and v is (1, heads, tokens, head_dim)
            q, k, v = (x.transpose(0, 1)[None] for x in row.view(-1, 3, 4, 64).unbind(1))
            exact = reference.attention(q, k, v, q, causal="top-left", dtype=dtype)
            outs.append(exact["out"][0].transpose(0, 1))
        return {"out": torch.cat(outs)}

    return comparison.compare(PLACEHOLDER, {"out": out}, expected, route.dtype)


def captured(route: Watched, options: RunOptions) -> dict | Result:
    """Check that the replay of a captured graph reads the current values of the graph's inputs.

    The check catches a replay that uses the values of the captured call. On gfx1151, vLLM hung when
    it captured graphs: https://github.com/vllm-project/vllm/issues/32180
    """
    need_gpu(options, "only a GPU captures graphs")
    case = SdpaCase("captured", "", causal=True, seqlen_q=113, seqlen_k=113)
    problem = Problem(case, route.dtype, options.device)
    *tensors, _ = problem.inputs
    inputs = [torch.zeros_like(x) for x in tensors]
    route(*inputs, is_causal=True)  # this raises CannotRun before the capture if torch refuses
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        route.unwatched(*inputs, is_causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph), torch.no_grad():
        out = route.unwatched(*inputs, is_causal=True)
    for captured_input, x in zip(inputs, tensors, strict=True):
        captured_input.copy_(x)
    graph.replay()

    def expected(dtype: reference.Precision) -> dict[str, Tensor]:
        return {"out": problem.expected(dtype)["out"]}

    return comparison.compare(PLACEHOLDER, {"out": out.clone()}, expected, route.dtype)


def compiled(route: Watched, options: RunOptions) -> dict | Result:
    """Check the output and gradients of a call that torch.compile has compiled.

    A quick run uses the backend aot_eager, and larger runs use inductor. An operator of flash-attn
    2.8.3 declared other output shapes than it returned
    (patches/flash-attn/0002-register-op-outputs.patch)
    """
    uses_inductor = options.size.includes(Size.FULL)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if uses_inductor and options.device == "cpu" and not compiler:
        raise CannotRun("torch.compile needs a C++ compiler on the CPU")
    case = SdpaCase("compiled", "", causal=True, seqlen_q=113, seqlen_k=113)
    problem = Problem(case, route.dtype, options.device)
    *tensors, grad_out = problem.inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    route(*leaves, is_causal=True)  # this raises CannotRun before compilation if torch refuses
    torch.compiler.reset()
    backend = "inductor" if uses_inductor else "aot_eager"
    out = torch.compile(route.unwatched, backend=backend)(*leaves, is_causal=True)
    actual = _differentiate(out, leaves, grad_out)
    return comparison.compare(PLACEHOLDER, actual, problem.expected, route.dtype)


BODIES = index_by_name(
    large,
    deterministic,
    finite,
    masked_row,
    nan,
    lse,
    dropout,
    compiled,
    nested,
    captured,
)
