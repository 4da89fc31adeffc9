# SPDX-License-Identifier: BSD-3-Clause
"""Package test: torchvision's codecs and operators on the CPU; its operators on the GPU, if any."""

import io

import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from torchvision.ops import nms, roi_align

from checks.gpu import find_skip_reason
from checks.verdict import require

# If setup.py does not find a codec, it only prints a warning. So check that each codec works.
for codec, bound in {"PNG": 0, "JPEG": 8, "WEBP": 0}.items():
    pixels = Image.new("RGB", (16, 8), (200, 100, 50))
    data = io.BytesIO()
    pixels.save(data, codec, lossless=True)
    encoded = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
    decoded = decode_image(encoded, ImageReadMode.RGB).int()
    expected = torch.tensor([200, 100, 50]).view(3, 1, 1)
    error = (decoded - expected).abs().max()
    is_right = decoded.shape == (3, 8, 16) and error <= bound
    require(is_right, f"{codec}: {decoded.shape}, off by {error}")
print("decodes PNG, JPEG and WebP")

torch.manual_seed(0)
corners = torch.rand(64, 2) * 50
boxes = torch.cat([corners, corners + 1 + torch.rand(64, 2) * 20], dim=1)
scores = torch.rand(64)
image = torch.rand(1, 3, 80, 80)
rois = torch.cat([torch.zeros(64, 1), boxes], dim=1)

selected = nms(boxes, scores, 0.5)
count = len(selected)
require(0 < count < 64, f"nms keeps {count} of 64 boxes")
pooled = roi_align(image, rois, (7, 7))
shape = tuple(pooled.shape)
require(shape == (64, 3, 7, 7), f"roi_align gives {shape}, expected (64, 3, 7, 7)")
print(f"CPU: nms keeps {count} of 64, roi_align gives {shape}")

reason = find_skip_reason()
if reason:
    print(f"SKIPPED: checks on the GPU, because {reason}; nothing ran on gfx1151")
else:
    selected_on_gpu = nms(boxes.cuda(), scores.cuda(), 0.5).cpu()
    torch.testing.assert_close(selected_on_gpu, selected)
    on_gpu = roi_align(image.cuda(), rois.cuda(), (7, 7)).cpu()
    torch.testing.assert_close(on_gpu, pooled, rtol=1e-4, atol=1e-4)
    print(f"{torch.cuda.get_device_name()}: nms and roi_align agree with the CPU")
