# SPDX-License-Identifier: BSD-3-Clause
"""Measure the configurations of one problem: `python -m strix_validate.tuning.worker FILE`.

The worker is a process of its own, because a kernel may hang the GPU. The worker writes lines of
JSON, each with an object of one of three kinds:

- "configuration" and "fault": the number of a configuration, and the fault of its result or "".
- "file" and "packaged", only for vLLM: the name of the file of tuned configurations that `tune`
  writes for vLLM, and the configuration that vLLM uses without this file.
- "round": milliseconds of each configuration with a right result.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strix_validate.checks import Check, State, derive_seed
from strix_validate.numerics.comparison import compare
from strix_validate.numerics.reference import Precision
from strix_validate.timing import time_call
from strix_validate.triton import stand_in
from strix_validate.triton.cases import Expected
from strix_validate.tuning.candidates import Configuration, ConfiguredCall, Problem, configured
from strix_validate.vllm import kernels as vllm_kernels
from strix_validate.vllm.source import MOE_MODULE

#: Milliseconds for which a configuration is timed in a round. With the warm-up, a round of all
#: configurations takes seconds.
_TURN = 150.0
#: The names of the results that are compared with float64.
_COMPARED = {"out", "dq", "dk", "dv"}


@dataclass(frozen=True)
class Request:
    """A request to a worker.

    Attributes:
        problem: The kernel and shape to measure.
        configurations: The configurations to check and to time; the first is the packaged one.
        device: "cuda", or "cpu" for Triton's interpreter.
        first: The number of the first round.
        rounds: The number of the last round, plus 1.
    """

    problem: Problem
    configurations: tuple[Configuration, ...]
    device: str
    first: int
    rounds: int


def find_fault(problem: Problem, configuration: Configuration, device: str) -> str:
    """Compare a configuration's results with float64, and return their fault or ""."""
    generator = torch.Generator().manual_seed(derive_seed(problem.name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(problem.dtype)

    try:
        for builder in problem.checked:
            call, expected = problem.build(builder, randn)
            if _is_forward(problem):
                call = replace(call, grad_out=None)
            with configured(problem, configuration):
                results = {name: x.cpu() for name, x in call.execute(device).items()}
            compared = _select_results(results, expected)
            result = compare(Check(problem.name), results, compared, problem.dtype)
            if result.state is not State.PASSED:
                return result.reason
    except Exception as error:  # for example, the kernel needs too many resources
        return f"{type(error).__name__}: {error!s:.200}"
    return ""


def _is_forward(problem: Problem) -> bool:
    return problem.library != "vllm" and not problem.kernel.startswith("_bwd")


def _select_results(results: dict[str, Tensor], expected: Expected) -> Expected:
    """Limit the expected results to those that a call has. The call may have no gradients."""

    def select(dtype: Precision) -> dict[str, Tensor]:
        names = results.keys() & _COMPARED
        return {name: x for name, x in expected(dtype).items() if name in names}

    return select


def bind(problem: Problem, device: str) -> Callable[[], Callable[[], Any]]:
    """Build the timed calls of a problem.

    Returns:
        A function that returns the function to time. Call it in the context of a configuration.
    """
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=problem.dtype)

    with torch.device(device):
        calls = [problem.build(builder, randn)[0] for builder in problem.timed]
    if problem.library == "vllm":
        return partial(_bind_experts, calls, device)
    function = _bind_attention(problem, calls[0], device)
    return lambda: function


def _bind_attention(problem: Problem, call: Any, device: str) -> Callable[[], Any]:
    """Return the function to time: it launches a forward kernel, or the backward kernels."""
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
    """Return the function that launches both products of a layer of experts.

    The tokens are sorted only once, here. The sorting depends on the current configuration.
    """
    launches = []
    for call in calls:
        tensors = {name: x.to(device) for name, x in call.tensors.items()}
        launch, _ = vllm_kernels.bind_moe(**tensors, **call.options)
        launches.append(launch)

    def launch_all() -> None:
        for launch in launches:
            launch()

    return launch_all


def measure(request: Request, emit: Callable[[dict], None]) -> None:
    """Check the configurations, and time those with right results.

    Each round times each configuration with right results once. Each round begins one
    configuration later than the round before.

    Args:
        request: The request.
        emit: Writes a line.

    Raises:
        SystemExit: No configuration gives a right result.
    """
    problem = request.problem
    ConfiguredCall(problem, problem.checked[0], {}).prepare()
    right = []
    for i, configuration in enumerate(request.configurations):
        fault = find_fault(problem, configuration, request.device)
        emit({"configuration": i, "fault": fault})
        if not fault:
            right.append(i)
    if not right:
        raise SystemExit("no configuration gives a right result")
    if problem.library == "vllm":
        module = importlib.import_module(MOE_MODULE)
        packaged = module.try_get_optimal_moe_config(*problem.shapes)
        emit({"file": build_file_name(problem), "packaged": packaged})
    bind_configuration = bind(problem, request.device)
    functions = {}
    for i in right:
        with configured(problem, request.configurations[i]):
            functions[i] = bind_configuration()
    for number in range(request.first, request.rounds):
        start = number % len(right)
        times = {}
        for i in right[start:] + right[:start]:
            with configured(problem, request.configurations[i]), _gradients(problem):
                timing = time_call(functions[i], request.device, _TURN, with_kernels=False)
            times[i] = timing.median
        emit({"round": times})


def _gradients(problem: Problem) -> Any:
    """Return a context without gradients for a forward kernel of attention, else an empty one."""
    return torch.no_grad() if _is_forward(problem) else nullcontext()


def build_file_name(problem: Problem) -> str:
    """Return the name of vLLM's file for a problem on this GPU."""
    module = importlib.import_module(MOE_MODULE)
    experts, _, inner = problem.shapes[1]
    dtype_name = problem.shapes[3]
    block = problem.shapes[5]
    if dtype_name == "int4_w4a16":
        # The tensor has two weights in each byte, and the file's name has the number of weights.
        inner = 2 * inner
    return module.get_config_file_name(experts, inner, dtype_name, block)


def _end_with_parent() -> None:
    """End this process when the parent closes standard input and no longer reads the results."""
    # This uses os.read, because sys.stdin would hold its lock when Python ends.
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


def _main(file: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Unpickling is safe, because the parent process wrote this file.
    request = pickle.loads(Path(file).read_bytes())
    if request.device == "cuda" and not torch.version.hip:
        stand_in.ignore_amd_options()
    measure(request, lambda line: print(json.dumps(line), flush=True))


if __name__ == "__main__":
    # Run the module under its importable name, so that a request can be unpickled.
    from strix_validate.tuning import worker

    worker._main(sys.argv[1])
