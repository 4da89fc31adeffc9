# SPDX-License-Identifier: BSD-3-Clause
"""What is tuned for a model, which configurations are tried, and which are worth measuring."""

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
from strix_validate.triton.stand_in import Lookup
from strix_validate.tuning.record import Trial
from strix_validate.vllm import kernels as vllm_kernels

#: Tile and launch options, by the names that the library's file has; {} is the packaged choice.
Configuration = dict[str, Any]
#: Lengths of timed calls in tokens: a prompt, and a cache to decode from.
PROMPT, CACHE = 2048, 4096
#: Tokens of a step, for which vLLM's file has a row each; vLLM takes the nearest one.
STEPS = (1, 8, 32, 128, 512, 2048)
#: Tokens of a prompt whose result is checked: no multiple of a tile.
_CHECKED = 300
#: Rows and columns of a checked product of experts; the kernel is that of any multiple of 16.
_SMALL = 256
_SAME = "the same code as one above"
_AITER = "aiter.ops.triton._triton_kernels.flash_attn_triton_amd.fwd_prefill"


def _grid(**values: Iterable) -> list[Configuration]:
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


def _tiles(tiles: Iterable[tuple[int, int]]) -> list[Configuration]:
    """Return backward configurations: rows and keys of a tile, which divide each other."""
    launches = _grid(num_warps=(4, 8), waves_per_eu=(1, 2))
    return [{"BLOCK_M": m, "BLOCK_N": n} | launch for (m, n), launch in product(tiles, launches)]


#: Stages of a forward kernel, which AMD's compiler makes longer loops of.
_ONE: dict[str, tuple] = {"num_stages": (1,), "PRE_LOAD_V": (False,)}
_TWO: dict[str, tuple] = {"num_stages": (2,), "PRE_LOAD_V": (False,)}
_KEYS = ((16, 64), (32, 32), (32, 64), (16, 128), (16, 32))
#: By kernel of flash-attn's built-in backend: the beginning of its name, and what is tried.
SPACES: dict[str, tuple[str, list[Configuration]]] = {
    "forward": (
        "attn_fwd",
        _grid(BLOCK_M=(64, 128), BLOCK_N=(32, 64), num_warps=(4, 8), waves_per_eu=(1, 2), **_ONE)
        + _grid(BLOCK_M=(64,), BLOCK_N=(32, 64), num_warps=(4,), waves_per_eu=(1,), **_TWO),
    ),
    "decode": ("_fwd_kernel_splitK", _grid(BLOCK_N=(16, 32, 64), waves_per_eu=(0, 1, 2))),
    "dkdv": ("_bwd_kernel_dkdv", _tiles(_KEYS)),
    "dq": ("_bwd_kernel_dq", _tiles([(n, m) for m, n in _KEYS])),
}


@dataclass(frozen=True)
class Problem:
    """A kernel for one shape.

    Attributes:
        library: "flash-attn", "aiter" or "vllm".
        key: What the library's file calls it; for vllm, the number of tokens.
        kernel: The beginning of the names of the kernels whose counts are compared.
        checked: Builders of the calls whose results are compared with float64.
        timed: Builders of the calls that are timed together.
        dtype: Of the calls.
        configurations: What is tried beside the packaged choice.
        shapes: For vllm, the arguments by which it looks for a configuration.
        source: For vllm, its folder.
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
        """What the record and messages call it."""
        if not self.shapes:
            return f"{self.library} {self.key}"
        (_, rows, _), (experts, _, _), _, kind, *_ = self.shapes
        dtype = kind or str(self.dtype).removeprefix("torch.")
        return f"{self.library} E={experts},N={rows // 2} {dtype} {self.key}"

    def build(self, builder: partial, randn: Callable[..., Tensor]) -> tuple[Any, Any]:
        """Build a call and what it must return; see triton.cases.Case."""
        call, expected = builder(randn)
        return (replace(call, source=self.source) if self.source else call), expected


def problems_of(
    model: ModelLayers, backend: str, source: Path | None, steps: Sequence[int] = STEPS
) -> list[Problem]:
    """Return what is tuned for a model, what an owner meets first before the rest.

    Args:
        model: Its layers.
        backend: Whose kernels flash-attn calls, "built-in" or "aiter"; "" without flash-attn.
        source: vLLM's folder, None without vLLM.
        steps: Numbers of tokens for which experts are tuned.
    """
    kinds = {(layer.head_dim, layer.causal): layer for layer in model.attention}
    layers = [layer for layer in kinds.values() if layer.head_dim <= 256]
    found: list[Problem] = []
    if backend == "aiter" and layers:  # it takes one tile for all: that of the widest head
        widest = max(layers, key=lambda layer: layer.head_dim)
        found.append(_attention("aiter", "forward", widest, model.dtype))
    if backend == "built-in":
        served = [("forward", layer) for layer in layers]
        served += [("decode", layer) for layer in layers if layer.causal]
        trained = [(kernel, layer) for layer in layers for kernel in ("dkdv", "dq")]
        found += [_attention("flash-attn", *each, model.dtype) for each in served]
    if source:
        found += [_experts(x, n, model.dtype, source) for x in model.experts for n in steps]
    if backend == "built-in":
        found += [_attention("flash-attn", *each, model.dtype) for each in trained]
    return found


def _attention(library: str, kernel: str, layer: Attention, dtype: torch.dtype) -> Problem:
    size, least = layer.head_dim, 32 if kernel in ("dkdv", "dq") else 16
    padded = max(least, 1 << (size - 1).bit_length())
    kind = str(dtype).removeprefix("torch.")
    key = f"{kernel}-{padded}-{kind}-{'causal' if layer.causal else 'full'}"
    few = {"heads": 2 * layer.group, "kv_heads": 2, "head_dim": size}
    whole = {"heads": layer.heads, "kv_heads": layer.kv_heads, "head_dim": size}
    if kernel == "decode":
        decode = partial(flash.kv_cache, queries=1, new=0)
        checked = partial(decode, batch=2, lengths=(_CHECKED, 77), capacity=_CHECKED + 100, **few)
        timed = partial(decode, batch=1, lengths=(CACHE - 1,), capacity=CACHE, **whole)
    else:
        fixed = partial(flash.fixed, causal=layer.causal)
        checked = partial(fixed, seqlen_q=_CHECKED, seqlen_k=_CHECKED, **few)
        timed = partial(fixed, seqlen_q=PROMPT, seqlen_k=PROMPT, **whole)
    prefix, configurations = SPACES[kernel]
    return Problem(library, key, prefix, (checked,), (timed,), dtype, tuple(configurations))


def _experts(layer: Experts, tokens: int, dtype: torch.dtype, source: Path) -> Problem:
    """Return both products of a layer of experts, which share a configuration."""
    bits = 4 if layer.group else 8 if layer.block else 16
    kind = {4: "int4_w4a16", 8: "fp8_w8a8"}.get(bits)
    block = [layer.block, layer.group or layer.block]
    build = partial(
        vllm_kernels.moe,
        experts=layer.experts,
        bits=bits,
        group=layer.group or 32,
        zeros=layer.zeros,
    )
    halves = 2 if bits == 4 else 1
    sizes = ((2 * layer.inner, layer.hidden), (layer.hidden, layer.inner))
    shapes = [(layer.experts, rows, columns // halves) for rows, columns in sizes]

    def products(count: int, *dimensions: tuple[int, int]) -> tuple[partial, ...]:
        """Return the builders: a token is a row of the first, and top_k rows of the second."""
        batches = ((count, layer.top_k, False), (count * layer.top_k, 1, not layer.first))
        return tuple(
            partial(build, tokens=n, top_k=k, routed=routed, rows=rows, columns=columns)
            for (n, k, routed), (rows, columns) in zip(batches, dimensions, strict=True)
        )

    return Problem(
        "vllm",
        str(tokens),
        "fused_moe_kernel",
        products(min(tokens, 32), (_SMALL, _SMALL), (_SMALL, _SMALL)),
        products(tokens, *sizes),
        dtype,
        tuple(_expert_tiles(tokens, layer.group, layer.block)),
        (*shapes, layer.top_k, kind, tokens, block if any(block) else None),
        source,
    )


def _expert_tiles(tokens: int, group: int, block: int) -> Iterator[Configuration]:
    """Yield tiles of tokens, rows and columns, with the warps that a tile of its size can use."""
    heights = (16,) if tokens <= 32 else (16, 32, 64) if tokens <= 128 else (32, 64, 128)
    depths = (block,) if block else (group, 64) if group else (64, 128, 256)
    for m, n, k in product(heights, (32, 64, 128), depths):
        for warps in (2, 4) if m * n <= 2048 else (4, 8):
            tile = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}
            yield tile | {"GROUP_SIZE_M": 1, "SPLIT_K": 1, "num_warps": warps, "num_stages": 2}


@contextlib.contextmanager
def configured(problem: Problem, configuration: Configuration) -> Iterator[None]:
    """Have a library take a configuration for a problem, and none of its files."""
    if problem.library == "flash-attn":
        utils = importlib.import_module("flash_attn.flash_attn_triton_amd.utils")
        tiles = {problem.key: configuration} if configuration else {}
        change: Any = patch.object(utils, "TILES", tiles)
    elif problem.library == "aiter":
        module = importlib.import_module(_AITER)
        chosen = [_autotuned(configuration)] if configuration else module.attn_fwd.configs
        change = patch.object(module.attn_fwd, "configs", chosen)
    else:
        module = importlib.import_module(vllm_kernels.MOE)
        chosen = configuration or module.try_get_optimal_moe_config(*problem.shapes)
        change = patch.object(module, "get_default_config", lambda *_: dict(chosen))
    with change:
        yield


def _autotuned(configuration: Configuration) -> Any:
    """Return a configuration as triton.autotune has it."""
    from triton import Config

    launch = {name: configuration[name] for name in ("num_warps", "num_stages")}
    tile = {name: value for name, value in configuration.items() if name not in launch}
    return Config(tile, **launch)


@dataclass(frozen=True)
class ConfiguredCall:
    """A checked call of a problem under a configuration, to be compiled; see triton.call.Call."""

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

    def _call(self) -> Call:
        zeros = partial(torch.zeros, dtype=self.dtype)
        call, _ = self.problem.build(self.builder, lambda *shape: zeros(shape))
        is_backward = self.problem.kernel.startswith("_bwd")
        return call if is_backward or self.problem.source else replace(call, grad_out=None)

    def prepare(self) -> str:
        """Make the library ready; return which kernels it will run."""
        return self._call().prepare()

    def execute(self, device: str) -> dict[str, Tensor]:
        """Make the call."""
        with configured(self.problem, self.configuration):
            return self._call().execute(device)


def short_list(problem: Problem, cache: Path, jobs: int | None, most: int) -> list[Trial]:
    """Compile a problem's configurations for gfx1151, and return them with what their counts say.

    The packaged configuration is the first; at most so many others are without a reason not to be
    measured.

    Raises:
        RuntimeError: The packaged configuration does not compile, or no other is taken.
    """
    configurations = ({}, *problem.configurations)
    calls = [ConfiguredCall(problem, b, c) for c in configurations for b in problem.checked]
    answers = packages.look_up(calls, cache, jobs)
    trials: list[Trial] = []
    costs: list[KernelCost | None] = []
    seen: set[bytes] = set()
    for i, configuration in enumerate(configurations):
        own = answers[i * len(problem.checked) : (i + 1) * len(problem.checked)]
        errors = [": ".join(answer.error) for answer in own if answer.error]
        found = [x for answer in own for x in answer.lookups if x.name.startswith(problem.kernel)]
        trial = Trial(configuration=configuration)
        if errors or not (found or trials):
            trial.reason = (errors or [f"no kernel {problem.kernel} was compiled"])[0][:300]
        elif not found or {_code(x) for x in found} <= seen:
            trial.reason = _SAME
        seen |= {_code(x) for x in found}
        costs.append(worst(map(_cost, found)) if found and not errors else None)
        trial.cost = asdict(costs[-1]) if costs[-1] else {}
        trials.append(trial)
    packaged = costs[0]
    if packaged is None:
        raise RuntimeError(f"{problem.name}, as packaged: {trials[0].reason}")
    if all(trial.reason == _SAME for trial in trials[1:]):
        raise RuntimeError(f"{problem.name}: {problem.library} takes no other configuration")
    choose(trials, costs, packaged, most)
    return trials


def choose(
    trials: list[Trial], costs: list[KernelCost | None], packaged: KernelCost, most: int
) -> None:
    """Give a reason to each trial that is not worth measuring; the packaged one is measured."""
    left = []
    for trial, cost in list(zip(trials, costs, strict=True))[1:]:
        if cost is None or trial.reason:
            continue
        trial.reason = reject(cost, packaged)
        if not trial.reason:
            left.append((rank(trial.configuration, cost), trial))
    left.sort(key=lambda pair: pair[0])
    # the best of each tile before the second best of any
    of_tile: Counter[tuple] = Counter()
    order = []
    for _, trial in left:
        tile = _tile(trial.configuration)
        order.append((of_tile[tile], trial))
        of_tile[tile] += 1
    order.sort(key=lambda pair: pair[0])
    for _, trial in order[most:]:
        trial.reason = f"not among the first {most}"


def _tile(configuration: Configuration) -> tuple[int, ...]:
    return tuple(x for name, x in configuration.items() if name.startswith("BLOCK"))


def _code(lookup: Lookup) -> bytes:
    """Return a kernel's code object: options that change nothing give the same."""
    return next(Path(x).read_bytes() for x in lookup.files.values() if x.endswith(".hsaco"))


def _cost(lookup: Lookup) -> KernelCost:
    """Return what a kernel costs; of a package's, which has no assembly, what its list says."""
    file = Path(next(iter(lookup.files.values())))
    listed = file.parents[1] / LIST
    if listed.is_file():
        return KernelCost(**json.loads(listed.read_bytes())["kernels"][lookup.key]["cost"])
    return packages.measure_lookup(lookup)


def worst(costs: Iterable[KernelCost]) -> KernelCost:
    """Return the largest of each number, and the smallest of waves and matrix instructions."""
    columns = zip(*map(astuple, costs), strict=True)
    smallest = ("waves", "wmma")
    return KernelCost(
        *(
            min(x) if y.name in smallest else max(x)
            for x, y in zip(columns, fields(KernelCost), strict=True)
        )
    )


def reject(cost: KernelCost, packaged: KernelCost) -> str:
    """Return why a configuration is not worth measuring beside the packaged one, or ""."""
    if cost.scratch > packaged.scratch or cost.vgpr_spills > packaged.vgpr_spills:
        return f"{cost.scratch} bytes of scratch, {cost.vgpr_spills} registers spilled"
    if cost.lds > TARGETS[TARGET].lds:
        return f"{cost.lds} bytes of LDS"
    if packaged.wmma and not cost.wmma:
        return "no matrix instructions"
    if 2 * cost.waves < packaged.waves:
        return f"{cost.waves} waves, packaged {packaged.waves}"
    return ""


def rank(configuration: Configuration, cost: KernelCost) -> tuple:
    """Return a key for sorting: least scratch first, then the largest tile, then most waves."""
    area = math.prod(_tile(configuration))
    return cost.scratch, cost.vgpr_spills, -area, -cost.waves
