# SPDX-License-Identifier: BSD-3-Clause
"""gfx1151 code objects of flash-attn and vLLM, executed under emulation on any machine.

strix-emulate executes the instructions that the real call path compiles, forward and backward. A
pass means "executed under emulation"; it says nothing about timing or a real gfx1151.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from strix_validate.attention import flash
from strix_validate.checks import CannotRun, Check, Result, RunOptions, State
from strix_validate.numerics.comparison import compare
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call
from strix_validate.triton_packages import package_checks
from strix_validate.vllm import vllm_checks

_WHY = (
    "a code object whose numbers are wrong although its source is correct, a missing wait or a "
    "race between waves: https://github.com/ROCm/aotriton/issues/54"
)


@dataclass(frozen=True)
class CallShape:
    """The shape of a call; lengths are (queries, keys) of each sequence of a varlen call."""

    dtype: torch.dtype = torch.float16
    head_dim: int = 64
    causal: bool = False
    heads: int = 2
    kv_heads: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 70
    lengths: tuple[tuple[int, int], ...] = ()
    batch: int = 1
    lse: bool = False


def _pairs(lengths: dict) -> tuple[tuple[int, int], ...]:
    return tuple(zip(lengths["lengths_q"], lengths["lengths_k"], strict=True))


#: Three head dims (72 is padded), two types, causal or not; grouped queries; ragged; varlen,
#: also with sequences that have no queries or no keys.
SHAPES = {
    f"d{head_dim}{'-causal' if causal else ''}-{str(dtype).removeprefix('torch.')}": CallShape(
        dtype, head_dim, causal
    )
    for head_dim in (64, 72, 128)
    for causal in (False, True)
    for dtype in (torch.float16, torch.bfloat16)
} | {
    "gqa-causal": CallShape(causal=True, heads=4, lse=True),
    "batch-causal": CallShape(torch.bfloat16, batch=2, causal=True, seqlen_k=90),
    "gqa-long-keys": CallShape(head_dim=128, causal=True, kv_heads=1, seqlen_q=100, seqlen_k=150),
    "ragged": CallShape(seqlen_q=33, seqlen_k=131),
    "whole-blocks": CallShape(seqlen_q=128, seqlen_k=128),
    "varlen": CallShape(heads=4, causal=True, lse=True, lengths=((37, 64), (64, 64), (10, 50))),
    "varlen-bfloat16": CallShape(torch.bfloat16, lengths=((40, 70), (100, 20))),
    "varlen-empty": CallShape(causal=True, lengths=_pairs(flash.NO_TOKENS)),
    "varlen-empty-gqa": CallShape(causal=True, heads=4, lengths=((10, 10), (0, 0), (33, 33))),
    "varlen-no-keys": CallShape(causal=True, lengths=_pairs(flash.NO_KEYS)),
    "varlen-no-keys-d72": CallShape(head_dim=72, causal=True, lengths=_pairs(flash.NO_KEYS)),
    "varlen-no-keys-full": CallShape(lengths=_pairs(flash.NO_KEYS)),
}


def checks() -> list[Check]:
    """List one check for each call."""
    return [*_flash_checks(), *vllm_checks.checks("emulated"), *package_checks.checks("emulated")]


def _flash_checks() -> list[Check]:
    return [
        Check(f"emulated/{name}", f"flash-attn executed under emulation: {name}", _WHY)
        for name in SHAPES
    ]


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers. Needs flash_attn or vLLM's source, a libLLVM, and no GPU."""
    yield from vllm_checks.run("emulated", wanted, options, "emulate", judge)
    yield from package_checks.run("emulated", wanted, options, "emulate", judge)
    known = _flash_checks()
    wanted = [check for check in wanted if check in known]
    if not wanted:
        return
    if importlib.util.find_spec("flash_attn") is None:
        yield from (Result(check, State.SKIPPED, "flash_attn is not installed") for check in wanted)
        return
    problems = [problem(SHAPES[check.id.removeprefix("emulated/")]) for check in wanted]
    try:
        answers = triton_modes.run([call for call, _ in problems], "emulate")
    except (CannotRun, triton_modes.ChildError) as error:
        state = State.SKIPPED if isinstance(error, CannotRun) else State.FAILED
        yield from (Result(check, state, str(error)) for check in wanted)
        return
    kernels = f"flash-attn's kernels: {answers.backend}"
    for check, (call, expected), answer in zip(wanted, problems, answers.calls, strict=True):
        result = judge(check, call, expected, answer)
        yield replace(result, reason=f"{kernels}. {result.reason}".strip())


def judge(check: Check, call: Call, expected, answer: triton_modes.CallAnswer) -> Result:
    """Fail a call for an exception, such as a trap, a wrong number, or if no kernel was executed.

    Skipped if all is correct once the waits are back that LLVM dropped; skips.toml says where that
    is known.
    """
    if answer.error:
        return Result(check, State.FAILED, ": ".join(answer.error))
    if not answer.executed:
        return Result(check, State.FAILED, "no kernel was executed")
    result = compare(check, answer.tensors, expected, call.dtype)
    kernels = {
        f"{number}-{done.name}": {"code": done.code, "wave_instructions": done.wave_instructions}
        for number, done in enumerate(answer.executed)
    }
    seconds = sum(done.seconds for done in answer.executed)
    lost = [done.lost_wait for done in answer.executed if done.lost_wait]
    if lost and result.state is State.PASSED:
        result = replace(result, state=State.SKIPPED, reason=f"LLVM dropped a wait. {lost[0]}")
    return replace(result, measured=result.measured | {"kernels": kernels}, seconds=seconds)


def problem(shape: CallShape):
    """Return the call, the same numbers in every run, and what it must return: see flash_cases."""
    lengths = shape.lengths or ((shape.seqlen_q, shape.seqlen_k),) * shape.batch
    lengths_q, lengths_k = zip(*lengths, strict=True)
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad_out = (
        torch.randn(sum(tokens), heads, shape.head_dim, generator=generator).to(shape.dtype)
        for tokens, heads in (
            (lengths_q, shape.heads),
            (lengths_k, shape.kv_heads),
            (lengths_k, shape.kv_heads),
            (lengths_q, shape.heads),
        )
    )
    options = {"causal": shape.causal, "lse": shape.lse}
    if shape.lengths:
        return flash.packed(q, k, v, grad_out, lengths_q, lengths_k, **options)
    sequences = (x.unflatten(0, (shape.batch, -1)) for x in (q, k, v, grad_out))
    return flash.dense(*sequences, **options)
