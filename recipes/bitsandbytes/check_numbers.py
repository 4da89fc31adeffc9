# SPDX-License-Identifier: BSD-3-Clause
"""Package test: compare bitsandbytes with float64, on the CPU and, if there is one, on the GPU.

Quantisation must choose, for each scaled number, the code with the nearest value. For products,
gradients and optimiser steps, the float64 reference is computed from the quantised codes on the
device, so that the quantisation error does not hide a fault. The only exception is the gradient of
trained 8-bit weights. On the CPU, only the package's own library is checked.
"""

import ctypes
import itertools
import os

import bitsandbytes as bnb
import bitsandbytes.functional as F
import torch
from bitsandbytes.consts import PACKAGE_DIR
from bitsandbytes.cuda_specs import get_cuda_version_string

from checks.gpu import find_skip_reason
from checks.target import ARCH
from checks.verdict import require

# The values of the 4-bit data types, by code. NF4 is QLoRA's table. FP4 is the table of magnitudes,
# by the last three bits of a code. The first bit of the code is the sign.
NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
FP4 = [0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
TABLES = {
    "nf4": torch.tensor(NF4).double(),
    "fp4": torch.tensor(FP4 + [-x for x in FP4]).double(),
}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().double()


def to_blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return values in rows of `size`. The last row is padded with zeros."""
    flat = to_float64(values).flatten()
    padding = -len(flat) % size
    return torch.nn.functional.pad(flat, (0, padding)).view(-1, size)


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` codes of four bits."""
    pairs = packed.detach().cpu().flatten().view(torch.uint8)
    return torch.stack([pairs >> 4, pairs & 15], dim=1).flatten()[:count].long()


def multiply_scale(values: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply each value by the scale of its block. A block has `size` values."""
    scaled = to_blocks(values, size) * scale.cpu().double()[:, None]
    return scaled.flatten()[: len(values)]


def require_nearest(values, codes, scale, table, size, tolerance, case, keeps_sign=False) -> None:
    """Require that each code is the code whose value is nearest to the scaled number.

    Args:
        values: The values that were quantised.
        codes: The codes.
        scale: The scale of each block, which must be the block's largest magnitude.
        table: The value of each code.
        size: The size of a block.
        tolerance: The largest allowed error of scales and codes.
        case: A description of the comparison, for the message.
        keeps_sign: Also accept a neighbour of the nearest code, if the signs of the nearest code
            and of the number differ, because optimisers keep the sign.
    """
    rows = to_blocks(values, size)
    largest = rows.abs().amax(1)
    divisor = largest.clamp(min=1e-30)
    scale_error = ((scale.cpu().double() - largest).abs() / divisor).max()
    require(scale_error <= tolerance, f"{case}: a block's scale is off by {scale_error:.2e}")
    x = (rows / divisor[:, None]).flatten()[: len(codes)]
    distance = (table[None] - x[:, None]).abs()
    best, nearest = distance.min(1)
    excess = distance.gather(1, codes[:, None])[:, 0] - best
    if keeps_sign:
        is_moved = (codes - nearest).abs() == 1
        has_other_sign = torch.signbit(table[nearest]) != torch.signbit(x)
        excess[is_moved & has_other_sign] = 0
    excess[x == 0] = 0  # in a block of zeros, any code is right, since the scale is 0
    require(
        excess.max() <= tolerance,
        f"{case}: a code is {excess.max():.2e} farther from its number than the nearest code",
    )


def require_close(result, expected, dtype, case) -> None:
    """Require that each error is at most 8 eps (float32: 64 eps) times the RMS of `expected`."""
    bound = 8 * torch.finfo(dtype).eps
    if dtype == torch.float32:
        bound *= 8
    largest = (to_float64(result) - expected).abs().max()
    error = largest / expected.square().mean().sqrt()
    require(error <= bound, f"{case}: off by {error:.2e}, bound {bound:.2e}")


def check_blockwise(device: str, draw) -> int:
    """Check quantisation with each block size that a kind of quantisation supports.

    The second block of the numbers is all zeros, and the last block is short.

    Returns:
        The number of cases. All checks that `check_all` calls return it.
    """
    # On the CPU, only the kind `dynamic` uses compiled code of the package.
    kinds = ("dynamic",) if device == "cpu" else ("nf4", "fp4", "dynamic")
    cases = 0
    for dtype, size in itertools.product(DTYPES, BLOCKSIZES):
        values = draw(2 * size + 37)
        values[size : 2 * size] = 0
        values = values.to(device, dtype)
        for kind in kinds:
            if kind == "dynamic" and size <= 32:
                continue
            check_blocks(values, size, kind)
            cases += 1
    return cases


def check_blocks(values: torch.Tensor, size: int, kind: str) -> None:
    """Check quantisation and dequantisation of values in blocks of `size`."""
    dtype = values.dtype
    case = f"{kind}, {dtype}, blocks of {size}"
    if kind == "dynamic":
        table = F.create_dynamic_map().double()
        packed, state = F.quantize_blockwise(values, blocksize=size)
        codes = packed.cpu().long()
        dequantised = F.dequantize_blockwise(packed, state)
    else:
        table = TABLES[kind]
        packed, state = F.quantize_4bit(values, blocksize=size, quant_type=kind)
        codes = unpack(packed, len(values))
        dequantised = F.dequantize_4bit(packed, state)
    # The CPU finds the code in a table of 65,536 entries, so its choice is less exact than a GPU's.
    tolerance = 4e-5 if values.device.type == "cpu" else 1e-6
    require_nearest(values, codes, state.absmax, table, size, tolerance, case)
    expected = multiply_scale(table[codes], state.absmax, size)
    rounding = torch.finfo(dtype).eps * expected.abs() + 1e-7
    excess = (to_float64(dequantised).flatten() - expected).abs() - rounding
    is_right = dequantised.dtype == dtype and excess.max() <= 0
    require(is_right, f"{case}: dequantised wrong")


def check_rows(device: str, draw) -> int:
    """Check weights that the CPU dequantises, maybe with AVX-512. Some rows end inside a block."""
    num_rows = 37
    cases = 0
    for dtype, kind, columns in itertools.product(DTYPES, TABLES, (32, 64, 96)):
        weight = draw(num_rows, columns).to(device, dtype)
        packed, state = F.quantize_4bit(weight, blocksize=64, quant_type=kind)
        codes = unpack(packed, num_rows * columns)
        expected = multiply_scale(TABLES[kind][codes], state.absmax, 64)
        dequantised = F.dequantize_4bit(packed, state).flatten()
        case = f"{kind}, {dtype}, rows of {columns}, dequantised"
        require_close(dequantised, expected, dtype, case)
        cases += 1
    return cases


def dequantise_weight(layer: bnb.nn.Linear4bit, kind: str) -> torch.Tensor:
    """Return a weight in float64, from its codes and its scales, which may also be quantised."""
    state = layer.weight.quant_state
    codes = unpack(layer.weight.data, state.shape.numel())
    scale = state.absmax
    if state.nested:
        nested = state.state2
        table = nested.code.cpu().double()
        scale = multiply_scale(table[scale.cpu().long()], nested.absmax, nested.blocksize)
        scale = scale + state.offset.cpu().double()
    return multiply_scale(TABLES[kind][codes], scale, state.blocksize).view(state.shape)


def check_linear_4bit(device: str, draw) -> int:
    """Check gemv_4bit, and Linear4bit with 1 to 8 rows (the fused kernel) and with 9.

    The gradient of Linear4bit is checked with 9 rows.
    """
    cases = 0
    # columns, size of a block, whether scales are quantised, kind
    # The fused kernel takes 1,024 columns of a row in each iteration of its loop.
    shapes = (
        (1152, 64, True, "nf4"),  # the loop has more than one iteration
        (96, 32, False, "fp4"),  # the loop has one iteration, with fewer than 1,024 columns
        (96, 64, True, "nf4"),  # the number of columns is not a multiple of the block size
    )
    for dtype, (columns, size, nested, kind) in itertools.product(DTYPES, shapes):
        layer = bnb.nn.Linear4bit(
            columns,
            37,
            quant_type=kind,
            compute_dtype=dtype,
            compress_statistics=nested,
        )
        layer.weight.blocksize = size
        layer = layer.to(dtype).to(device)
        weight = dequantise_weight(layer, kind)
        bias = to_float64(layer.bias)
        for num_rows in range(1, 10):
            case = f"Linear4bit {kind}, {dtype}, {num_rows} x {columns}, nested {nested}"
            x = draw(num_rows, columns).to(device, dtype).requires_grad_()
            y = layer(x)
            require_close(y, to_float64(x) @ weight.T + bias, dtype, case)
            cases += 1
        grad = draw(num_rows, 37).to(device, dtype)
        y.backward(grad)
        require_close(x.grad, to_float64(grad) @ weight, dtype, f"{case}, gradient")
        vector = draw(1, columns).to(device, dtype)
        y = F.gemv_4bit(vector, layer.weight.data.t(), state=layer.weight.quant_state)
        case = f"gemv_4bit, {dtype}, {columns}"
        require_close(y, to_float64(vector) @ weight.T, dtype, case)
        cases += 1
    return cases


def check_all_8bit(device: str, draw) -> int:
    """Check Linear8bitLt forward and backward, with and without outliers, and int8 products."""
    cases = 0
    for columns, num_rows, threshold in itertools.product((64, 1500, 30), (1, 5, 40), (0.0, 6.0)):
        check_linear_8bit(device, draw, columns, num_rows, threshold)
        cases += 1
    for num_rows, columns, inner in ((48, 40, 64), (3, 7, 30), (128, 96, 1500)):
        check_int8(device, draw, num_rows, columns, inner)
        cases += 2
    check_trained_8bit(device, draw)
    return cases + 1


def check_linear_8bit(device: str, draw, columns: int, num_rows: int, threshold: float) -> None:
    """Compare Linear8bitLt and its gradient with float64.

    Inputs whose magnitude is at least `threshold` are outliers. If it is 0, there are no outliers.
    """
    case = f"Linear8bitLt {num_rows} x {columns}, threshold {threshold}"
    layer = bnb.nn.Linear8bitLt(columns, 48, has_fp16_weights=False, threshold=threshold)
    layer = layer.half().to(device)
    x = draw(num_rows, columns).half()
    if threshold:
        x[0, 3] = 20
        x[-1, columns - 2] = -9
    a = x.double()
    x = x.to(device).requires_grad_()
    y = layer(x)
    codes = layer.state.CB.cpu().double()
    scale = layer.state.SCB.cpu().double()
    weight = codes * scale[:, None] / 127
    if threshold:
        is_outlier = a.abs() >= threshold
        outlier_columns = is_outlier.any(0)
        scaled = a.masked_fill(is_outlier, 0)
    else:
        outlier_columns = torch.zeros(columns).bool()
        scaled = a
    largest = scaled.abs().amax(1, keepdim=True)
    inside = a.masked_fill(outlier_columns, 0)
    quantised = (inside * 127 / largest).round() * largest / 127
    expected = quantised @ weight.T + a[:, outlier_columns] @ weight[:, outlier_columns].T
    require_close(y, expected + to_float64(layer.bias), torch.float16, case)
    grad = draw(num_rows, 48).half().to(device)
    y.backward(grad)
    require_close(x.grad, to_float64(grad) @ weight, torch.float16, f"{case}, gradient")


def check_int8(device: str, draw, num_rows: int, columns: int, inner: int) -> None:
    """Require that int8 products are exact, and that codes of weights are rounded to nearest."""
    a = torch.randint(-127, 128, (num_rows, inner)).to(torch.int8)
    b = torch.randint(-127, 128, (columns, inner)).to(torch.int8)
    product = F.int8_linear_matmul(a.to(device), b.to(device)).cpu().long()
    is_exact = (product == a.long() @ b.long().T).all()
    require(is_exact, f"int8 product {num_rows} x {columns} x {inner}")
    w = draw(num_rows, inner).half()
    codes, scale, _ = F.int8_vectorwise_quant(w.to(device))
    exact = w.double() * 127 / w.double().abs().amax(1, keepdim=True)
    error = (codes.cpu().double() - exact).abs().max()
    require(error <= 0.5 + 1e-3, f"int8 codes of {num_rows} x {inner}: off by {error}")
    is_largest = (scale.cpu() == w.abs().amax(1)).all()
    require(is_largest, f"int8 scales of {num_rows} x {inner}")


def check_trained_8bit(device: str, draw) -> None:
    """Compare the gradient of trained weights, which is computed as a product of int8 codes."""
    layer = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=True).half().to(device)
    x = draw(40, 64).half()
    grad = draw(40, 48).half()
    layer(x.to(device)).backward(grad.to(device))
    expected = grad.double().T @ x.double()
    error = (to_float64(layer.weight.grad) - expected).norm() / expected.norm()
    require(error < 0.02, f"Linear8bitLt, gradient of the weight: off by {error:.2e}")


def to_float32(numbers) -> list[float]:
    """Round numbers to float32, as the kernels get them. This changes 1 - 0.999, for example."""
    return torch.tensor(numbers, dtype=torch.float32).tolist()


def compute_step(name, p, g, states, step, group):
    """Compute a step of an optimiser in float64, in bitsandbytes' order of operations.

    Args:
        name: The optimiser.
        p: The parameter.
        g: Its gradient.
        states: The states before the step.
        step: The number of the step, beginning with 1.
        group: The options of the optimiser.

    Returns:
        The parameter and the states after the step.
    """
    lr, eps, decay = to_float32([group[key] for key in ("lr", "eps", "weight_decay")])
    betas = to_float32(group["betas"])
    beta1, beta2 = betas[:2]
    s1 = states[0]
    if name in ("adam", "ademamix"):
        s1 = beta1 * s1 + (1 - beta1) * g
        s2 = beta2 * states[1] + (1 - beta2) * g * g
        states = [s1, s2, *states[2:]]
        update = s1 / (1 - beta1**step)
        if name == "ademamix":
            states[2] = betas[2] * states[2] + (1 - betas[2]) * g
            update = update + group["alpha"] * states[2]
        root = s2.sqrt() / (1 - beta2**step) ** 0.5
        return (p - lr * update / (root + eps)) * (1 - lr * decay), states
    if name == "lion":
        p = p * (1 - lr * decay) - lr * torch.sign(beta1 * s1 + (1 - beta1) * g)
        return p, [beta2 * s1 + (1 - beta2) * g]
    g = g + decay * p
    if name == "momentum":
        s1 = g if step == 1 else beta1 * s1 + g
        return p - lr * s1, [s1]
    if name == "adagrad":
        s1 = s1 + g * g
        return p - lr * g / (s1.sqrt() + eps), [s1]
    s1 = beta1 * s1 + (1 - beta1) * g * g
    return p - lr * g / (s1.sqrt() + eps), [s1]


def read_states(state) -> tuple[list[torch.Tensor], list[tuple]]:
    """Read the states of an optimiser.

    Returns:
        The states in float64; and the codes, scales and table of each state of an 8-bit optimiser.
    """
    if state["state1"].dtype != torch.uint8:
        tensors = [to_float64(state[key]) for key in ("state1", "state2") if key in state]
        if tensors[0].dim() == 2:  # the first tensor of AdEMAMix has two states
            tensors = [tensors[0][0], tensors[1], tensors[0][1]]
        return tensors, []
    parts = []
    for number in "12":
        if f"state{number}" not in state:
            continue
        codes = state[f"state{number}"].detach().cpu().long()
        scale = state[f"absmax{number}"].detach().cpu()
        table = state[f"qmap{number}"].cpu().double()
        if codes.dim() == 1:
            parts.append((codes, scale, table))
        else:
            parts += zip(codes, scale, [table] * 2, strict=True)
    if len(parts) == 3:
        parts = [parts[0], parts[2], parts[1]]
    return [multiply_scale(table[codes], scale, 256) for codes, scale, table in parts], parts


DECAY = {"lr": 1e-2, "weight_decay": 0.1}
MOMENTUM = DECAY | {"momentum": 0.9}
PLAIN = {"lr": 1e-2}
OPTIMISERS = (
    (bnb.optim.Adam8bit, DECAY),
    (bnb.optim.AdamW8bit, DECAY),
    (bnb.optim.Lion8bit, DECAY),
    (bnb.optim.RMSprop8bit, PLAIN),
    (bnb.optim.SGD8bit, MOMENTUM),
    (bnb.optim.Adagrad8bit, PLAIN),
    (bnb.optim.AdEMAMix8bit, DECAY),
    (bnb.optim.PagedAdamW8bit, DECAY),
    (bnb.optim.Adam32bit, DECAY),
    (bnb.optim.Lion32bit, DECAY),
    (bnb.optim.AdEMAMix32bit, DECAY),
    (bnb.optim.SGD32bit, MOMENTUM),
    (bnb.optim.RMSprop32bit, DECAY),
    (bnb.optim.Adagrad32bit, DECAY),
    (bnb.optim.PagedAdamW32bit, DECAY),
)
# The optimisers for which upstream has no kernel for bfloat16.
WITHOUT_BFLOAT16 = ("SGD32bit", "RMSprop32bit", "Adagrad32bit")


def check_optimisers(device: str, draw) -> int:
    """Check three steps of each optimiser.

    The reference of each step starts from the state on the device.
    """
    cases = 0
    for (make, options), dtype in itertools.product(OPTIMISERS, DTYPES):
        name = make.__name__
        if dtype == torch.bfloat16 and name in WITHOUT_BFLOAT16:
            continue
        is_paged = name.startswith("Paged")
        if is_paged and dtype != torch.float32:
            continue
        # The last block is short. A paged state is in managed memory only if it has at least
        # 100,000 numbers.
        size = 100_037 if is_paged else 1357
        parameter = torch.nn.Parameter(draw(size).to(device, dtype))
        if "8bit" in name and not is_paged:
            options = options | {"min_8bit_size": 1}
        optimiser = make([parameter], **options)
        for step in (1, 2, 3):
            parameter.grad = draw(size).to(device, dtype) / 8
            check_step(optimiser, parameter, step, f"{name}, {dtype}, step {step}")
        cases += 1
    return cases


def check_step(optimiser, parameter: torch.nn.Parameter, step: int, case: str) -> None:
    """Take a step of an optimiser, and compare its parameter and states."""
    group = optimiser.param_groups[0]
    if not optimiser.state[parameter]:
        optimiser.init_state(group, parameter, 0, 0)
    config = optimiser.get_config(0, 0, group)
    start = to_float64(parameter)
    states, _ = read_states(optimiser.state[parameter])
    grad = parameter.grad.cpu().double()
    name = optimiser.optimizer_name
    expected, expected_states = compute_step(name, start, grad, states, step, config)
    optimiser.step()
    dtype = parameter.dtype
    eps = torch.finfo(dtype).eps
    bound = 2 * eps * start.abs() + max(1e-4, 2 * eps) * (expected - start).abs()
    excess = ((to_float64(parameter) - expected).abs() - bound).max()
    require(excess <= 0, f"{case}: the error of a parameter exceeds its bound by {excess:.2e}")
    states, parts = read_states(optimiser.state[parameter])
    for number, (state, expected_state) in enumerate(zip(states, expected_states, strict=True)):
        if parts:
            codes, scale, table = parts[number]
            require_nearest(expected_state, codes, scale, table, 256, 1e-5, case, keeps_sign=True)
        else:
            # The bound is that of the gradient's dtype, in which the kernel adds decay to the
            # gradient.
            require_close(state, expected_state, dtype, f"{case}, state")


def check_all(device: str) -> None:
    """Run the checks for a device, and print their numbers of cases."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    checks = (check_blockwise, check_linear_4bit, check_all_8bit, check_optimisers)
    if device == "cpu":
        checks = (check_blockwise, check_rows)
    for check in checks:
        cases = check(device, draw)
        print(f"{device}: {check.__name__}, {cases} cases correct", flush=True)


def load_library() -> None:
    """Load the library for the GPU by the name that bitsandbytes uses, and resolve all symbols."""
    path = PACKAGE_DIR / f"libbitsandbytes_rocm{get_cuda_version_string()}.so"
    require(path.exists(), f"torch is for HIP {torch.version.hip}, but {path} does not exist")
    ctypes.CDLL(str(path), mode=os.RTLD_NOW)


def main() -> None:
    load_library()
    check_all("cpu")
    reason = find_skip_reason()
    if reason:
        print(f"SKIPPED: checks on the GPU, because {reason}; nothing ran on {ARCH}")
        return
    require(torch.cuda.is_available(), f"there is a {ARCH}, but torch finds no GPU")
    check_all("cuda")


if __name__ == "__main__":
    main()
