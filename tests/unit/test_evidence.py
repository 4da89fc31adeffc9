# SPDX-License-Identifier: BSD-3-Clause
"""Every record in evidence/ is valid, and README claims nothing that none of them shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from strix_validate import record
from strix_validate.checks import State
from support.project import CHECKOUT

EVIDENCE = CHECKOUT / "evidence"
RECORDS = sorted(EVIDENCE.glob("*.json"))
COLUMN = "Runs on gfx1151"


def claims(readme: str) -> dict[str, str]:
    """The README's column of what runs on gfx1151, by package."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in readme.splitlines()
        if line.startswith("| ")
    ]
    (head,) = (row for row in rows if COLUMN in row)
    table = [row for row in rows[rows.index(head) + 1 :] if len(row) == len(head)]
    return {row[0]: row[head.index(COLUMN)] for row in table if not row[0].startswith("-")}


def unproven(readme: str, records: list[record.Record]) -> list[str]:
    """Packages said to run on gfx1151 that no passed run on gfx1151 lists."""
    shown = {
        package.name
        for found in records
        if found.subject == "packages" and found.summary[State.FAILED.value] == 0
        for package in found.packages
    }
    return [
        name
        for name, said in claims(readme).items()
        if said not in ("not yet run", "") and not set(re.split(r",\s*", name)) <= shown
    ]


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_record_is_valid_and_keeps_to_itself(file: Path) -> None:
    found = record.load(file)
    assert found.summary == record.summarise(found.checks)
    arch = found.device.architecture.split(":")[0]
    assert file.stem == f"{found.created:%Y-%m-%d}-{arch}-{found.subject}"
    is_ours = found.device.build == "rocm" and arch == "gfx1151"
    assert found.subject == ("packages" if is_ours else "harness")
    assert file.stem in (EVIDENCE / "README.md").read_text()
    paths = re.findall(
        r"(?<![\w:/.$~])/(?:home|root|opt|usr|mnt|tmp|srv|data)/\S*", file.read_text()
    )
    assert not paths, "a record names no path of the machine"


def test_there_is_a_record_of_a_real_gpu() -> None:
    found = [record.load(file) for file in RECORDS]
    assert any(each.device.type == "gpu" and each.summary["comparisons"] > 1000 for each in found)


def test_readme_claims_nothing_without_a_record() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    assert len(claims(readme)) >= 4
    assert unproven(readme, [record.load(file) for file in RECORDS]) == []


def test_a_claim_without_a_record_is_found() -> None:
    readme = f"| Package | {COLUMN} |\n| --- | --- |\n| triton | yes |\n| vllm | not yet run |\n"
    harness = [record.load(file) for file in RECORDS]
    assert unproven(readme, harness) == ["triton"]
    shown = harness[0].model_copy(
        update={
            "subject": "packages",
            "packages": [record.Package(name="triton", version="3.7.1", build="h1_0")],
            "summary": {"passed": 1, "failed": 0, "skipped": 0, "comparisons": 0},
        }
    )
    assert unproven(readme, [shown]) == []


def test_a_record_of_another_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text('{"schema": 1, "checks": []}')
    with pytest.raises(record.BadRecord, match="schema"):
        record.load(file)
