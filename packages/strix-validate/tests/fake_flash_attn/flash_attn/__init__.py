# SPDX-License-Identifier: BSD-3-Clause
"""A mock of flash-attn in torch, whose tiles are slow, fast, wrong or impossible.

With a tile of BLOCK_M rows, a call takes BLOCK_M milliseconds. The packaged tile has 64 rows. A
BLOCK_N of 1 gives a wrong result, 0 needs too much LDS, and 7 ends the worker.
"""

import os
import time

import torch

from flash_attn import flash_attn_interface  # noqa: F401
from flash_attn.flash_attn_triton_amd import utils


def flash_attn_func(q, k, v, causal=False, **options):
    """Return attention. The forward tile for head_dim 64 sets the call's duration and fault."""
    del options
    tile = utils.TILES.get("forward-64-float16-causal", {})
    if tile.get("BLOCK_N") == 0:
        raise RuntimeError("out of resource: shared memory, Required: 131072")
    if tile.get("BLOCK_N") == 7:
        os.abort()
    time.sleep(tile.get("BLOCK_M", 64) / 1e3)
    group = q.shape[2] // k.shape[2]
    inputs = [x.transpose(1, 2).float() for x in (q, k, v)]
    inputs[1:] = [x.repeat_interleave(group, 1) for x in inputs[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    if tile.get("BLOCK_N") == 1:
        out[..., 0, 0] += 0.5
    return out.transpose(1, 2).to(q.dtype)
