# SPDX-License-Identifier: BSD-3-Clause
"""Memory traffic of a launch, computed from the number of times each block was entered."""

from types import SimpleNamespace

import pytest
from strix_emulate.code.decode import Instruction
from strix_emulate.statistics import count_lane_bytes, measure_traffic


def block(entered: int, *names: str) -> SimpleNamespace:
    """Return a block of instructions with these names, which waves entered `entered` times."""
    steps = [SimpleNamespace(instruction=Instruction(0, 4, name, name)) for name in names]
    return SimpleNamespace(steps=steps, end=None, entered=entered)


def launch(*blocks: SimpleNamespace) -> SimpleNamespace:
    """Return a launch of a kernel with waves of 32 lanes."""
    return SimpleNamespace(kernel=SimpleNamespace(width=32), blocks=dict(enumerate(blocks)))


@pytest.mark.parametrize(
    ("name", "lane_bytes"),
    [
        ("global_load_b128", 16),
        ("buffer_store_b96", 12),
        ("flat_load_u8", 1),
        ("global_load_d16_hi_b16", 2),
        ("global_atomic_add_f32", 4),
        ("scratch_store_b64", 8),
        ("ds_load_b128", 0),
        ("v_add_f32", 0),
        ("s_load_b64", 0),
    ],
)
def test_bytes_of_a_lane(name: str, lane_bytes: int) -> None:
    assert count_lane_bytes(Instruction(0, 4, name, name)) == lane_bytes


def test_traffic_of_a_loop() -> None:
    wmma = "v_wmma_f32_16x16x16_bf16"
    traffic = measure_traffic(
        launch(
            block(2, "global_load_b128", "scratch_store_b32"),
            block(10, wmma, wmma, "global_load_b64", "scratch_load_b32", "scratch_load_b128"),
            block(30, "v_add_f32"),
        )
    )
    assert traffic["memory_bytes"] == 32 * (2 * 16 + 10 * 8)
    assert traffic["scratch_bytes"] == 32 * (2 * 4 + 10 * 20)
    assert traffic["flops"] == 20 * 2 * 16**3
    assert traffic["bytes_per_flop"] == round(32 * 112 / (20 * 8192), 4)
    # Iterations are those of the loop that multiplies matrices, although waves enter another block
    # more often.
    assert traffic["scratch_bytes_per_iteration"] == round(32 * 208 / 10, 1)


def test_a_kernel_without_products_or_scratch() -> None:
    traffic = measure_traffic(launch(block(4, "global_load_b32", "v_add_f32")))
    assert traffic == {"memory_bytes": 512, "scratch_bytes": 0, "flops": 0}
