# SPDX-License-Identifier: BSD-3-Clause
"""Every record in evidence/ is valid, and README's table claims nothing that nothing shows."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from strix_validate.reporting import record
from support.project import CHECKOUT, module

from forge.bases import BaseName
from forge.building import runner
from forge.building.preflight import preflight
from forge.cli.context import Context
from forge.conda.local import Channel

EVIDENCE = CHECKOUT / "evidence"
RECORDS = sorted(EVIDENCE.glob("*.json"))
README = (CHECKOUT / "README.md").read_text()
Rows = dict[str, dict[str, list[str]]]

table = module(EVIDENCE / "table.py")
ROWS: Rows = table.claims()


def anchors(page: Path) -> set[str]:
    """The names by which links reach a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings}


def leads_nowhere(page: Path) -> list[str]:
    """The links of a page to files or headings that there are not."""
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text())
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def contradicted(rows: Rows, states: dict[str, str], names: Iterable[str]) -> list[str]:
    """Claims that a command contradicts: `plan` on the host base, the recipes, or a page's text.

    states: "build", "skipped" or "provided" on the host base, by recipe.
    """
    found = [f"{name}: no such recipe, or no line" for name in rows.keys() ^ set(names)]
    notes = anchors(CHECKOUT / "docs/packages.md")
    for name in rows.keys() & set(names):
        row = rows[name]
        if row.keys() != table.WORDS.keys():
            found.append(f"{name}: columns {sorted(row)}")
            continue
        for column, (word, *pages) in row.items():
            if word not in table.WORDS[column]:
                found.append(f"{name}: {column} is {word!r}")
            for page in pages:
                path, _, anchor = page.partition("#")
                if not (CHECKOUT / path).is_file() or name not in (CHECKOUT / path).read_text():
                    found.append(f"{name}: {page} does not name it")
                elif anchor and anchor not in anchors(CHECKOUT / path):
                    found.append(f"{name}: no {page}")
        built, installed, ran = (row[column][0] for column in table.WORDS)
        if (built == "yes") != (states[name] == "build"):
            found.append(
                f"{name}: built is {built!r}, and on the host base plan says {states[name]}"
            )
        if built not in ("yes", "no") and not row["built"][1:]:
            found.append(f"{name}: no page shows how it was built")
        if installed != "no" and built not in ("yes", "rehearsed"):
            found.append(f"{name}: installed, and built is {built!r}")
        if ran != "no" and built == "no":
            found.append(f"{name}: ran, and was not built")
        if name not in notes:
            found.append(f"{name}: docs/packages.md has no heading")
    return found


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


def test_the_readmes_table_is_what_the_command_writes(versions: dict[str, str]) -> None:
    """With the recipes' versions, and on gfx1151 nothing that no record shows."""
    on_gpu = table.shown_on_gfx1151(table.records())
    (written,) = (found[0] for found in table.TABLE.finditer(README))
    assert written == table.render(ROWS, versions, on_gpu), "run `python evidence/table.py`"


def test_the_readme_counts_what_can_be_built() -> None:
    built = [name for name, row in ROWS.items() if row["built"] == ["yes"]]
    assert f"build {len(built)} of the {len(ROWS)} packages" in README


PAGES = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/*.md"), *CHECKOUT.glob("evidence/*.md")]
PAGES += [*CHECKOUT.glob("stacks/*/*.md"), *CHECKOUT.glob("packages/*/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert leads_nowhere(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [x](page.md#a-b) [x](#b) [x](none.md) [x](https://x.org/y)\n")
    assert leads_nowhere(page) == ["#b", "none.md"]


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


def test_no_command_contradicts_a_claim(host: dict[str, str], versions: dict[str, str]) -> None:
    assert {"build", "skipped", "provided"} == set(host.values())
    assert contradicted(ROWS, host, versions) == []


@pytest.mark.parametrize(
    ("name", "column", "claim"),
    [
        ("flash-attn", "built", ["no"]),
        ("rocm-sdk", "built", ["yes"]),
        ("rocm-sdk", "built", ["surely"]),
        ("aotriton", "built", ["rehearsed"]),
        ("torchcodec", "installed", ["yes"]),
        ("aotriton", "ran", ["emulated", "evidence/2026-11-21-none.md"]),
        ("aotriton", "ran", ["emulated", "docs/emulator.md#none"]),
        ("torchcodec", "ran", ["loads", "docs/emulator.md"]),
        ("amdsmy", "ran", ["no"]),
    ],
)
def test_a_contradicted_claim_is_found(
    host: dict[str, str], versions: dict[str, str], name: str, column: str, claim: list[str]
) -> None:
    rows = ROWS | {name: ROWS.get(name, ROWS["rocm-sdk"]) | {column: claim}}
    found = contradicted(rows, host, versions)
    assert found and all(each.startswith(name) for each in found)


# A sentence of each page that says what everything costs: on which base, for which Pythons.
COSTS = [
    ("README.md", BaseName.CONDA_FORGE, [], "about {hours} CPU hours, {disk} GiB of disk"),
    (
        "README.md",
        BaseName.HOST,
        [],
        "{count} packages: {download} GiB of downloads, {disk} GiB of disk, {hours} CPU hours",
    ),
    ("docs/build.md", BaseName.CONDA_FORGE, [], "plan for {disk} GiB of disk"),
    ("docs/build.md", BaseName.CONDA_FORGE, [], "CPU hours instead of {hours}."),
    (
        "docs/build.md",
        BaseName.CONDA_FORGE,
        ["python=3.13"],
        "for one of them, with {disk} GiB and {hours} CPU hours instead",
    ),
    (
        "docs/owner.md",
        BaseName.CONDA_FORGE,
        [],
        "{disk} GiB of disk, {download} GiB of downloads besides conda-forge's packages, and "
        "{hours} CPU hours",
    ),
]


def total_costs(base: BaseName, variants: list[str], skipped: set[str]) -> dict[str, str]:
    """What `plan` demands for everything, as pages say it: of disk no less than that."""
    forge = Context(base, None, variants, root=CHECKOUT)
    names = [name for name in forge.recipes.recipes if name not in skipped]
    made = [forge.hostbase.cost] if forge.hostbase else []
    lines, _ = preflight(forge.project, forge.base, [*made, *names])
    download, disk, hours = (
        float(re.search(rf"([\d.]+) {words}", lines[-1])[1])
        for words in ("GiB to download", "GiB of disk with it", "CPU hours")
    )
    return {
        "count": str(len(names)),
        "download": f"{download:g}",
        "disk": str(math.ceil(disk)),
        "hours": f"{hours:.0f}" if hours > 10 else f"{hours:g}",
    }


@pytest.mark.parametrize(
    ("page", "base", "variants", "sentence"), COSTS, ids=lambda value: str(value)[:40]
)
def test_pages_say_what_plan_demands(
    page: str, base: BaseName, variants: list[str], sentence: str, host: dict[str, str]
) -> None:
    skipped = {n for n, state in host.items() if state != "build"} if base == "host" else set()
    figures = total_costs(base, variants, skipped)
    text = " ".join((CHECKOUT / page).read_text().split())
    assert sentence.format(**figures) in text
    for name in re.findall(r"\{(\w+)\}", sentence):
        assert sentence.format(**figures | {name: f"{float(figures[name]) + 0.1:g}"}) not in text


COMPARISON = {"error": 0.001, "bound": 0.002, "dtype": "float16", "size": 4.0}


def proof(**changed: object) -> record.Record:
    """A record as a full run on gfx1151 would write it, with some fields changed."""
    base = json.loads(max(RECORDS, key=lambda file: file.stat().st_size).read_text())
    base["checks"] = [
        {"id": f"{tier}/x", "tier": tier, "title": "", "why": "", "state": "passed",
         "measured": {str(n): COMPARISON for n in range(300)}}
        for tier in ("doctor", "backend", "libraries", "attention")
    ]  # fmt: skip
    base |= {"subject": "packages", "size": "full", "unfinished": 0}
    base["packages"] = [{"name": "triton", "version": "3.7.1", "build": "h1_0"}]
    base["device"] |= {"type": "gpu", "build": "rocm", "architecture": "gfx1151"}
    base["summary"] = {"passed": 4, "failed": 0, "skipped": 0, "comparisons": 1200}
    return record.Record.model_validate(base | changed)


def only(*tiers: str) -> dict[str, object]:
    """The fields of a run of some tiers."""
    checks = [each for each in json.loads(proof().dump())["checks"] if each["tier"] in tiers]
    count = {"passed": len(checks), "failed": 0, "skipped": 0, "comparisons": 300 * len(checks)}
    return {"checks": checks, "summary": count}


def test_a_full_run_on_gfx1151_proves_its_packages() -> None:
    shown = table.shown_on_gfx1151({"c.json": proof()})
    assert shown == {"triton": "c.json"}
    (line,) = table.render({"triton": ROWS["triton"]}, {}, shown).splitlines()[2:]
    assert line.endswith("| [yes](evidence/c.json) |")


@pytest.mark.parametrize(
    "changed",
    [
        only("doctor"),
        only("doctor", "backend", "libraries"),
        {"unfinished": 1},
        {"size": "quick"},
        {"packages": []},
        {"summary": {"passed": 3, "failed": 1, "skipped": 0, "comparisons": 1200}},
        {
            "checks": [
                each | {"measured": {str(n): {"error": 1, "bound": 2} for n in range(300)}}
                for each in json.loads(proof().dump())["checks"]
            ]
        },
        {"subject": "harness", "device": json.loads(RECORDS[0].read_text())["device"]},
    ],
    ids=[
        "doctor",
        "no attention",
        "interrupted",
        "quick",
        "no package",
        "failed",
        "no dtype",
        "harness",
    ],
)
def test_a_run_that_shows_less_proves_nothing(changed: dict[str, Any]) -> None:
    if changed.get("summary", {}).get("failed"):
        checks = json.loads(proof().dump())["checks"]
        changed = {**changed, "checks": [*checks[:-1], checks[-1] | {"state": "failed"}]}
    assert table.shown_on_gfx1151({"c.json": proof(**changed)}) == {}


def test_a_packages_own_checks_must_have_passed() -> None:
    base = json.loads(proof().dump())
    skipped = base["checks"][0] | {"id": "backend/triton", "state": "skipped", "measured": {}}
    summary = base["summary"] | {"skipped": 1}
    assert not proof(checks=[*base["checks"], skipped], summary=summary).proves("triton")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("summary", "failed"), 1, "summary"),
        (("summary", "comparisons"), 1201, "summary"),
        (("checks", 0, "state"), "failed", "summary"),
        (("checks", 0, "id"), "backend/x", "twice"),
        (("checks", 0, "measured", "0", "error"), 3, "beyond its own bound"),
        (("checks", 0, "measured", "0", "error"), None, "not finite"),
        (("checks", 0, "measured", "0", "error"), "0.001", "not finite"),
        (("checks", 0, "measured", "0", "error"), math.nan, "not finite"),
        (("checks", 0, "measured", "0", "error"), True, "not finite"),
        (("checks", 0, "measured", "0", "bound"), math.inf, "not finite"),
        (("checks", 0, "measured", "0", "size"), None, "not finite"),
        (("checks", 0, "measured", "0"), {"bound": 1}, "not finite"),
        (("checks", 0, "measured", "0", "bound"), 1e9, "does not follow from dtype and size"),
        (("checks", 0, "measured", "0", "bound"), 0.05, "does not follow from dtype and size"),
        (("checks", 0, "measured", "0", "size"), 1e12, "does not follow from dtype and size"),
        (("checks", 0, "measured", "0", "dtype"), "float1", "does not follow from dtype and size"),
        (("checks", 0, "measured", "0"), {"error": 1, "bound": 1e9}, "does not follow from dtype"),
        (("device", "architecture"), "sm_90", "on gfx1151 alone"),
        (("unfinished",), -1, "fewer than no check"),
    ],
)
def test_a_forged_record_is_refused(
    path: tuple[Any, ...], value: object, said: str, tmp_path: Path
) -> None:
    forged = json.loads(proof().dump())
    part = forged
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    file = tmp_path / "forged.json"
    file.write_text(json.dumps(forged))
    with pytest.raises(record.BadRecord, match=said):
        record.load(file)
