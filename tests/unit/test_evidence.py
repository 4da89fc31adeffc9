# SPDX-License-Identifier: BSD-3-Clause
"""Each record of a run is valid, and no recipe claims a state without evidence."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from strix_validate.reporting import record
from support.project import CHECKOUT

from forge.bases import BaseName
from forge.building import runner
from forge.cli.context import Context
from forge.conda.local import LocalChannel
from forge.errors import ForgeError
from forge.recipes import package_tables
from forge.recipes.recipe import Recipe

EVIDENCE = CHECKOUT / "docs/evidence"
# The state of one package: for each column of README's table, the word in the package's row, and
# the page that proves this word, or "".
State = dict[str, tuple[str, str]]
MACHINE_PATH = re.compile(r"(?<![\w:/.$~])/(?:home|root|opt|usr|mnt|tmp|srv|data)/\S*")


def read_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, which links name after `#`."""
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = re.findall(r"(?m)^#+ (.*)", prose)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_dead_links(page: Path) -> list[str]:
    """List the links of a page to files or headings that do not exist."""
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text())
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in read_anchors(target)):
            dead.append(link)
    return dead


def check_page(name: str, page: str) -> list[str]:
    """List the reasons why a page is not evidence for the state of a package."""
    path, _, anchor = page.partition("#")
    file = CHECKOUT / path
    if not file.is_file():
        return [f"no {page}"]
    problems = []
    if file.suffix == ".json":
        if not record.load(file).proves(name):
            problems.append(f"{page} does not prove that the package ran")
    elif name not in file.read_text():
        problems.append(f"{page} does not name the package")
    elif anchor and anchor not in read_anchors(file):
        problems.append(f"no {page}")
    return problems


def find_contradictions(name: str, state: State, on_host_base: str) -> list[str]:
    """List the claims about a package that evidence or other facts contradict.

    Args:
        name: The name of the recipe.
        state: The claims: the result of package_tables.read_state.
        on_host_base: The action of `plan` for the recipe on the host base: "build", "skipped" or
            "provided".
    """
    problems = []
    for _, page in state.values():
        if page:
            problems += check_page(name, page)
    words = {column: word for column, (word, _) in state.items()}
    if (words["built"] == "yes") != (on_host_base == "build"):
        problems.append(f"built is {words['built']}, and on the host base it is {on_host_base}")
    if words["built"] == "rehearsed" and not state["built"][1]:
        problems.append("no page shows how it was built")
    if words["installed"] != "no" and words["built"] == "no":
        problems.append("installed, but not built")
    if words["ran"] != "no" and words["built"] == "no":
        problems.append("ran, but was not built")
    if words["gfx1151"] == "yes" and not state["gfx1151"][1].endswith(".json"):
        problems.append("no record shows that it ran on gfx1151")
    return problems


def check_record(file: Path) -> list[str]:
    """List the faults of a contributed record."""
    content = record.load(file)
    arch = content.device.architecture.split(":")[0]
    name = f"{content.created:%Y-%m-%d}-{arch}-{content.subject}"
    problems = []
    if not re.fullmatch(rf"{re.escape(name)}(-[a-z]+)?", file.stem):
        problems.append(f"its name does not begin with {name}")
    if MACHINE_PATH.search(file.read_text()):
        problems.append("it names a path of the machine")
    return problems


def test_each_record_is_valid() -> None:
    problems = {file.name: check_record(file) for file in EVIDENCE.glob("*.json")}
    assert not any(problems.values()), problems


PAGES = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("patches/*.md")]
PAGES += [*CHECKOUT.glob("stacks/*/*.md"), *CHECKOUT.glob("packages/*/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert find_dead_links(page) == []


def test_a_dead_link_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [x](page.md#a-b) [x](#b) [x](none.md) [x](https://x.org/y)\n")
    assert find_dead_links(page) == ["#b", "none.md"]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The action of `plan` for each recipe on the host base, with an empty channel."""
    forge = Context(base_name=BaseName.HOST, root=CHECKOUT)
    steps = forge.recipes.plan(LocalChannel(tmp_path_factory.mktemp("empty")))
    skipped = runner.predict_skipped(forge.recipes, steps)
    states = {step.recipe.name: step.action for step in steps} | dict.fromkeys(skipped, "skipped")
    return states | dict.fromkeys(forge.recipes.absent, "provided")


@pytest.fixture(scope="module")
def recipes() -> Mapping[str, Recipe]:
    """The recipes, rendered with the conda-forge base."""
    return Context(base_name=BaseName.CONDA_FORGE, root=CHECKOUT).recipes.recipes


def test_nothing_contradicts_a_claim(host: dict[str, str], recipes: Mapping[str, Recipe]) -> None:
    assert {"build", "skipped", "provided"} == set(host.values())
    problems = {
        name: find_contradictions(name, package_tables.read_state(recipe), host[name])
        for name, recipe in recipes.items()
    }
    assert not any(problems.values()), problems


@pytest.mark.parametrize(
    ("name", "column", "word", "page"),
    [
        ("flash-attn", "built", "no", ""),
        ("rocm-sdk", "built", "yes", ""),
        ("aotriton", "built", "rehearsed", ""),
        ("torchcodec", "installed", "yes", ""),
        ("aotriton", "ran", "emulated", "docs/evidence/2026-11-21-none.md"),
        ("aotriton", "ran", "emulated", "docs/emulator.md#none"),
        ("torchcodec", "ran", "loads", "docs/emulator.md"),
        ("triton", "gfx1151", "yes", ""),
        ("triton", "gfx1151", "yes", "docs/emulator.md"),
    ],
)
def test_a_contradicted_claim_is_reported(
    host: dict[str, str],
    recipes: Mapping[str, Recipe],
    name: str,
    column: str,
    word: str,
    page: str,
) -> None:
    state = package_tables.read_state(recipes[name])
    assert find_contradictions(name, state, host[name]) == []
    assert find_contradictions(name, state | {column: (word, page)}, host[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"built": "surely"}, r"extra\.state\.built is 'surely'; expected one of yes, rehearsed"),
        ({"ran": ["loads", "a.md", "b.md"]}, r"extra\.state\.ran is \['loads'"),
        ({"run": "yes"}, r"extra\.state has gfx1151, built, installed, ran, run; expected"),
    ],
)
def test_an_unknown_state_is_refused(
    recipes: Mapping[str, Recipe],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    recipe = recipes["triton"]
    state = recipe.extra["state"] | change
    monkeypatch.setattr(recipe, "extra", recipe.extra | {"state": state})
    with pytest.raises(ForgeError, match=message):
        package_tables.read_state(recipe)


# The record of a run on another GPU, without checks.
HARNESS: dict[str, Any] = {
    "schema": 3,
    "created": "2026-11-26T14:39:46Z",
    "command": ["run"],
    "size": "full",
    "seed": 0,
    "subject": "harness",
    "versions": {"torch": "2.13.0"},
    "packages": [],
    "host": {
        "kernel": "6.18.44",
        "distribution": "Ubuntu 24.04.3 LTS",
        "glibc": "2.39",
        "cpu": "a CPU",
        "cores": 16,
        "memory_gib": 125.9,
        "python": "3.12.3",
    },
    "device": {
        "type": "gpu",
        "architecture": "sm_90",
        "name": "a GPU",
        "build": "cuda",
        "toolkit": "13.0",
        "units": 132,
        "clock_mhz": 1980,
        "memory_gib": 79.2,
    },
    "seconds": 60,
}
COMPARISON = {"error": 0.001, "bound": 0.002, "dtype": "float16", "size": 4.0}


def make_record(**changed: object) -> record.Record:
    """Return the record of a full run on gfx1151, with some fields changed."""
    base: dict[str, Any] = json.loads(json.dumps(HARNESS))
    measured = {str(number): COMPARISON for number in range(300)}
    base["checks"] = []
    for tier in ("doctor", "backend", "libraries", "attention"):
        check = {
            "id": f"{tier}/x",
            "tier": tier,
            "title": "",
            "purpose": "",
            "state": "passed",
            "measured": measured,
        }
        base["checks"].append(check)
    base |= {"subject": "packages", "unfinished": 0}
    base["packages"] = [{"name": "triton", "version": "3.7.1", "build": "h1_0"}]
    base["device"] |= {"build": "rocm", "architecture": "gfx1151"}
    base["summary"] = {"passed": 4, "failed": 0, "skipped": 0, "comparisons": 1200}
    return record.Record.model_validate(base | changed)


def select_tiers(*tiers: str) -> dict[str, object]:
    """Return the fields of a record that change if only these tiers are run."""
    checks = [each for each in json.loads(make_record().dump())["checks"] if each["tier"] in tiers]
    summary = {
        "passed": len(checks),
        "failed": 0,
        "skipped": 0,
        "comparisons": 300 * len(checks),
    }
    return {"checks": checks, "summary": summary}


def remove_dtypes() -> dict[str, object]:
    """Return the fields of a record that change if its comparisons have no dtype."""
    measured = {str(number): {"error": 1, "bound": 2} for number in range(300)}
    checks = [each | {"measured": measured} for each in json.loads(make_record().dump())["checks"]]
    return {"checks": checks}


def test_a_full_run_on_gfx1151_proves_its_packages(
    recipes: Mapping[str, Recipe],
    host: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert make_record().proves("triton")
    assert not make_record().proves("flash-attn")
    file = tmp_path / "record.json"
    file.write_text(make_record().dump())
    monkeypatch.setattr(f"{__name__}.CHECKOUT", tmp_path)
    assert check_page("triton", file.name) == []
    assert check_page("flash-attn", file.name) == [
        "record.json does not prove that the package ran"
    ]


def test_a_record_keeps_to_itself(tmp_path: Path) -> None:
    file = tmp_path / f"{make_record().created:%Y-%m-%d}-gfx1151-packages.json"
    file.write_text(make_record().dump())
    assert check_record(file) == []
    file.write_text(make_record(command=["run", "--model", "/home/somebody/model"]).dump())
    assert check_record(file) == ["it names a path of the machine"]
    renamed = file.rename(tmp_path / "2026-01-01-gfx1100-packages.json")
    assert len(check_record(renamed)) == 2


@pytest.mark.parametrize(
    "changed",
    [
        select_tiers("doctor"),
        select_tiers("doctor", "backend", "libraries"),
        {"unfinished": 1},
        {"size": "quick"},
        {"packages": []},
        {"summary": {"passed": 3, "failed": 1, "skipped": 0, "comparisons": 1200}},
        remove_dtypes(),
        {"subject": "harness", "device": HARNESS["device"]},
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
        checks = json.loads(make_record().dump())["checks"]
        changed = {**changed, "checks": [*checks[:-1], checks[-1] | {"state": "failed"}]}
    assert not make_record(**changed).proves("triton")


def test_a_packages_own_checks_must_have_passed() -> None:
    base = json.loads(make_record().dump())
    skipped = base["checks"][0] | {"id": "backend/triton", "state": "skipped", "measured": {}}
    summary = base["summary"] | {"skipped": 1}
    assert not make_record(checks=[*base["checks"], skipped], summary=summary).proves("triton")


@pytest.mark.parametrize(
    ("path", "value", "message"),
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
        (("checks", 0, "measured", "0", "bound"), 1e9, "is too large for the dtype and size"),
        (("checks", 0, "measured", "0", "bound"), 0.05, "is too large for the dtype and size"),
        (("checks", 0, "measured", "0", "size"), 1e12, "is too large for the dtype and size"),
        (("checks", 0, "measured", "0", "dtype"), "float1", "is too large for the dtype and size"),
        (("checks", 0, "measured", "0"), {"error": 1, "bound": 1e9}, "is too large for the dtype"),
        (("device", "architecture"), "sm_90", "the run was not on gfx1151"),
        (("unfinished",), -1, "unfinished checks is negative"),
    ],
)
def test_a_forged_record_is_refused(
    path: tuple[Any, ...], value: object, message: str, tmp_path: Path
) -> None:
    forged = json.loads(make_record().dump())
    part = forged
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    file = tmp_path / "forged.json"
    file.write_text(json.dumps(forged))
    with pytest.raises(record.BadRecord, match=message):
        record.load(file)
