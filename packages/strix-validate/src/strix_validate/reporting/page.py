# SPDX-License-Identifier: BSD-3-Clause
"""Records as one page of HTML that holds everything it shows: no script, no network."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from strix_validate.checks import State
from strix_validate.reporting.record import Package, Record
from strix_validate.reporting.terminal_table import summary, worst

#: What the state of a check is shown as, worst first.
_ORDER = (State.FAILED, State.PASSED, State.SKIPPED)


def render(records: list[Record], names: list[str]) -> str:
    """Return the page of these records.

    Args:
        names: what each record is called on the page, its file's name for example.
    """
    try:
        from strix_validate.reporting.plots import figures, svg
    except ModuleNotFoundError:  # matplotlib is optional, and the page says that it is absent
        has_plots = False
    else:
        has_plots = True
    environment = Environment(
        loader=PackageLoader("strix_validate.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"worst": worst, "values": summary}
    runs = [
        {
            "name": name,
            "record": record,
            "tiers": _tiers(record),
            "plots": [svg(figure) for figure in figures(record)] if has_plots else None,
        }
        for record, name in zip(records, names, strict=True)
    ]
    libraries = dict.fromkeys(name for record in records for name in record.versions)
    return environment.get_template("page.html.j2").render(
        runs=runs,
        rows=_compare(records),
        states=_ORDER,
        versions={name: [record.versions.get(name) for record in records] for name in libraries},
        packages=_packages(records, names),
    )


def _packages(records: list[Record], names: list[str]) -> list[tuple[Package, list[str]]]:
    """Return each conda package once, with the names of the records that have it."""
    found: dict[tuple, tuple[Package, list[str]]] = {}
    for record, name in zip(records, names, strict=True):
        for package in record.packages:
            key = tuple(package.model_dump().values())
            found.setdefault(key, (package, []))[1].append(name)
    return sorted(found.values(), key=lambda entry: entry[0].name)


def _compare(records: list[Record]) -> list[dict]:
    """Return the checks that all of several records have, if states differ or a rate was measured.
    A single record has none."""
    if len(records) < 2:
        return []
    by_id = [{check.id: check for check in record.checks} for record in records]
    rows = []
    for id_ in by_id[0]:
        checks = [found[id_] for found in by_id if id_ in found]
        rates = [check.measured.get("forward_tflops") for check in checks]
        if len(checks) == len(records) and (any(rates) or len({c.state for c in checks}) > 1):
            rows.append({"id": id_, "checks": checks, "rates": rates})
    return rows


def _tiers(record: Record) -> list[dict]:
    tiers = []
    for name in dict.fromkeys(check.tier for check in record.checks):
        checks = [check for check in record.checks if check.tier == name]
        groups = {state: [c for c in checks if c.state is state] for state in _ORDER}
        tiers.append({"name": name, "groups": groups})
    return tiers
