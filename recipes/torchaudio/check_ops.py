# SPDX-License-Identifier: BSD-3-Clause
"""Package test: torchaudio's operators on the CPU, and lfilter on gfx1151 if there is one."""

import torch
from torchaudio.functional import forced_align, lfilter, melscale_fbanks

from checks.gpu import find_skip_reason
from checks.verdict import require

torch.manual_seed(0)
wave = torch.rand(1, 1000) - 0.5
a = torch.tensor([1.0, -0.5])
b = torch.tensor([0.5, 0.0])
filtered = lfilter(wave, a, b)
expected = []
last = 0.0
for sample in wave[0].tolist():
    last = 0.5 * sample + 0.5 * last
    expected.append(last)
torch.testing.assert_close(filtered[0], torch.tensor(expected), rtol=1e-4, atol=1e-5)

log_probs = torch.rand(1, 20, 5).log_softmax(-1)
targets = torch.tensor([[1, 2, 3]])
aligned, _ = forced_align(log_probs, targets)
tokens = [int(token) for token in aligned[0].unique_consecutive() if token]
require(tokens == [1, 2, 3], f"forced_align gives {tokens}, expected [1, 2, 3]")
shape = tuple(melscale_fbanks(201, 0.0, 8000.0, 80, 16000).shape)
require(shape == (201, 80), f"melscale_fbanks gives {shape}, expected (201, 80)")
print("CPU: lfilter, forced_align and melscale_fbanks")

reason = find_skip_reason()
if reason:
    print(f"SKIPPED: checks on the GPU, because {reason}; nothing ran on the GPU")
else:
    on_gpu = lfilter(wave.cuda(), a.cuda(), b.cuda()).cpu()
    torch.testing.assert_close(on_gpu, filtered, rtol=1e-4, atol=1e-5)
    # On the GPU, lfilter uses torch's operators. forced_align and RNN-T loss are only for the CPU.
    print(f"{torch.cuda.get_device_name()}: lfilter agrees with the CPU")
