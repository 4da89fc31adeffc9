# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of the benchmarks, and the calls that the benchmarks time."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from records import make, timing
from rich.console import Console
from strix_validate.checks import Check, CheckFailed, RunOptions, State
from strix_validate.reporting.page import render
from strix_validate.reporting.terminal_table import show
from strix_validate.runner import run
from strix_validate.tiers import bench, machine_speed
from strix_validate.timing import Timing, time_call
from strix_validate.triton import launches
from strix_validate.vllm import experts


def test_operations_are_counted_once():
    """The counted operations divided by the published time give the published rate.

    A well-known script counts twice as many operations.
    """
    assert bench.count_operations("tiny", False, "forward") == 4 * 128 * 128 * 64
    causal = bench.count_operations("xlarge", True, "forward")
    assert causal == 4 * 16 * 16 * 64 * (4096 * 4097 // 2)
    assert bench.count_operations("xlarge", True, "backward") == 2.5 * causal
    assert causal / 68.5042 / 1e9 == pytest.approx(8.03, abs=0.005)
    assert bench.count_operations("xlarge", True, "backward") / 115.386 / 1e9 == pytest.approx(
        11.91, abs=0.005
    )


def test_what_is_timed_has_the_shape_of_a_server():
    ids = {check.id for check in bench.checks()}
    assert ids >= {
        "bench/flash-attn/gqa-causal",
        "bench/vllm/decode-full",
        "bench/flash/decode-full",
        "bench/flash/large128-full",
        "bench/math/gqa-full",
        "bench/speedup/gqa-causal",
        "bench/published/large-causal",
        "bench/published/large-full",
        "bench/experts/decode",
    }
    assert not ids & {
        "bench/vllm/decode-causal",
        "bench/vllm/gqa-full",
        "bench/published/gqa-causal",
        # For full attention, the published table lacks the backward pass and the smallest size.
        "bench/published/tiny-full",
    }
    assert bench.count_operations("decode", False, "forward") == 4 * 16 * 32 * 128 * 4096
    assert bench.SIZES["decode"].cache_bytes == 2 * 2 * 16 * 8 * 4096 * 128
    q, k, v, grad_out = bench.SIZES["gqa"].shapes()
    assert q == grad_out == (4, 32, 2048, 128)
    assert k == v == (4, 8, 2048, 128)


def test_what_only_a_gpu_runs_is_skipped_on_a_cpu():
    only = ["bench/flash-attn/tiny-causal", "bench/vllm/tiny-causal"]
    record = run(["bench"], RunOptions(), only)
    assert [check.state for check in record.checks] == [State.SKIPPED] * 2


def test_both_directions_are_timed(monkeypatch):
    monkeypatch.setattr(machine_speed, "peak", lambda device: 50.0)
    (result,) = run(["bench"], RunOptions(), ["bench/math/tiny-causal"]).checks
    assert result.state is State.PASSED, result.reason
    measured = result.measured
    for direction in ("forward", "backward"):
        low, median, high = (measured[f"{direction}_{x}ms"] for x in ("low_", "", "high_"))
        assert 0 < low <= median <= high
        assert measured[f"{direction}_repeats"] > 1
        rate = bench.count_operations("tiny", True, direction) / median / 1e9
        assert measured[f"{direction}_tflops"] == pytest.approx(rate)
        assert measured[f"{direction}_of_peak"] == pytest.approx(rate / 50)
    assert measured["peak_tflops"] == 50


def test_flash_attn_is_given_its_own_layout(monkeypatch):
    """flash-attn's layout is (batch, tokens, heads, head_dim)."""
    shapes = []

    def flash_attn_func(q, k, v, causal):
        shapes.append(q.shape)
        return q + k + v

    mock = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn", mock)
    bench.time_torch("flash-attn", bench.SIZES["tiny"], True, "cpu")
    assert {*shapes} == {(1, 128, 1, 64)}


def test_decoding_has_a_row_without_a_backward_pass(capsys):
    result = timing("flash", "decode", "full", 1.0)
    measured = {n: v for n, v in result.measured.items() if "backward" not in n}
    page = make(replace(result, measured=measured | {"cache_gbps": 123.0}))
    show(page, Console(width=200))
    assert "123" in capsys.readouterr().out
    assert "<svg" in render([page], ["mine"])


def test_peak_is_computed_from_units_and_clock():
    assert machine_speed.peak_tflops("gfx1151", 20, 2900) == pytest.approx(59.4, abs=0.05)
    assert machine_speed.peak_tflops("gfx9999", 40, 2900) is None
    assert machine_speed.peak_tflops("gfx1151", 40, 0) is None


@pytest.mark.parametrize(
    ("name", "rate", "value"),
    [
        ("copy", "copy_gbps", 1073.7),
        ("product", "product_tflops", 137.4),
        ("product-fp32", "product_fp32_tflops", 137.4),
    ],
)
def test_rate_of_a_copy_or_a_product_that_takes_a_millisecond(name, rate, value, monkeypatch):
    """A copy reads and writes 512 MiB. A product with 4096 rows takes 2 * 4096**3 operations."""
    timing = Timing(median=1.0, low=1.0, high=1.0, repeats=1)
    monkeypatch.setattr(machine_speed, "time_call", lambda function, device: timing)
    monkeypatch.setattr(torch, "randn", lambda *size, **options: None)
    measured = machine_speed.CHECKS[Check(f"bench/{name}")](RunOptions(device="cuda"))
    assert measured[rate] == pytest.approx(value, abs=0.1)


def test_flash_that_is_no_faster_than_math_fails():
    forward_ms = {"flash": 1.0, "math": 1.1}

    def measure(route, size, mask):
        return {"forward_ms": forward_ms[route], "backward_ms": 1.0}

    body = bench.bodies(measure)[Check("bench/speedup/large-causal")]
    with pytest.raises(CheckFailed, match=r"1.10 times as fast as math"):
        body(RunOptions(device="cuda"))


def test_timer_times_what_it_is_given(monkeypatch):
    """The first call is a warm-up. Of the others, one takes 2 ms on a mock clock, and most 9 ms."""
    clock = [0.0]
    calls = iter([1000, 9, 2, 9, 9, 9, 9, 9])

    def call():
        clock[0] += next(calls) / 1e3

    monkeypatch.setattr("strix_validate.timing.time.perf_counter", lambda: clock[0])
    timing = time_call(call, "cpu", budget_ms=50)
    assert timing.repeats == 7
    assert timing.median == pytest.approx(9)
    assert 2 <= round(timing.low, 6) < timing.median == timing.high


def test_full_attention_of_the_published_table_is_counted_as_full():
    """For full attention, the published script counts causal operations, which halves the rate."""
    body = bench.bodies(lambda *_: {"forward_tflops": 10.0, "backward_tflops": 11.0})[
        Check("bench/published/xlarge-full")
    ]
    measured = body(RunOptions(device="cuda"))
    assert measured["published_0_forward_tflops"] == pytest.approx(14.63, abs=0.005)
    assert "published_0_backward_tflops" not in measured
    assert "published_1" not in measured


def test_a_timing_survives_the_way_out_of_a_child():
    """A Timing is packed in tensors, because a child process can return only tensors."""
    original = Timing(1.5, 1.25, 2.0, 7, "attn_fwd (BLOCK_M=128 num_warps=8, 256 VGPRs, 0 spilled)")
    assert Timing.unpack(original.pack()) == original
    assert Timing.unpack(Timing(1.0, 1.0, 1.0, 5).pack()).kernels == ""


def test_the_tile_of_a_launch_is_told():
    """The description has the tile's constants from the compiled kernel, but no other constants."""
    kernel = SimpleNamespace(
        name="attn_fwd",
        src=SimpleNamespace(
            fn=SimpleNamespace(arg_names=["Q", "IS_CAUSAL", "BLOCK_M", "BLOCK_N"]),
            constants={(1,): True, (2,): 128, (3,): 64},
        ),
        metadata=SimpleNamespace(num_warps=8),
        n_regs=256,
        n_spills=0,
    )
    assert launches.describe_options(kernel) == (
        "BLOCK_M=128 BLOCK_N=64 num_warps=8, 256 VGPRs, 0 spilled"
    )


def test_a_cpp_kernel_is_told_without_its_arguments():
    name = "void pytorch_flash::flash_fwd_kernel<Traits<128, 64>, true>(pytorch_flash::Params)"
    assert launches.shorten(name) == "pytorch_flash::flash_fwd_kernel"
    assert launches.shorten("attn_fwd") == "attn_fwd"


def test_operations_and_bytes_of_experts(monkeypatch):
    """Sixteen tokens, eight experts for each, use all 128 experts. All weights are read once."""
    calls = []

    def time_in_child(call, _):
        calls.append(call)
        return Timing(2.0, 2.0, 2.0, 5)

    monkeypatch.setattr(bench, "_time_in_child", time_in_child)
    measured = bench.bodies(dict)[Check("bench/experts/decode")](RunOptions(device="cuda"))
    weights = 3 * 2048 * 768
    assert measured["weights_gbps"] == pytest.approx(2 * 128 * weights / 2e-3 / 1e9)
    assert measured["experts_tflops"] == pytest.approx(2 * 128 * weights / 2e-3 / 1e12)
    assert calls[0].launch is experts.time_mixture
    assert calls[0].tensors["x"].shape == (16, 2048)
