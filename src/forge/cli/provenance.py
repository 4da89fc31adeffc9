# SPDX-License-Identifier: BSD-3-Clause
"""The commands that print what a package was made of, and check a file against that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from forge.cli.context import Context, command, out
from forge.errors import ForgeError, NotAttempted
from forge.provenance import records

app = typer.Typer()


@command(app)
def provenance(
    forge: Context,
    package: Annotated[str, Argument(help="A package of the channel; the newest build.")],
    sbom: Annotated[bool, Option("--sbom", help="Print the SBOM (CycloneDX).")] = False,
) -> None:
    """Print the provenance of a package: an in-toto Statement with SLSA provenance."""
    there = forge.channel.records()
    builds = [record for record in there if record.name == package]
    if not builds:
        names = ", ".join(sorted({record.name for record in there})) or "none"
        raise ForgeError(f"no package {package} in {forge.channel.folder}; there are: {names}")
    newest = max(builds, key=lambda record: record.number)
    suffix = records.SBOM if sbom else records.RECORD
    file = forge.channel.folder / "forge" / f"{newest.dist}{suffix}"
    if not file.exists():
        raise NotAttempted(f"{file} does not exist; forge rebuild {package} makes one")
    print(file.read_text(), end="")


@command(app)
def verify(
    forge: Context,
    files: Annotated[list[Path], Argument(exists=True, dir_okay=False)],
    record: Annotated[
        Path | None, Option(help="Its provenance, if not beside it or in ../forge/.")
    ] = None,
) -> None:
    """Check package files against their provenance and against themselves, without a network.

    Exit 1 for any difference, 3 where there is no provenance: then only the files inside a
    package are checked, against its own list.
    """
    if record and len(files) > 1:
        raise ForgeError("--record is for one file; name one package")
    codes = [verify_one(file, record) for file in files]
    raise typer.Exit(1 if 1 in codes else max(codes))


def verify_one(file: Path, record: Path | None) -> int:
    """Print what was checked and every difference; returns the exit code."""
    places = [record] if record else [path for path in records.beside(file) if path.exists()]
    verdict = records.verify(file, records.read(places[0]) if places else None)
    for line in verdict.wrong:
        out.print(f"{file.name}: {line}")
    says = "not as recorded" if verdict.wrong else "as recorded"
    if not places:
        says = f"no record at {' or '.join(map(str, records.beside(file)))}"
    out.print(f"{file.name}: {says}; checked: {', '.join(verdict.checked) or 'nothing'}")
    return 1 if verdict.wrong else 0 if places else 3
