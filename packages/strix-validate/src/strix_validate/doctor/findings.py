# SPDX-License-Identifier: BSD-3-Clause
"""The output of `strix-validate doctor --json`, which docs/validate.md documents."""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from strix_validate import TARGET
from strix_validate.checks import Severity, State
from strix_validate.reporting.record import CheckRecord, Record

Status = Literal["ok", "info", "warning", "error", "skipped"]
#: Statuses by ascending severity.
_ORDER: list[Status] = ["skipped", "ok", "info", "warning", "error"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Finding(_Model):
    """The result of one check.

    Attributes:
        id: The check, such as doctor/gtt; ids are stable.
        status: "ok"; "info" for information about something that is not a fault; "warning" for a
            fault that costs speed, memory or stability; "error" if the check failed, for example
            because of a fault that keeps the GPU from working; "skipped" if the check could not be
            run.
        message: The result in words. If the status is "ok", it is empty or a note, such as the
            flags of `vllm serve`. If the status is "skipped", it is the reason.
        fix: A command, or an instruction if no command exists; empty if there is nothing to do.
        needs_reboot: Whether the fix takes effect only at the next start of the machine.
        source: Links to where the advice comes from, separated by blanks.
        measured: The values from which the status follows, by name. The names are not stable.
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
        format: The version of this format. It is raised when a field changes its meaning or is
            removed; new fields do not raise it.
        version: The version of strix-validate.
        gpu_arch: The GPU that the doctor looked for.
        status: The most severe status among the findings; "skipped" if all are skipped.
        needs_reboot: Whether any fix needs a reboot.
        findings: One for each selected check, skipped ones included, in the record's order.
    """

    format: Literal[1] = 1
    version: str
    gpu_arch: str
    status: Status
    needs_reboot: bool
    findings: list[Finding]


def _find_status(check: CheckRecord) -> Status:
    if check.state is State.SKIPPED:
        return "skipped"
    if check.severity is Severity.INFO:
        return "info"
    if check.severity is Severity.WARNING:
        return "warning"
    if check.state is State.FAILED:
        return "error"
    return "ok"


def _find_source(check: CheckRecord) -> str:
    """Return the links of the result, or the check's link if the result has none."""
    if check.source:
        return check.source
    link = re.search(r"https://\S+|docs/\S+\.md", check.purpose)
    return link[0] if link else ""


def _make_finding(check: CheckRecord) -> Finding:
    # skips.toml gives the reason of a skipped check. Its own reason is a measured value.
    message = str(check.measured.get("own_reason") or check.reason)
    return Finding(
        id=check.id,
        status=_find_status(check),
        message=message,
        fix=check.fix,
        needs_reboot=check.needs_reboot,
        source=_find_source(check),
        measured=check.measured,
    )


def make_findings(record: Record) -> Findings:
    """Return the findings of a record of the doctor."""
    findings = [_make_finding(check) for check in record.checks]
    statuses = [finding.status for finding in findings]
    return Findings(
        version=record.versions.get("strix-validate") or "unknown",
        gpu_arch=TARGET,
        status=max(statuses, key=_ORDER.index, default="skipped"),
        needs_reboot=any(finding.needs_reboot for finding in findings),
        findings=findings,
    )


def dump(record: Record) -> str:
    """Return the findings of a record as JSON."""
    return make_findings(record).model_dump_json(indent=1)
