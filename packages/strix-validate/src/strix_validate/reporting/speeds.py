# SPDX-License-Identifier: BSD-3-Clause
"""What was measured beside what is expected of gfx1151, by speeds.toml."""

import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from pydantic import Field, ValidationError, model_validator
from rich.markup import escape
from rich.table import Table

from strix_validate import TARGET
from strix_validate.reporting.record import CheckRecord, Record, StrictModel


class BadSpeeds(ValueError):
    """A table of speeds that cannot be read; the message says which row, and why."""


class Speed(StrictModel):
    """A row of speeds.toml, which says what its fields are."""

    what: str
    check: str
    measured: str
    unit: str
    model: str = "*"
    bounds: tuple[float, float] | None = Field(None, alias="range")
    published: str = ""
    cause: str = ""
    source: str = ""

    @model_validator(mode="after")
    def _is_complete(self) -> "Speed":
        """Refuse a range that is none, or that says neither why nor where from."""
        if self.bounds is None:
            return self
        low, high = self.bounds
        if not 0 < low <= high:
            raise ValueError(f"range {low:g} to {high:g} is no range of speeds")
        missing = [name for name in ("published", "cause", "source") if not getattr(self, name)]
        if missing:
            raise ValueError(f"a range needs {' and '.join(missing)}")
        return self

    def applies_to(self, check: CheckRecord) -> bool:
        """Return whether the row is about what a check measured, and of this model."""
        name = str(check.measured.get("model", "")).lower()
        return (
            isinstance(check.measured.get(self.measured), int | float)
            and fnmatchcase(check.id, self.check)
            and fnmatchcase(name, self.model)
        )


@dataclass(frozen=True)
class Comparison:
    """A measured speed and its row.

    Attributes:
        name: What was measured, in words.
        here: The speed, in the row's unit.
        speed: The row.
        kernels: What ran on the GPU, with its configuration; empty if not recorded.
    """

    name: str
    here: float
    speed: Speed
    kernels: str = ""

    @property
    def share(self) -> float:
        """The speed as a part of the range's lower end; infinite where no range is known."""
        return self.here / self.speed.bounds[0] if self.speed.bounds else math.inf

    @property
    def expected(self) -> str:
        """The range in words."""
        if self.speed.bounds is None:
            return "not published"
        low, high = self.speed.bounds
        return f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"

    @property
    def verdict(self) -> str:
        """ "slow", "too fast" or "as expected"; nothing where no range is known."""
        if self.speed.bounds is None:
            return ""
        low, high = self.speed.bounds
        if self.here < low:
            return "slow"
        return "too fast" if self.here > high else "as expected"

    def explain(self) -> str:
        """Return what is off and its usual cause, for a verdict that is not as expected."""
        speed, unit = self.speed, self.speed.unit
        measured = f"{self.name}: {self.here:.3g} {unit}, expected {self.expected}"
        if self.verdict == "too fast":
            return (
                f"{measured}: more than the hardware can, so the measurement is wrong, or the GPU "
                "another one"
            )
        ran = f" Ran: {self.kernels}." if self.kernels else ""
        return (
            f"{measured}; published: {speed.published}.{ran} Usual cause: {speed.cause} "
            f"({speed.source})"
        )


def load(text: str | None = None) -> list[Speed]:
    """Read the rows of speeds.toml, or of a text in its form.

    Raises:
        BadSpeeds: it is no TOML, or a row of it is malformed.
    """
    if text is None:
        text = (files(__package__) / "speeds.toml").read_text()
    try:
        rows: Any = tomllib.loads(text).get("speed")
    except tomllib.TOMLDecodeError as error:
        raise BadSpeeds(f"speeds.toml is no TOML: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise BadSpeeds("speeds.toml has no [[speed]]")
    return [_read_row(row, number) for number, row in enumerate(rows, 1)]


def _read_row(row: Any, number: int) -> Speed:
    try:
        return Speed.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the row"
        name = row.get("what", "") if isinstance(row, dict) else ""
        raise BadSpeeds(
            f"speeds.toml, row {number} ({name}): {where}: {first['msg']:.200}"
        ) from error


def compare(record: Record, speeds: list[Speed]) -> Iterator[Comparison]:
    """Put each measured speed beside the first row that is about it, in the order of the rows."""
    seen = set()
    for speed in speeds:
        for check in record.checks:
            key = (check.id, speed.measured)
            if key in seen or not speed.applies_to(check):
                continue
            seen.add(key)
            name = speed.what.replace("{}", re.split("[/-]", check.id)[-1])
            direction = speed.measured.partition("_")[0]
            kernels = check.measured.get(f"{direction}_kernels", check.measured.get("kernels", ""))
            yield Comparison(name, check.measured[speed.measured], speed, kernels)


def table(record: Record) -> tuple[Table, list[str]]:
    """Return the table of speeds, and what is off in it, the one farthest below its range first.

    On another GPU than gfx1151 nothing is off.

    Raises:
        BadSpeeds: see :func:`load`.
    """
    is_ours = record.device.architecture.startswith(TARGET)
    rows = Table("speed", "here", "on gfx1151", "", box=None)
    off = []
    for each in compare(record, load()):
        verdict = each.verdict if is_ours else ""
        rows.add_row(
            escape(each.name), f"{each.here:.4g} {each.speed.unit}", each.expected, verdict
        )
        if verdict in ("slow", "too fast"):
            off.append(each)
    off.sort(key=lambda each: each.share)
    explanations = [each.explain() for each in off]
    if off and off[0].verdict == "slow":
        explanations[0] = (
            f"Farthest below its range, at {off[0].share:.0%} of it: {explanations[0]}"
        )
    return rows, explanations
