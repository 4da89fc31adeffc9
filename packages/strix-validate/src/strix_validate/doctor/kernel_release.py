# SPDX-License-Identifier: BSD-3-Clause
"""Parse releases of Linux, as `uname -r` prints them, and compare them with kernels.toml."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

#: The candidate number of a final release; it sorts after every release candidate.
_FINAL = 1 << 30
#: The date of TheRock's first nightly build that works on kernels with the fixes for gfx1151.
_FIXED_NIGHTLY = 20251219
#: Patterns of releases, by who built the kernel. The first matching pattern decides.
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
#: Origins that number kernels x.y.0-BUILD, whatever stable upstream release a kernel contains.
_OWN_NUMBERS = ("ubuntu", "ubuntu-oem", "ubuntu-other", "rhel")


@dataclass(frozen=True)
class Release:
    """The release of a Linux kernel.

    Attributes:
        text: The whole release, as `uname -r` prints it.
        origin: A key of _ORIGINS, or "" if the release does not show who built it.
        version: The first three numbers: upstream's version if has_upstream_version is true.
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
        """Whether the version names the stable upstream release that the kernel contains."""
        if self.origin == "debian":
            # 6.1.0-13-amd64 is Debian 12's numbering; later releases name upstream's version.
            return not re.match(r"\d+\.\d+\.0-\d+-amd64", self.text)
        return self.origin not in _OWN_NUMBERS


class Fixed(BaseModel):
    """A row of [[fixed]] in kernels.toml: the first build with the fixes for KFD's limits.

    Attributes:
        kernel: How the row's builds are numbered; kernels.toml lists the numberings.
        from_: The first build.
        source: Link.
    """

    model_config = ConfigDict(extra="forbid")
    kernel: str
    from_: str
    source: str


class Faulty(Fixed):
    """A row of [[faulty]]: builds with a fault.

    Attributes:
        to: The first build after the faulty ones.
        symptom: The effect of the fault.
        fix: Which build has the fix, and what to do until then.
        is_reported: Whether owners reported the fault with these builds.
    """

    to: str
    symptom: str
    fix: str
    is_reported: bool


class Runtime(BaseModel):
    """A row of [[runtime]]: versions of ROCm that fail on Linux kernels with the fixes.

    Attributes:
        from_: The first version that fails.
        to: The first version that works again.
        source: Link.
    """

    model_config = ConfigDict(extra="forbid")
    from_: str
    to: str
    source: str


class Nightly(BaseModel):
    """A row of [[nightly]]: faulty nightly builds of ROCm.

    Attributes:
        from_: The date of the first faulty build, such as 20260609.
        to: The date of the first build after the faulty ones.
        symptom: The effect of the fault.
        source: Link.
    """

    model_config = ConfigDict(extra="forbid")
    from_: int
    to: int
    symptom: str
    source: str


class Table(BaseModel):
    """The file kernels.toml, which describes its own sections."""

    model_config = ConfigDict(extra="forbid")
    fixed: list[Fixed]
    faulty: list[Faulty]
    runtime: list[Runtime]
    nightly: list[Nightly]


@cache
def read_table() -> Table:
    """Return the table of known kernels and runtimes."""
    text = (files(__package__) / "kernels.toml").read_text()
    sections = tomllib.loads(text)
    for rows in sections.values():
        for row in rows:
            # "from" is a keyword of Python.
            row["from_"] = row.pop("from")
    return Table.model_validate(sections)


def parse(text: str) -> Release | None:
    """Return the release that a text names, or None if it does not begin with a version."""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", text)
    if not numbers:
        return None
    major, minor, patch = (int(number or 0) for number in numbers.groups())
    # examples: 7.1.0-rc6-arch1-1, 7.1-rc6, 7.1.0-0.rc6.fc45, 7.1~rc6, 7.1.0-070100rc6-generic
    rc = re.search(r"(?:[-~.]|-\d{6})rc(\d{1,4})", text)
    candidate = int(rc[1]) if rc else _FINAL
    build = re.match(r"[\d.]+-(\d{1,5})(?![\d])", text)
    build_number = int(build[1]) if build else 0
    return Release(
        text=text,
        origin=_find_origin(text),
        version=(major, minor, patch),
        candidate=candidate,
        build=build_number,
    )


def _find_origin(text: str) -> str:
    """Return who built the release, as a key of _ORIGINS, or "" if the release does not show it."""
    for origin, pattern in _ORIGINS.items():
        if re.search(pattern, text):
            return origin
    return ""


def sort_key(release: Release, kernel: str) -> tuple[int, ...]:
    """Return the key by which a release sorts; `kernel` is the numbering of a row."""
    key = (*release.version, release.candidate)
    return key if kernel == "upstream" else (*key, release.build)


def _is_at_least(release: Release, bound: str, kernel: str) -> bool:
    limit = parse(bound)
    return limit is not None and sort_key(release, kernel) >= sort_key(limit, kernel)


def find_first_fixed(release: Release | None = None) -> str:
    """Return the first kernel build that has the fixes for KFD's limits.

    If kernels.toml has a [[fixed]] row for the release's own numbering, the build is from that row.
    Without such a row, or without a release, it is from upstream's row.
    """
    return _find_fixed_row(release).from_


def is_fixed(release: Release) -> bool:
    """Return whether a release has the fixes for KFD's limits, judged by its version alone."""
    row = _find_fixed_row(release)
    return _is_at_least(release, row.from_, row.kernel)


def _find_fixed_row(release: Release | None) -> Fixed:
    """Return the [[fixed]] row in the release's numbering, or upstream's row if there is none."""
    rows = {row.kernel: row for row in read_table().fixed}
    upstream = rows["upstream"]
    if release is None:
        return upstream
    return rows.get(release.origin, upstream)


def find_fault(release: Release) -> Faulty | None:
    """Return the known fault of a release, if it has one."""
    for row in read_table().faulty:
        if _is_comparable(row, release) and _is_inside(row, release):
            return row
    return None


def _is_comparable(row: Fixed, release: Release) -> bool:
    """Return whether the release is numbered in the same way as the row's builds."""
    if row.kernel == "upstream":
        return release.has_upstream_version
    return row.kernel == release.origin


def _is_inside(row: Faulty, release: Release) -> bool:
    if not _is_at_least(release, row.from_, row.kernel):
        return False
    return not _is_at_least(release, row.to, row.kernel)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers that a version of ROCm begins with: (7, 2, 53150) for 7.2.53150."""
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _parse_nightly_date(runtime: str) -> int:
    """Return the date of a nightly build of ROCm, 20260612 for 7.14.0a20260612, or 0."""
    date = re.search(r"(?:^|a)(20\d{6})$", runtime)
    return int(date[1]) if date else 0


def find_faulty_nightly(runtime: str) -> Nightly | None:
    """Return the [[nightly]] row whose range includes the date of a runtime, or None."""
    date = _parse_nightly_date(runtime)
    for row in read_table().nightly:
        if row.from_ <= date < row.to:
            return row
    return None


def find_misfit(runtime: str) -> Runtime | None:
    """Return the [[runtime]] row of a version of ROCm, or None if it has none.

    The versions in these rows page-fault on Linux kernels with the fixes for gfx1151.
    """
    rows = read_table().runtime
    date = _parse_nightly_date(runtime)
    if date:
        # The date of a nightly build of TheRock shows whether it page-faults; its version does not.
        return None if date >= _FIXED_NIGHTLY else rows[-1]
    version = parse_version(runtime)[:2]
    if not version:
        return None
    for row in rows:
        if parse_version(row.from_) <= version < parse_version(row.to):
            return row
    return None
