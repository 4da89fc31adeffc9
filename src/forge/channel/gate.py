# SPDX-License-Identifier: BSD-3-Clause
"""The rules of what may be published, checked on each package and on the note of its build."""

import re
from collections.abc import Container, Iterator, Mapping, Set
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from forge.conda.local import HOST_BOUND, REHEARSED, LocalChannel, Record
from forge.conda.package import Package, Places, require_confined
from forge.errors import ForgeError, Refused
from forge.files import read_text, sha256_file

LICENSES = "licenses/"
UNTESTED = "untested"  # in the name of a channel of which nothing has run on the GPU
GPL_LIBRARIES = re.compile(r"(^|/)lib(cholmod|fftw3|readline)[^/]*\.so")
SHA256SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *]\S.*")


def select_packages(
    channel: LocalChannel,
    published: Mapping[str, Path],
    withdrawn: Container[str],
    validated: Set[str] | None = None,
) -> dict[str, Record]:
    """Return the packages of a local channel that a publish adds, by SUBDIR/FILE.

    The published channel is judged as it will be: what two packages do together counts whether
    they are published now or were published before, by this checkout or another.

    Args:
        channel: The local channel.
        published: The packages that are in the published folder already, by SUBDIR/FILE.
        withdrawn: Names SUBDIR/FILE that were withdrawn; they are left out.
        validated: The sha256 of each file that passed on the GPU; None to publish others too.

    Raises:
        ForgeError: The local channel is empty.
        Refused: A package is unfit. The message has every reason.
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
            faults.append("was not validated on the GPU: no line of --validated has its sha256")
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
    """Read the sha256 of each file that passed on the GPU, from lines of sha256sum.

    Raises:
        ForgeError: The file is missing, empty, or has another line.
    """
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise ForgeError(f"cannot read --validated {path}: {error.strerror}") from None
    digests = set()
    for number, line in enumerate(lines, 1):
        match = SHA256SUM_LINE.fullmatch(line)
        if not match:
            raise ForgeError(f"{path}, line {number} is not one of sha256sum: {line!r:.100}")
        digests.add(match[1])
    if not digests:
        raise ForgeError(f"{path} names no file: sha256sum of the validated files writes it")
    return digests


def require_untested_name(folder: Path) -> None:
    """Raise Refused for a channel whose name does not say that nothing has run on the GPU."""
    if UNTESTED not in folder.name:
        reason = f"nothing is published: {folder.name!r} does not say that its packages are"
        raise Refused(f"{reason} {UNTESTED}. Publish to a folder that has that word in its name")


def _build_faults(channel: LocalChannel, record: Record) -> Iterator[str]:
    """Yield what the note of a package's build lacks."""
    path = channel.path(record)
    if not path.is_file() or sha256_file(path) != record.sha256:
        yield "is missing or differs from its record in the index; ./forge rebuild its recipe"
        return
    tests = channel.read_test_count(record)
    if tests is None:
        yield "has no note of passed tests for these bytes; ./forge rebuild its recipe"
    elif tests == 0:
        yield "has no tests; add some to its recipe"


def _name_faults(record: Record, published: Path | None) -> Iterator[str]:
    """Yield the fault of a package whose name is published with other content.

    Args:
        record: The package.
        published: The published file of that name, if there is one.
    """
    if published and sha256_file(published) != record.sha256:
        advice = "published files never change: build with the next build number"
        yield f"is already published with other content ({published}); {advice}"


def _package_faults(path: Path, places: list[Places]) -> Iterator[str]:
    """Yield what is wrong with a package itself.

    Args:
        path: The package.
        places: Gets the places of the package, if it is safe.
    """
    if not path.is_file():
        return  # the check of its build has already reported that
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
    """Yield why a package's licence does not allow to publish it, or is not what it states."""
    expression = str(package.index.get("license") or "")
    if not _is_public(expression):
        yield f"has the licence {expression or 'nothing'!r}: about.license must be an SPDX one"
    libraries = sorted(name for name in package.payload if GPL_LIBRARIES.search(name))
    if libraries and "GPL-" not in expression.replace("LGPL-", ""):
        yield f"has {libraries[0]}, which is under the GPL, and the licence {expression!r}"
    texts = [text for name, text in package.info.items() if name.startswith(LICENSES)]
    if not any(text.strip() for text in texts):  # redistribution requires one
        yield f"has no licence text in info/{LICENSES}: name it in about.license_file"


def _is_public(expression: str) -> bool:
    """Return whether a licence is an SPDX one; LicenseRef-X is SPDX's name for a private one."""
    try:
        return "LicenseRef-" not in canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        return False
