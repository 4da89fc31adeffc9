# SPDX-License-Identifier: BSD-3-Clause
"""Compare measured speeds with those that speeds.toml expects of gfx1151."""

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

from strix_validate.reporting.record import CheckRecord, Record, StrictModel


class BadSpeeds(ValueError):
    """A table of speeds cannot be read; the message says which row, and why."""


class Speed(StrictModel):
    """A row of speeds.toml.

    Attributes:
        what: What was measured, in words; {} stands for the last word of the check's id.
        check: A pattern of ids of checks.
        measured: The name of the measured value.
        unit: Its unit.
        model: A pattern of names of models, in lower case.
        bounds: The lowest speed of a machine without faults, and the highest that the hardware
            allows; None if unknown.
        published: Speeds that owners published, on gfx1151 unless it names another GPU, and their
            configuration.
        cause: The usual cause of a slower speed.
        source: Links.
    """

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
    def _refuse_incomplete(self) -> "Speed":
        """Refuse a range that is empty, or for which a required field is missing."""
        if self.bounds is None:
            return self
        low, high = self.bounds
        if not 0 < low <= high:
            raise ValueError(f"the range {low:g} to {high:g} is empty, or does not begin above 0")
        required = ("published", "cause", "source")
        missing = [name for name in required if not getattr(self, name)]
        if missing:
            raise ValueError(f"a range needs {' and '.join(missing)}")
        return self

    def applies_to(self, check: CheckRecord) -> bool:
        """Return whether a check measured the row's value, with the row's model."""
        model = str(check.measured.get("model", "")).lower()
        value = check.measured.get(self.measured)
        return (
            isinstance(value, int | float)
            and fnmatchcase(check.id, self.check)
            and fnmatchcase(model, self.model)
        )


@dataclass(frozen=True)
class Comparison:
    """A measured speed and its row.

    Attributes:
        name: What was measured, in words.
        value: The measured speed, in the row's unit.
        speed: The row.
        kernels: The kernels that ran on the GPU, with their configuration; empty if not recorded.
    """

    name: str
    value: float
    speed: Speed
    kernels: str = ""

    @property
    def share(self) -> float:
        """The speed as a share of the range's lower end; infinite if no range is known."""
        if self.speed.bounds is None:
            return math.inf
        return self.value / self.speed.bounds[0]

    @property
    def expected(self) -> str:
        """The range in words."""
        if self.speed.bounds is None:
            return "not published"
        low, high = self.speed.bounds
        return f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"

    @property
    def verdict(self) -> str:
        """The word "slow", "too fast" or "as expected"; empty if no range is known."""
        if self.speed.bounds is None:
            return ""
        low, high = self.speed.bounds
        if self.value < low:
            return "slow"
        if self.value > high:
            return "too fast"
        return "as expected"

    def explain(self) -> str:
        """Explain a speed outside its range: the expected range, and likely causes."""
        speed = self.speed
        measured = f"{self.name}: {self.value:.3g} {speed.unit}, expected {self.expected}"
        if self.verdict == "too fast":
            return (
                f"{measured}: more than the hardware allows, so the measurement is wrong, or "
                "another GPU reports itself as gfx1151"
            )
        kernels = f" Kernels that ran: {self.kernels}." if self.kernels else ""
        return (
            f"{measured}; published: {speed.published}.{kernels} Usual cause: {speed.cause} "
            f"({speed.source})"
        )


def load(text: str | None = None) -> list[Speed]:
    """Read the rows of speeds.toml, or of a text in its form.

    Raises:
        BadSpeeds: The text is no TOML, or a row is malformed.
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
        place = ".".join(map(str, first["loc"])) or "the row"
        name = row.get("what", "") if isinstance(row, dict) else ""
        message = f"{place}: {first['msg']:.200}"
        raise BadSpeeds(f"speeds.toml, row {number} ({name}): {message}") from error


def compare(record: Record, speeds: list[Speed]) -> Iterator[Comparison]:
    """Yield each measured speed with the first row that applies to it, in the order of the rows."""
    compared = set()
    for speed in speeds:
        for check in record.checks:
            key = (check.id, speed.measured)
            if key not in compared and speed.applies_to(check):
                compared.add(key)
                yield _compare_check(check, speed)


def _compare_check(check: CheckRecord, speed: Speed) -> Comparison:
    last_word = re.split("[/-]", check.id)[-1]
    direction = speed.measured.partition("_")[0]
    kernels = check.measured.get("kernels", "")
    return Comparison(
        name=speed.what.replace("{}", last_word),
        value=check.measured[speed.measured],
        speed=speed,
        kernels=check.measured.get(f"{direction}_kernels", kernels),
    )


def table(record: Record) -> tuple[Table, list[str]]:
    """Return the table of speeds, and an explanation of each speed outside its range.

    The explanation of the speed farthest below its range is the first. Speeds of another GPU than
    gfx1151 are not explained.

    Raises:
        BadSpeeds: See :func:`load`.
    """
    is_gfx1151 = record.device.architecture.split(":")[0] == "gfx1151"
    rows = Table("speed", "here", "on gfx1151", "", box=None)
    off = []
    for comparison in compare(record, load()):
        verdict = comparison.verdict if is_gfx1151 else ""
        rows.add_row(
            escape(comparison.name),
            f"{comparison.value:.4g} {comparison.speed.unit}",
            comparison.expected,
            verdict,
        )
        if verdict in ("slow", "too fast"):
            off.append(comparison)
    off.sort(key=lambda comparison: comparison.share)
    explanations = [comparison.explain() for comparison in off]
    if off and off[0].verdict == "slow":
        lead = f"Farthest below its range, at {off[0].share:.0%} of its lower end"
        explanations[0] = f"{lead}: {explanations[0]}"
    return rows, explanations
