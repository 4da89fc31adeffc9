# SPDX-License-Identifier: BSD-3-Clause
"""The rules that a package must satisfy to be published.

The rules apply to the package itself, to its record in the local channel's index, and to the note
that the driver has written about its build.
"""

import re
from collections.abc import Container, Iterator, Mapping, Set
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from forge.conda.local import HOST_BOUND, REHEARSED, LocalChannel, Record
from forge.conda.package import Package, Places, require_confined
from forge.errors import ForgeError, Refused
from forge.files import read_text, sha256_file

LICENSES = "licenses/"
# `publish --untested` requires this word in the channel's name: no GPU has run its packages.
UNTESTED = "untested"
GPL_LIBRARIES = re.compile(r"(^|/)lib(cholmod|fftw3|readline)[^/]*\.so")
REBUILD = "build its recipe again with ./forge rebuild"
SHA256SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *]\S.*")


def select_packages(
    channel: LocalChannel,
    published: Mapping[str, Path],
    withdrawn: Container[str],
    validated: Set[str] | None = None,
) -> dict[str, Record]:
    """Return the packages of a local channel that have to be added to a published channel.

    The rules for the packages themselves are applied to all packages that the published channel
    would have, so that two conflicting packages are refused even if they are published at different
    times, or from different checkouts.

    Args:
        channel: The local channel.
        published: The path of each package in the published folder, by SUBDIR/FILE, without the
            withdrawn packages.
        withdrawn: The withdrawn packages as SUBDIR/FILE; they are left out.
        validated: The sha256 of each file of the channel whose stacks passed on the GPU. Other
            files are refused. None accepts all files.

    Returns:
        The record of each package to add, by SUBDIR/FILE.

    Raises:
        ForgeError: The local channel is empty.
        Refused: Packages break rules, and the message has every reason. Or, if no package breaks a
            rule by itself, two packages conflict, and the message has the first conflict.
    """
    records = channel.records()
    if not records:
        reason = f"nothing is published: {channel.folder} holds no packages"
        raise ForgeError(f"{reason}. Run ./forge build-all, or name another folder with --output")
    offered = {}
    for record in records:
        name = f"{record.subdir}/{record.file_name}"
        if name not in withdrawn:
            offered[name] = record
    added = {name: record for name, record in offered.items() if name not in published}
    reasons: list[str] = []
    for name, record in offered.items():
        faults = [*_build_faults(channel, record), *_name_faults(record, published.get(name))]
        if validated is not None and record.sha256 not in validated:
            faults.append("is not a validated file: no line of --validated has its sha256")
        path = channel.path(record)
        reasons += [f"  {path} {fault}" for fault in faults]
    places: list[Places] = []
    for path in [*map(channel.path, added.values()), *published.values()]:
        reasons += [f"  {path} {fault}" for fault in _package_faults(path, places)]
    if reasons:
        raise Refused("\n".join(["nothing is published:", *dict.fromkeys(reasons)]))
    require_confined(places)
    return added


def read_validated(path: Path) -> set[str]:
    """Read the sha256 of each validated file from a file in sha256sum's format.

    Raises:
        ForgeError: The file cannot be read, is empty, or has a line in another format.
    """
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise ForgeError(f"cannot read --validated {path}: {error.strerror}") from None
    digests = set()
    for number, line in enumerate(lines, 1):
        match = SHA256SUM_LINE.fullmatch(line)
        if not match:
            reason = f"{path}, line {number} is not in sha256sum's format"
            raise ForgeError(f"{reason}: {line!r:.100}")
        digests.add(match[1])
    if not digests:
        raise ForgeError(f"{path} names no file: write it with sha256sum VALIDATED_FILE...")
    return digests


def require_untested_name(folder: Path) -> None:
    """Raise Refused unless a channel's name contains the word `untested`."""
    if UNTESTED not in folder.name:
        reason = f"nothing is published: {folder.name!r} does not say that its packages are"
        raise Refused(f"{reason} {UNTESTED}. Publish to a folder that has that word in its name")


def _build_faults(channel: LocalChannel, record: Record) -> Iterator[str]:
    """Yield why a package's index record or the note about its build forbids publishing it."""
    path = channel.path(record)
    if not path.is_file() or sha256_file(path) != record.sha256:
        yield f"is missing or differs from its record in the index; {REBUILD}"
        return
    tests = channel.read_test_count(record)
    if tests is None:
        yield f"has no note of passed tests for these bytes; {REBUILD}"
    elif tests == 0:
        yield "has no tests; add some to its recipe"


def _name_faults(record: Record, published: Path | None) -> Iterator[str]:
    """Yield a fault if a file of the same name is published with other content.

    Args:
        record: The package.
        published: The published file of that name, if there is one.
    """
    if published and sha256_file(published) != record.sha256:
        advice = "published files never change: build with the next build number"
        yield f"is already published with other content ({published}); {advice}"


def _package_faults(path: Path, places: list[Places]) -> Iterator[str]:
    """Yield the faults of a package itself.

    Args:
        path: The package.
        places: If the package is safe, the places of its files are appended to this list.
    """
    if not path.is_file():
        # _build_faults reports a missing file.
        return
    try:
        package = Package(path)
        places.append(package.require_safe())
    except ForgeError as error:
        yield f"is not fit to be installed: {error}"
        return
    build = str(package.index["build"])
    if build.startswith(HOST_BOUND):
        advice = "build into an empty folder, with --base conda-forge --output DIR"
        yield f"is host-bound (built on the host base), so it is never published: {advice}"
        return
    if build.startswith(REHEARSED):
        advice = "build it from this checkout, into a folder without a rehearsal's packages"
        yield f"was made by a rehearsal, so it is never published: {advice}"
        return
    yield from _license_faults(package)


def _license_faults(package: Package) -> Iterator[str]:
    """Yield why a package's licence does not allow publishing it or does not match its content."""
    expression = str(package.index.get("license") or "")
    if not _is_public(expression):
        stated = expression or "nothing"
        rule = "about.license must be an SPDX expression without LicenseRef-"
        yield f"has the licence {stated!r}: {rule}"
    libraries = sorted(name for name in package.payload if GPL_LIBRARIES.search(name))
    if libraries and "GPL-" not in expression.replace("LGPL-", ""):
        yield f"has {libraries[0]}, which is under the GPL, and the licence {expression!r}"
    texts = [text for name, text in package.info.items() if name.startswith(LICENSES)]
    if not any(text.strip() for text in texts):
        # Licences require that copies include their text.
        yield f"has no licence text in info/{LICENSES}: name it in about.license_file"


def _is_public(expression: str) -> bool:
    """Return whether a licence is an SPDX expression without private licences (LicenseRef-X)."""
    try:
        return "LicenseRef-" not in canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        return False
