# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run: written by --json, read by `report`, stored in docs/evidence/."""

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
from strix_validate.json_file import read_small_file

#: The version of the schema. It increases when a field changes its meaning or is removed.
SCHEMA = 3
#: A run proves that packages work only if checks of all tiers in _PROVING_TIERS passed, the size is
#: in _PROVING_SIZES, and at least _PROVING_COMPARISONS tensors were compared.
_PROVING_TIERS = {"doctor", "backend", "libraries", "attention"}
_PROVING_SIZES = ("full", "stress")
_PROVING_COMPARISONS = 1000
#: The largest accepted bound of a comparison by dtype, as a multiple of the size of the largest
#: terms. The checks' own bounds are smaller: about 4 * 2**-11 in float16, 4 * 2**-8 in bfloat16,
#: and 200 * 2**-24 in float32 (convolutions).
_LARGEST_RELATIVE_BOUNDS = {
    "float32": 1000 * 2**-24,
    "float16": 16 * 2**-11,
    "bfloat16": 16 * 2**-8,
}
#: The largest accepted size of terms; no check sums larger terms.
_LARGEST_SIZE = 2**20
#: The largest accepted bound of a comparison without a dtype. Comparisons of probabilities have no
#: dtype, nor does any comparison in a record of an earlier version of strix-validate.
_LARGEST_BOUND = 64
#: The numeric keys of a comparison; their values must be finite and not negative.
_NUMBERS = ("error", "bound", "local", "rms", "rms_bound", "drift", "size")


class BadRecord(ValueError):
    """A file is not a valid record; the message says which file, and why."""


class StrictModel(BaseModel):
    """A part of a record; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class CheckRecord(StrictModel):
    """A result; see strix_validate.checks.Check and Result for the fields.

    Attributes:
        tier: The tier that ran the check.
    """

    id: str
    tier: str
    title: str
    purpose: str
    state: State
    reason: str = ""
    measured: dict[str, Any] = {}
    severity: Severity | None = None
    fix: str = ""
    seconds: float = 0.0
    needs_reboot: bool = False
    source: str = ""


class Package(StrictModel):
    """An installed conda package.

    Attributes:
        name: Its name.
        version: Its version.
        build: Its build string.
        sha256: The hash of its archive, if conda-meta has it.
    """

    name: str
    version: str
    build: str
    sha256: str | None = None


class Host(StrictModel):
    """The machine that checks ran on.

    Attributes:
        kernel: The release of Linux.
        distribution: The name and version of the Linux distribution.
        glibc: The version of the C library.
        cpu: The name of the processor.
        cores: Number of cores.
        memory_gib: Its memory in GiB.
        python: The version of Python.
    """

    kernel: str
    distribution: str
    glibc: str
    cpu: str
    cores: int
    memory_gib: float
    python: str


class Device(StrictModel):
    """The device of a run.

    Attributes:
        type: "gpu", "cpu", or "none" if no check uses torch, or if torch or the requested GPU is
            absent.
        architecture: The GPU's name in LLVM or, without a GPU, the processor's architecture.
        name: The GPU's product name; "" without a GPU.
        build: What torch was built for.
        toolkit: The version of HIP or CUDA that torch was built with.
        units: torch's multi_processor_count: workgroup processors on gfx1151, which have two
            compute units each; multiprocessors on NVIDIA's GPUs.
        clock_mhz: The clock in MHz.
        memory_gib: The GPU's memory in GiB.
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
    """The record of a run.

    Attributes:
        schema_version: SCHEMA; the key is "schema".
        created: When it began.
        command: The tiers that ran.
        size: The size of the run.
        seed: The seed of random inputs.
        subject: What it is evidence for: "packages" on gfx1151, otherwise "harness", the validator
            itself.
        versions: Versions of Python packages by name; None if not installed.
        packages: The conda packages of the environment.
        host: The machine.
        device: The device.
        checks: The results.
        summary: Number of checks by state, and of compared tensors ("comparisons").
        seconds: How long it took.
        unfinished: Number of checks that did not run because the run was interrupted.
    """

    schema_version: Literal[3] = Field(SCHEMA, alias="schema")
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
    def _refuse_contradictions(self) -> "Record":
        """Refuse a record whose fields contradict each other. No run writes such a record."""
        if self.summary != summarise(self.checks):
            raise ValueError("the summary does not match the checks")
        ids = {check.id for check in self.checks}
        if len(ids) < len(self.checks):
            raise ValueError("a check is listed twice")
        if self.unfinished < 0:
            raise ValueError("the number of unfinished checks is negative")
        architecture = self.device.architecture.split(":")[0]
        is_target = self.device.build == "rocm" and architecture == TARGET
        if self.subject == "packages" and not is_target:
            raise ValueError(f"the subject is packages, but the run was not on {TARGET} with ROCm")
        for check in self.checks:
            if check.state is State.PASSED:
                reason = find_unsound_reason(check.measured)
                if reason:
                    raise ValueError(f"a check passed {reason}")
        return self

    def proves(self, package: str) -> bool:
        """Return whether the run shows that a package works on gfx1151.

        The record has to list the package, the run must be complete and have no failure, and the
        limits of _PROVING_TIERS, _PROVING_SIZES and _PROVING_COMPARISONS apply. If checks are named
        after the package, at least one of them has to have passed.
        """
        if self.subject != "packages" or self.device.type != "gpu":
            return False
        if self.summary[State.FAILED.value] or self.unfinished:
            return False
        if package not in {installed.name for installed in self.packages}:
            return False
        tiers = {check.tier for check in self.checks if check.state is State.PASSED}
        if self.size not in _PROVING_SIZES or not tiers >= _PROVING_TIERS:
            return False
        if self._count_typed_comparisons() < _PROVING_COMPARISONS:
            return False
        named = [check for check in self.checks if package in check.id.split("/")]
        return not named or any(check.state is State.PASSED for check in named)

    def _count_typed_comparisons(self) -> int:
        """Return the number of comparisons that have a dtype."""
        number = 0
        for check in self.checks:
            number += sum("dtype" in comparison for comparison in _comparisons(check.measured))
        return number

    def dump(self) -> str:
        """Return the record as JSON."""
        return self.model_dump_json(indent=1, by_alias=True)

    def write(self, file: Path) -> None:
        """Write the record to a file, replacing a previous file in one step.

        The text is on the disk before the new file gets its name. If the run is killed or the
        machine stops before that, the previous file remains.
        """
        part = file.with_suffix(".part")
        with part.open("w") as stream:
            stream.write(self.dump() + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)


def _comparisons(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the comparison of each compared tensor among a check's measured values."""
    for value in measured.values():
        if isinstance(value, dict) and "bound" in value:
            yield value


def find_unsound_reason(measured: dict[str, Any]) -> str:
    """Return why a check with these measured values cannot have passed, or "" if it can."""
    for comparison in _comparisons(measured):
        numbers = [comparison[name] for name in _NUMBERS if name in comparison]
        if "error" not in comparison or not all(map(_is_finite, numbers)):
            return "with a number that is missing, negative or not finite"
        if comparison["error"] > comparison["bound"]:
            return "with an error beyond its own bound"
        if comparison["bound"] > _compute_largest_bound(comparison):
            return "with a bound that is too large for the dtype and size"
    return ""


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number that is finite and not negative."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _compute_largest_bound(comparison: dict[str, Any]) -> float:
    """Return the largest accepted bound for a comparison's dtype and size."""
    if "dtype" not in comparison:
        return _LARGEST_BOUND
    size = comparison.get("size", math.inf)
    if size > _LARGEST_SIZE:
        return 0.0
    relative_bound = _LARGEST_RELATIVE_BOUNDS.get(str(comparison["dtype"]), 0.0)
    return relative_bound * max(size, 1.0)


def summarise(checks: list[CheckRecord]) -> dict[str, int]:
    """Return the number of checks in each state, and of compared tensors."""
    states = Counter(check.state for check in checks)
    summary = {state.value: states[state] for state in State}
    summary["comparisons"] = 0
    for check in checks:
        summary["comparisons"] += len(list(_comparisons(check.measured)))
    return summary


def make_check_record(tier: str, result: Result) -> CheckRecord:
    """Return the record of a result.

    A pass becomes a failure if its measured values do not prove it.
    """
    if result.state is State.PASSED:
        reason = find_unsound_reason(result.measured)
        if reason:
            reason = f"passed {reason}. {result.reason}"
            result = replace(result, state=State.FAILED, reason=reason)
    fields = vars(result) | vars(result.check)
    fields["seconds"] = round(result.seconds, 3)
    del fields["check"]
    return CheckRecord(tier=tier, **fields)


def load(file: Path) -> Record:
    """Read the record in a file.

    Raises:
        BadRecord: The file cannot be read, or is not a record of this schema.
    """
    try:
        return Record.model_validate_json(read_small_file(file))
    except OSError as error:
        raise BadRecord(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{place:.100} {first['msg']:.200}"
        raise BadRecord(f"{file} is not a record of schema {SCHEMA}: {message}") from error
