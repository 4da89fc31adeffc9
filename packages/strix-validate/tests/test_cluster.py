# SPDX-License-Identifier: BSD-3-Clause
"""Two machines: what is refused with one message; Ray, and vLLM's executor, in two namespaces."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from calls import skip_without
from strix_validate import cluster
from strix_validate.doctor import cluster_machine
from strix_validate.doctor.cluster_machine import Link, NotReady
from typer.testing import CliRunner

NEAR = Link("10.77.0.1", "thunderbolt0")


def node(address: str, label: str, alive: bool = True, gpus: int = 1) -> dict:
    resources = {"GPU": gpus} if gpus else {}
    labels = {cluster.LABEL: label}
    return {
        "Alive": alive, "NodeManagerAddress": address, "Resources": resources, "Labels": labels,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "0 of 2 machines have joined (none)"),
        ([node("a", "1")], "1 of 2 machines have joined (a): on the other one, run"),
        ([node("a", "1"), node("b", "1", alive=False)], "worker 10.0.0.1"),
        ([node("a", "1"), node("b", "1", gpus=0)], "1 of 2"),
        ([node("a", "1"), node("b", "2")], "different packages (a 1, b 2)"),
        ([node("a", "1"), node("b", "1") | {"Labels": {}}], "different packages"),
    ],
)
def test_a_missing_or_other_machine_is_one_message(nodes: list[dict], words: str) -> None:
    with pytest.raises(NotReady) as reason:
        cluster.require_alike(nodes, 2, "10.0.0.1")
    assert words in str(reason.value) and "\n" not in str(reason.value)


def test_interface_must_be_named_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [NEAR, Link("192.168.0.2", "enp1s0")]
    monkeypatch.setattr(cluster_machine, "interfaces", lambda: both)
    assert cluster_machine.own_link("10.77.0.1") == NEAR
    with pytest.raises(NotReady, match=r"which network.*thunderbolt0.*enp1s0"):
        cluster_machine.own_link("")
    with pytest.raises(NotReady, match="is not this machine's"):
        cluster_machine.own_link("10.9.9.9")
    monkeypatch.setattr(cluster_machine, "interfaces", lambda: [NEAR])
    assert cluster_machine.own_link("") == NEAR


def test_the_way_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_machine, "interfaces", lambda: [NEAR, Link("127.0.0.1", "lo")])
    assert cluster_machine.link_to("127.0.0.1").interface == "lo"
    with pytest.raises(NotReady, match="no way to 255.255.255.255"):
        cluster_machine.link_to("255.255.255.255")


def test_machines_share_the_layers_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(cluster, "own_link", lambda _: NEAR)
    monkeypatch.setattr(cluster, "_nodes", lambda _: [node("a", "1"), node("b", "1")])
    monkeypatch.setattr(cluster, "check_port", lambda _: None)
    monkeypatch.setattr(cluster, "_run", lambda _, words: ran.append(words))
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "")
    for option in ([], ["--tensor-parallel-size=2"]):
        assert CliRunner().invoke(cluster.app, ["serve", "MODEL", *option]).exit_code == 0
    backend = "--distributed-executor-backend=ray"
    assert [words[2:] for words in ran] == [
        ["MODEL", backend, "--pipeline-parallel-size=2"],
        ["MODEL", backend, "--tensor-parallel-size=2"],
    ]


def test_limits_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    set_: list[tuple] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 10**6))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: set_.append(pair))
    cluster_machine.raise_limit()
    assert set_ == [(cluster_machine.FILES, 10**6)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(NotReady, match="start `head` first"):
            cluster.check_port("127.0.0.1", free.getsockname()[1])
        free.listen()
        cluster.check_port("127.0.0.1", free.getsockname()[1])


def test_a_firewall_that_drops_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(cluster, "link_to", lambda peer: NEAR)
    with pytest.raises(NotReady, match=r"6379 does not answer.*change-interface=thunderbolt0"):
        cluster.check_port("10.77.0.2")


def test_sockets_of_the_link_and_a_label() -> None:
    said = cluster.network_variables(NEAR)
    assert said["NCCL_SOCKET_IFNAME"] == said["GLOO_SOCKET_IFNAME"] == "thunderbolt0"
    assert (said["NCCL_IB_DISABLE"], said["VLLM_HOST_IP"]) == ("1", "10.77.0.1")
    first = cluster.ray_command(NEAR, "", [])
    second = cluster.ray_command(NEAR, "10.77.0.2", ["--num-cpus=2"])
    assert "--head" in first and "--address=10.77.0.2:6379" in second
    assert second[-1] == "--num-cpus=2"
    assert f"--labels={cluster.LABEL}={cluster_machine.digest_of_packages()}" in first


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, each with the end of a cable that has its name, and no other one."""
    names = [f"sx{os.getpid() % 10**6}{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for number, name in enumerate(names, 1):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def ends() -> Iterator[list[str]]:
    if not find_spec("ray"):
        pytest.skip("ray is not installed")
    try:
        with namespaces() as names:
            yield names
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need root and iproute2")


def command(name: str, *words: str) -> list[str]:
    inside = ["ip", "netns", "exec", name]
    return [*inside, sys.executable, "-m", "strix_validate.cli", "cluster", *words]


@contextmanager
def running(name: str, *words: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        command(name, *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def options() -> Iterator[list[list[str]]]:
    """Of `head` and of `worker`: little of the machine, and a folder whose name is short."""
    folders = [f"/tmp/sx{os.getpid()}{end}" for end in "ab"]
    small = ["--num-cpus=1", "--object-store-memory=100000000"]
    yield [[*small, f"--temp-dir={folder}"] for folder in folders]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def test_two_namespaces_are_two_machines(ends: list[str], options: list[list[str]]) -> None:
    refused = subprocess.run(
        command(ends[1], "worker", "10.77.0.1"), capture_output=True, text=True, timeout=600
    )
    assert refused.returncode == 1 and "start `head` first" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    with running(ends[0], "head", *options[0]):
        lines = wait(ends[0], "1 of 2 machines")
        assert lines == [lines[0]] and "worker 10.77.0.1" in lines[0]
        with running(ends[1], "worker", "10.77.0.1", *options[1]):
            # the machines are ready: what follows is vLLM's, which this environment has not
            wait(ends[0], "vllm serve MODEL --distributed-executor-backend=ray")
        wait(ends[0], "1 of 2 machines")


@pytest.mark.skipif(not os.environ.get("VLLM_SOURCE"), reason="VLLM_SOURCE is not set")
@skip_without("transformers", "compressed_tensors", "xgrammar")
def test_vllms_executor_starts_and_stops_on_both(
    ends: list[str], options: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, source = Path(__file__).parent, os.environ["VLLM_SOURCE"]
    paths = [str(here), source, os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    script = [sys.executable, str(here / "two_machines.py"), source]
    config = str(here / "configs" / "Llama-3.1-8B.json")
    with running(ends[0], "head", *options[0]):
        wait(ends[0], "1 of 2 machines")
        with running(ends[1], "worker", "10.77.0.1", *options[1]):
            wait(ends[0], "vllm serve MODEL")
            found = subprocess.run(
                ["ip", "netns", "exec", ends[0], *script, config],
                capture_output=True, text=True, timeout=500, check=False,
                env=os.environ | cluster.network_variables(Link("10.77.0.1", ends[0]))
                | {"RAY_ADDRESS": f"10.77.0.1:{cluster.PORT}"},
            )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    said = json.loads(found.stdout.splitlines()[-1])
    assert said["executor"] == "RayExecutorV2"
    assert sorted(said["met"]) == [["10.77.0.1", 0, 3.0], ["10.77.0.2", 1, 3.0]]


def wait(name: str, words: str) -> list[str]:
    """What `serve` says, once it says these words."""
    said = ""
    for _ in range(300):
        said = subprocess.run(
            command(name, "serve", "MODEL"), capture_output=True, text=True, timeout=6000
        ).stderr
        if words in said:
            return said.splitlines()
        time.sleep(1)
    raise AssertionError(said)
