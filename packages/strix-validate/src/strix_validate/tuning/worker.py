# SPDX-License-Identifier: BSD-3-Clause
"""Measure the configurations of one problem: `python -m strix_validate.tuning.worker FILE`.

A process of its own, since a kernel may hang the GPU. Each line that it writes is a JSON object:
"fault", what is wrong with a configuration's result, "" for nothing; "round", milliseconds of each
right configuration; or "file" and "packaged", the name of vLLM's file and what it takes without it.
"""

import importlib
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strix_validate.checks import Check, State, seed_of
from strix_validate.numerics.comparison import compare
from strix_validate.timing import timed
from strix_validate.triton import stand_in
from strix_validate.tuning.candidates import Configuration, ConfiguredCall, Problem, configured
from strix_validate.vllm import kernels as vllm_kernels

#: Milliseconds of a configuration's turn: with its warm-up, a round takes seconds.
_TURN = 150.0


@dataclass(frozen=True)
class Request:
    """What a worker measures.

    Attributes:
        problem: The kernel.
        configurations: The packaged one first; each is checked before it is timed.
        device: "cuda", or "cpu" in Triton's interpreter.
        first, rounds: The number of the first round, and the number behind the last one.
    """

    problem: Problem
    configurations: tuple[Configuration, ...]
    device: str
    first: int
    rounds: int


def fault_of(problem: Problem, configuration: Configuration, device: str) -> str:
    """Return what is wrong with a configuration's results beside float64, or ""."""
    generator = torch.Generator().manual_seed(seed_of(problem.name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(problem.dtype)

    try:
        for builder in problem.checked:
            call, expected = problem.build(builder, randn)
            if _is_forward(problem):
                call = replace(call, grad_out=None)
            with configured(problem, configuration):
                found = {name: x.cpu() for name, x in call.execute(device).items()}
            wanted = _only(found, expected)
            result = compare(Check(problem.name), found, wanted, problem.dtype)
            if result.state is not State.PASSED:
                return result.reason
    except Exception as error:  # too many resources, say: it is measured no further
        return f"{type(error).__name__}: {error!s:.200}"
    return ""


def _is_forward(problem: Problem) -> bool:
    return problem.library != "vllm" and not problem.kernel.startswith("_bwd")


def _only(found: dict[str, Tensor], expected: Callable) -> Callable:
    """Return what of an expectation the call gave: no gradients of a call without them."""
    names = ("out", "dq", "dk", "dv")
    return lambda dtype: {
        name: x for name, x in expected(dtype).items() if name in names and name in found
    }


def bind(problem: Problem, device: str) -> Callable[[Configuration], Callable[[], Any]]:
    """Return what gives the function to time, under a configuration."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=problem.dtype)

    with torch.device(device):
        calls = [problem.build(builder, randn)[0] for builder in problem.timed]
    if problem.library == "vllm":
        return lambda configuration: _bind_experts(calls, device)
    function = _bind_attention(problem, calls[0], device)
    return lambda configuration: function


def _bind_attention(problem: Problem, call: Any, device: str) -> Callable[[], Any]:
    import flash_attn

    function = getattr(flash_attn, call.name)
    tensors = {name: x.to(device) for name, x in call.tensors.items()}
    if _is_forward(problem):
        return lambda: function(**tensors, **call.options)
    leaves = [tensors[name].requires_grad_() for name in ("q", "k", "v")]
    with configured(problem, {}), torch.enable_grad():
        out = function(**tensors, **call.options)
    grad_out = call.grad_out.to(device)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def _bind_experts(calls: list[Any], device: str) -> Callable[[], None]:
    """Return what launches both products; the tokens are sorted once, for this configuration."""
    launches = []
    for call in calls:
        tensors = {name: x.to(device) for name, x in call.tensors.items()}
        launches.append(vllm_kernels.bind_moe(**tensors, **call.options)[0])

    def launch_all() -> None:
        for launch in launches:
            launch()

    return launch_all


def measure(request: Request, emit: Callable[[dict], None]) -> None:
    """Check the configurations, and time the right ones in turns, each round in another order."""
    problem, device = request.problem, request.device
    ConfiguredCall(problem, problem.checked[0], {}).prepare()
    right = []
    for i, configuration in enumerate(request.configurations):
        fault = fault_of(problem, configuration, device)
        emit({"configuration": i, "fault": fault})
        if not fault:
            right.append(i)
    if not right:
        raise SystemExit("no configuration gives a right result")
    if problem.library == "vllm":
        module = importlib.import_module(vllm_kernels.MOE)
        packaged = module.try_get_optimal_moe_config(*problem.shapes)
        emit({"file": file_name(problem), "packaged": packaged})
    bound = bind(problem, device)
    functions = {}
    for i in right:
        with configured(problem, request.configurations[i]):
            functions[i] = bound(request.configurations[i])
    for number in range(request.first, request.rounds):
        turn = number % len(right)
        times = {}
        for i in right[turn:] + right[:turn]:
            with configured(problem, request.configurations[i]), _gradients(problem):
                times[i] = timed(functions[i], device, _TURN, named=False).median
        emit({"round": times})


def _gradients(problem: Problem) -> Any:
    return torch.no_grad() if _is_forward(problem) else nullcontext()


def file_name(problem: Problem) -> str:
    """Return how vLLM itself names the file of a problem on this GPU."""
    module = importlib.import_module(vllm_kernels.MOE)
    (experts, _, inner), kind, block = problem.shapes[1], problem.shapes[3], problem.shapes[5]
    whole = 2 * inner if kind == "int4_w4a16" else inner
    return module.get_config_file_name(experts, whole, kind, block)


def _end_with_parent() -> None:
    """End when the other end of standard input is closed: nobody reads what is measured."""
    while os.read(0, 1 << 16):  # not sys.stdin, whose lock would be held when Python ends
        pass
    os._exit(1)


def _main(file: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # the parent process wrote this file
    request = pickle.loads(Path(file).read_bytes())
    if request.device == "cuda" and not torch.version.hip:
        stand_in.ignore_amd_options()
    measure(request, lambda line: print(json.dumps(line), flush=True))


if __name__ == "__main__":
    # under its importable name, so that a request can be unpickled
    from strix_validate.tuning import worker

    worker._main(sys.argv[1])
