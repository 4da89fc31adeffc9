# SPDX-License-Identifier: BSD-3-Clause
"""bitsandbytes: weights in NF4, layers of them, and optimisers whose states have 8 bits.

Tables and steps are computed here in float64, and nothing of bitsandbytes is taken for them. Codes
must be the nearest; whatever is computed from codes is compared with float64 from the codes that
the device holds, so that quantisation hides no error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from strix_validate.checks import ANY, Body, Check, Result, RunOptions, require, seed_of
from strix_validate.numerics import comparison, reference
from strix_validate.numerics.reference import Precision, stored
from strix_validate.triton.call import require as require_module

MODULE = "bitsandbytes"
#: Of a layer's weight: whole blocks of either size in a row.
ROWS, COLUMNS = 37, 128
#: The last block of a vector is short; of a matrix, rows end inside a block.
_VECTOR, _MATRIX = (ROWS * COLUMNS + 38,), (ROWS, 96)
#: Numbers of a block of quantised scales and of an optimiser's state.
_STATE_BLOCK = 256
#: How much farther than the nearest entry of a table one may be: on a CPU bitsandbytes finds codes
#: of 8 bits by a table of 65,536 numbers.
_SLACK = 4e-5
_NF4 = "NF4 that is wrong on one GPU: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2087"
_ROWS = "a scale of the next block where a row ends inside one (patches/bitsandbytes/0005)"
_STEP = "a state of 8 bits with another block's scale: https://arxiv.org/abs/2110.02861"


def checks() -> dict[Check, Body]:
    """Return one check for each kind, block size and data type, with its function."""
    found: dict[Check, Body] = {}

    def add(name: str, why: str, body: Callable[[str, RunOptions], dict | Result]) -> None:
        check = Check(f"bitsandbytes/{name}", f"bitsandbytes: {name}", why)
        found[check] = partial(body, check.id)

    for block in (64, 128):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            suffix = f"{block}-{str(dtype).removeprefix('torch.')}"
            add(f"nf4-{suffix}", _NF4, partial(_quantised, _VECTOR, block, False, dtype))
            add(f"nf4-nested-{suffix}", _NF4, partial(_quantised, _VECTOR, block, True, dtype))
            add(f"nf4-rows-{suffix}", _ROWS, partial(_quantised, _MATRIX, block, False, dtype))
            if dtype is not torch.float32:
                add(f"linear-nf4-{suffix}", _NF4, partial(_linear, block, dtype))
    for optimizer in _STEPS:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{optimizer.lower()}-{str(dtype).removeprefix('torch.')}"
            add(name, _STEP, partial(_optimised, optimizer, dtype))
    return found


@cache
def nf4_table() -> Tensor:
    """Return NF4's 16 numbers: quantiles of the normal distribution (QLoRA, appendix E)."""
    outermost = 0.9677083
    upper, lower = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, n, dtype=torch.float64)[:-1])
        for n in (9, 8)
    )
    table = torch.cat([upper, torch.zeros(1, dtype=torch.float64), -lower]).sort().values
    return table / table.abs().max()


@cache
def dynamic_table(signed: bool) -> Tensor:
    """Return the 256 numbers of dynamic quantisation: decades, each twice as fine as the lower."""
    parts = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        parts.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6))
    numbers = torch.cat(parts)
    both = torch.cat([numbers, -numbers]) if signed else numbers
    return torch.cat([both, torch.tensor([0.0, 1.0], dtype=torch.float64)]).sort().values


def _blocks(values: Tensor, size: int) -> Tensor:
    """Return (blocks, size) in float64, the last one filled up with zeros."""
    flat = values.detach().cpu().double().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def _scaled(numbers: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiply each block of numbers by its scale."""
    return (_blocks(numbers, size) * scales.cpu().double()[:, None]).flatten()[: len(numbers)]


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """Return codes of 4 bits, the first of a byte in its upper half."""
    both = packed.detach().cpu().flatten().view(torch.uint8)
    return torch.stack([both >> 4, both & 15], 1).flatten()[:count].long()


@dataclass(frozen=True)
class Codes:
    """Numbers in codes: a table's entries times a scale for each block of so many."""

    codes: Tensor
    scales: Tensor
    table: Tensor
    block: int

    def values(self) -> Tensor:
        """Return the numbers in float64."""
        return _scaled(self.table[self.codes], self.scales, self.block)

    def require_right(self, values: Tensor, what: str, *, keeps_sign: bool = False) -> None:
        """Require scales that are the blocks' largest magnitudes, and codes that are the nearest.

        Args:
            values: what was quantised. In a block of zeros any code is right.
            keeps_sign: a code may be the neighbour where the nearest has the other sign.
        """
        rows = _blocks(values, self.block)
        largest = rows.abs().amax(1, keepdim=True)
        divisor = largest.clamp(min=1e-30)
        off = ((self.scales[:, None] - largest).abs() / divisor).max().item()
        require(off <= 2e-5, f"{what}: a block's scale is {off:.2g} of itself off")
        normal = (rows / divisor).flatten()[: len(self.codes)]
        is_empty = (largest == 0).expand_as(rows).flatten()[: len(self.codes)]
        distance = (self.table - normal[:, None]).abs()
        excess = distance.gather(1, self.codes[:, None])[:, 0] - distance.amin(1)
        excess[is_empty] = 0
        if keeps_sign:
            nearest = distance.argmin(1)
            is_other = torch.signbit(self.table[nearest]) != torch.signbit(normal)
            excess[is_other & ((self.codes - nearest).abs() == 1)] = 0
        worst = excess.max().item()
        require(worst <= _SLACK, f"{what}: a code is {worst:.2g} farther than the nearest")


def _weight(packed: Tensor, state: Any, values: Tensor) -> Tensor:
    """Return the weight in float64 that codes and scales stand for; require that they are right."""
    largest = _blocks(values, state.blocksize).abs().amax(1)
    scales = state.absmax.cpu()
    if state.nested:
        offset, mean = state.offset.cpu().double(), largest.mean()
        require((offset - mean).abs() <= 1e-5 * mean, "the offset of the scales is not their mean")
        inner = state.state2
        quantised = Codes(
            scales.long(), inner.absmax.cpu().double(), dynamic_table(signed=True), inner.blocksize
        )
        quantised.require_right(largest - offset, "a quantised scale")
        scales = quantised.values() + offset
    codes = _unpacked(packed, values.numel())
    weight = Codes(codes, scales.double(), nf4_table(), state.blocksize)
    # codes are chosen by the scales before these are quantised
    chosen = replace(weight, scales=largest) if state.nested else weight
    chosen.require_right(values, "NF4")
    return weight.values().view(values.shape)


def _draw(id_: str) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed_of(id_))
    return lambda *size: torch.randn(size, generator=generator)


def _quantised(
    shape: tuple[int, ...], block: int, nested: bool, dtype: torch.dtype, id_: str,
    options: RunOptions,
) -> Result:  # fmt: skip
    """Compare weights after quantisation with what their codes stand for."""
    require_module(MODULE)
    from bitsandbytes import functional

    values = _draw(id_)(*shape).to(dtype)
    values.view(-1)[block : 2 * block] = 0
    packed, state = functional.quantize_4bit(
        values.to(options.device), blocksize=block, compress_statistics=nested, quant_type="nf4"
    )
    # on a CPU a vector comes back as a matrix of one row
    out = functional.dequantize_4bit(packed, state).cpu().reshape(shape)
    weight = _weight(packed, state, values)

    def expected(precision: Precision) -> dict[str, Tensor]:
        size = weight.abs() if precision == reference.TERMS else weight
        return {"out": stored(size.to(reference.working(precision)), precision)}

    return comparison.compare(ANY, {"out": out}, expected, dtype)


def _linear(block: int, dtype: torch.dtype, id_: str, options: RunOptions) -> Result:
    """Compare a layer of one row, for which there is a kernel, and of nine, with its gradient."""
    require_module(MODULE)
    import bitsandbytes

    draw = _draw(id_)
    layer = bitsandbytes.nn.Linear4bit(
        COLUMNS, ROWS, bias=False, quant_type="nf4", compute_dtype=dtype, compress_statistics=True
    )
    values = draw(ROWS, COLUMNS).to(dtype)
    layer.weight.data, layer.weight.blocksize = values.clone(), block
    layer = layer.to(options.device)
    weight = _weight(layer.weight.data, layer.weight.quant_state, values)
    inputs = {"one": draw(1, COLUMNS).to(dtype), "nine": draw(9, COLUMNS).to(dtype)}
    grad = draw(9, ROWS).to(dtype)
    leaves = {
        name: x.to(options.device).requires_grad_(name == "nine") for name, x in inputs.items()
    }
    outs = {name: layer(x) for name, x in leaves.items()}
    outs["nine"].backward(grad.to(options.device))
    actual = {name: out.detach().cpu() for name, out in outs.items()}
    actual["dnine"] = leaves["nine"].grad.cpu()

    def expected(precision: Precision) -> dict[str, Tensor]:
        # a layer of several rows rounds its weights
        own = stored(weight.to(reference.working(precision)), precision)
        found = {name: reference.product(x, own, precision) for name, x in inputs.items()}
        found["dnine"] = reference.product(grad, own.T, precision)
        return {name: stored(value, precision) for name, value in found.items()}

    return comparison.compare(ANY, actual, expected, dtype)


#: By optimiser: its options, and which of its states have a sign.
_STEPS: dict[str, tuple[dict, tuple[bool, ...]]] = {
    "Adam8bit": ({"lr": 1e-2, "weight_decay": 0.1}, (True, False)),
    "AdamW8bit": ({"lr": 1e-2, "weight_decay": 0.1}, (True, False)),
    "Lion8bit": ({"lr": 1e-2, "weight_decay": 0.1}, (True,)),
    "SGD8bit": ({"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}, (True,)),
}


def step(
    name: str, p: Tensor, grad: Tensor, states: list[Tensor], number: int, group: dict
) -> tuple[Tensor, list[Tensor]]:
    """Compute a parameter and an optimiser's states after a step, in float64."""
    # as kernels have them: 0.999 is another number in float32
    numbers = torch.tensor([group["lr"], group["eps"], group["weight_decay"], *group["betas"][:2]])
    rate, eps, decay, first, second = numbers.tolist()
    if name.startswith("Adam"):
        mean = first * states[0] + (1 - first) * grad
        square = second * states[1] + (1 - second) * grad.square()
        root = square.sqrt() / (1 - second**number) ** 0.5 + eps
        moved = p - rate * mean / (1 - first**number) / root
        return moved * (1 - rate * decay), [mean, square]
    (state,) = states
    if name.startswith("Lion"):
        moved = p * (1 - rate * decay) - rate * (first * state + (1 - first) * grad).sign()
        return moved, [second * state + (1 - second) * grad]
    grad = grad + decay * p
    state = grad if number == 1 else first * state + grad
    return p - rate * state, [state]


def _held(state: dict, signs: tuple[bool, ...]) -> list[Codes]:
    """Return an optimiser's states."""
    parts = []
    for number, signed in enumerate(signs, 1):
        table = dynamic_table(signed)
        off = (state[f"qmap{number}"].cpu().double() - table).abs().max()
        require(off <= 1e-6, f"the table of state {number} is not that of dynamic quantisation")
        codes, scales = (state[f"{name}{number}"].cpu() for name in ("state", "absmax"))
        parts.append(Codes(codes.long(), scales.double(), table, _STATE_BLOCK))
    return parts


def _optimised(name: str, dtype: torch.dtype, id_: str, options: RunOptions) -> dict:
    """Judge three steps, each from the state that the device holds."""
    require_module(MODULE)
    import bitsandbytes

    draw, (given, signs) = _draw(id_), _STEPS[name]
    # a short last block
    p = torch.nn.Parameter(draw(5 * _STATE_BLOCK + 77).to(options.device, dtype))
    optimizer = getattr(bitsandbytes.optim, name)([p], min_8bit_size=1, **given)
    group = optimizer.param_groups[0]
    optimizer.init_state(group, p, 0, 0)
    eps, worst = torch.finfo(dtype).eps, 0.0
    for number in (1, 2, 3):
        p.grad = (draw(len(p)) / 8).to(options.device, dtype)
        before = [held.values() for held in _held(optimizer.state[p], signs)]
        start, grad = p.detach().cpu().double(), p.grad.cpu().double()
        moved, states = step(name, start, grad, before, number, optimizer.get_config(0, 0, group))
        optimizer.step()
        # weights decay before or after the step
        decay = group["lr"] * group["weight_decay"]
        size = (moved - start).abs() + decay * start.abs()
        bound = 2 * eps * start.abs() + (max(1e-4, 2 * eps) + decay) * size
        off = (p.detach().cpu().double() - moved).abs() / bound
        require(off.max() <= 1, f"step {number}: a parameter is {off.max():.3g} of its bound off")
        worst = max(worst, off.max().item())
        after = _held(optimizer.state[p], signs)
        for held, state in zip(after, states, strict=True):
            held.require_right(state, f"step {number}, a state", keeps_sign=True)
    return {"parameter": {"error": worst, "bound": 1.0}}
