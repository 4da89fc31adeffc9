# SPDX-License-Identifier: BSD-3-Clause
"""flash-attn's public functions, forward and backward, with every kernel executed under emulation.

The real call path runs on CPU tensors (see :mod:`strix_emulate.triton_device`), with whichever
backend flash-attn chooses: its own Triton kernels, or amd-aiter's. Bounds are those of flash-attn's
own tests: twice the error of PyTorch's attention in the same type, three times for gradients.
"""

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from strix_emulate import llvm, triton_device
from strix_emulate.errors import EmulatorError, Trap
from strix_emulate.machine import Options

#: Added to bounds: where the result is exact in the type by chance.
_SLACK = 1e-5


@dataclass(frozen=True)
class Case:
    """Shapes of a call; with lengths, of queries and keys of each sequence, the varlen call."""

    name: str
    dtype: str = "float16"
    head_dim: int = 64
    causal: bool = False
    heads: int = 2
    kv_heads: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 70
    lengths: tuple[tuple[int, int], ...] = ()
    backward: bool = True


@dataclass
class Result:
    """errors: (error against float64, bound); kernels: (name, digest, executed, CPU seconds)."""

    case: Case
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    kernels: list[tuple[str, str, int, float]] = field(default_factory=list)
    fault: str = ""

    @property
    def passed(self) -> bool:
        return not self.fault and all(error <= bound for error, bound in self.errors.values())


def cases() -> Iterator[Case]:
    """Head dimensions 64, 72 and 128, two types, causal or not; grouped queries; ragged; varlen."""
    for head_dim in (64, 72, 128):
        for causal in (False, True):
            for dtype in ("float16", "bfloat16"):
                name = f"d{head_dim}{'-causal' if causal else ''}-{dtype}"
                yield Case(name, dtype, head_dim, causal)
    yield Case("gqa-causal", causal=True, heads=4, kv_heads=2)
    yield Case(
        "gqa-long-keys", head_dim=128, causal=True, heads=2, kv_heads=1, seqlen_q=100, seqlen_k=150
    )
    yield Case("ragged", seqlen_q=33, seqlen_k=131)
    yield Case("whole-blocks", seqlen_q=128, seqlen_k=128)
    yield Case("varlen", heads=4, kv_heads=2, causal=True, lengths=((37, 64), (64, 64), (10, 50)))
    yield Case("varlen-bfloat16", "bfloat16", heads=2, lengths=((40, 70), (100, 20)))


def run(wanted: list[Case], options: Options | None = None) -> Iterator[Result]:
    """Results of cases, one by one. Changes this process: it then has no other Triton device.

    Raises:
        EmulatorError: flash-attn or Triton is not installed. DisassemblerError: no fit LLVM.
    """
    try:
        import torch
    except ImportError as error:
        raise EmulatorError(f"attention needs torch, triton and flash-attn ({error})") from error
    llvm.find()  # before the cases, which take whatever is raised as their result
    recorder = triton_device.Recorder(options or Options())
    try:
        triton_device.install(recorder)
        import flash_attn
    except ImportError as error:
        raise EmulatorError(f"attention needs torch, triton and flash-attn ({error})") from error
    accept_cpu_tensors()
    for case in wanted:
        generator = torch.Generator().manual_seed(1)
        recorder.launches.clear()
        result = Result(case)
        try:
            result.errors = _errors(case, generator, torch, flash_attn)
        except Trap as trap:
            result.fault = str(trap)
        except Exception as error:  # whatever a backend raises is the case's result
            result.fault = f"{type(error).__name__}: {error}"
        for done in recorder.launches:
            digest = hashlib.sha256(done.kernel.code).hexdigest()[:12]
            result.kernels.append((done.kernel.name, digest, done.executed, done.seconds))
        yield result


def accept_cpu_tensors() -> None:
    """flash-attn registers its ops for GPU tensors only; the bodies do not care."""
    interface = sys.modules["flash_attn.flash_attn_interface"]
    for name in ("forward", "varlen_forward", "backward", "varlen_backward"):
        op = getattr(interface, f"_flash_attn_{name}")
        op.register_kernel("cpu")(op._init_fn)


def backend() -> str:
    """The kernels that flash-attn uses: "aiter" or "built-in"; "unknown" if it is not patched."""
    return getattr(sys.modules.get("flash_attn.flash_attn_interface"), "BACKEND", "unknown")


def _errors(case: Case, generator, torch, flash_attn) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of the output and the gradients."""
    dtype = getattr(torch, case.dtype)
    lengths = case.lengths or ((case.seqlen_q, case.seqlen_k),)
    total_q, total_k = (sum(x) for x in zip(*lengths, strict=True))

    def randn(tokens, heads):
        return torch.randn(tokens, heads, case.head_dim, generator=generator).to(dtype)

    q, k, v, grad = (randn(total_q, case.heads), randn(total_k, case.kv_heads),
                     randn(total_k, case.kv_heads), randn(total_q, case.heads))  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if case.lengths:
        starts = [
            torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in zip(*lengths, strict=True)
        ]
        longest = [max(x) for x in zip(*lengths, strict=True)]
        out = flash_attn.flash_attn_varlen_func(*leaves, *starts, *longest, causal=case.causal)
    else:
        out = flash_attn.flash_attn_func(*(x[None] for x in leaves), causal=case.causal)[0]
    got = [out.detach()]
    if case.backward:
        got += torch.autograd.grad(out, leaves, grad)
    exact, rough = (
        _reference(torch, [x.to(kind) for x in (q, k, v, grad)], lengths, case)
        for kind in (torch.float64, dtype)
    )
    errors = {}
    for i, (name, value) in enumerate(zip(("out", "dq", "dk", "dv"), got, strict=False)):
        bound = (2 if i == 0 else 3) * (rough[i].double() - exact[i]).abs().max() + _SLACK
        error = (value.double() - exact[i]).abs().max()
        # a NaN is no error that compares
        errors[name] = (float(error) if error == error else float("inf"), float(bound))
    return errors


def _reference(torch, tensors, lengths, case: Case):
    """Plain attention, sequence by sequence, in the type of the tensors: out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    outs, at_q, at_k = [], 0, 0
    for n, m in lengths:
        q = leaves[0][at_q : at_q + n].transpose(0, 1)
        k, v = (
            x[at_k : at_k + m].transpose(0, 1).repeat_interleave(case.heads // case.kv_heads, 0)
            for x in leaves[1:]
        )
        scores = q @ k.transpose(1, 2) * case.head_dim**-0.5
        if case.causal:
            # the last query sees the last key
            seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
            scores = scores.masked_fill(~seen, float("-inf"))
        # a query that sees no key has output zero
        p = scores.softmax(-1).nan_to_num(0.0)
        outs.append((p @ v).transpose(0, 1))
        at_q, at_k = at_q + n, at_k + m
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
