# SPDX-License-Identifier: BSD-3-Clause
"""The commands that tell what a package was made of, and check a file against that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forge.cli.context import say, session
from forge.errors import ForgeError, NotAttempted
from forge.provenance import records

app = typer.Typer()


@app.command()
def provenance(
    package: Annotated[str, typer.Argument(help="A package of the channel; the newest build.")],
    sbom: Annotated[bool, typer.Option("--sbom", help="Print the SBOM (CycloneDX).")] = False,
) -> None:
    """Print the record of a package: an in-toto Statement with SLSA provenance."""
    known = session.channel.records()
    found = [record for record in known if record.name == package]
    if not found:
        names = ", ".join(sorted({record.name for record in known})) or "none"
        raise ForgeError(f"no package {package} in {session.channel.folder}; there are: {names}")
    newest = max(found, key=lambda record: record.number)
    suffix = records.SBOM if sbom else records.RECORD
    file = session.channel.folder / "forge" / f"{newest.dist}{suffix}"
    if not file.exists():
        raise NotAttempted(
            f"{newest.dist} has no record: {file}; forge rebuild {package} makes one"
        )
    print(file.read_text(), end="")


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
    record: Annotated[
        Path | None, typer.Option(help="Its record, where that is not beside it or in ../forge/.")
    ] = None,
) -> None:
    """Check package files against their records, and against themselves, without a network.

    Exit 1 for any difference, 3 where there is no record: then only the files inside a package
    are checked, against its own list.
    """
    if record and len(files) > 1:
        raise ForgeError("--record names one file; give one package")
    codes = [verify_one(file, record) for file in files]
    raise typer.Exit(1 if 1 in codes else max(codes))


def verify_one(file: Path, record: Path | None) -> int:
    """Print what was checked and every difference; returns the exit code."""
    places = [record] if record else [path for path in records.beside(file) if path.exists()]
    verdict = records.verify(file, records.read(places[0]) if places else None)
    for line in verdict.wrong:
        say(f"{file.name}: {line}")
    says = "not as recorded" if verdict.wrong else "as recorded"
    if not places:
        says = f"no record at {' or '.join(map(str, records.beside(file)))}"
    say(f"{file.name}: {says}; checked: {', '.join(verdict.checked) or 'nothing'}")
    return 1 if verdict.wrong else 0 if places else 3
