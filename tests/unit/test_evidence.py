# SPDX-License-Identifier: BSD-3-Clause
"""Every record in evidence/ is valid, and README claims nothing that none of them shows."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from strix_validate.checks import State
from strix_validate.reporting import record
from support.project import CHECKOUT

from forge.bases import BaseName
from forge.building import runner
from forge.building.preflight import preflight
from forge.cli.context import Context
from forge.conda.local import Channel

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


def rows(readme: str) -> dict[str, dict[str, str]]:
    """The README's table of what exists: cells by column, by package."""
    lines = [line for line in readme.splitlines() if line.startswith("| ")]
    start = next(n for n, line in enumerate(lines) if COLUMN in line)
    head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start:])
    cells = [dict(zip(head, row, strict=True)) for row in body if len(row) == len(head)]
    return {row["Package"].partition(" (")[0]: row for row in cells}


def contradicted(readme: str, states: dict[str, str], versions: dict[str, str]) -> list[str]:
    """Cells that a command contradicts: `plan` on the host base, the recipes, or a missing file.

    states: "build", "skipped" or "provided" on the host base, by recipe.
    """
    table = rows(readme)
    found = [f"{name}: no such recipe, or no row" for name in table.keys() ^ versions.keys()]
    for name in table.keys() & versions.keys():
        row, state = table[name], states[name]
        builds = row["Builds"]
        by_hand = "by hand" if builds.startswith("by hand") else "not yet"
        right = {
            "Version": (versions[name],),
            "Renders": ("conda-forge",) if state == "provided" else ("both bases",),
            "Builds": ("host",) if state == "build" else ("not yet", "by hand, ["),
            "Installs": ("host", "not yet") if state == "build" else (by_hand,),
            "Loads": ("yes",) if state == "build" else ("not yet", "[by hand]"),
        }
        for column, starts in right.items():
            if not row[column].startswith(starts):
                found.append(f"{name}: {column} says {row[column]!r}, expected {starts}")
        links = re.findall(r"\]\(([^)]+)\)", " ".join(row.values()))
        found += [f"{name}: no {link}" for link in links if not (CHECKOUT / link).exists()]
    return found


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
    name = f"{found.created:%Y-%m-%d}-{arch}-{found.subject}"
    assert re.fullmatch(rf"{re.escape(name)}(-[a-z]+)?", file.stem)
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


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `plan` says of each recipe on the host base, with nothing built."""
    forge = Context(base_name=BaseName.HOST, root=CHECKOUT)
    steps = forge.recipes.plan(Channel(tmp_path_factory.mktemp("empty")))
    skipped = runner.skipped(forge.project, forge.recipes, steps, last_run=False)
    states = {step.recipe.name: step.action for step in steps} | dict.fromkeys(skipped, "skipped")
    return states | dict.fromkeys(forge.recipes.absent, "provided")


@pytest.fixture(scope="module")
def versions() -> dict[str, str]:
    recipes = Context(base_name=BaseName.CONDA_FORGE, root=CHECKOUT).recipes.recipes
    return {name: recipe.version for name, recipe in recipes.items()}


def test_no_command_contradicts_the_readmes_table(
    host: dict[str, str], versions: dict[str, str]
) -> None:
    assert {"build", "skipped", "provided"} == set(host.values())
    assert contradicted((CHECKOUT / "README.md").read_text(), host, versions) == []


@pytest.mark.parametrize(
    ("row", "old", "new"),
    [
        ("triton", "| 3.7.1 |", "| 3.7.2 |"),
        ("pytorch", "| conda-forge |", "| both bases |"),
        ("aotriton", "by hand, [", "host, ["),
        ("aotriton", "| by hand |", "| host |"),
        ("aotriton", "2026-11-21-aotriton.md", "2026-11-21-none.md"),
        ("flash-attn", "| host | host |", "| not yet | host |"),
        ("rocm-sdk", "| not yet | not yet | not yet run |", "| not yet | yes | not yet run |"),
        ("amdsmi", "| amdsmi |", "| amdsmy |"),
    ],
)
def test_a_contradicted_cell_is_found(
    host: dict[str, str], versions: dict[str, str], row: str, old: str, new: str
) -> None:
    lines = (CHECKOUT / "README.md").read_text().splitlines()
    (at,) = [
        n
        for n, line in enumerate(lines)
        if re.match(rf"\| {row}( \(.*?\))? \|", line) and old in line
    ]
    lines[at] = lines[at].replace(old, new)
    found = contradicted("\n".join(lines), host, versions)
    assert found and all(each.startswith((row, new.strip("| "))) for each in found)


def test_readme_asks_for_the_disk_that_plan_demands() -> None:
    """Rounded up: with less, a build is refused."""
    forge = Context(base_name=BaseName.CONDA_FORGE, root=CHECKOUT)
    lines, _ = preflight(forge.project, forge.base, list(forge.recipes.recipes))
    demanded = float(re.search(r"([\d.]+) GiB of disk with it", lines[-1])[1])
    said = re.findall(r"plan for (\d+) GiB of disk", (CHECKOUT / "README.md").read_text())
    assert [math.ceil(demanded)] == list(map(int, said))


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
