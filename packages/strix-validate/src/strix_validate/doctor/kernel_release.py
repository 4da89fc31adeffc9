# SPDX-License-Identifier: BSD-3-Clause
"""Releases of Linux, as `uname -r` prints them, compared with the table of known kernels."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

#: A final release sorts after each of its candidates.
_FINAL = 1 << 30
#: The first of TheRock's nightlies with the fix.
_FIXED_NIGHTLY = 20251219
#: Patterns of releases, by who built the kernel. The first that fits counts.
_ORIGINS = {
    "wsl": r"microsoft",
    "proxmox": r"-pve\b",
    "fedora": r"\.fc\d+",
    "rhel": r"\.el\d+",
    # Ubuntu's build of an unpatched release, and System76's kernels: 6.17.9-76061709-generic
    "mainline": r"^\d+\.\d+\.\d+-\d{6,8}(rc\d+)?-generic",
    "ubuntu-oem": r"-\d+-oem$",
    "ubuntu": r"-\d+-(generic|lowlatency)(-hwe)?(-64k)?$",
    "ubuntu-other": r"-\d+-(aws|azure|gcp|oracle|nvidia|realtime|kvm|raspi|tuxedo)",
    "debian": r"deb\d+|-amd64$|-liquorix",
    "arch": r"arch\d|-zen|cachyos|-lts$|-hardened|manjaro",
    "opensuse": r"-(default|longterm)$",
}
#: Who numbers kernels x.y.0-BUILD, whatever upstream's stable release they contain.
_OWN_NUMBERS = ("ubuntu", "ubuntu-oem", "ubuntu-other", "rhel")


@dataclass(frozen=True)
class Release:
    """A kernel.

    Attributes:
        text: What `uname -r` prints.
        origin: A key of _ORIGINS, or "" if the release does not show who built it.
        version: Upstream's version, three numbers.
        candidate: The number of a release candidate, or _FINAL.
        build: The distribution's build number, or 0.
    """

    text: str
    origin: str
    version: tuple[int, int, int]
    candidate: int
    build: int

    @property
    def has_upstream_version(self) -> bool:
        """Whether the version tells which stable release of upstream the kernel contains."""
        if self.origin == "debian":
            # 6.1.0-13-amd64 is Debian 12's numbering; later releases name upstream's version
            return not re.match(r"\d+\.\d+\.0-\d+-amd64", self.text)
        return self.origin not in _OWN_NUMBERS


class Fixed(BaseModel):
    """A row of [[fixed]]."""

    model_config = ConfigDict(extra="forbid")
    kernel: str
    from_: str
    source: str


class Faulty(Fixed):
    """A row of [[faulty]]."""

    to: str
    symptom: str
    fix: str
    is_reported: bool


class Runtime(BaseModel):
    """A row of [[runtime]]."""

    model_config = ConfigDict(extra="forbid")
    from_: str
    to: str
    source: str


class Nightly(BaseModel):
    """A row of [[nightly]]: dates as 20260609."""

    model_config = ConfigDict(extra="forbid")
    from_: int
    to: int
    symptom: str
    source: str


class Table(BaseModel):
    """The file kernels.toml."""

    model_config = ConfigDict(extra="forbid")
    fixed: list[Fixed]
    faulty: list[Faulty]
    runtime: list[Runtime]
    nightly: list[Nightly]


@cache
def table() -> Table:
    """Return the table of known kernels and runtimes."""
    rows = tomllib.loads((files(__package__) / "kernels.toml").read_text())
    for row in (row for group in rows.values() for row in group):
        row["from_"] = row.pop("from")
    return Table.model_validate(rows)


def parse(text: str) -> Release | None:
    """Return the release that a text names, or None if it does not begin with a version."""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", text)
    if not numbers:
        return None
    major, minor, patch = (int(number or 0) for number in numbers.groups())
    origin = next((name for name, form in _ORIGINS.items() if re.search(form, text)), "")
    # 7.1.0-rc6-arch1-1, 7.1-rc6, 7.1.0-0.rc6.fc45, 7.1~rc6, 7.1.0-070100rc6-generic
    candidate = re.search(r"(?:[-~.]|-\d{6})rc(\d{1,4})", text)
    build = re.match(r"[\d.]+-(\d{1,5})(?![\d])", text)
    return Release(
        text,
        origin,
        (major, minor, patch),
        int(candidate[1]) if candidate else _FINAL,
        int(build[1]) if build else 0,
    )


def sort_key(release: Release, kernel: str) -> tuple[int, ...]:
    """Return what sorts a release among those that a row's numbers compare."""
    key = (*release.version, release.candidate)
    return key if kernel == "upstream" else (*key, release.build)


def _applies(row: Fixed, release: Release) -> bool:
    """Return whether a row compares numbers that the release has."""
    if row.kernel == "upstream":
        return release.has_upstream_version
    return row.kernel == release.origin


def _at_least(release: Release, bound: str, kernel: str) -> bool:
    limit = parse(bound)
    return limit is not None and sort_key(release, kernel) >= sort_key(limit, kernel)


def upstream_fixed() -> str:
    """Return upstream's first version with the fixes."""
    return next(row.from_ for row in table().fixed if row.kernel == "upstream")


def first_fixed(release: Release) -> str:
    """Return the first build with the fixes, in the numbers of the release's kernel."""
    return _fixed_row(release).from_


def is_fixed(release: Release) -> bool:
    """Return whether a release has the fixes for KFD's limits, going by its numbers alone."""
    row = _fixed_row(release)
    return _at_least(release, row.from_, row.kernel)


def _fixed_row(release: Release) -> Fixed:
    """Return the row of the release's own kernel, or upstream's."""
    rows = {row.kernel: row for row in table().fixed}
    return rows.get(release.origin, rows["upstream"])


def fault_of(release: Release) -> Faulty | None:
    """Return the row of the table that says what is wrong with a release, if one does."""
    for row in table().faulty:
        is_inside = _at_least(release, row.from_, row.kernel) and not _at_least(
            release, row.to, row.kernel
        )
        if _applies(row, release) and is_inside:
            return row
    return None


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers that a version of ROCm begins with: (7, 2) for 7.2.53150 or 7.2."""
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*", text)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def date_of(runtime: str) -> int:
    """Return the date of a nightly build of ROCm, 20260612 for 7.14.0a20260612, or 0."""
    date = re.search(r"(?:^|a)(20\d{6})$", runtime)
    return int(date[1]) if date else 0


def nightly_of(runtime: str) -> Nightly | None:
    """Return the row of a faulty nightly build of ROCm, if a runtime is one."""
    return next((r for r in table().nightly if r.from_ <= date_of(runtime) < r.to), None)


def misfit_of(runtime: str) -> Runtime | None:
    """Return the row of a ROCm runtime that page-faults on the fixed kernels, if there is one."""
    date = date_of(runtime)
    if date:
        # TheRock's nightlies have the fix from a date on, whatever version they are of
        return None if date >= _FIXED_NIGHTLY else table().runtime[-1]
    version = version_of(runtime)[:2]
    for row in table().runtime:
        if version and version_of(row.from_) <= version < version_of(row.to):
            return row
    return None
