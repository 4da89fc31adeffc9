# SPDX-License-Identifier: BSD-3-Clause
"""One machine of a cluster: its network, its limit of open files, and a hash of its packages."""

import hashlib
import ipaddress
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path

from strix_validate.doctor import host

#: Open files: Ray's processes hold sockets to each other, and it fails late at the usual 1024.
FILES = 8192


@dataclass(frozen=True)
class Link:
    """An IPv4 address of this machine, and the interface that has it."""

    address: str
    interface: str


def interfaces() -> list[Link]:
    """Return the machine's IPv4 addresses, except loopback."""
    done = subprocess.run(["ip", "-brief", "-4", "address"], capture_output=True, text=True)
    links = []
    for name, _, *addresses in (line.split() for line in done.stdout.splitlines()):
        for address in addresses:
            own = address.partition("/")[0]
            if not ipaddress.ip_address(own).is_loopback:
                links.append(Link(own, name.partition("@")[0]))
    return links


def digest_of_packages(prefix: Path) -> str:
    """Return one hash of all conda packages of an environment, as a lock has them."""
    names = sorted(f"{p.name} {p.version} {p.build} {p.sha256}" for p in host.packages(prefix))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def open_files() -> tuple[int, int]:
    """Return the soft and the hard limit of open files; no limit counts as what Ray needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        FILES if soft == resource.RLIM_INFINITY else soft,
        FILES if hard == resource.RLIM_INFINITY else hard,
    )
