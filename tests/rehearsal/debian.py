# SPDX-License-Identifier: BSD-3-Clause
"""What the packages of a Debian installation hold, as dpkg knows it."""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

RELEASE = Path("/etc/debian_version")
ROOT = Path("/")


class Missing(SystemExit):
    """This machine lacks something; the message says what to do."""


def require_sid() -> None:
    """Raises Missing anywhere but on Debian's unstable release, the only one with this ROCm."""
    release = RELEASE.read_text().strip() if RELEASE.exists() else "no Debian"
    if not release.endswith("/sid"):
        raise Missing(f"the rehearsal needs Debian sid, and this is {release}: docs/rehearsal.md")


def _query(form: str, packages: Iterable[str]) -> list[list[str]]:
    """Fields of each installed package, separated by tabs in `form`. Raises Missing."""
    names = [*packages]
    command = ["dpkg-query", "--show", "--showformat", f"{form}\n", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        absent = re.findall(r"no packages found matching (\S+)", done.stderr)
        advice = "python tests/rehearsal packages | xargs apt-get install -y"
        raise Missing(f"not installed: {' '.join(absent) or done.stderr}; run {advice}")
    return [line.split("\t") for line in done.stdout.splitlines()]


def version(package: str) -> str:
    """Upstream's version of an installed package: no epoch, no revision, no `+dfsg`."""
    ((text,),) = _query("${Version}", [package])
    found = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", text)
    assert found, text
    return found[1]


def closure(packages: Iterable[str], sources: str) -> list[str]:
    """The packages and what they depend on, as far as `sources`, a pattern, has its source."""
    rows = _query("${Package}\t${source:Package}\t${Depends}\t${db:Status-Abbrev}", [])
    installed = {row[0]: row for row in rows if row[3].startswith("ii")}
    found, todo = set[str](), [*packages]
    if absent := [name for name in todo if name not in installed]:
        _query("${Package}", absent)
    while todo:
        name = todo.pop()
        if name in found or name not in installed:
            continue
        found.add(name)
        needs = re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]*)", installed[name][2])
        todo += [n for n in needs if n in installed and re.fullmatch(sources, installed[n][1])]
    return sorted(found)


def files(package: str) -> list[str]:
    """Files and links of an installed package, relative to `/`, in folders as they are on disk."""
    done = subprocess.run(
        ["dpkg-query", "--listfiles", package], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(f"{package} is not installed; see python tests/rehearsal packages")
    names = set[str]()
    for line in done.stdout.splitlines():
        path = ROOT / line.lstrip("/")
        if line.startswith("/") and (path.is_symlink() or path.is_file()):
            # /lib is a link to usr/lib since the merge of both
            folder = os.path.realpath(path.parent)
            names.add(os.path.relpath(f"{folder}/{path.name}", ROOT))
    return sorted(names)


def owner(path: Path) -> str:
    """The package that has a file, or an empty text."""
    command = ["dpkg-query", "--search", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.partition(":")[0].partition(",")[0]
