# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on two machines: `strix-validate cluster head | worker ADDRESS | serve MODEL`.

Ray joins the machines, and each says in a label which packages it has: two that differ would fail
in the middle of a start, or compute with different kernels.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from strix_validate.doctor.cluster_machine import (
    Link,
    NotReady,
    digest_of_packages,
    link_to,
    own_link,
    raise_limit,
)

#: Of Ray's head. Its other processes, RCCL and gloo choose theirs: a firewall must trust the link.
PORT = 6379
LABEL = "strix-packages"
_JOIN = "pixi run -e cluster worker"
app = typer.Typer(no_args_is_help=True, help="Serve a model on two machines with vLLM and Ray.")


def network_variables(link: Link) -> dict[str, str]:
    """Return what vLLM, gloo and RCCL must know of the link: sockets, no InfiniBand."""
    return {
        "VLLM_HOST_IP": link.address,
        "NCCL_SOCKET_IFNAME": link.interface,
        "GLOO_SOCKET_IFNAME": link.interface,
        "NCCL_IB_DISABLE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def check_port(peer: str, port: int = PORT, seconds: float = 5) -> None:
    """Connect to the head's port, to see that the head answers.

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
    """Return Ray's command line; peer: the head's address, empty on the head itself."""
    begin = [f"--address={peer}:{PORT}"] if peer else [
        "--head", f"--port={PORT}", "--include-dashboard=false"
    ]  # fmt: skip
    return [
        str(Path(sys.executable).with_name("ray")), "start", "--block", *begin,
        f"--node-ip-address={link.address}", "--num-gpus=1",
        f"--labels={LABEL}={digest_of_packages()}", "--disable-usage-stats", *more,
    ]  # fmt: skip


def require_alike(nodes: list[dict], wanted: int, own: str) -> None:
    """Require that as many machines have joined as are wanted, and that all have our packages.

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
    if not (program := Path(command[0])).exists():
        why = f"{program.name} is not installed in {sys.prefix}"
        raise NotReady(f"{why}: run this in the environment `cluster`")
    os.environ.update(network_variables(link))
    typer.echo(f"{link.interface}, {link.address}: {' '.join(command)}", err=True)
    os.execv(command[0], command)


@contextlib.contextmanager
def _ready() -> Iterator[None]:
    """End the command with the reason of NotReady."""
    try:
        yield
    except NotReady as reason:
        typer.echo(str(reason), err=True)
        raise typer.Exit(1) from reason


_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_ANY)
def head(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(metavar="IP", help="This machine's address on the cable.")
    ] = "",
) -> None:
    """Start the cluster here, and stay until Ctrl-C. What follows is for `ray start`."""
    with _ready():
        link = own_link(address)
        raise_limit()
        command = ray_command(link, "", context.args)
        typer.echo(f"on the other machine: {_JOIN} {link.address}", err=True)
        _run(link, command)


@app.command(context_settings=_ANY)
def worker(
    context: typer.Context,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="The head's.")],
) -> None:
    """Join the head at ADDRESS, and stay until Ctrl-C. What follows is for `ray start`."""
    with _ready():
        link = link_to(address)
        raise_limit()
        check_port(address)
        _run(link, ray_command(link, address, context.args))


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
    with _ready():
        link = own_link(address)
        check_port(link.address)
        require_alike(_nodes(link), machines, link.address)
        split = [] if any("parallel-size" in option for option in context.args) else [
            f"--pipeline-parallel-size={machines}"
        ]  # fmt: skip
        os.environ["RAY_ADDRESS"] = f"{link.address}:{PORT}"
        program = str(Path(sys.executable).with_name("vllm"))
        ray = ["--distributed-executor-backend=ray", *split, *context.args]
        _run(link, [program, "serve", model, *ray])


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
