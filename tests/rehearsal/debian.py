# SPDX-License-Identifier: BSD-3-Clause
"""Read the versions, the dependencies and the files of Debian packages from dpkg."""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

RELEASE = Path("/etc/debian_version")
ROOT = Path("/")


class Missing(SystemExit):
    """This machine lacks a package or has another Debian release. The message says what to do."""


def require_sid() -> None:
    """Raise Missing unless this machine has Debian's unstable release, sid."""
    release = RELEASE.read_text().strip() if RELEASE.exists() else "no Debian"
    if not release.endswith("/sid"):
        raise Missing(
            f"the rehearsal needs Debian sid, but this machine has {release}: see docs/rehearsal.md"
        )


def _query(form: str, packages: Iterable[str]) -> list[list[str]]:
    """Return fields of packages.

    Args:
        form: The fields, separated by tabs, as dpkg-query reads them.
        packages: The names of the packages. If it is empty, all packages that dpkg knows.

    Raises:
        Missing: A package is not installed.
    """
    command = ["dpkg-query", "--show", "--showformat", f"{form}\n", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        names = re.findall(r"no packages found matching (\S+)", done.stderr)
        advice = "python tests/rehearsal packages | xargs apt-get install -y"
        raise Missing(f"not installed: {' '.join(names) or done.stderr}; run {advice}")
    return [line.split("\t") for line in done.stdout.splitlines()]


def read_version(package: str) -> str:
    """Return upstream's version of an installed package: no epoch, no revision, no `+dfsg`."""
    ((text,),) = _query("${Version}", [package])
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", text)
    assert match, text
    return match[1]


def list_with_dependencies(packages: Iterable[str], sources: str) -> list[str]:
    """Return packages and those that they depend on, directly or indirectly.

    Args:
        packages: The names of the packages.
        sources: A pattern for names of source packages. Dependencies from source packages that do
            not match it are left out.

    Raises:
        Missing: One of `packages` is not installed.
    """
    rows = _query("${Package}\t${source:Package}\t${Depends}\t${db:Status-Abbrev}", [])
    installed = {row[0]: row for row in rows if row[3].startswith("ii")}
    pending = list(packages)
    missing = [name for name in pending if name not in installed]
    if missing:
        _query("${Package}", missing)
    result: set[str] = set()
    while pending:
        name = pending.pop()
        if name in result or name not in installed:
            continue
        result.add(name)
        depends = installed[name][2]
        for needed in re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]*)", depends):
            if needed in installed and re.fullmatch(sources, installed[needed][1]):
                pending.append(needed)
    return sorted(result)


def list_files(package: str) -> list[str]:
    """Return the files and links of an installed package, relative to `/`.

    Links to folders in the paths are resolved. For example, /lib is a link to usr/lib.

    Raises:
        Missing: The package is not installed.
    """
    done = subprocess.run(
        ["dpkg-query", "--listfiles", package], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(f"{package} is not installed; see python tests/rehearsal packages")
    names: set[str] = set()
    for line in done.stdout.splitlines():
        path = ROOT / line.lstrip("/")
        if line.startswith("/") and (path.is_symlink() or path.is_file()):
            folder = os.path.realpath(path.parent)
            names.add(os.path.relpath(f"{folder}/{path.name}", ROOT))
    return sorted(names)


def find_owner(path: Path) -> str:
    """Return the package that a file belongs to, or an empty string."""
    command = ["dpkg-query", "--search", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.partition(":")[0].partition(",")[0]
