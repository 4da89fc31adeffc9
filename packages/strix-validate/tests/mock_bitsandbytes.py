# SPDX-License-Identifier: BSD-3-Clause
"""A mock of bitsandbytes in torch: 4-bit quantization, and one 8-bit optimiser.

The mock is correct unless `fault` names a fault. It shares no code with the checks.
"""

from types import SimpleNamespace

import torch

NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.39491749,
        -0.28444138,
        -0.18477343,
        -0.09105004,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ]
)


def make_dynamic_map(signed):
    numbers = [0.0, 1.0]
    for i in range(7):
        count = 2**i if signed else 2 ** (i + 1)
        step = 0.9 / count
        middle = [(0.1 + (j + 0.5) * step) * 10.0 ** (i - 6) for j in range(count)]
        numbers += middle + [-x for x in middle] * signed
    return torch.tensor(sorted(numbers))


def quantize(values, table, block):
    """Return the codes of values, and each block's largest magnitude."""
    rows = torch.nn.functional.pad(values.flatten().float(), (0, -values.numel() % block))
    rows = rows.view(-1, block)
    scales = rows.abs().amax(1)
    normal = rows / scales.clamp(min=1e-30)[:, None]
    return (normal[..., None] - table).abs().argmin(-1).flatten()[: values.numel()], scales


def dequantize(numbers, scales, block):
    places = torch.arange(len(numbers)) // block
    return numbers * scales[places]


class Mock:
    """A mock of the module bitsandbytes, with a fault or without."""

    def __init__(self, fault=""):
        self.fault = fault
        self.functional = self
        self.optim = SimpleNamespace(AdamW8bit=lambda *a, **o: Adam(self, *a, **o))

    def quantize_4bit(self, x, blocksize, compress_statistics, quant_type):
        assert quant_type == "nf4"
        table = NF4.clone()
        if self.fault == "another table of codes":
            table[8] = 0.09
        codes, scales = quantize(x, table, blocksize)
        if self.fault == "codes are one too small":
            codes = (codes - 1).clamp(min=0)
        first = codes[::2]
        second = codes[1::2]
        if self.fault == "nibbles of a byte swapped":
            first, second = second, first
        state = SimpleNamespace(
            blocksize=blocksize,
            nested=compress_statistics,
            shape=x.shape,
            absmax=scales,
            dtype=x.dtype,
        )
        if compress_statistics:
            state.offset = scales.mean()
            state.absmax, inner = quantize(scales - state.offset, make_dynamic_map(True), 256)
            if self.fault == "offset not subtracted from scales":
                state.absmax, inner = quantize(scales, make_dynamic_map(True), 256)
            state.state2 = SimpleNamespace(absmax=inner, blocksize=256)
        return (first << 4 | second).to(torch.uint8)[:, None], state

    def dequantize_4bit(self, packed, state):
        scales = state.absmax
        if state.nested:
            scales = dequantize(make_dynamic_map(True)[scales], state.state2.absmax, 256)
            scales = scales + (0 if self.fault == "offset not added to scales" else state.offset)
        codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten().long()
        values = dequantize(NF4[codes], scales, state.blocksize)
        if self.fault == "blocks of scales counted in each row":
            columns = state.shape[-1]
            block = -(-columns // state.blocksize)
            place = torch.arange(len(codes))
            blocks = place // columns * block + place % columns // state.blocksize
            values = NF4[codes] * scales[blocks.clamp(max=len(scales) - 1)]
        return values.view(state.shape).to(state.dtype)


class Adam:
    def __init__(self, module, parameters, *, lr, weight_decay, min_8bit_size):
        (self.p,), self.fault = parameters, module.fault
        self.param_groups = [
            {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.999), "eps": 1e-8}
        ]
        self.state = {}
        self.number = 0

    def get_config(self, *_):
        return self.param_groups[0]

    def init_state(self, *_):
        buffers = {}
        self.state[self.p] = buffers
        for n in (1, 2):
            buffers[f"qmap{n}"] = make_dynamic_map(n == 1)
            zeros = torch.zeros(self.p.numel())
            buffers[f"state{n}"], buffers[f"absmax{n}"] = quantize(zeros, buffers[f"qmap{n}"], 256)
            buffers[f"state{n}"][:] = int((buffers[f"qmap{n}"] == 0).nonzero())

    def step(self):
        self.number += 1
        buffers = self.state[self.p]
        grad = self.p.grad.float()
        p = self.p.data.float()
        mean, square = (
            dequantize(buffers[f"qmap{n}"][buffers[f"state{n}"]], buffers[f"absmax{n}"], 256)
            for n in (1, 2)
        )
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad * (
            1 if self.fault == "gradient not squared" else grad
        )
        number = 1 if self.fault == "step number stays 1" else self.number
        root = square.abs().sqrt() / (1 - 0.999**number) ** 0.5 + 1e-8
        decay = 0 if self.fault == "no weight decay" else 1e-3
        rate = 0.010005 if self.fault == "learning rate 0.05 % too large" else 0.01
        p = p * (1 - decay) - rate * mean / (1 - 0.9**number) / root
        if self.fault == "last block of parameters not updated":
            p[-77:] = self.p.data[-77:].float()
        self.p.data = p.to(self.p.dtype)
        for n, state in ((1, mean), (2, square)):
            buffers[f"state{n}"], buffers[f"absmax{n}"] = quantize(state, buffers[f"qmap{n}"], 256)
            if self.fault == "scales of the previous block used":
                buffers[f"absmax{n}"] = buffers[f"absmax{n}"].roll(1)
