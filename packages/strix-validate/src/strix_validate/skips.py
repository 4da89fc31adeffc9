# SPDX-License-Identifier: BSD-3-Clause
"""Which checks may be skipped, and where; anywhere else a skipped check counts as failed.

The table is skips.toml, with one entry per reason.
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

#: The tiers that check each package of kernels.
_PACKAGE_TIERS = ("kernels", "attention", "emulated")


class Skip(BaseModel):
    """An entry of the table.

    Attributes:
        ids: Checks, by id or prefix, with ``*`` as a wildcard.
        when: Values that fields of the device must have; a missing key always holds.
        said: A regular expression that the check's own reason must contain.
        reason: Why the checks may be skipped.
        link: Where that is explained.
        date: The day on which the entry was added.
    """

    model_config = ConfigDict(extra="forbid")
    ids: list[str] = Field(min_length=1)
    when: dict[Literal["build", "type", "architecture"], str] = {}
    said: str
    reason: str = Field(min_length=20)
    link: str = Field(pattern=r"^https://")
    date: date

    def covers(self, result: Result, device: Device) -> bool:
        """Return whether an entry explains a skipped result on a device."""
        if not is_named(result.check.id, self.ids):
            return False
        if any(getattr(device, key) != value for key, value in self.when.items()):
            return False
        return re.search(self.said, result.reason) is not None


@cache
def table() -> list[Skip]:
    """Return the entries of skips.toml, and one for each of its packages."""
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
        group: The word that the names of its checks begin with.
        module: Its name in Python.
        name: The package.
        link: Its home page.
        since: The day on which it was added.
    """
    return {
        "ids": [f"{tier}/{group}-*" for tier in _PACKAGE_TIERS],
        "said": f"{module} is not installed",
        "reason": f"{name} is a separate package",
        "link": link,
        "date": since,
    }


def judge(result: Result, device: Device) -> Result:
    """Return the result; if skipped, with the table's reason, or failed if no entry covers it."""
    if result.state is not State.SKIPPED:
        return result
    for skip in table():
        if skip.covers(result, device):
            return replace(
                result,
                reason=f"{skip.reason}: {skip.link}",
                measured=result.measured | {"said": result.reason},
            )
    return replace(
        result,
        state=State.FAILED,
        reason=f"not expected to be skipped here: {result.reason}",
    )
