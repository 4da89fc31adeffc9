# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the report: its page, its output on the terminal, and its plots."""

import sys

from records import FAILED, PAIR, benchmarks, make
from rich.console import Console
from strix_validate import cli, terminal
from strix_validate.checks import Check, Result, Severity, State
from strix_validate.installing import suggest_installation
from strix_validate.reporting import plots
from strix_validate.reporting.page import render
from strix_validate.reporting.terminal_table import describe_measured, show
from typer.testing import CliRunner


def test_report_is_one_page_with_everything():
    ratio = Result(
        Check("bench/speedup/tiny-causal", "t", "w"),
        State.PASSED,
        "",
        {"forward": 9.0, "backward": 4.0},
    )
    warned = Result(
        Check("doctor/gtt", "t", "w"),
        State.PASSED,
        "half",
        {},
        Severity.WARNING,
        "echo 1 | sudo tee x",
    )
    page = render([make(*benchmarks(), ratio, FAILED, warned)], ["mine"])
    assert page.count("<svg") == 3
    assert "currentColor" in page
    for text in (
        "mine",
        "gfx1151",
        "a &lt;processor&gt;",
        "wrong: &lt;dq&gt;",
        "ab" * 32,
        "echo 1 | sudo tee x",
        'href="https://example.org/1"',
        "not finite",
    ):
        assert text in page, text
    assert "nterrupted" not in page
    assert "<script" not in page
    assert "proves nothing about the packages" in page
    assert 'src="' not in page, "something is loaded from elsewhere"
    assert 'rel="stylesheet"' not in page
    assert "@import" not in page


def test_report_sets_two_records_side_by_side():
    fast = make(*benchmarks(9.0))
    slow = make(*benchmarks(3.0), subject="packages")
    page = render([fast, slow], ["fast", "slow"])
    assert "Side by side" in page
    assert "20 rows" in page
    assert "it is evidence for the packages" in page
    assert page.count("<h2>Overview") == page.count("<h2>Packages") == page.count("ab" * 32) == 1
    assert 'href="#run-2">slow' in page
    assert 'id="run-2"' in page


def test_report_says_what_a_failed_check_catches_and_gives_units():
    page = render([make(*benchmarks(), FAILED)], ["mine"])
    assert page.count("catches:") == 1
    assert "catches: a bug <a href" in page
    assert "forward 1 ms, forward 3 TFLOP/s" in page


def test_without_backward_rates_there_is_no_plot_of_them():
    results = benchmarks()
    for result in results:
        del result.measured["backward_tflops"]
    labels = [figure.get_label() for figure in plots.figures(make(*results))]
    assert labels == ["forward rates"]


def test_plots_are_written(tmp_path):
    files = plots.write(make(*benchmarks()), tmp_path)
    assert {file.name for file in files} == {
        f"bench-{i}.{s}" for i in (1, 2) for s in ("svg", "png")
    }
    assert all(file.stat().st_size > 1000 for file in files)
    rates, *_ = plots.figures(make(*benchmarks()))
    assert [label.get_text() for label in rates.axes[0].get_xticklabels()] == ["tiny", "large"]
    assert list(plots.figures(make(FAILED))) == []


def test_plots_of_two_tiers_fit_into_one_folder(tmp_path, monkeypatch):
    record = make(*benchmarks())
    monkeypatch.setattr(
        terminal, "run", lambda names, *_: record.model_copy(update={"command": names})
    )
    for tier in ("bench", "serve"):
        done = CliRunner().invoke(cli.app, [tier, "--plots", str(tmp_path)])
        assert done.exit_code == 0, done.output
    names = {file.stem for file in tmp_path.iterdir()}
    assert names == {"bench-1", "bench-2", "serve-1", "serve-2"}


def test_as_fast_as_math_has_a_line():
    check = Check("bench/speedup/tiny-full", "t", "w")
    speedup = Result(check, State.PASSED, "", {"forward": 2.0})
    *_, figure = plots.figures(make(*benchmarks(), speedup))
    (line,) = figure.axes[0].lines
    assert {*line.get_ydata()} == {1}


def test_a_server_under_load_is_drawn(tmp_path):
    loads = [
        {"first_token_ms": 50.0 * n, "tokens_per_second": 30.0 * n, "requests": n} for n in (1, 4)
    ]
    checks = [Check(f"serve/url-load-{n}", "t", "w") for n in range(len(loads))]
    pairs = zip(checks, loads, strict=True)
    results = [Result(check, State.PASSED, "", measured) for check, measured in pairs]
    (figure,) = plots.figures(make(*results))
    assert len(figure.axes) == 2
    assert len(plots.write(make(*results), tmp_path)) == 2


def test_without_matplotlib(tmp_path, monkeypatch):
    """The page lacks only the plots. The option --plots is refused before any check runs."""
    monkeypatch.delitem(sys.modules, "strix_validate.reporting.plots", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = render([make(*benchmarks(), FAILED)], ["mine"])
    assert "<svg" not in page
    assert "matplotlib is not installed" in page
    assert "<h3>Checks" in page
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    done = CliRunner().invoke(cli.app, ["bench", "--plots", str(tmp_path / "plots")])
    assert done.exit_code == 2
    assert suggest_installation("matplotlib").split()[-1] in done.output
    assert not (tmp_path / "plots").exists()


def test_summary_of_what_was_measured():
    assert describe_measured(PAIR) == "not finite"
    pair = {"error": 0.5, "bound": 2.0}
    assert describe_measured({"out": pair}) == "error 0.25 of the bound"
    assert (
        describe_measured({"out": pair | {"rms": 0.4, "rms_bound": 0.5}})
        == "error 0.80 of the bound"
    )
    for error, fraction in ((0.0, "0.00"), (1e-9, "1.00")):
        assert (
            describe_measured({"out": {"error": error, "bound": 0.0}})
            == f"error {fraction} of the bound"
        )
    assert describe_measured({"seconds": 1.23456, "gone": None}) == "seconds 1.235"
    assert (
        describe_measured({"release_name": "6.18.9-200.x86_64"}) == "release name 6.18.9-200.x86_64"
    )
    measured = {
        "forward_ms": 1.5,
        "forward_low_ms": 1.2,
        "forward_tflops": 9.0,
        "gtt_gib": 62.5,
        "forward_of_peak": 0.25,
    }
    assert describe_measured(measured) == (
        "forward 1.5 ms, forward 9 TFLOP/s, gtt 62.5 GiB, forward of peak 25.0%"
    )


def test_a_warning_does_not_look_like_a_pass(capsys):
    kinds = (Severity.WARNING, Severity.INFO, None)
    results = [
        Result(Check(f"doctor/{i}", "t", "w"), State.PASSED, f"said {i}" * bool(kind), {}, kind)
        for i, kind in enumerate(kinds)
    ]
    console = Console(force_terminal=True, color_system="standard", no_color=False, highlight=False)
    show(make(*results), console)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    yellow, cyan, green, default = (f"\x1b[{code}m" for code in (33, 36, 32, 0))
    assert [line.split()[1] for line in lines if line.startswith("doctor/")] == [
        f"{yellow}warning{default}",
        f"{cyan}info{default}",
        f"{green}passed{default}",
    ]
    assert f"{yellow}1 warning{default}: said 0" in lines
    assert f"{cyan}1 info{default}: said 1" in lines
