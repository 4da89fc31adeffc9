# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on two machines: `strix-validate cluster head | worker ADDRESS | serve MODEL`.

Ray joins the machines, and each says in a label which packages it has: two that differ would fail
in the middle of a start, or compute with different kernels.
"""

import hashlib
import ipaddress
import os
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from strix_validate.doctor import host

#: Of Ray's head. Its other processes, RCCL and gloo choose theirs: a firewall must trust the link.
PORT = 6379
#: Open files: Ray's processes hold sockets to each other, and it fails late at the usual 1024.
FILES = 8192
LABEL = "strix-packages"
_JOIN = "pixi run -e cluster worker"
app = typer.Typer(no_args_is_help=True, help="Serve a model on two machines with vLLM and Ray.")


class NotReady(RuntimeError):
    """What keeps two machines from serving, and what to do."""


@dataclass(frozen=True)
class Link:
    """The way to the other machine: this one's address, and its interface."""

    address: str
    interface: str


def interfaces() -> list[Link]:
    """The machine's IPv4 addresses, but for loopback."""
    done = subprocess.run(["ip", "-brief", "-4", "address"], capture_output=True, text=True)
    found = []
    for name, _, *addresses in (line.split() for line in done.stdout.splitlines()):
        for address in addresses:
            own = address.partition("/")[0]
            if not ipaddress.ip_address(own).is_loopback:
                found.append(Link(own, name.partition("@")[0]))
    return found


def link_to(peer: str) -> Link:
    """How this machine reaches another one.

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
    """The interface with this address of ours; without one, the only interface.

    Raises:
        NotReady: there is none, or none was named of several.
    """
    found = [link for link in interfaces() if address in ("", link.address)]
    known = ", ".join(f"{link.address} ({link.interface})" for link in interfaces()) or "none"
    if len(found) != 1:
        what = f"{address} is not this machine's" if address else "which network joins them?"
        raise NotReady(f"{what}: name one of its addresses: {known}")
    return found[0]


def packages(prefix: Path = Path(sys.prefix)) -> str:
    """One hash of all conda packages of an environment, as a lock has them."""
    names = sorted(f"{p.name} {p.version} {p.build} {p.sha256}" for p in host.packages(prefix))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def environment(link: Link) -> dict[str, str]:
    """What vLLM, gloo and RCCL must know of the link: sockets, no InfiniBand."""
    return {
        "VLLM_HOST_IP": link.address,
        "NCCL_SOCKET_IFNAME": link.interface,
        "GLOO_SOCKET_IFNAME": link.interface,
        "NCCL_IB_DISABLE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def raise_limit() -> None:
    """Open files as Ray wants them.

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


def check_port(peer: str, port: int = PORT, seconds: float = 5) -> None:
    """Whether the head answers.

    Raises:
        NotReady: it does not; why, as far as can be told.
    """
    try:
        socket.create_connection((peer, port), seconds).close()
    except ConnectionRefusedError:
        raise NotReady(f"{peer} answers, and no head runs there: start `head` first") from None
    except OSError as error:
        raise NotReady(
            f"{peer}:{port} does not answer ({error}): trust the interface on both, as by "
            f"firewall-cmd --zone=trusted --change-interface={link_to(peer).interface}"
        ) from None


def ray_command(link: Link, peer: str, more: list[str]) -> list[str]:
    """Ray's command line; peer: the head's address, empty on the head itself."""
    begin = [f"--address={peer}:{PORT}"] if peer else [
        "--head", f"--port={PORT}", "--include-dashboard=false"
    ]  # fmt: skip
    return [
        str(Path(sys.executable).with_name("ray")), "start", "--block", *begin,
        f"--node-ip-address={link.address}", "--num-gpus=1", f"--labels={LABEL}={packages()}",
        "--disable-usage-stats", *more,
    ]  # fmt: skip


def compare(nodes: list[dict], wanted: int, own: str) -> None:
    """Whether as many machines have joined as are wanted, and all have our packages.

    Raises:
        NotReady: one is missing, or has others.
    """
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    known = ", ".join(sorted(node["NodeManagerAddress"] for node in alive)) or "none"
    if len(alive) < wanted:
        raise NotReady(
            f"{len(alive)} of {wanted} machines have joined ({known}): on the other one, run "
            f"`{_JOIN} {own}`"
        )
    labels = {node["NodeManagerAddress"]: node.get("Labels", {}).get(LABEL) for node in alive}
    if len(set(labels.values())) > 1:
        said = ", ".join(f"{address} {label}" for address, label in sorted(labels.items()))
        raise NotReady(
            f"the machines have different packages ({said}): copy pixi.lock from one to the other, "
            f"pixi install there, and start its worker again"
        )


def _run(link: Link, command: list[str]) -> None:
    os.environ.update(environment(link))
    typer.echo(f"{link.interface}, {link.address}: {' '.join(command)}", err=True)
    os.execv(command[0], command)


def _refuse(reason: NotReady) -> typer.Exit:
    typer.echo(str(reason), err=True)
    return typer.Exit(1)


_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_ANY)
def head(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(metavar="IP", help="This machine's address on the cable.")
    ] = "",
) -> None:
    """Start the cluster here, and stay until Ctrl-C. What follows is for `ray start`."""
    try:
        link = own_link(address)
        raise_limit()
        command = ray_command(link, "", context.args)
    except NotReady as reason:
        raise _refuse(reason) from reason
    typer.echo(f"on the other machine: {_JOIN} {link.address}", err=True)
    _run(link, command)


@app.command(context_settings=_ANY)
def worker(
    context: typer.Context,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="The head's.")],
) -> None:
    """Join the head at ADDRESS, and stay until Ctrl-C. What follows is for `ray start`."""
    try:
        link = link_to(address)
        raise_limit()
        check_port(address)
        command = ray_command(link, address, context.args)
    except NotReady as reason:
        raise _refuse(reason) from reason
    _run(link, command)


@app.command(context_settings=_ANY)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name or a folder on both.")],
    address: Annotated[
        str, typer.Option(metavar="IP", help="The head's, which is this machine's.")
    ] = "",
    machines: Annotated[int, typer.Option(min=1, help="How many must have joined.")] = 2,
) -> None:
    """Serve MODEL on all machines, from the head. What follows is for `vllm serve`.

    Each machine has a part of the layers, which talks once a token; with --tensor-parallel-size 2
    each has a part of every layer, which talks twice a layer.
    """
    try:
        link = own_link(address)
        check_port(link.address)
        compare(_nodes(link), machines, link.address)
    except NotReady as reason:
        raise _refuse(reason) from reason
    split = [] if any("parallel-size" in option for option in context.args) else [
        f"--pipeline-parallel-size={machines}"
    ]  # fmt: skip
    os.environ["RAY_ADDRESS"] = f"{link.address}:{PORT}"
    program = str(Path(sys.executable).with_name("vllm"))
    _run(
        link, [program, "serve", model, "--distributed-executor-backend=ray", *split, *context.args]
    )


def _nodes(link: Link) -> list[dict]:
    try:
        import ray
    except ModuleNotFoundError:
        raise NotReady("ray is not installed: run this in the environment `cluster`") from None
    ray.init(
        f"{link.address}:{PORT}", _node_ip_address=link.address, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    nodes = ray.nodes()
    ray.shutdown()
    return nodes
