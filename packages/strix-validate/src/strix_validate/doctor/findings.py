# SPDX-License-Identifier: BSD-3-Clause
"""What `strix-validate doctor --json` prints; docs/validate.md describes it to its readers."""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from strix_validate import TARGET
from strix_validate.checks import Severity, State
from strix_validate.reporting.record import CheckRecord, Record

Status = Literal["ok", "info", "warning", "error", "skipped"]
_ORDER: list[Status] = ["skipped", "ok", "info", "warning", "error"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Finding(_Model):
    """A check of the doctor and what it found.

    Attributes:
        id: The check, such as doctor/gtt; ids are stable.
        status: ok; info, worth knowing and no fault; warning, costs speed, memory or stability;
            error, keeps the GPU from working; skipped, could not be checked.
        message: What was found, in words. If status is ok: empty, or a note such as the flags of
            `vllm serve`; if it is skipped: what is missing.
        fix: A command, or an instruction where there is none; empty if there is nothing to do.
        needs_reboot: Whether the fix takes effect at the next start of the machine only.
        source: Links to where the advice comes from, separated by blanks.
        measured: Numbers and words behind the status, by name. Their names are not stable.
    """

    id: str
    status: Status
    message: str
    fix: str
    needs_reboot: bool
    source: str
    measured: dict[str, Any]


class Findings(_Model):
    """All findings about a machine.

    Attributes:
        format: The version of this format. It is raised when a field changes its meaning or goes
            away; new fields do not raise it.
        version: The version of strix-validate.
        gpu_arch: The GPU that the doctor looked for.
        status: The worst status among the findings, skipped ones aside.
        needs_reboot: Whether any fix needs a reboot.
        findings: One for each check that ran, in the order of the terminal's output.
    """

    format: Literal[1] = 1
    version: str
    gpu_arch: str
    status: Status
    needs_reboot: bool
    findings: list[Finding]


def _status(check: CheckRecord) -> Status:
    if check.state is State.SKIPPED:
        return "skipped"
    if check.severity is Severity.INFO:
        return "info"
    if check.severity is Severity.WARNING:
        return "warning"
    return "error" if check.state is State.FAILED else "ok"


def _source(check: CheckRecord) -> str:
    """Return the finding's own links, or that of the check."""
    links = re.findall(r"https://\S+|docs/\S+\.md", check.why)
    return check.source or (links[0] if links else "")


def _message(check: CheckRecord) -> str:
    """Return the check's own words; a skipped one's reason is the table's, and its own beside."""
    return str(check.measured.get("said") or check.reason)


def of_record(record: Record) -> Findings:
    """Return the findings that a record of the doctor holds."""
    findings = [
        Finding(
            id=check.id,
            status=_status(check),
            message=_message(check),
            fix=check.fix,
            needs_reboot=check.needs_reboot,
            source=_source(check),
            measured=check.measured,
        )
        for check in record.checks
    ]
    return Findings(
        version=record.versions.get("strix-validate") or "unknown",
        gpu_arch=TARGET,
        status=max((f.status for f in findings), key=_ORDER.index, default="skipped"),
        needs_reboot=any(finding.needs_reboot for finding in findings),
        findings=findings,
    )


def dump(record: Record) -> str:
    """Return the findings of a record as JSON."""
    return of_record(record).model_dump_json(indent=1)
