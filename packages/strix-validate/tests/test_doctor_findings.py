# SPDX-License-Identifier: BSD-3-Clause
"""The format of `strix-validate doctor --json`, as docs/validate.md describes it."""

import json
import re
from pathlib import Path

import hosts
import pytest
from strix_validate.checks import Check, Result, Severity, State
from strix_validate.cli import app
from strix_validate.doctor import findings
from strix_validate.reporting.record import make_check_record
from test_doctor import command
from typer.testing import CliRunner

PAGE = Path(__file__).parents[3] / "docs/validate.md"


def document(root: Path, changes: dict) -> dict:
    return json.loads(command(hosts.make(root, changes)).stdout)


def by_id(root: Path, changes: dict) -> dict[str, dict]:
    return {finding["id"]: finding for finding in document(root, changes)["findings"]}


def test_the_document_is_its_own_model(tmp_path):
    text = command(hosts.make(tmp_path, {})).stdout
    read = findings.Findings.model_validate_json(text)
    assert (read.format, read.gpu_arch, read.needs_reboot) == (1, "gfx1151", False)
    assert {finding.status for finding in read.findings} <= {"ok", "skipped", "warning"}


@pytest.mark.parametrize("damage", [{"format": 2}, {"findings": [{}]}, {"more": 1}])
def test_another_format_is_refused(damage, tmp_path):
    with pytest.raises(ValueError, match="validation error"):
        findings.Findings.model_validate(document(tmp_path, {}) | damage)


def test_each_status(tmp_path):
    changes = {
        "proc/sys/kernel/osrelease": "7.0.12-200.fc44.x86_64\n",
        "proc/cmdline": "quiet\n",
        f"{hosts.GPU}/power_dpm_force_performance_level": "low\n",
        "etc/group": None,
        **hosts.mes(0x83),
        **hosts.environ(HSA_OVERRIDE_GFX_VERSION="11.0.0"),
    }
    results = by_id(tmp_path, changes)
    expected = {
        "doctor/gpu": ("ok", False),
        "doctor/iommu": ("info", True),
        "doctor/kernel": ("warning", True),
        "doctor/power": ("warning", False),
        "doctor/environment": ("error", False),
        "doctor/firmware": ("error", True),
        "doctor/copies": ("skipped", False),
    }
    for name, (status, reboot) in expected.items():
        finding = results[name]
        assert (finding["status"], finding["needs_reboot"]) == (status, reboot), finding
        assert bool(finding["message"]) == (status != "ok"), finding
    assert results["doctor/copies"]["message"].startswith(
        "copies were not measured: the doctor reads a copy"
    )
    assert results["doctor/kernel"]["source"].endswith("/issues/6358"), "the row's own link"
    assert results["doctor/environment"]["source"].endswith("/issues/5824"), "the check's link"
    output = document(tmp_path, changes)
    assert (output["status"], output["needs_reboot"]) == ("error", True)


def test_a_pass_may_have_a_note(tmp_path):
    notes = {name: f["message"] for name, f in by_id(tmp_path, {}).items() if f["status"] == "ok"}
    assert [name for name, note in notes.items() if note] == ["doctor/vllm-memory"]
    assert notes["doctor/vllm-memory"].startswith("vllm serve MODEL")


def test_each_finding_has_a_source(tmp_path):
    for name, finding in by_id(tmp_path, {}).items():
        assert re.match(r"https://\S+|docs/\w+\.md", finding["source"]), name


@pytest.mark.parametrize(("check", "words"), [("iommu", "# then reboot"), ("power", "# no reboot")])
def test_the_terminal_says_whether_to_reboot(check, words, tmp_path):
    level = {f"{hosts.GPU}/power_dpm_force_performance_level": "low\n"}
    hosts.make(tmp_path, {"proc/cmdline": "quiet\n"} | level)
    command = ["doctor", "--root", str(tmp_path), "--only", f"doctor/{check}"]
    lines = CliRunner().invoke(app, command, env={"COLUMNS": "200"}).output.splitlines()
    fixes = [line for line in lines if line.startswith(f"doctor/{check}: ")]
    assert len(fixes) == 1 and fixes[0].endswith(words), lines


def test_a_record_keeps_it():
    """A record keeps needs_reboot and source. Older records, which lack them, can still be read."""
    check = Check("doctor/gtt", "t", "w")
    result = Result(
        check, State.PASSED, "half", {}, Severity.WARNING, "raise it", needs_reboot=True
    )
    record = make_check_record("doctor", result)
    assert record.needs_reboot
    assert record.source == ""
    old = record.model_dump(exclude={"needs_reboot", "source"})
    assert not type(record).model_validate(old).needs_reboot


@pytest.mark.skipif(not PAGE.exists(), reason="only a checkout has docs/validate.md")
def test_the_page_names_each_field():
    text = PAGE.read_text()
    section = text[text.index("## Read doctor's findings") :]
    section = section[: section.index("\n## ", 5)]
    rows = set(re.findall(r"(?m)^\| `(?:findings\[\]\.)?(\w+)` \|", section))
    fields = {*findings.Findings.model_fields, *findings.Finding.model_fields}
    assert rows == fields
