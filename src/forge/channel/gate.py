# SPDX-License-Identifier: BSD-3-Clause
"""What may be published. Every answer is read from the package itself or from its build's note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from forge.channel.local import HOST_BOUND, Channel, Record
from forge.errors import BuildFailed, ForgeError
from forge.files import sha256_file
from forge.provenance.package import Package

PublishedHash = Callable[[str], str | None]
"""The sha256 under which SUBDIR/FILE is published already, or None."""

LICENSES = "info/licenses/"


def admitted(channel: Channel, published: PublishedHash) -> dict[str, Record]:
    """The packages of a channel by SUBDIR/FILE, all of them fit to be published.

    Raises ForgeError that names every package that is not, and why; then none is to go. Raises it
    for an empty channel, too.
    """
    records = channel.records()
    if not records:
        raise ForgeError(
            f"nothing is published: {channel.folder} holds no packages. Run ./forge build-all, or "
            "name another folder with --output"
        )
    refused = [
        f"{channel.path(record)} {reason}"
        for record in records
        for reason in refusals(channel, record, published)
    ]
    if refused:
        raise ForgeError("nothing is published:\n" + "\n".join(f"  {line}" for line in refused))
    return {f"{record.subdir}/{record.file_name}": record for record in records}


def refusals(channel: Channel, record: Record, published: PublishedHash) -> Iterator[str]:
    """Why a package may not be published, each with what to do; nothing when it may."""
    path = channel.path(record)
    if not path.exists():
        yield "is in the index but not there; ./forge build-all makes it again"
        return
    if sha256_file(path) != record.sha256:
        yield "differs from its record in the index; rebuild it"
        return
    try:
        build, expression, texts = _read(path)
    except (BuildFailed, KeyError) as error:
        yield f"cannot be read: {error}; rebuild it"
        return
    if build.startswith(HOST_BOUND):
        yield (
            "is host-bound (made on the host base) and is never published. Build on the "
            "conda-forge base into an empty folder: --base conda-forge --output DIR"
        )
        return
    tests = channel.tests_of(record)
    if tests is None:
        yield "has no note of passed tests for these bytes; ./forge rebuild its recipe"
    elif tests == 0:
        yield "has no tests; add some to its recipe"
    yield from _unlicensed(expression, texts)
    known = published(f"{record.subdir}/{record.file_name}")
    if known not in (None, record.sha256):
        yield (
            f"is already published with other content (sha256 {known}). A published name keeps "
            "its bytes: build with the next build number"
        )


def _read(path: Path) -> tuple[str, str, list[bytes]]:
    """Build string, licence expression and licence texts, as the package's own info folder says."""
    package = Package(path)
    texts = [text for name, text in package.info.items() if name.startswith(LICENSES)]
    return str(package.index["build"]), str(package.index.get("license") or ""), texts


def _unlicensed(expression: str, texts: list[bytes]) -> Iterator[str]:
    """As rocm-sdk's build has it: without a licence text nothing may be given on."""
    try:
        canonical = canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        canonical = ""
    # LicenseRef-X is SPDX's way to say that a licence is none of the public ones
    if not canonical or "LicenseRef-" in canonical:
        yield f"says {expression or 'nothing'!r} for its licence: about.license has to be SPDX's"
    if not any(text.strip() for text in texts):
        yield f"has no licence text in {LICENSES}: name it in about.license_file"
