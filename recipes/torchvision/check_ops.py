# SPDX-License-Identifier: BSD-3-Clause
"""Package test: torchvision's operators on the CPU, and the same on the GPU if there is one."""

import torch
from torchvision.ops import nms, roi_align

from checks.verdict import require

torch.manual_seed(0)
corners = torch.rand(64, 2) * 50
boxes = torch.cat([corners, corners + 1 + torch.rand(64, 2) * 20], dim=1)
scores = torch.rand(64)
image = torch.rand(1, 3, 80, 80)
rois = torch.cat([torch.zeros(64, 1), boxes], dim=1)

kept, pooled = nms(boxes, scores, 0.5), roi_align(image, rois, (7, 7))
require(0 < len(kept) < 64, f"nms keeps {len(kept)} of 64 boxes")
shape = tuple(pooled.shape)
require(shape == (64, 3, 7, 7), f"roi_align gives {shape}, expected (64, 3, 7, 7)")
print(f"CPU: nms keeps {len(kept)} of 64, roi_align gives {shape}")

if not torch.cuda.is_available():
    print("SKIPPED: GPU half, because torch sees no GPU; nothing ran on gfx1151")
else:
    torch.testing.assert_close(nms(boxes.cuda(), scores.cuda(), 0.5).cpu(), kept)
    on_gpu = roi_align(image.cuda(), rois.cuda(), (7, 7)).cpu()
    torch.testing.assert_close(on_gpu, pooled, rtol=1e-4, atol=1e-4)
    print(f"{torch.cuda.get_device_name()}: nms and roi_align agree with the CPU")
