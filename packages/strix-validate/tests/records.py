# SPDX-License-Identifier: BSD-3-Clause
"""Mock results and records, for the tests of records and reports."""

import itertools
from datetime import UTC, datetime

from strix_validate.checks import Check, Result, State
from strix_validate.reporting import plots, record
from strix_validate.reporting.record import Device, Host, Package, Record
from strix_validate.tiers import bench


def make(*results, subject="harness", tier="bench", **device):
    checks = [record.make_check_record(tier, result) for result in results]
    return Record(
        created=datetime(2026, 11, 21, 12, tzinfo=UTC),
        command=[tier],
        size="full",
        seed=0,
        subject=subject,
        versions={"torch": "2.13.0", "vllm": None},
        packages=[Package(name="torch", version="2.13.0", build="h1_0", sha256="ab" * 32)],
        host=Host(
            kernel="6.18.9",
            distribution="Fedora",
            glibc="2.42",
            cpu="a <processor>",
            cores=32,
            memory_gib=125,
            python="3.12.1",
        ),
        device=Device(**{"type": "gpu", "architecture": "gfx1151", "build": "rocm"} | device),
        checks=checks,
        summary=record.summarise(checks),
        seconds=12.5,
    )


def timing(route, size, mask, rate):
    measured = {}
    for direction in ("forward", "backward"):
        measured[f"{direction}_ms"] = 1.0
        measured[f"{direction}_low_ms"] = 0.9
        measured[f"{direction}_high_ms"] = 1.1
        measured[f"{direction}_tflops"] = rate
    return Result(Check(f"bench/{route}/{size}-{mask}", "t", "w"), State.PASSED, "", measured)


PAIR = {"out": {"error": 0.5, "bound": 2.0}, "dq": {"error": None, "bound": 1.0}}
FAILED = Result(
    Check("sdpa/flash/x", "a title", "a bug https://example.org/1"),
    State.FAILED,
    "wrong: <dq>",
    PAIR,
)


def benchmarks(rate=3.0):
    cases = itertools.product(plots.COLOURS, ("tiny", "large"), bench.MASKS)
    return [timing(*case, rate) for case in cases]
