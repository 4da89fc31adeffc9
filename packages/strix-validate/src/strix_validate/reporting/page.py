# SPDX-License-Identifier: BSD-3-Clause
"""Render records as one self-contained HTML page, without scripts or network access."""

from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from strix_validate.checks import State
from strix_validate.reporting.record import CheckRecord, Package, Record
from strix_validate.reporting.terminal_table import describe_measured, find_worst_share

#: The order in which states are shown, failures first.
_ORDER = (State.FAILED, State.PASSED, State.SKIPPED)


@dataclass(frozen=True)
class _Tier:
    """The checks of a tier.

    Attributes:
        name: The tier.
        groups: Its checks by state, in the order of the page.
    """

    name: str
    groups: dict[State, list[CheckRecord]]


@dataclass(frozen=True)
class _Run:
    """A record on the page.

    Attributes:
        name: Its name on the page.
        record: The record.
        tiers: Its checks.
        plots: SVG elements; None without matplotlib.
    """

    name: str
    record: Record
    tiers: list[_Tier]
    plots: list[str] | None


@dataclass(frozen=True)
class _Row:
    """A check that all records have.

    Attributes:
        id: The check.
        checks: Its result in each record.
        rates: The forward rate in TFLOP/s in each record, or None.
    """

    id: str
    checks: list[CheckRecord]
    rates: list[Any]


def render(records: list[Record], names: list[str]) -> str:
    """Return the page of these records.

    Args:
        records: The records.
        names: The name of each record on the page, such as that of its file.
    """
    environment = Environment(
        loader=PackageLoader("strix_validate.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["worst"] = find_worst_share
    environment.filters["values"] = describe_measured
    runs = [
        _Run(name, record, _group_by_tier(record), _draw_plots(record))
        for name, record in zip(names, records, strict=True)
    ]
    return environment.get_template("page.html.j2").render(
        runs=runs,
        rows=_compare(records),
        states=_ORDER,
        versions=_collect_versions(records),
        packages=_collect_packages(records, names),
    )


def _draw_plots(record: Record) -> list[str] | None:
    """Return the plots of a record as SVG; None without matplotlib, which is optional."""
    try:
        from strix_validate.reporting.plots import figures, svg
    except ModuleNotFoundError:
        return None
    return [svg(figure) for figure in figures(record)]


def _collect_versions(records: list[Record]) -> dict[str, list[str | None]]:
    """Return the version of each package in each record."""
    versions: dict[str, list[str | None]] = {}
    for record in records:
        for name in record.versions:
            versions[name] = [other.versions.get(name) for other in records]
    return versions


def _collect_packages(
    records: list[Record],
    names: list[str],
) -> list[tuple[Package, list[str]]]:
    """Return each conda package once, with the names of the records that have it."""
    entries: dict[tuple, tuple[Package, list[str]]] = {}
    for record, name in zip(records, names, strict=True):
        for package in record.packages:
            key = tuple(package.model_dump().values())
            _, holders = entries.setdefault(key, (package, []))
            holders.append(name)
    return sorted(entries.values(), key=lambda entry: entry[0].name)


def _compare(records: list[Record]) -> list[_Row]:
    """Return the checks that all records have, if they have a rate or their states differ.

    With a single record, return no checks.
    """
    if len(records) < 2:
        return []
    by_id = [{check.id: check for check in record.checks} for record in records]
    rows = []
    for id_ in by_id[0]:
        checks = [checks_of_record[id_] for checks_of_record in by_id if id_ in checks_of_record]
        if len(checks) < len(records):
            continue
        rates = [check.measured.get("forward_tflops") for check in checks]
        states = {check.state for check in checks}
        if any(rates) or len(states) > 1:
            rows.append(_Row(id_, checks, rates))
    return rows


def _group_by_tier(record: Record) -> list[_Tier]:
    tiers: dict[str, _Tier] = {}
    for check in record.checks:
        if check.tier not in tiers:
            tiers[check.tier] = _Tier(check.tier, {state: [] for state in _ORDER})
        tiers[check.tier].groups[check.state].append(check)
    return list(tiers.values())
