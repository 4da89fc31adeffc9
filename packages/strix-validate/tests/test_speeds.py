# SPDX-License-Identifier: BSD-3-Clause
"""The report compares measured speeds with published ones, and explains large differences."""

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from records import make, timing
from rich.console import Console
from strix_validate.checks import Check, Result, State
from strix_validate.reporting import speeds
from strix_validate.reporting.terminal_table import show
from strix_validate.tiers import bench, doctor, serve

ROW = """
[[speed]]
what = "copy, {} at a time"
check = "bench/copy*"
measured = "copy_gbps"
unit = "GB/s"
range = [180, 256]
published = "212"
cause = "memory in one channel"
source = "https://example.org/1"
"""


def results(**measured):
    """Return passed results from keywords.

    A keyword is a check's id with "_" for "/" and "-". The value has the measured numbers.
    """
    return [
        Result(Check(name.replace("_", "/", 1).replace("_", "-")), State.PASSED, "", values)
        for name, values in measured.items()
    ]


def compare(text, *checks):
    return list(speeds.compare(make(*checks), speeds.load(text)))


@pytest.mark.parametrize(
    "speed, verdict",
    [
        (179.9, "slow"),
        (180.0, "as expected"),
        (212, "as expected"),
        (256.0, "as expected"),
        (257.0, "too fast"),
    ],
)
def test_a_speed_is_below_within_or_above_its_range(speed, verdict):
    (row,) = compare(ROW, *results(bench_copy={"copy_gbps": speed}))
    assert row.verdict == verdict
    assert row.expected == "180 to 256"


def test_what_is_off_is_explained():
    (row,) = compare(ROW, *results(bench_copy_4={"copy_gbps": 90.0}))
    assert row.explain() == (
        "copy, 4 at a time: 90 GB/s, expected 180 to 256; published: 212. Usual cause: memory in "
        "one channel (https://example.org/1)"
    )
    (row,) = compare(ROW, *results(bench_copy={"copy_gbps": 900.0}))
    assert "more than the hardware allows" in row.explain()
    assert "channel" not in row.explain()


@pytest.mark.parametrize(
    "measured", [{}, {"copy_gbps": None}, {"copy_gbps": "fast"}, {"other_gbps": 200.0}]
)
def test_what_was_not_measured_has_no_row(measured):
    assert compare(ROW, *results(bench_copy=measured)) == []
    assert compare(ROW, *results(bench_product={"copy_gbps": 200.0})) == []


def test_what_is_not_published_is_not_judged():
    text = "\n".join(line for line in ROW.splitlines() if "range" not in line)
    (row,) = compare(text, *results(bench_copy={"copy_gbps": 1e-3}))
    assert (row.verdict, row.expected) == ("", "not published")


def test_a_model_has_its_own_row_and_others_the_one_for_all():
    text = ROW.replace("256]", "inf]") + 'model = "*qwen3-8b"\n'
    text += ROW.replace("180, 256", "1, 2").replace("copy,", "any,")
    names = {"Qwen3-8B": "copy", "my-qwen3-8b": "copy", "Qwen3-8B-AWQ": "any"}
    for model, expected in names.items():
        measured = {"copy_gbps": 1e9, "model": model}
        (row,) = compare(text, *results(bench_copy=measured))
        assert row.name.startswith(expected), model
    assert row.verdict == "too fast"
    (row,) = compare(text, *results(bench_copy={"copy_gbps": 1e9, "model": "qwen3-8b"}))
    assert (row.verdict, row.expected) == ("as expected", "180 or more")


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "has no [[speed]]"),
        ("speed = 3", "has no [[speed]]"),
        ("[[speed]\nwhat = 1", "is no TOML"),
        (ROW.replace('unit = "GB/s"', ""), r"row 1 (copy, {} at a time): unit: Field required"),
        (ROW.replace("[180, 256]", '"fast"'), "range: Input should be a valid tuple"),
        (ROW.replace("[180, 256]", "[256, 180]"), "the range 256 to 180 is empty"),
        (ROW.replace("[180, 256]", "[nan, 180]"), "is empty, or does not begin above 0"),
        (ROW.replace("[180, 256]", "[0, 180]"), "is empty, or does not begin above 0"),
        (ROW.replace("[180, 256]", "[180]"), "range.1: Field required"),
        (ROW.replace("source", "sauce"), "sauce: Extra inputs"),
        (ROW.replace('cause = "memory in one channel"', ""), "a range needs cause"),
        (ROW + "[[speed]]\nwhat = 3", "row 2 (3): what: Input should be a valid string"),
    ],
)
def test_a_malformed_table_is_refused_with_its_row(text, words):
    with pytest.raises(speeds.BadSpeeds) as refused:
        speeds.load(text)
    assert words in str(refused.value)


def test_a_malformed_table_costs_no_result(monkeypatch, capsys):
    """If speeds.toml is malformed, the report still shows all results of the run."""
    load = speeds.load
    monkeypatch.setattr(speeds, "load", lambda: load("[[speed]"))
    show(make(*results(bench_copy={"copy_gbps": 90.0})), Console(width=200))
    out = capsys.readouterr().out
    assert "no speeds are compared: speeds.toml is no TOML" in out
    assert "bench/copy" in out
    assert "1 passed" in out


def test_run_shows_what_is_off_on_gfx1151_alone(capsys):
    checks = results(
        bench_copy={"copy_gbps": 90.0},
        bench_product_fp32={"product_fp32_tflops": 8.7},
        bench_host_copy={"to_gpu_gbps": 84.0, "from_gpu_gbps": 84.0},
        doctor_copies={"writable_gbps": 0.002, "read_only_gbps": 11.0},
        **{"serve_url-load-1": {"tokens_per_second": 12.0, "model": "Qwen3-8B"}},
    )
    checks.append(timing("flash", "medium", "causal", 7.0))
    for architecture, off in (("gfx1151", 2), ("sm_90", 0)):
        show(make(*checks, architecture=architecture), Console(width=300))
        out = capsys.readouterr().out
        assert out.count("off: ") == off
        assert out.count("not published") == 1
        assert "180 to 256" in out
        assert "server, Qwen3-8B, 1 at a time" in out
        if off:
            assert "off: copy in memory: 90 GB/s, expected 180 to 256; published: 212" in out
            assert "off: Farthest below its range, at 1% of its lower end: copy to the GPU" in out
            assert "Usual cause: a Linux kernel with slow copies; doctor/kernel names it" in out
            assert out.count("as expected") == 5


def test_the_ranges_of_gfx1151_do_not_judge_another_target(monkeypatch):
    """The variable gpu_arch selects a smaller GPU, for which no range is known."""
    monkeypatch.setattr(speeds, "TARGET", "gfx1150", raising=False)
    checks = results(bench_product={"product_tflops": 12.0})
    table, explanations = speeds.table(make(*checks, architecture="gfx1150"))
    assert table.row_count == 1
    assert explanations == []


def test_each_row_is_about_what_a_check_measures():
    ids = [check.id for tier in (bench, doctor, serve) for check in tier.checks()]
    for row in speeds.load():
        assert any(fnmatchcase(id_, row.check) for id_ in ids), row.what


def test_rows_have_the_published_figures():
    rows = {(row.what, row.check): row for row in speeds.load()}
    fp32 = rows["product, fp32", "bench/product-fp32"]
    assert fp32.bounds == (6, 29.7)
    assert fp32.published.startswith("8.7")
    eight = rows["server, Qwen3-8B, {} at a time", "serve/url-load-1"]
    assert eight.bounds == (9.2, math.inf)
    assert eight.published == "12.3"
    served = [row for row in rows.values() if row.model != "*"]
    assert len(served) == 15
    for row in served:
        slowest = float(row.published.split()[0])
        assert row.bounds[0] == pytest.approx(0.75 * slowest, rel=0.02), row.what
        assert row.source.startswith("https://")


@pytest.mark.parametrize(
    "model, name",
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("/data/Qwen3-8B-AWQ/", "Qwen3-8B-AWQ"),
        ("tiny", "tiny"),
        (
            "/x/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a7208912126459214e8b04321603b3df60c",
            "Qwen3-4B",
        ),
    ],
)
def test_a_model_is_named_without_its_folders(model, name):
    assert serve.shorten_name(model) == name


def test_the_slowest_is_first_with_the_configuration_that_ran():
    ran = "attn_fwd (BLOCK_M=64 num_warps=4, 256 VGPRs, 34 spilled)"
    slow = timing("flash", "medium", "causal", 0.4)
    slow = replace(slow, measured=slow.measured | {"forward_kernels": ran})
    _, explanations = speeds.table(make(*results(bench_copy={"copy_gbps": 170.0}), slow))
    assert "backward: 0.4" in explanations[0]
    assert explanations[0].startswith("Farthest below")
    assert f"published: 4.31. Kernels that ran: {ran}. Usual cause" in explanations[1]
    assert explanations[2].startswith("copy in memory: 170 GB/s")


def test_what_is_too_fast_is_not_called_slow():
    _, explanations = speeds.table(make(*results(bench_copy={"copy_gbps": 900.0})))
    assert len(explanations) == 1
    assert explanations[0].startswith("copy in memory: 900 GB/s")
