# SPDX-License-Identifier: BSD-3-Clause
"""Decide which checks may be skipped, and on which devices.

The table skips.toml has one entry per reason. A skipped check that no entry covers counts as
failed.
"""

import re
import tomllib
from dataclasses import replace
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from strix_validate.checks import Result, State, is_named
from strix_validate.reporting.record import Device

#: The tiers whose checks of a package in [package] may be skipped.
_PACKAGE_TIERS = ("kernels", "attention", "emulated")


class Skip(BaseModel):
    """An entry of the table.

    Attributes:
        ids: Checks, by id, prefix or shell pattern; see checks.is_named.
        when: Required values of fields of the device; other fields may have any value.
        pattern: A regular expression that must match a part of the check's own reason.
        reason: Why the checks may be skipped.
        link: A page that explains the reason.
        date: The day on which the entry was added.
    """

    model_config = ConfigDict(extra="forbid")
    ids: list[str] = Field(min_length=1)
    when: dict[Literal["build", "type", "architecture"], str] = {}
    pattern: str
    reason: str = Field(min_length=20)
    link: str = Field(pattern=r"^https://")
    date: date

    def covers(self, result: Result, device: Device) -> bool:
        """Return whether the entry covers a skipped result on a device."""
        if not is_named(result.check.id, self.ids):
            return False
        if any(getattr(device, key) != value for key, value in self.when.items()):
            return False
        return re.search(self.pattern, result.reason) is not None


@cache
def table() -> list[Skip]:
    """Return the entries of skips.toml, first those of [package], then those of [[skip]]."""
    text = (files("strix_validate") / "skips.toml").read_text()
    data = tomllib.loads(text)
    entries = []
    for group, fields in data["package"].items():
        entries.append(_make_package_entry(group, *fields))
    entries += data["skip"]
    return [Skip.model_validate(entry) for entry in entries]


def _make_package_entry(group: str, module: str, name: str, link: str, since: date) -> dict:
    """Return the entry for the checks of a package that is not installed.

    Args:
        group: The first word in the names of the package's checks.
        module: The package's import name.
        name: The package's name.
        link: The package's home page.
        since: The day on which the entry was added.
    """
    return {
        "ids": [f"{tier}/{group}-*" for tier in _PACKAGE_TIERS],
        "pattern": f"{module} is not installed",
        "reason": f"{name} is a separate package",
        "link": link,
        "date": since,
    }


def judge(result: Result, device: Device) -> Result:
    """Return the result, adjusted by the table if the check was skipped.

    A skip that an entry covers gets the entry's reason and link. Any other skip becomes a failure.
    """
    if result.state is not State.SKIPPED:
        return result
    for skip in table():
        if skip.covers(result, device):
            return replace(
                result,
                reason=f"{skip.reason}: {skip.link}",
                measured=result.measured | {"own_reason": result.reason},
            )
    return replace(
        result,
        state=State.FAILED,
        reason=f"not expected to be skipped here: {result.reason}",
    )
