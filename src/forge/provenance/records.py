# SPDX-License-Identifier: BSD-3-Clause
"""Where the record and the SBOM of a package lie, how they are written and read."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from forge.errors import ForgeError
from forge.files import write_text
from forge.provenance import sbom, statement

RECORD, SBOM = ".provenance.json", ".cdx.json"


def write(channel: Path, package: Path, recipe: Path, root: Path, base: str) -> None:
    """Write CHANNEL/forge/DIST.provenance.json and DIST.cdx.json of a built package."""
    data = statement.statement(package, recipe, root, base)
    folder = channel / "forge"
    write_text(folder / f"{package.stem}{SBOM}", sbom.sbom(package, data))
    write_text(folder / f"{package.stem}{RECORD}", json.dumps(data, indent=1) + "\n")


def beside(package: Path) -> list[Path]:
    """Where the record of a package lies: beside it, or in its channel's folder `forge`."""
    name = f"{package.stem}{RECORD}"
    return [package.with_name(name), package.absolute().parent.parent / "forge" / name]


def read(path: Path) -> dict[str, Any]:
    """A record from its file. Raises ForgeError when it is none."""
    try:
        data = json.loads(path.read_bytes())
        kinds = data["_type"], data["predicateType"]
        definition = data["predicate"]["buildDefinition"]
        recipe = definition["externalParameters"]["recipe"]["name"]
        _ = [entry["annotations"]["kind"] for entry in definition["resolvedDependencies"]]
        _ = definition["externalParameters"].get("variant", {}).keys()
        (subject,) = data["subject"]
        _ = subject["name"], subject["digest"]["sha256"], PurePosixPath(recipe)
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForgeError(f"{path} is not the record of a package: {error!r}") from None
    if kinds != (statement.STATEMENT, statement.PREDICATE):
        raise ForgeError(f"{path} is {' with '.join(map(str, kinds))}, not {statement.PREDICATE}")
    return data
