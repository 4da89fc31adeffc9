# SPDX-License-Identifier: BSD-3-Clause
"""List the problems to tune for a model, and select the configurations worth measuring.

A problem is a kernel of attention with one shape, or the two products of a layer of experts for one
number of tokens.
"""

import contextlib
import importlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from strix_emulate import TARGETS
from torch import Tensor

from strix_validate import TARGET
from strix_validate.attention import flash
from strix_validate.doctor.kernel_lists import LIST
from strix_validate.layers.config import ModelLayers
from strix_validate.layers.table import Attention, Experts
from strix_validate.precompiled import packages
from strix_validate.precompiled.costs import KernelCost
from strix_validate.triton.call import Call
from strix_validate.triton.modes import CallAnswer
from strix_validate.triton.stand_in import Lookup
from strix_validate.tuning.record import Trial
from strix_validate.vllm import kernels as vllm_kernels
from strix_validate.vllm.source import MOE_MODULE

#: Tile and launch options, by their names in the library's file; {} is the packaged choice.
Configuration = dict[str, Any]
#: Numbers of tokens of the prompt and of the cache in timed calls.
PROMPT = 2048
CACHE = 4096
#: Numbers of tokens of a step for which experts are tuned. The tuned file has a row for each of
#: them. For a step of another number of tokens, vLLM uses the row of the nearest number.
STEPS = (1, 8, 32, 128, 512, 2048)
#: Number of tokens of a prompt whose result is checked. It is not a multiple of a tile's size.
_CHECKED = 300
#: Rows and columns of a checked product of experts. All multiples of 16 use the same kernel.
_SMALL = 256
_SAME = "compiles to the same code as an earlier configuration"
_AITER = "aiter.ops.triton._triton_kernels.flash_attn_triton_amd.fwd_prefill"


def _grid(**values: Iterable) -> list[Configuration]:
    """Return every combination of values."""
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


def _backward_tiles(tiles: Iterable[tuple[int, int]]) -> list[Configuration]:
    """Return backward configurations with the given tiles of rows and keys."""
    launches = _grid(num_warps=(4, 8), waves_per_eu=(1, 2))
    configurations = []
    for (rows, keys), launch in product(tiles, launches):
        configurations.append({"BLOCK_M": rows, "BLOCK_N": keys} | launch)
    return configurations


#: Sizes of the tiles of the kernel dkdv: number of rows, number of keys. The kernel dq exchanges
#: the two numbers. One number divides the other.
_KEYS = ((16, 64), (32, 32), (32, 64), (16, 128), (16, 32))
#: Forward configurations. Few of them have two stages, because AMD's compiler then makes longer
#: loops.
_FORWARD = [
    *_grid(
        BLOCK_M=(64, 128),
        BLOCK_N=(32, 64),
        num_warps=(4, 8),
        waves_per_eu=(1, 2),
        num_stages=(1,),
        PRE_LOAD_V=(False,),
    ),
    *_grid(
        BLOCK_M=(64,),
        BLOCK_N=(32, 64),
        num_warps=(4,),
        waves_per_eu=(1,),
        num_stages=(2,),
        PRE_LOAD_V=(False,),
    ),
]
_DECODE = _grid(BLOCK_N=(16, 32, 64), waves_per_eu=(0, 1, 2))
#: For each kernel of flash-attn's built-in backend: the beginning of its name, and the
#: configurations to try. aiter's forward kernel has the configurations of "forward".
SPACES: dict[str, tuple[str, list[Configuration]]] = {
    "forward": ("attn_fwd", _FORWARD),
    "decode": ("_fwd_kernel_splitK", _DECODE),
    "dkdv": ("_bwd_kernel_dkdv", _backward_tiles(_KEYS)),
    "dq": ("_bwd_kernel_dq", _backward_tiles([(keys, rows) for rows, keys in _KEYS])),
}


@dataclass(frozen=True)
class Problem:
    """A problem to tune; see the module's docstring.

    Attributes:
        library: "flash-attn", "aiter" or "vllm".
        key: The problem's name in the library's file; for vllm, the number of tokens.
        kernel: The beginning of the names of the kernels whose counts are compared.
        checked: Builders of the calls whose results are compared with float64.
        timed: Builders of the calls that are timed together.
        dtype: The data type of the calls.
        configurations: The configurations to try besides the packaged one.
        shapes: For vllm, the arguments with which it looks up a configuration.
        source: For vllm, vLLM's folder.
    """

    library: str
    key: str
    kernel: str
    checked: tuple[partial, ...]
    timed: tuple[partial, ...]
    dtype: torch.dtype
    configurations: tuple[Configuration, ...]
    shapes: tuple = ()
    source: Path | None = None

    @property
    def name(self) -> str:
        """The name in the record and in messages."""
        if not self.shapes:
            return f"{self.library} {self.key}"
        (_, rows, _), (experts, _, _), _, dtype_name, *_ = self.shapes
        dtype = dtype_name or str(self.dtype).removeprefix("torch.")
        return f"{self.library} E={experts},N={rows // 2} {dtype} {self.key}"

    def build(self, builder: partial, randn: Callable[..., Tensor]) -> tuple[Any, Any]:
        """Build a call and its expected results; see triton.cases.Case."""
        call, expected = builder(randn)
        if self.source:
            call = replace(call, source=self.source)
        return call, expected


def list_problems(
    model: ModelLayers,
    backend: str,
    source: Path | None,
    steps: Sequence[int] = STEPS,
) -> list[Problem]:
    """Return the problems to tune for a model: first those of serving, then those of training.

    Layers of attention with the same head dim and mask share their problems. Layers with a head dim
    above 256 are left out.

    Args:
        model: The layers of the model.
        backend: The backend whose kernels flash-attn calls, "built-in" or "aiter"; "" without
            flash-attn.
        source: vLLM's folder; None without vLLM.
        steps: Numbers of tokens for which experts are tuned.
    """
    # Keep one layer for each head dim and mask.
    layers_by_kernel = {(layer.head_dim, layer.causal): layer for layer in model.attention}
    layers = [layer for layer in layers_by_kernel.values() if layer.head_dim <= 256]
    problems: list[Problem] = []
    if backend == "aiter" and layers:
        # aiter uses one tile for all layers, which is tuned for the largest head dim.
        widest = max(layers, key=lambda layer: layer.head_dim)
        problems.append(_build_attention("aiter", "forward", widest, model.dtype))
    if backend == "built-in":
        causal_layers = [layer for layer in layers if layer.causal]
        problems += _list_flash_attn(layers, ("forward",), model.dtype)
        problems += _list_flash_attn(causal_layers, ("decode",), model.dtype)
    if source:
        for experts, tokens in product(model.experts, steps):
            problems.append(_build_experts(experts, tokens, model.dtype, source))
    if backend == "built-in":
        problems += _list_flash_attn(layers, ("dkdv", "dq"), model.dtype)
    return problems


def _list_flash_attn(
    layers: Sequence[Attention],
    kernels: Sequence[str],
    dtype: torch.dtype,
) -> list[Problem]:
    """Return a problem to tune for each of flash-attn's kernels and each layer."""
    problems = []
    for layer, kernel in product(layers, kernels):
        problems.append(_build_attention("flash-attn", kernel, layer, dtype))
    return problems


def _build_attention(
    library: str,
    kernel: str,
    layer: Attention,
    dtype: torch.dtype,
) -> Problem:
    smallest_tile = 32 if kernel in ("dkdv", "dq") else 16
    padded_head_dim = max(smallest_tile, 1 << (layer.head_dim - 1).bit_length())
    dtype_name = str(dtype).removeprefix("torch.")
    mask = "causal" if layer.causal else "full"
    few_heads = {
        "heads": 2 * layer.group,
        "kv_heads": 2,
        "head_dim": layer.head_dim,
    }
    all_heads = {
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
    }
    if kernel == "decode":
        decode = partial(flash.kv_cache, queries=1, new=0)
        checked = partial(
            decode,
            batch=2,
            lengths=(_CHECKED, 77),
            capacity=_CHECKED + 100,
            **few_heads,
        )
        timed = partial(decode, batch=1, lengths=(CACHE - 1,), capacity=CACHE, **all_heads)
    else:
        fixed = partial(flash.fixed, causal=layer.causal)
        checked = partial(fixed, seqlen_q=_CHECKED, seqlen_k=_CHECKED, **few_heads)
        timed = partial(fixed, seqlen_q=PROMPT, seqlen_k=PROMPT, **all_heads)
    name_prefix, configurations = SPACES[kernel]
    return Problem(
        library,
        f"{kernel}-{padded_head_dim}-{dtype_name}-{mask}",
        name_prefix,
        (checked,),
        (timed,),
        dtype,
        tuple(configurations),
    )


def _build_experts(
    layer: Experts,
    tokens: int,
    dtype: torch.dtype,
    source: Path,
) -> Problem:
    """Return the problem of a layer's two products of experts, which share a configuration."""
    bits = 16
    if layer.group:
        bits = 4
    elif layer.block:
        bits = 8
    dtype_name = {4: "int4_w4a16", 8: "fp8_w8a8"}.get(bits)
    block = [layer.block, layer.group or layer.block]
    weights_per_item = 2 if bits == 4 else 1
    sizes = (
        (2 * layer.intermediate_size, layer.hidden_size),
        (layer.hidden_size, layer.intermediate_size),
    )
    block_shape = block if any(block) else None
    shapes = [(layer.experts, rows, columns // weights_per_item) for rows, columns in sizes]
    small_sizes = ((_SMALL, _SMALL), (_SMALL, _SMALL))
    return Problem(
        "vllm",
        str(tokens),
        "fused_moe_kernel",
        _build_products(layer, bits, min(tokens, 32), small_sizes),
        _build_products(layer, bits, tokens, sizes),
        dtype,
        tuple(_list_expert_tiles(tokens, layer.group, layer.block)),
        (*shapes, layer.top_k, dtype_name, tokens, block_shape),
        source,
    )


def _build_products(
    layer: Experts,
    bits: int,
    tokens: int,
    sizes: tuple[tuple[int, int], tuple[int, int]],
) -> tuple[partial, partial]:
    """Return the builders of both products of a layer of experts.

    A token is one row of the first product, and top_k rows of the second.

    Args:
        layer: The layer, with its experts and the format of their weights.
        bits: Bits of the weights.
        tokens: Tokens of the step.
        sizes: Rows and columns of the weights of each product.
    """
    build = partial(
        vllm_kernels.moe,
        experts=layer.experts,
        bits=bits,
        group=layer.group or 32,
        zeros=layer.zeros,
    )
    (first_rows, first_columns), (second_rows, second_columns) = sizes
    first = partial(
        build,
        tokens=tokens,
        top_k=layer.top_k,
        routed=False,
        rows=first_rows,
        columns=first_columns,
    )
    second = partial(
        build,
        tokens=tokens * layer.top_k,
        top_k=1,
        routed=not layer.weights_input,
        rows=second_rows,
        columns=second_columns,
    )
    return first, second


def _list_expert_tiles(tokens: int, group: int, block: int) -> Iterator[Configuration]:
    """Yield tiles of tokens, rows and columns, with the warps that a tile of this size can use."""
    heights: tuple[int, ...] = (32, 64, 128)
    if tokens <= 32:
        heights = (16,)
    elif tokens <= 128:
        heights = (16, 32, 64)
    depths: tuple[int, ...] = (64, 128, 256)
    if block:
        depths = (block,)
    elif group:
        depths = (group, 64)
    for m, n, k in product(heights, (32, 64, 128), depths):
        num_warps = (2, 4) if m * n <= 2048 else (4, 8)
        for warps in num_warps:
            yield {
                "BLOCK_SIZE_M": m,
                "BLOCK_SIZE_N": n,
                "BLOCK_SIZE_K": k,
                "GROUP_SIZE_M": 1,
                "SPLIT_K": 1,
                "num_warps": warps,
                "num_stages": 2,
            }


@contextlib.contextmanager
def configured(problem: Problem, configuration: Configuration) -> Iterator[None]:
    """Return a context in which a library uses a configuration.

    For {}, flash-attn's built-in kernels use the packaged configuration. aiter and vLLM then use
    their own choice.
    """
    if problem.library == "flash-attn":
        utils = importlib.import_module("flash_attn.flash_attn_triton_amd.utils")
        tiles = {problem.key: configuration} if configuration else {}
        change: Any = patch.object(utils, "TILES", tiles)
    elif problem.library == "aiter":
        module = importlib.import_module(_AITER)
        configs = module.attn_fwd.configs
        if configuration:
            configs = [_convert_to_triton(configuration)]
        change = patch.object(module.attn_fwd, "configs", configs)
    else:
        module = importlib.import_module(MOE_MODULE)
        config = configuration or module.try_get_optimal_moe_config(*problem.shapes)
        change = patch.object(module, "get_default_config", lambda *_: dict(config))
    with change:
        yield


def _convert_to_triton(configuration: Configuration) -> Any:
    """Return a configuration as triton.autotune's type."""
    from triton import Config

    tile = dict(configuration)
    num_warps = tile.pop("num_warps")
    num_stages = tile.pop("num_stages")
    return Config(tile, num_warps=num_warps, num_stages=num_stages)


@dataclass(frozen=True)
class ConfiguredCall:
    """A checked call of a problem with a configuration; see triton.call.Call.

    Attributes:
        problem: The problem.
        builder: One of the problem's builders of checked calls.
        configuration: The configuration with which the call is made.
    """

    problem: Problem
    builder: partial
    configuration: Configuration

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.problem.name} {self.configuration}"

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the call."""
        return self.problem.dtype

    def _build_call(self) -> Call:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype)

        call, _ = self.problem.build(self.builder, zeros)
        is_backward = self.problem.kernel.startswith("_bwd")
        if is_backward or self.problem.source:
            return call
        return replace(call, grad_out=None)

    def prepare(self) -> str:
        """Prepare the library, and describe the kernels that the call will run."""
        return self._build_call().prepare()

    def execute(self, device: str) -> dict[str, Tensor]:
        """Make the call on a device."""
        with configured(self.problem, self.configuration):
            return self._build_call().execute(device)


def short_list(problem: Problem, cache: Path, jobs: int | None, most: int) -> list[Trial]:
    """Compile a problem's configurations for gfx1151; return a trial for each, with its counts.

    The first trial is that of the packaged configuration. A trial that is not to be measured has a
    reason.

    Args:
        problem: The problem to tune.
        cache: Triton's cache.
        jobs: Number of processes that compile; None for the number of cores.
        most: Maximum number of configurations to measure besides the packaged one.

    Raises:
        RuntimeError: The packaged configuration does not compile, or the library ignores all other
            configurations.
    """
    configurations = ({}, *problem.configurations)
    calls = []
    for configuration, builder in product(configurations, problem.checked):
        calls.append(ConfiguredCall(problem, builder, configuration))
    answers = packages.look_up(calls, cache, jobs)
    trials: list[Trial] = []
    costs: list[KernelCost | None] = []
    compiled_code: set[bytes] = set()
    count = len(problem.checked)
    for i, configuration in enumerate(configurations):
        own_answers = answers[i * count : (i + 1) * count]
        trial, cost = _judge_compiled(problem, configuration, own_answers, compiled_code)
        trials.append(trial)
        costs.append(cost)
    packaged = costs[0]
    if packaged is None:
        raise RuntimeError(f"{problem.name}, as packaged: {trials[0].reason}")
    if all(trial.reason == _SAME for trial in trials[1:]):
        raise RuntimeError(f"{problem.name}: {problem.library} ignores other configurations")
    choose(trials, costs, packaged, most)
    return trials


def _judge_compiled(
    problem: Problem,
    configuration: Configuration,
    answers: list[CallAnswer],
    compiled_code: set[bytes],
) -> tuple[Trial, KernelCost | None]:
    """Return a configuration's trial, and its cost; None if a call failed or compiled no kernel.

    Args:
        problem: The problem to tune.
        configuration: The configuration; {} stands for the packaged one.
        answers: The answers to the calls that were compiled with the configuration.
        compiled_code: Code objects of earlier configurations. The function adds the code objects of
            this configuration.
    """
    errors = [": ".join(answer.error) for answer in answers if answer.error]
    kernels: list[Lookup] = []
    for answer in answers:
        kernels += [x for x in answer.lookups if x.name.startswith(problem.kernel)]
    # A process looks up each kernel once. If a configuration has no kernel here, an earlier one
    # needed the same kernel.
    code = {_read_code(kernel) for kernel in kernels}
    trial = Trial(configuration=configuration)
    if errors:
        trial.reason = errors[0][:300]
    elif not kernels and not configuration:
        trial.reason = f"no kernel {problem.kernel} was compiled"
    elif code <= compiled_code:
        trial.reason = _SAME
    compiled_code |= code
    if errors or not kernels:
        return trial, None
    cost = combine_costs([_read_cost(kernel) for kernel in kernels])
    trial.cost = asdict(cost)
    return trial, cost


def choose(
    trials: list[Trial],
    costs: list[KernelCost | None],
    packaged: KernelCost,
    most: int,
) -> None:
    """Set the reason of each trial that is not worth measuring.

    Args:
        trials: The trials. The first is the packaged configuration, which is always measured.
        costs: The costs of the trials; None for a trial without a compiled kernel.
        packaged: The cost of the packaged configuration.
        most: Maximum number of other trials to measure.
    """
    candidates = []
    for trial, cost in list(zip(trials, costs, strict=True))[1:]:
        if cost is None or trial.reason:
            continue
        trial.reason = reject(cost, packaged)
        if not trial.reason:
            candidates.append((sort_key(trial.configuration, cost), trial))
    candidates.sort(key=lambda pair: pair[0])
    # The best trials of all tiles come before the second best trial of any tile.
    places: Counter[tuple] = Counter()
    order = []
    for _, trial in candidates:
        tile = _read_tile(trial.configuration)
        order.append((places[tile], trial))
        places[tile] += 1
    order.sort(key=lambda pair: pair[0])
    for _, trial in order[most:]:
        trial.reason = f"not among the first {most} configurations"


def _read_tile(configuration: Configuration) -> tuple[int, ...]:
    return tuple(x for name, x in configuration.items() if name.startswith("BLOCK"))


def _read_code(lookup: Lookup) -> bytes:
    """Return a kernel's code object. An option that changes nothing leaves it the same."""
    for path in lookup.files.values():
        if path.endswith(".hsaco"):
            return Path(path).read_bytes()
    raise FileNotFoundError(f"{lookup.name} has no code object")


def _read_cost(lookup: Lookup) -> KernelCost:
    """Return a kernel's cost, from the list of its package or from its assembly."""
    file = Path(next(iter(lookup.files.values())))
    kernel_list = file.parents[1] / LIST
    if kernel_list.is_file():
        kernels = json.loads(kernel_list.read_bytes())["kernels"]
        return KernelCost(**kernels[lookup.key]["cost"])
    return packages.measure_lookup(lookup)


def combine_costs(costs: Iterable[KernelCost]) -> KernelCost:
    """Return the worst of each count: the minimum of waves and wmma, the maximum of all others."""
    columns = zip(*map(astuple, costs), strict=True)
    values = {}
    for column, field in zip(columns, fields(KernelCost), strict=True):
        is_better_if_larger = field.name in ("waves", "wmma")
        values[field.name] = min(column) if is_better_if_larger else max(column)
    return KernelCost(**values)


def reject(cost: KernelCost, packaged: KernelCost) -> str:
    """Return why a configuration other than the packaged one is not worth measuring, or ""."""
    if cost.scratch > packaged.scratch or cost.vgpr_spills > packaged.vgpr_spills:
        return f"{cost.scratch} bytes of scratch, {cost.vgpr_spills} registers spilled"
    if cost.lds > TARGETS[TARGET].lds:
        return f"{cost.lds} bytes of LDS"
    if packaged.wmma and not cost.wmma:
        return "no matrix instructions"
    if 2 * cost.waves < packaged.waves:
        return f"{cost.waves} waves; the packaged configuration has {packaged.waves}"
    return ""


def sort_key(configuration: Configuration, cost: KernelCost) -> tuple:
    """Return a sort key: least scratch first, then fewest spills, largest tile and most waves."""
    area = math.prod(_read_tile(configuration))
    return cost.scratch, cost.vgpr_spills, -area, -cost.waves
