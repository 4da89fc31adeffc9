# SPDX-License-Identifier: BSD-3-Clause
"""Package test: what bitsandbytes computes, against float64, on the GPU if it is there.

Codes must be the nearest of the codebook, block by block. Products, gradients and optimiser steps
are compared with float64 from the codes that the device holds, so that quantisation hides no error.
On the CPU only the package's own library is checked.
"""

import ctypes
import itertools
import os

import bitsandbytes as bnb
import bitsandbytes.functional as F
import torch
from bitsandbytes.consts import PACKAGE_DIR
from bitsandbytes.cuda_specs import get_cuda_version_string

from checks.gpu import why_skipped
from checks.target import ARCH
from checks.verdict import require

# QLoRA's table, and FP4's eight magnitudes with the sign in front
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
FP4 = [0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
TABLES = {"nf4": torch.tensor(NF4).double(), "fp4": torch.tensor(FP4 + [-x for x in FP4]).double()}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of `size`, the last one filled up with zeros."""
    flat = values.detach().cpu().double().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    both = packed.detach().cpu().flatten().view(torch.uint8)
    return torch.stack([both >> 4, both & 15], dim=1).flatten()[:count].long()


def times_scale(values: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    return (blocks(values, size) * scale.cpu().double()[:, None]).flatten()[: len(values)]


def require_nearest(values, codes, scale, table, size, slack, what, keep_sign=False) -> None:
    """`scale` is each block's largest magnitude, and `codes` name the nearest entries of `table`.

    keep_sign: optimisers move a code by one where the nearest has the other sign.
    """
    rows = blocks(values, size)
    largest = rows.abs().amax(1)
    off = ((scale.cpu().double() - largest).abs() / largest.clamp(min=1e-30)).max()
    require(off <= slack, f"{what}: a block's scale is off by {off:.2e}")
    x = (rows / largest.clamp(min=1e-30)[:, None]).flatten()[: len(codes)]
    distance = (table[None] - x[:, None]).abs()
    best, near = distance.min(1)
    excess = distance.gather(1, codes[:, None])[:, 0] - best
    if keep_sign:
        moved = (codes - near).abs() == 1
        excess[moved & (torch.signbit(table[near]) != torch.signbit(x))] = 0
    excess[x == 0] = 0  # a block of zeros: any code times 0
    require(excess.max() <= slack, f"{what}: a code is {excess.max():.2e} off the nearest")


def require_close(got, expected, dtype, what) -> None:
    """Each number within eight roundings of the root mean square of the expected."""
    bound = 8 * torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    off = (got.detach().cpu().double() - expected).abs().max() / expected.square().mean().sqrt()
    require(off <= bound, f"{what}: off by {off:.2e}, bound {bound:.2e}")


def blockwise(device: str, draw) -> int:
    """Quantise and dequantise in all block sizes; the last block is short, the second one zero."""
    dynamic = F.create_dynamic_map()
    cases = 0
    for dtype, size in itertools.product(DTYPES, BLOCKSIZES):
        values = draw(2 * size + 37)
        values[size : 2 * size] = 0
        values = values.to(device, dtype)
        # on the CPU only this kind is compiled code of the package
        for kind in ("nf4", "fp4", "dynamic") if device != "cpu" else ("dynamic",):
            what = f"{kind}, {dtype}, blocks of {size}"
            if kind != "dynamic":
                table = TABLES[kind]
                packed, state = F.quantize_4bit(values, blocksize=size, quant_type=kind)
                codes, back = unpack(packed, len(values)), F.dequantize_4bit(packed, state)
            elif size > 32:
                table = dynamic.double()
                packed, state = F.quantize_blockwise(values, blocksize=size)
                codes, back = packed.cpu().long(), F.dequantize_blockwise(packed, state)
            else:
                continue
            # on the CPU a table of 65,536 entries gives the code
            slack = 1e-6 if device != "cpu" else 4e-5
            require_nearest(values, codes, state.absmax, table, size, slack, what)
            expected = times_scale(table[codes], state.absmax, size)
            rounding = torch.finfo(dtype).eps * expected.abs() + 1e-7
            off = (back.cpu().double().flatten() - expected).abs() - rounding
            require(back.dtype == dtype and off.max() <= 0, f"{what}: dequantised wrong")
            cases += 1
    return cases


def rows(device: str, draw) -> int:
    """Weights whose rows end inside a block; AVX-512 has a way of its own in the CPU's library."""
    cases = 0
    for dtype, kind, columns in itertools.product(DTYPES, TABLES, (32, 64, 96)):
        what = f"{kind}, {dtype}, rows of {columns}"
        packed, state = F.quantize_4bit(
            draw(37, columns).to(device, dtype), blocksize=64, quant_type=kind
        )
        codes = unpack(packed, 37 * columns)
        expected = times_scale(TABLES[kind][codes], state.absmax, 64)
        got = F.dequantize_4bit(packed, state).flatten()
        require_close(got, expected, dtype, f"{what}, dequantised")
        cases += 1
    return cases


def weight_of(layer: bnb.nn.Linear4bit, kind: str) -> torch.Tensor:
    """The weight in float64 from its codes and, possibly quantised, scales."""
    state = layer.weight.quant_state
    codes = unpack(layer.weight.data, state.shape.numel())
    scale = state.absmax
    if state.nested:
        table, nested = state.state2.code.cpu().double(), state.state2
        scale = times_scale(table[scale.cpu().long()], nested.absmax, nested.blocksize)
        scale = scale + state.offset.cpu().double()
    return times_scale(TABLES[kind][codes], scale, state.blocksize).view(state.shape)


def linear_4bit(device: str, draw) -> int:
    """Linear4bit and its gradient: the fused kernel, for at most eight rows, and the other way."""
    cases = 0
    # more than one round of 1,024; one short round; columns that are no multiple of the block
    shapes = (1152, 64, True, "nf4"), (96, 32, False, "fp4"), (96, 64, True, "nf4")
    for dtype, (columns, size, nested, kind) in itertools.product(DTYPES, shapes):
        layer = bnb.nn.Linear4bit(
            columns, 37, quant_type=kind, compute_dtype=dtype, compress_statistics=nested
        )
        layer.weight.blocksize = size
        layer = layer.to(dtype).to(device)
        weight, bias = weight_of(layer, kind), layer.bias.detach().cpu().double()
        for rows in range(1, 10):
            what = f"Linear4bit {kind}, {dtype}, {rows} x {columns}, nested {nested}"
            x = draw(rows, columns).to(device, dtype).requires_grad_()
            y = layer(x)
            require_close(y, x.detach().cpu().double() @ weight.T + bias, dtype, what)
            cases += 1
        towards = draw(rows, 37).to(device, dtype)
        y.backward(towards)
        require_close(x.grad, towards.cpu().double() @ weight, dtype, f"{what}, gradient")
        one = draw(1, columns).to(device, dtype)
        y = F.gemv_4bit(one, layer.weight.data.t(), state=layer.weight.quant_state)
        require_close(y, one.cpu().double() @ weight.T, dtype, f"gemv_4bit, {dtype}, {columns}")
        cases += 1
    return cases


def linear_8bit(device: str, draw) -> int:
    """Linear8bitLt forward and backward, with and without columns of outliers."""
    cases = 0
    for columns, rows, threshold in itertools.product((64, 1500, 30), (1, 5, 40), (0.0, 6.0)):
        what = f"Linear8bitLt {rows} x {columns}, threshold {threshold}"
        layer = bnb.nn.Linear8bitLt(columns, 48, has_fp16_weights=False, threshold=threshold)
        layer = layer.half().to(device)
        x = draw(rows, columns).half()
        if threshold:
            x[0, 3], x[-1, columns - 2] = 20, -9
        a = x.double()
        x = x.to(device).requires_grad_()
        y = layer(x)
        codes, scale = layer.state.CB.cpu().double(), layer.state.SCB.cpu().double()
        weight = codes * scale[:, None] / 127
        outlier = (a.abs() >= threshold).any(0) if threshold else torch.zeros(columns).bool()
        inside = a.masked_fill(outlier, 0)
        own = a.masked_fill(a.abs() >= threshold, 0) if threshold else a
        largest = own.abs().amax(1, keepdim=True)
        quantised = (inside * 127 / largest).round() * largest / 127
        expected = quantised @ weight.T + a[:, outlier] @ weight[:, outlier].T
        require_close(y, expected + layer.bias.detach().cpu().double(), torch.float16, what)
        towards = draw(rows, 48).half().to(device)
        y.backward(towards)
        require_close(x.grad, towards.cpu().double() @ weight, torch.float16, f"{what}, gradient")
        cases += 1

    # int8 products are exact; codes of weights are the nearest
    for rows, columns, inner in ((48, 40, 64), (3, 7, 30), (128, 96, 1500)):
        a, b = (torch.randint(-127, 128, (n, inner)).to(torch.int8) for n in (rows, columns))
        got = F.int8_linear_matmul(a.to(device), b.to(device)).cpu().long()
        require((got == a.long() @ b.long().T).all(), f"int8 product {rows} x {columns} x {inner}")
        w = draw(rows, inner).half()
        codes, scale, _ = F.int8_vectorwise_quant(w.to(device))
        exact = w.double() * 127 / w.double().abs().amax(1, keepdim=True)
        off = (codes.cpu().double() - exact).abs().max()
        require(off <= 0.5 + 1e-3, f"int8 codes of {rows} x {inner}: off by {off}")
        require((scale.cpu() == w.abs().amax(1)).all(), f"int8 scales of {rows} x {inner}")
        cases += 2

    # weights that train: their gradient is a product of int8 codes itself
    layer = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=True).half().to(device)
    x, towards = draw(40, 64).half(), draw(40, 48).half()
    layer(x.to(device)).backward(towards.to(device))
    exact = towards.double().T @ x.double()
    off = (layer.weight.grad.cpu().double() - exact).norm() / exact.norm()
    require(off < 0.02, f"Linear8bitLt, gradient of the weight: off by {off:.2e}")
    return cases + 1


def stepped(name, p, g, states, step, group):
    """Parameter and states after a step, in float64, in bitsandbytes' order of operations."""
    # as the kernels get them: 1 - 0.999 is another number in float32
    (lr, eps, decay), betas = (
        torch.tensor(numbers, dtype=torch.float32).tolist()
        for numbers in ([group[n] for n in ("lr", "eps", "weight_decay")], group["betas"])
    )
    first, second = betas[0], betas[1]
    s1, *more = states
    correction = 1 - first**step, (1 - second**step) ** 0.5
    if name in ("adam", "ademamix"):
        s2 = second * more[0] + (1 - second) * g * g
        s1 = first * s1 + (1 - first) * g
        update, states = s1 / correction[0], [s1, s2]
        if name == "ademamix":
            s3 = betas[2] * more[1] + (1 - betas[2]) * g
            update, states = update + group["alpha"] * s3, [s1, s2, s3]
        return (p - lr * update / (s2.sqrt() / correction[1] + eps)) * (1 - lr * decay), states
    if name == "lion":
        moved = p * (1 - lr * decay) - lr * torch.sign(first * s1 + (1 - first) * g)
        return moved, [second * s1 + (1 - second) * g]
    g = g + decay * p
    if name == "momentum":
        s1 = g if step == 1 else first * s1 + g
        return p - lr * s1, [s1]
    s1 = s1 + g * g if name == "adagrad" else first * s1 + (1 - first) * g * g
    return p - lr * g / (s1.sqrt() + eps), [s1]


def held(state) -> tuple[list[torch.Tensor], list[tuple]]:
    """An optimiser's states in float64, and for 8 bits codes, scales and table of each."""
    if state["state1"].dtype != torch.uint8:
        raw = [state[n].detach().cpu().double() for n in ("state1", "state2") if n in state]
        if raw[0].dim() == 2:  # AdEMAMix holds two in the first
            raw = [raw[0][0], raw[1], raw[0][1]]
        return raw, []
    parts = []
    for number in "12":
        if f"state{number}" in state:
            codes = state[f"state{number}"].detach().cpu().long()
            scale = state[f"absmax{number}"].detach().cpu()
            table = state[f"qmap{number}"].cpu().double()
            rows = (
                [(codes, scale, table)]
                if codes.dim() == 1
                else zip(codes, scale, [table] * 2, strict=True)
            )
            parts += rows
    if len(parts) == 3:
        parts = [parts[0], parts[2], parts[1]]
    return [times_scale(table[codes], scale, 256) for codes, scale, table in parts], parts


def optimisers(device: str, draw) -> int:
    """Three steps of each optimiser; every step starts from the state that the device holds."""
    cases = 0
    o = bnb.optim
    decay = {"lr": 1e-2, "weight_decay": 0.1}
    plain = {"lr": 1e-2}
    eight = [(o.Adam8bit, decay), (o.AdamW8bit, decay), (o.Lion8bit, decay), (o.RMSprop8bit, plain),
             (o.SGD8bit, decay | {"momentum": 0.9}), (o.Adagrad8bit, plain),
             (o.AdEMAMix8bit, decay), (o.PagedAdamW8bit, decay)]  # fmt: skip
    full = [(o.Adam32bit, decay), (o.Lion32bit, decay), (o.AdEMAMix32bit, decay),
            (o.SGD32bit, decay | {"momentum": 0.9}), (o.RMSprop32bit, decay),
            (o.Adagrad32bit, decay), (o.PagedAdamW32bit, decay)]  # fmt: skip
    for (make, options), dtype in itertools.product(eight + full, DTYPES):
        name = make.__name__
        if dtype == torch.bfloat16 and name in ("SGD32bit", "RMSprop32bit", "Adagrad32bit"):
            continue  # upstream has none
        paged = name.startswith("Paged")
        if paged and dtype != torch.float32:
            continue
        # a short last block; from 100,000 numbers on, paged states lie in managed memory
        p = torch.nn.Parameter(draw(100_037 if paged else 1357).to(device, dtype))
        if "8bit" in name and not paged:
            options = options | {"min_8bit_size": 1}
        optimiser = make([p], **options)
        group = optimiser.param_groups[0]
        for step in (1, 2, 3):
            p.grad = draw(len(p)).to(device, dtype) / 8
            before = optimiser.state[p]
            if not before:
                optimiser.init_state(group, p, 0, 0)
                before = optimiser.state[p]
            config = optimiser.get_config(0, 0, group)
            start = p.detach().cpu().double()
            states, _ = held(before)
            expected, states = stepped(
                optimiser.optimizer_name, start, p.grad.cpu().double(), states, step, config
            )
            optimiser.step()
            what = f"{name}, {dtype}, step {step}"
            eps = torch.finfo(dtype).eps
            bound = 2 * eps * start.abs() + max(1e-4, 2 * eps) * (expected - start).abs()
            off = ((p.detach().cpu().double() - expected).abs() - bound).max()
            require(off <= 0, f"{what}: a parameter is {off:.2e} beyond its bound")
            now, parts = held(optimiser.state[p])
            for number, (got, state) in enumerate(zip(now, states, strict=True)):
                if parts:
                    codes, scale, table = parts[number]
                    require_nearest(state, codes, scale, table, 256, 1e-5, what, keep_sign=True)
                else:
                    # decay is added to the gradient in its own type
                    require_close(got, state, dtype, f"{what}, state")
        cases += 1
    return cases


def numbers(device: str) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    parts = blockwise, linear_4bit, linear_8bit, optimisers
    for part in parts if device != "cpu" else (blockwise, rows):
        print(f"{device}: {part.__name__}, {part(device, draw)} cases correct", flush=True)


def load() -> None:
    """The library has the name that is asked for where there is a GPU, and all its symbols."""
    path = PACKAGE_DIR / f"libbitsandbytes_rocm{get_cuda_version_string()}.so"
    require(path.exists(), f"torch is for HIP {torch.version.hip}, and there is no {path}")
    ctypes.CDLL(str(path), mode=os.RTLD_NOW)


def main() -> None:
    load()
    numbers("cpu")
    if reason := why_skipped():
        print(f"SKIPPED: GPU half, because {reason}; nothing ran on {ARCH}")
        return
    require(torch.cuda.is_available(), f"KFD names a {ARCH}, but torch sees no GPU")
    numbers("cuda")


if __name__ == "__main__":
    main()
