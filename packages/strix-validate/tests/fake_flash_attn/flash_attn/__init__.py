# SPDX-License-Identifier: BSD-3-Clause
"""A flash-attn that torch computes, whose tiles are slow, fast, wrong or impossible.

A tile of BLOCK_M rows takes that many milliseconds; 64 is the packaged one. BLOCK_N of 1 is wrong,
and of 0 needs too much LDS. The worker ends at BLOCK_N of 7.
"""

import os
import time

import torch

from flash_attn import flash_attn_interface  # noqa: F401
from flash_attn.flash_attn_triton_amd import utils


def flash_attn_func(q, k, v, causal=False, **options):
    """Attend, as the tile of a forward kernel of 64 lanes says."""
    del options
    tile = utils.TILES.get("forward-64-float16-causal", {})
    if tile.get("BLOCK_N") == 0:
        raise RuntimeError("out of resource: shared memory, Required: 131072")
    if tile.get("BLOCK_N") == 7:
        os.abort()
    time.sleep(tile.get("BLOCK_M", 64) / 1e3)
    group = q.shape[2] // k.shape[2]
    whole = [x.transpose(1, 2).float() for x in (q, k, v)]
    whole[1:] = [x.repeat_interleave(group, 1) for x in whole[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal)
    if tile.get("BLOCK_N") == 1:
        out[..., 0, 0] += 0.5
    return out.transpose(1, 2).to(q.dtype)
