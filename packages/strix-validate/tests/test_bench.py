# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks' arithmetic, and what is timed."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from records import make, timing
from rich.console import Console
from strix_validate.checks import Check, CheckFailed, RunOptions, State
from strix_validate.reporting.page import render
from strix_validate.reporting.terminal_table import show
from strix_validate.runner import run
from strix_validate.tiers import bench


def test_operations_are_counted_once():
    """The published rate of the largest size follows from its time; the script has twice it."""
    assert bench.operations("tiny", False, "forward") == 4 * 128 * 128 * 64
    causal = bench.operations("xlarge", True, "forward")
    assert causal == 4 * 16 * 16 * 64 * (4096 * 4097 // 2)
    assert bench.operations("xlarge", True, "backward") == 2.5 * causal
    assert causal / 68.5042 / 1e9 == pytest.approx(8.03, abs=0.005)
    assert bench.operations("xlarge", True, "backward") / 115.386 / 1e9 == pytest.approx(
        11.91, abs=0.005
    )


def test_what_is_timed_has_the_shape_of_a_server():
    ids = {check.id for check in bench.checks()}
    assert {"bench/flash-attn/gqa-causal", "bench/vllm/decode-full", "bench/flash/decode-full",
            "bench/math/gqa-full", "bench/speedup/gqa-causal"} <= ids  # fmt: skip
    assert not {"bench/vllm/decode-causal", "bench/vllm/gqa-full", "bench/published/gqa"} & ids
    assert bench.operations("decode", False, "forward") == 4 * 16 * 32 * 128 * 4096
    assert bench.SIZES["decode"].cache_bytes == 2 * 2 * 16 * 8 * 4096 * 128
    q, k, v, grad_out = bench.SIZES["gqa"].shapes()
    assert q == grad_out == (4, 32, 2048, 128) and k == v == (4, 8, 2048, 128)


def test_what_only_a_gpu_runs_is_skipped_on_a_cpu():
    only = ["bench/flash-attn/tiny-causal", "bench/vllm/tiny-causal"]
    found = run(["bench"], RunOptions(), only)
    assert [check.state for check in found.checks] == [State.SKIPPED] * 2


def test_both_directions_are_timed():
    (result,) = run(["bench"], RunOptions(), ["bench/math/tiny-causal"]).checks
    assert result.state is State.PASSED, result.reason
    found = result.measured
    for direction in ("forward", "backward"):
        low, median, high = (found[f"{direction}_{x}ms"] for x in ("low_", "", "high_"))
        assert 0 < low <= median <= high and found[f"{direction}_repeats"] > 1
        rate = bench.operations("tiny", True, direction) / median / 1e9
        assert found[f"{direction}_tflops"] == pytest.approx(rate)


def test_flash_attn_is_given_its_own_layout(monkeypatch):
    """(batch, tokens, heads, lanes)."""
    seen = []
    mock = SimpleNamespace(
        flash_attn_func=lambda q, k, v, causal: seen.append(q.shape) or q + k + v
    )
    monkeypatch.setitem(sys.modules, "flash_attn", mock)
    bench.time_torch("flash-attn", bench.SIZES["tiny"], True, "cpu", {})
    assert {*seen} == {(1, 128, 1, 64)}


def test_decoding_has_a_row_without_a_backward_pass(capsys):
    result = timing("flash", "decode", "full", 1.0)
    measured = {n: v for n, v in result.measured.items() if "backward" not in n}
    page = make(replace(result, measured=measured | {"cache_gbps": 123.0}))
    show(page, Console(width=200))
    assert "123" in capsys.readouterr().out
    assert "<svg" in render([page], ["mine"])


def test_peak_is_computed_from_units_and_clock():
    assert bench.peak_tflops("gfx1151", 20, 2900) == pytest.approx(59.4, abs=0.05)
    assert bench.peak_tflops("gfx9999", 40, 2900) is None
    assert bench.peak_tflops("gfx1151", 40, 0) is None


def test_flash_that_is_no_faster_than_math_fails():
    def measure(route, size, mask):
        return {"forward_ms": {"flash": 1.0, "math": 1.1}[route], "backward_ms": 1.0}

    body = bench.bodies(measure)[Check("bench/speedup/large-causal")]
    with pytest.raises(CheckFailed, match=r"1.10 times math"):
        body(RunOptions(device="cuda"))


def test_timer_times_what_it_is_given(monkeypatch):
    """Calls of 2 ms between slower ones, by a clock that they advance: the first one warms up."""
    clock, calls = [0.0], iter([1000, 9, 2, 9, 9, 9, 9, 9])

    def call():
        clock[0] += next(calls) / 1e3

    monkeypatch.setattr("strix_validate.tiers.bench.time.perf_counter", lambda: clock[0])
    found = bench.timed(call, "cpu", budget_ms=50)
    assert found.repeats == 7 and found.median == pytest.approx(9)
    assert 2 <= round(found.low, 6) < found.median == found.high
