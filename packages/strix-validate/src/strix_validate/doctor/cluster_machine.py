# SPDX-License-Identifier: BSD-3-Clause
"""Read what decides whether a machine fits a cluster: network, open-file limit and packages."""

import hashlib
import ipaddress
import json
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path

from strix_validate.checks import CannotRun
from strix_validate.doctor import host

#: Number of open files that Ray needs, because its processes hold sockets to each other. With the
#: usual limit of 1024, Ray starts but fails later.
FILES = 8192


@dataclass(frozen=True)
class Link:
    """An IPv4 address of this machine, and the interface that has it."""

    address: str
    interface: str


def list_links() -> list[Link]:
    """Return the machine's IPv4 addresses, except loopback.

    Raises:
        CannotRun: The program ip is not installed.
    """
    try:
        process = subprocess.run(
            ["ip", "-json", "-4", "address"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        message = "this machine's addresses cannot be read, because the program ip is not installed"
        raise CannotRun(message) from error
    links = []
    for interface in json.loads(process.stdout or "[]"):
        # Some versions of ip print an empty object for an interface without an IPv4 address.
        for entry in interface.get("addr_info", ()):
            address = entry["local"]
            if not ipaddress.ip_address(address).is_loopback:
                links.append(Link(address, interface["ifname"]))
    return links


def hash_packages(prefix: Path) -> str:
    """Return one hash of the names, versions, builds and sha256 of an environment's packages."""
    lines = []
    for package in host.list_packages(prefix):
        lines.append(f"{package.name} {package.version} {package.build} {package.sha256}")
    lines.sort()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_file_limits() -> tuple[int, int]:
    """Return the soft and the hard limit of open files, with FILES for an infinite limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = FILES
    if hard == resource.RLIM_INFINITY:
        hard = FILES
    return soft, hard
