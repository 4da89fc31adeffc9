# SPDX-License-Identifier: BSD-3-Clause
"""Check bitsandbytes: NF4 weights, layers with such weights, and optimizers with 8-bit states.

This module computes the tables of codes and the optimizers' steps in float64, without
bitsandbytes. A code is right if no other number of the table is nearer to the scaled value than the
code's, except by _SLACK. Results are compared with float64 results of the same codes, so that the
error of quantisation does not hide other errors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from strix_validate.checks import PLACEHOLDER, Body, Check, Result, RunOptions, derive_seed, require
from strix_validate.numerics import comparison, reference
from strix_validate.numerics.reference import Precision, store
from strix_validate.triton.call import require as require_module

MODULE = "bitsandbytes"
#: Size of a layer's weight. A row is a whole number of blocks of either size in _BLOCK_SIZES.
ROWS = 37
COLUMNS = 128
#: Shape of a vector whose last block is not full.
_VECTOR = (ROWS * COLUMNS + 38,)
#: Shape of a matrix in which some rows end inside a block.
_MATRIX = (ROWS, 96)
#: Numbers in a block of an optimizer's state.
_STATE_BLOCK = 256
#: A code's number may be this much farther from the scaled value than the table's nearest number.
#: On a CPU, bitsandbytes looks 8-bit codes up in a table of 65,536 numbers, which is less exact.
_SLACK = 4e-5
_NF4 = (
    "NF4 that is wrong on one kind of GPU: "
    "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2087"
)
_ROWS = "the scale of the wrong block if a row ends inside a block (patches/bitsandbytes/0005)"
_STEP = "an 8-bit state with the scale of another block: https://arxiv.org/abs/2110.02861"
_BLOCK_SIZES = (64, 128)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def checks() -> dict[Check, Body]:
    """Return the checks with their functions.

    NF4 has four kinds of checks: codes of a vector, codes with quantised scales, codes of rows, and
    a layer. Each kind has one check for each block size and data type, but a layer has none in
    float32. An optimizer has one check for each of two data types.
    """
    bodies: dict[Check, Body] = {}

    def add(
        name: str,
        catches: str,
        body: Callable[[str, RunOptions], dict | Result],
    ) -> None:
        check = Check(f"bitsandbytes/{name}", f"bitsandbytes: {name}", catches)
        bodies[check] = partial(body, check.id)

    for block, dtype in product(_BLOCK_SIZES, _DTYPES):
        suffix = f"{block}-{_get_dtype_name(dtype)}"
        add(f"nf4-{suffix}", _NF4, partial(_check_codes, _VECTOR, block, False, dtype))
        add(f"nf4-nested-{suffix}", _NF4, partial(_check_codes, _VECTOR, block, True, dtype))
        add(f"nf4-rows-{suffix}", _ROWS, partial(_check_codes, _MATRIX, block, False, dtype))
        if dtype is not torch.float32:
            add(f"linear-nf4-{suffix}", _NF4, partial(_check_layer, block, dtype))
    for optimizer, dtype in product(_OPTIMIZERS, (torch.float32, torch.bfloat16)):
        name = f"{optimizer.lower()}-{_get_dtype_name(dtype)}"
        add(name, _STEP, partial(_check_optimizer, optimizer, dtype))
    return bodies


def _get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def nf4_table() -> Tensor:
    """Return NF4's 16 numbers: quantiles of the normal distribution (QLoRA, appendix E)."""
    outermost = 0.9677083

    def quantiles(count: int) -> Tensor:
        shares = torch.linspace(outermost, 0.5, count, dtype=torch.float64)
        return torch.special.ndtri(shares[:-1])

    zero = torch.zeros(1, dtype=torch.float64)
    table = torch.cat([quantiles(9), zero, -quantiles(8)]).sort().values
    return table / table.abs().max()


@cache
def dynamic_table(signed: bool) -> Tensor:
    """Return the 256 numbers of dynamic quantisation.

    Each decade has twice as many numbers as the decade below it.
    """
    decades = []
    for decade in range(7):
        count = 2 ** (decade + (not signed))
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        decades.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6))
    numbers = torch.cat(decades)
    if signed:
        numbers = torch.cat([numbers, -numbers])
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return torch.cat([numbers, ends]).sort().values


def _split_blocks(values: Tensor, size: int) -> Tensor:
    """Return the values as (blocks, size) in float64; zeros fill the last block."""
    flat = values.detach().cpu().double().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def _scale_blocks(numbers: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiply each block of numbers by its scale."""
    blocks = _split_blocks(numbers, size) * scales.cpu().double()[:, None]
    return blocks.flatten()[: len(numbers)]


def _unpack_codes(packed: Tensor, count: int) -> Tensor:
    """Return codes of 4 bits; the first code of a byte is in its upper half."""
    packed_bytes = packed.detach().cpu().flatten().view(torch.uint8)
    halves = torch.stack([packed_bytes >> 4, packed_bytes & 15], 1)
    return halves.flatten()[:count].long()


@dataclass(frozen=True)
class Codes:
    """Quantised numbers, each of which is an entry of a table times the scale of its block.

    Attributes:
        codes: The index of each number in the table.
        scales: The scale of each block.
        table: The number of each code, before scaling.
        block: How many numbers a block has.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor
    block: int

    def values(self) -> Tensor:
        """Return the numbers in float64."""
        return _scale_blocks(self.table[self.codes], self.scales, self.block)

    def require_right(self, values: Tensor, subject: str, *, keeps_sign: bool = False) -> None:
        """Require that the scales and the codes are right.

        A scale must be its block's largest magnitude. A code must be that of the table's number
        that is nearest to the scaled value.

        Args:
            values: The numbers that were quantised. In a block of zeros any code is right.
            subject: The name of the numbers in messages.
            keeps_sign: Whether the code next to the nearest one is allowed if the nearest one's
                number has the wrong sign.

        Raises:
            CheckFailed: A scale or a code is wrong.
        """
        blocks = _split_blocks(values, self.block)
        largest = blocks.abs().amax(1, keepdim=True)
        divisor = largest.clamp(min=1e-30)
        error = ((self.scales[:, None] - largest).abs() / divisor).max().item()
        require(error <= 2e-5, f"{subject}: the relative error of a block's scale is {error:.2g}")
        count = len(self.codes)
        normalized = (blocks / divisor).flatten()[:count]
        is_zero_block = (largest == 0).expand_as(blocks).flatten()[:count]
        distance = (self.table - normalized[:, None]).abs()
        excess = distance.gather(1, self.codes[:, None])[:, 0] - distance.amin(1)
        excess[is_zero_block] = 0
        if keeps_sign:
            nearest = distance.argmin(1)
            has_other_sign = torch.signbit(self.table[nearest]) != torch.signbit(normalized)
            is_neighbour = (self.codes - nearest).abs() == 1
            excess[has_other_sign & is_neighbour] = 0
        worst = excess.max().item()
        require(
            worst <= _SLACK,
            f"{subject}: a code's number is {worst:.2g} farther from the scaled value than the "
            "table's nearest number",
        )


def _read_weight(packed: Tensor, state: Any, values: Tensor) -> Tensor:
    """Return the dequantised weight in float64; require that its codes and scales are right.

    Args:
        packed: Codes as bitsandbytes packs them.
        state: bitsandbytes' state of the quantised weight.
        values: The weight before it was quantised.

    Raises:
        CheckFailed: A code, a scale or an offset is wrong.
    """
    largest = _split_blocks(values, state.blocksize).abs().amax(1)
    scales = state.absmax.cpu()
    if state.nested:
        scales = _read_nested_scales(state, largest)
    codes = _unpack_codes(packed, values.numel())
    weight = Codes(codes, scales.double(), nf4_table(), state.blocksize)
    # bitsandbytes chooses the weight's codes with exact scales, and then quantises the scales
    with_exact_scales = replace(weight, scales=largest) if state.nested else weight
    with_exact_scales.require_right(values, "NF4")
    return weight.values().view(values.shape)


def _read_nested_scales(state: Any, largest: Tensor) -> Tensor:
    """Return the dequantised scales of a weight whose scales are quantised; check them.

    Args:
        state: bitsandbytes' state of the quantised weight.
        largest: Largest magnitude of each block of the weight.
    """
    offset = state.offset.cpu().double()
    mean = largest.mean()
    is_mean = (offset - mean).abs() <= 1e-5 * mean
    require(is_mean, "the offset of the scales is not their mean")
    inner_state = state.state2
    quantised = Codes(
        state.absmax.cpu().long(),
        inner_state.absmax.cpu().double(),
        dynamic_table(signed=True),
        inner_state.blocksize,
    )
    quantised.require_right(largest - offset, "a quantised scale")
    return quantised.values() + offset


def _make_randn(id_: str) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(derive_seed(id_))

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    return randn


def _check_codes(
    shape: tuple[int, ...],
    block: int,
    nested: bool,
    dtype: torch.dtype,
    id_: str,
    options: RunOptions,
) -> Result:
    """Compare the weights that bitsandbytes dequantises with the numbers of their codes."""
    require_module(MODULE)
    from bitsandbytes import functional

    values = _make_randn(id_)(*shape).to(dtype)
    values.view(-1)[block : 2 * block] = 0
    packed, state = functional.quantize_4bit(
        values.to(options.device),
        blocksize=block,
        compress_statistics=nested,
        quant_type="nf4",
    )
    # on a CPU, bitsandbytes returns a vector as a matrix of one row
    out = functional.dequantize_4bit(packed, state).cpu().reshape(shape)
    weight = _read_weight(packed, state, values)

    def expected(precision: Precision) -> dict[str, Tensor]:
        exact = weight.abs() if precision == reference.TERMS else weight
        return {"out": store(exact.to(reference.working_dtype(precision)), precision)}

    return comparison.compare(PLACEHOLDER, {"out": out}, expected, dtype)


def _check_layer(block: int, dtype: torch.dtype, id_: str, options: RunOptions) -> Result:
    """Compare a layer's results for one row and for nine rows, and the gradient for nine rows.

    For one row, bitsandbytes has a kernel of its own.
    """
    require_module(MODULE)
    import bitsandbytes

    randn = _make_randn(id_)
    layer = bitsandbytes.nn.Linear4bit(
        COLUMNS,
        ROWS,
        bias=False,
        quant_type="nf4",
        compute_dtype=dtype,
        compress_statistics=True,
    )
    values = randn(ROWS, COLUMNS).to(dtype)
    layer.weight.data = values.clone()
    layer.weight.blocksize = block
    layer = layer.to(options.device)
    weight = _read_weight(layer.weight.data, layer.weight.quant_state, values)
    one_row = randn(1, COLUMNS).to(dtype)
    nine_rows = randn(9, COLUMNS).to(dtype)
    grad = randn(9, ROWS).to(dtype)
    one_row_out = layer(one_row.to(options.device))
    leaf = nine_rows.to(options.device).requires_grad_()
    nine_rows_out = layer(leaf)
    nine_rows_out.backward(grad.to(options.device))
    actual = {
        "one": one_row_out.detach().cpu(),
        "nine": nine_rows_out.detach().cpu(),
        "dnine": leaf.grad.cpu(),
    }

    def expected(precision: Precision) -> dict[str, Tensor]:
        # with several rows, a layer rounds its dequantised weights before it multiplies
        rounded_weight = store(weight.to(reference.working_dtype(precision)), precision)
        results = {
            "one": reference.product(one_row, rounded_weight, precision),
            "nine": reference.product(nine_rows, rounded_weight, precision),
            "dnine": reference.product(grad, rounded_weight.T, precision),
        }
        return {name: store(value, precision) for name, value in results.items()}

    return comparison.compare(PLACEHOLDER, actual, expected, dtype)


@dataclass(frozen=True)
class _Optimizer:
    """An optimizer of bitsandbytes.

    Attributes:
        options: The optimizer's arguments.
        signed: For each state of the optimizer, whether its numbers have signs.
    """

    options: dict[str, float]
    signed: tuple[bool, ...]


_OPTIMIZERS = {
    "Adam8bit": _Optimizer({"lr": 1e-2, "weight_decay": 0.1}, (True, False)),
    "AdamW8bit": _Optimizer({"lr": 1e-2, "weight_decay": 0.1}, (True, False)),
    "Lion8bit": _Optimizer({"lr": 1e-2, "weight_decay": 0.1}, (True,)),
    "SGD8bit": _Optimizer({"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}, (True,)),
}


def step(
    name: str,
    p: Tensor,
    grad: Tensor,
    states: list[Tensor],
    number: int,
    group: dict,
) -> tuple[Tensor, list[Tensor]]:
    """Compute a parameter and an optimizer's states after a step, in float64.

    Args:
        name: Name of the optimizer.
        p: Parameter before the step.
        grad: Gradient of the parameter.
        states: States before the step.
        number: Number of the step, from 1.
        group: Options of the optimizer's group of parameters.
    """
    options = [group["lr"], group["eps"], group["weight_decay"], *group["betas"][:2]]
    # the kernels round these options to float32, which changes, for example, 0.999
    lr, eps, decay, beta1, beta2 = torch.tensor(options).tolist()
    if name.startswith("Adam"):
        mean = beta1 * states[0] + (1 - beta1) * grad
        square = beta2 * states[1] + (1 - beta2) * grad.square()
        root = square.sqrt() / (1 - beta2**number) ** 0.5 + eps
        moved = p - lr * mean / (1 - beta1**number) / root
        return moved * (1 - lr * decay), [mean, square]
    (state,) = states
    if name.startswith("Lion"):
        direction = (beta1 * state + (1 - beta1) * grad).sign()
        moved = p * (1 - lr * decay) - lr * direction
        return moved, [beta2 * state + (1 - beta2) * grad]
    grad = grad + decay * p
    state = grad if number == 1 else beta1 * state + grad
    return p - lr * state, [state]


def _read_states(state: dict, signs: tuple[bool, ...]) -> list[Codes]:
    """Return the codes of an optimizer's states; require that their tables are right."""
    states = []
    for number, signed in enumerate(signs, 1):
        table = dynamic_table(signed)
        error = (state[f"qmap{number}"].cpu().double() - table).abs().max()
        require(
            error <= 1e-6,
            f"the table of codes of state {number} is not that of dynamic quantisation",
        )
        codes = state[f"state{number}"].cpu().long()
        scales = state[f"absmax{number}"].cpu().double()
        states.append(Codes(codes, scales, table, _STATE_BLOCK))
    return states


def _check_optimizer(name: str, dtype: torch.dtype, id_: str, options: RunOptions) -> dict:
    """Compare three steps of an optimizer with steps in float64 from the same states."""
    require_module(MODULE)
    import bitsandbytes

    randn = _make_randn(id_)
    row = _OPTIMIZERS[name]
    # with this length, the last block is not full
    p = torch.nn.Parameter(randn(5 * _STATE_BLOCK + 77).to(options.device, dtype))
    optimizer = getattr(bitsandbytes.optim, name)([p], min_8bit_size=1, **row.options)
    group = optimizer.param_groups[0]
    optimizer.init_state(group, p, 0, 0)
    config = optimizer.get_config(0, 0, group)
    worst = 0.0
    for number in (1, 2, 3):
        p.grad = (randn(len(p)) / 8).to(options.device, dtype)
        before = [codes.values() for codes in _read_states(optimizer.state[p], row.signed)]
        start = p.detach().cpu().double()
        expected, states = step(name, start, p.grad.cpu().double(), before, number, config)
        optimizer.step()
        bound = _bound_parameters(start, expected, group, dtype)
        error = (p.detach().cpu().double() - expected).abs() / bound
        largest = error.max().item()
        require(
            largest <= 1,
            f"step {number}: a parameter's error is {largest:.3g} times its bound",
        )
        worst = max(worst, largest)
        after = _read_states(optimizer.state[p], row.signed)
        for codes, state in zip(after, states, strict=True):
            codes.require_right(state, f"step {number}, a state", keeps_sign=True)
    return {"parameter": {"error": worst, "bound": 1.0}}


def _bound_parameters(
    start: Tensor,
    expected: Tensor,
    group: dict,
    dtype: torch.dtype,
) -> Tensor:
    """Return the allowed error of each parameter after a step.

    Args:
        start: Parameters before the step.
        expected: Parameters after it.
        group: Options of the optimizer's group of parameters.
        dtype: Dtype of the parameters.
    """
    eps = torch.finfo(dtype).eps
    # an optimizer may apply weight decay before or after its step, and both results are allowed
    decay = group["lr"] * group["weight_decay"]
    change = (expected - start).abs() + decay * start.abs()
    return 2 * eps * start.abs() + (max(1e-4, 2 * eps) + decay) * change
