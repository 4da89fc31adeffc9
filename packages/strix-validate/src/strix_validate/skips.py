# SPDX-License-Identifier: BSD-3-Clause
"""Which checks may be skipped, and where; anywhere else a skipped check counts as failed.

The table, skips.toml, has one entry per reason. ``ids``: checks, by id or prefix, with ``*`` as a
wildcard. ``when``: of :class:`Device`, what it must be; a missing key always holds.
``said``: a regular expression that the check's own reason must contain.
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


class Skip(BaseModel):
    """An entry of the table."""

    model_config = ConfigDict(extra="forbid")
    ids: list[str] = Field(min_length=1)
    when: dict[Literal["build", "type", "architecture"], str] = {}
    said: str
    reason: str = Field(min_length=20)
    link: str = Field(pattern=r"^https://")
    date: date

    def covers(self, result: Result, device: Device) -> bool:
        """Return whether an entry explains a skipped result on a device."""
        return (
            is_named(result.check.id, self.ids)
            and all(getattr(device, key) == value for key, value in self.when.items())
            and re.search(self.said, result.reason) is not None
        )


@cache
def table() -> list[Skip]:
    """Return the entries of skips.toml, and one for each of its packages."""
    known = tomllib.loads((files("strix_validate") / "skips.toml").read_text())
    packages = [
        {
            "ids": [f"{tier}/{begin}-*" for tier in ("kernels", "attention", "emulated")],
            "said": f"{module} is not installed",
            "reason": f"{name} is a separate package",
            "link": link,
            "date": since,
        }
        for begin, (module, name, link, since) in known["package"].items()
    ]
    return [Skip.model_validate(entry) for entry in packages + known["skip"]]


def judge(result: Result, device: Device) -> Result:
    """Return the result; if skipped, with the table's reason, or failed if no entry covers it."""
    if result.state is not State.SKIPPED:
        return result
    for skip in table():
        if skip.covers(result, device):
            said = result.measured | {"said": result.reason}
            return replace(result, reason=f"{skip.reason}: {skip.link}", measured=said)
    reason = f"not expected to be skipped here: {result.reason}"
    return replace(result, state=State.FAILED, reason=reason)
