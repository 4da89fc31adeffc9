# SPDX-License-Identifier: BSD-3-Clause
"""One machine of a cluster: its network, its limit of open files, and a hash of its packages.

The doctor checks them, and `strix-validate cluster` needs them before it starts Ray.
"""

import hashlib
import ipaddress
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from strix_validate.doctor import host

#: Open files: Ray's processes hold sockets to each other, and it fails late at the usual 1024.
FILES = 8192


class NotReady(RuntimeError):
    """What keeps two machines from serving, and what to do."""


@dataclass(frozen=True)
class Link:
    """The way to the other machine: this one's address, and its interface."""

    address: str
    interface: str


def interfaces() -> list[Link]:
    """Return the machine's IPv4 addresses, except loopback."""
    done = subprocess.run(["ip", "-brief", "-4", "address"], capture_output=True, text=True)
    found = []
    for name, _, *addresses in (line.split() for line in done.stdout.splitlines()):
        for address in addresses:
            own = address.partition("/")[0]
            if not ipaddress.ip_address(own).is_loopback:
                found.append(Link(own, name.partition("@")[0]))
    return found


def link_to(peer: str) -> Link:
    """Return the link by which this machine reaches another one.

    Raises:
        NotReady: it does not.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing, and asks the routing table
            own = probe.getsockname()[0]
    except OSError as error:
        raise NotReady(f"no way to {peer} ({error.strerror}): is the cable's network up?") from None
    found = [link for link in interfaces() if link.address == own]
    if not found:
        raise NotReady(
            f"{own}, the way to {peer}, is of no interface: not another machine's address"
        )
    return found[0]


def own_link(address: str) -> Link:
    """Return the interface with this address of ours; without an address, the only interface.

    Raises:
        NotReady: there is none, or none was named of several.
    """
    found = [link for link in interfaces() if address in ("", link.address)]
    known = ", ".join(f"{link.address} ({link.interface})" for link in interfaces()) or "none"
    if len(found) != 1:
        what = f"{address} is not this machine's" if address else "which network joins them?"
        raise NotReady(f"{what}: name one of its addresses: {known}")
    return found[0]


def digest_of_packages(prefix: Path = Path(sys.prefix)) -> str:
    """Return one hash of all conda packages of an environment, as a lock has them.

    Raises:
        NotReady: it has none, so that two machines could not be compared.
    """
    names = sorted(f"{p.name} {p.version} {p.build} {p.sha256}" for p in host.packages(prefix))
    if not names:
        raise NotReady(f"{prefix} is not a conda environment: run it in the environment `cluster`")
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def raise_limit() -> None:
    """Raise the limit of open files to what Ray needs.

    Raises:
        NotReady: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        raise NotReady(
            f"at most {hard} open files, and a cluster wants {FILES}: add "
            f"`* hard nofile {FILES}` to /etc/security/limits.conf and log in again"
        )
    if soft != resource.RLIM_INFINITY and soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
