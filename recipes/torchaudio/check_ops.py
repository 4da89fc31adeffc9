# SPDX-License-Identifier: BSD-3-Clause
"""torchaudio's own operators: on the CPU, and the same on the GPU where there is one."""

import torch
from torchaudio.functional import forced_align, lfilter, melscale_fbanks

torch.manual_seed(0)
wave = torch.rand(1, 1000) - 0.5
a, b = torch.tensor([1.0, -0.5]), torch.tensor([0.5, 0.0])
filtered = lfilter(wave, a, b)
expected, last = [], 0.0
for sample in wave[0].tolist():
    last = 0.5 * sample + 0.5 * last
    expected.append(last)
torch.testing.assert_close(filtered[0], torch.tensor(expected), rtol=1e-4, atol=1e-5)

log_probs = torch.rand(1, 20, 5).log_softmax(-1)
targets = torch.tensor([[1, 2, 3]])
aligned, _ = forced_align(log_probs, targets)
assert [int(t) for t in aligned[0].unique_consecutive() if t] == [1, 2, 3]
assert melscale_fbanks(201, 0.0, 8000.0, 80, 16000).shape == (201, 80)
print("CPU: lfilter, forced_align and melscale_fbanks")

if not torch.cuda.is_available():
    print("SKIPPED: the GPU half, because torch sees no GPU here; nothing ran on gfx1151")
else:
    on_gpu = lfilter(wave.cuda(), a.cuda(), b.cuda()).cpu()
    torch.testing.assert_close(on_gpu, filtered, rtol=1e-4, atol=1e-5)
    print(f"{torch.cuda.get_device_name()}: lfilter agrees with the CPU")
