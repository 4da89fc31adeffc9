# SPDX-License-Identifier: BSD-3-Clause
"""What may be published, decided from each package itself and from the note of its build."""

import re
from collections.abc import Callable, Iterator

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from forge.conda import provenance
from forge.conda.local import HOST_BOUND, REHEARSED, Channel, Record
from forge.conda.package import Package, Places, require_confined
from forge.errors import ForgeError, Refused
from forge.files import sha256_file

LICENSES = "licenses/"
GPL = re.compile(r"(^|/)lib(cholmod|fftw3|readline)[^/]*\.so")  # libraries under it


def admitted(channel: Channel, published: Callable[[str], str | None]) -> dict[str, Record]:
    """Return a channel's packages by SUBDIR/FILE, all fit to be published.

    `published` is the sha256 of SUBDIR/FILE if that is published already. Raises ForgeError for an
    empty channel, Refused with every reason if any package is unfit.
    """
    records = channel.records()
    if not records:
        where = f"nothing is published: {channel.folder} holds no packages"
        raise ForgeError(f"{where}. Run ./forge build-all, or name another folder with --output")
    named = {f"{record.subdir}/{record.file_name}": record for record in records}
    places: list[Places] = []
    refused = [
        f"  {channel.path(record)} {reason}"
        for name, record in named.items()
        for reason in refusals(channel, record, published(name), places)
    ]
    if refused:
        raise Refused("\n".join(["nothing is published:", *refused]))
    require_confined(places)
    return named


def refusals(  # noqa: C901 (one reason after another)
    channel: Channel, record: Record, known: str | None, places: list[Places]
) -> Iterator[str]:
    """Yield why a package may not be published, and what to do about each reason.

    `known` is the sha256 that is published under its name. `places` gets where it is installed.
    """
    path = channel.path(record)
    if not path.exists() or sha256_file(path) != record.sha256:
        yield "is missing or differs from its record in the index; rebuild it"
        return
    try:
        package = Package(path)
        places.append(package.require_safe())
    except ForgeError as error:
        yield f"is not fit to be installed: {error}"
        return
    expression = str(package.index.get("license") or "")
    build = str(package.index["build"])
    if build.startswith(HOST_BOUND):
        advice = "build into an empty folder, with --base conda-forge --output DIR"
        yield f"is host-bound (built on the host base), so it is never published: {advice}"
        return
    if build.startswith(REHEARSED):
        advice = "build it from this checkout, into a folder without a rehearsal's packages"
        yield f"was made by a rehearsal, so it is never published: {advice}"
        return
    if wrong := provenance.faults(path, package):
        yield f"is not what its provenance says: {wrong[0]}; ./forge rebuild its recipe"
    tests = channel.tests_of(record)
    if tests is None:
        yield "has no note of passed tests for these bytes; ./forge rebuild its recipe"
    elif tests == 0:
        yield "has no tests; add some to its recipe"
    if not _is_public(expression):
        yield f"has the licence {expression or 'nothing'!r}: about.license must be an SPDX one"
    if "GPL-" not in expression.replace("LGPL-", "") and (
        gpl := next(filter(GPL.search, sorted(package.payload)), "")
    ):
        yield f"has {gpl}, which is under the GPL, and the licence {expression!r}"
    # redistribution requires a licence text
    if not any(text.strip() for name, text in package.info.items() if name.startswith(LICENSES)):
        yield f"has no licence text in info/{LICENSES}: name it in about.license_file"
    if known not in (None, record.sha256):
        advice = "published files never change: build with the next build number"
        yield f"is already published with other content (sha256 {known}); {advice}"


def _is_public(expression: str) -> bool:
    """Return whether a licence is an SPDX one; LicenseRef-X is SPDX's name for a private one."""
    try:
        return "LicenseRef-" not in canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        return False
