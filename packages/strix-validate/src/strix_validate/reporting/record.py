# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run: written by --json, read by `report`, kept in docs/evidence/."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from strix_validate import TARGET
from strix_validate.checks import Result, Severity, State
from strix_validate.json_file import small_file

#: Raised when a field changes its meaning or goes away.
SCHEMA = 2
#: What a run must have compared, and at which sizes, before it proves that packages run.
_PROVING = {"doctor", "backend", "libraries", "attention"}
_SIZES, _COMPARISONS = ("full", "stress"), 1000
#: The largest bound by dtype, as a share of the size of the largest terms: several times that of
#: any check. It comes to 4 times half an eps in 16 bits, in float32 to 173 (convolutions).
_LOOSEST = {"float32": 1000 * 2**-24, "float16": 16 * 2**-11, "bfloat16": 16 * 2**-8}
#: Beyond the size of what any check sums up.
_LARGEST_SIZE = 2**20
#: The largest bound of what has no dtype: probabilities, and comparisons of earlier records.
_LARGEST_BOUND = 64
_NUMBERS = ("error", "bound", "local", "rms", "rms_bound", "drift", "size")


class BadRecord(ValueError):
    """A file that is not a valid record; the message says which file, and why."""


class StrictModel(BaseModel):
    """A part of a record; a key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid")


class CheckRecord(StrictModel):
    """A result; see strix_validate.checks.Check and Result for the fields."""

    id: str
    tier: str
    title: str
    why: str
    state: State
    reason: str = ""
    measured: dict[str, Any] = {}
    severity: Severity | None = None
    fix: str = ""
    seconds: float = 0.0
    needs_reboot: bool = False
    source: str = ""


class Package(StrictModel):
    """An installed conda package; sha256 of its archive, if conda-meta has it."""

    name: str
    version: str
    build: str
    sha256: str | None = None


class Host(StrictModel):
    """The machine that checks ran on."""

    kernel: str
    distribution: str
    glibc: str
    cpu: str
    cores: int
    memory_gib: float
    python: str


class Device(StrictModel):
    """The device of a run.

    type: "gpu", "cpu", or "none" without torch or without the requested GPU; units: compute units
    or multiprocessors; toolkit: version of HIP or CUDA that torch was built with.
    """

    type: Literal["gpu", "cpu", "none"]
    architecture: str
    name: str = ""
    build: Literal["rocm", "cuda", "cpu", ""] = ""
    toolkit: str = ""
    units: int = 0
    clock_mhz: int = 0
    memory_gib: float = 0.0


class Record(StrictModel):
    """A run.

    subject: what it is evidence for; "packages" on gfx1151, otherwise "harness", the validator
    itself. unfinished: how many checks an interrupted run did not get to.
    """

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    created: datetime
    command: list[str]
    size: str = ""
    seed: int
    subject: Literal["packages", "harness"]
    versions: dict[str, str | None]
    packages: list[Package]
    host: Host
    device: Device
    checks: list[CheckRecord]
    summary: dict[str, int]
    seconds: float
    unfinished: int = 0

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Record":
        """Refuse what no run writes: counts, verdicts or a subject that the rest contradicts."""
        ids = Counter(check.id for check in self.checks)
        passed = [check for check in self.checks if check.state is State.PASSED]
        unsound = next(filter(None, (unsound_pass(check.measured) for check in passed)), "")
        ours = self.device.build == "rocm" and self.device.architecture.split(":")[0] == TARGET
        for wrong, what in (
            (self.summary != summarise(self.checks), "the summary is not that of the checks"),
            (max(ids.values(), default=1) > 1, "a check is listed twice"),
            (self.unfinished < 0, "fewer than no check is unfinished"),
            (self.subject == "packages" and not ours, "packages are proven on gfx1151 alone"),
            (unsound, f"a check passed {unsound}"),
        ):
            if wrong:
                raise ValueError(what)
        return self

    def proves(self, package: str) -> bool:
        """Return whether the run shows that a package runs on gfx1151.

        It lists the package, compared enough in full, failed nowhere and was not interrupted; and a
        check that is named after the package, where it has any, passed.
        """
        own = [check for check in self.checks if package in check.id.split("/")]
        compared = sum("dtype" in found for c in self.checks for found in _comparisons(c.measured))
        return (
            self.subject == "packages"
            and self.device.type == "gpu"
            and package in {found.name for found in self.packages}
            and self.size in _SIZES
            and {check.tier for check in self.checks if check.state is State.PASSED} >= _PROVING
            and compared >= _COMPARISONS
            and not self.summary[State.FAILED.value]
            and not self.unfinished
            and (not own or any(check.state is State.PASSED for check in own))
        )

    def dump(self) -> str:
        """Return the record as JSON."""
        return self.model_dump_json(indent=1, by_alias=True)

    def write(self, file: Path) -> None:
        """Replace the file whole: a run that is killed in between leaves the one before.

        So does a machine that ends in between: the disk has the text before the file gets its name.
        """
        part = file.with_suffix(".part")
        with part.open("w") as stream:
            stream.write(self.dump() + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)


def _comparisons(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a check measured of each compared tensor."""
    for value in measured.values():
        if isinstance(value, dict) and "bound" in value:
            yield value


def unsound_pass(measured: dict[str, Any]) -> str:
    """Return why a check that measured this cannot have passed, or "" if it can."""
    for comparison in _comparisons(measured):
        numbers = [comparison[name] for name in _NUMBERS if name in comparison]
        if "error" not in comparison or not all(map(_is_finite, numbers)):
            return "by a number that is not finite"
        if comparison["error"] > comparison["bound"]:
            return "beyond its own bound"
        if comparison["bound"] > _largest_bound(comparison):
            return "by a bound that does not follow from dtype and size"
    return ""


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _largest_bound(comparison: dict[str, Any]) -> float:
    """Return the largest bound that follows from a comparison's dtype and size."""
    if "dtype" not in comparison:
        return _LARGEST_BOUND
    size, share = comparison.get("size", math.inf), _LOOSEST.get(str(comparison["dtype"]), 0.0)
    return share * max(size, 1.0) if size <= _LARGEST_SIZE else 0.0


def summarise(checks: list[CheckRecord]) -> dict[str, int]:
    """Count the checks in each state, and the compared tensors."""
    count = Counter(check.state for check in checks)
    compared = sum(1 for check in checks for _ in _comparisons(check.measured))
    return {**{state.value: count[state] for state in State}, "comparisons": compared}


def of_result(tier: str, result: Result) -> CheckRecord:
    """Return a result as records have it; failed if it passed by what proves nothing."""
    unsound = unsound_pass(result.measured) if result.state is State.PASSED else ""
    if unsound:
        result = replace(result, state=State.FAILED, reason=f"passed {unsound}. {result.reason}")
    fields = vars(result) | vars(result.check) | {"seconds": round(result.seconds, 3)}
    del fields["check"]
    return CheckRecord(tier=tier, **fields)


def load(file: Path) -> Record:
    """Read the record in a file.

    Raises:
        BadRecord: the file cannot be read, or is not a record of this schema.
    """
    try:
        return Record.model_validate_json(small_file(file))
    except OSError as error:
        raise BadRecord(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRecord(
            f"{file} is not a record of schema {SCHEMA}: {where:.100} {first['msg']:.200}"
        ) from error
