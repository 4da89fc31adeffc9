# SPDX-License-Identifier: BSD-3-Clause
"""The server of the emulated device answers broken and hostile clients with an error."""

import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from fixtures import code_object
from strix_emulate.code import llvm
from strix_emulate.device import protocol, report
from strix_emulate.device.protocol import Kind, Operation, Status

SIZE = 16 << 20
ADD_SEALS = 1033
SEAL_SHRINK = 2


def image(data: bytes) -> bytes:
    """Return the data of a request to load a code object, as if from a library without a name."""
    return protocol.ORIGIN.pack(0, 0) + data


@dataclass
class Client:
    process: subprocess.Popen
    socket: socket.socket
    pool: np.ndarray

    def receive(self) -> tuple[int, bytes]:
        head = self.socket.recv(protocol.REPLY.size, socket.MSG_WAITALL)
        status, _, size = protocol.REPLY.unpack(head)
        return status, self.socket.recv(size, socket.MSG_WAITALL)

    def request(self, operation: int, data: bytes = b"") -> tuple[int, bytes]:
        self.socket.sendall(protocol.REQUEST.pack(operation, 0, len(data)) + data)
        return self.receive()

    def table(self, *entries: tuple[int, int, int], count: int | None = None) -> None:
        """Write the table of allocations."""
        number = len(entries) if count is None else count
        self.pool[:16] = np.frombuffer(struct.pack("<2Q", SIZE, number), np.uint8)
        rows = np.array([(*entry, 0, 0, 0, 0) for entry in entries], protocol.ENTRY).view(np.uint8)
        self.pool[protocol.HEADER : protocol.HEADER + len(rows)] = rows

    def load(self) -> int:
        """Load and place the kernel `add`, and return its number."""
        status, data = self.request(Operation.LOAD, image(code_object()))
        assert status == Status.SUCCESS
        module, _, size = protocol.LOADED.unpack(data)
        self.table((protocol.HEAP, size, Kind.IMAGE))
        assert self.request(Operation.PLACE, protocol.PLACE.pack(module, 0, protocol.HEAP))[0] == 0
        status, data = self.request(Operation.FUNCTION, protocol.MODULE.pack(module, 0) + b"add")
        assert status == Status.SUCCESS
        return protocol.FUNCTION.unpack_from(data)[0]

    def finish(self) -> str:
        """Close the client's end, and return the server's standard error."""
        self.socket.close()
        text = self.process.communicate(timeout=600)[1]
        assert "Traceback" not in text
        return text


def start(sealed: bool = True, size: int = SIZE, **variables: str) -> Client:
    pool = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(pool, size)
    if sealed:
        fcntl.fcntl(pool, ADD_SEALS, SEAL_SHRINK)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "strix_emulate.device.server", str(theirs.fileno()), str(pool)],
        pass_fds=[theirs.fileno(), pool],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    theirs.close()
    memory = np.frombuffer(mmap.mmap(pool, size), np.uint8)
    os.close(pool)
    ours.settimeout(600)
    return Client(process, ours, memory)


def start_and_greet(**variables: str) -> Client:
    """Start a server, and receive its greeting."""
    client = start(**variables)
    assert client.receive() == (0, protocol.HELLO.pack(protocol.VERSION, 0))
    return client


@pytest.fixture(scope="module")
def client():
    """A server that all tests with this fixture share. At the end it must exit without an error."""
    new_client = start_and_greet()
    yield new_client
    assert new_client.finish() == ""
    assert new_client.process.returncode == 0


def launch(function: int, grid=(1, 1, 1), block=(128, 1, 1), lds=0, arguments=b"") -> bytes:
    return protocol.LAUNCHED.pack(function, *grid, *block, lds, 0, 0, 0) + arguments


def arrays(client: Client) -> tuple[list[np.ndarray], bytes]:
    """Return three arrays of 1000 floats, of which two have values, and the arguments of `add`."""
    end = protocol.HEADER + protocol.ENTRY.itemsize
    used = client.pool[protocol.HEADER : end].view(protocol.ENTRY)[0]
    first = (int(used["offset"]) + int(used["size"])) // 4096 * 4096 + 8192
    client.table(tuple(used)[:3], *((first + 8192 * i, 4000, Kind.DEVICE) for i in range(3)))
    places = [client.pool[first + 8192 * i :][:4000].view(np.float32) for i in range(3)]
    places[0][:] = np.arange(1000)
    places[1][:] = 1
    addresses = [protocol.BASE + first + 8192 * i for i in range(3)]
    return places, struct.pack("<3QI", *addresses, 1000)


def test_a_launch_on_two_cores() -> None:
    client = start_and_greet(STRIX_EMULATE_CORES="2", STRIX_EMULATE_LOG="1")
    function = client.load()
    places, arguments = arrays(client)
    request = launch(function, (8000, 1, 1), arguments=arguments)
    assert client.request(Operation.LAUNCH, request)[0] == 0
    assert (places[2] == np.arange(1000) + 1).all()
    assert "cores: 2" in client.finish()


#: A number that no module or kernel has, even if earlier tests have loaded a hundred of them.
UNUSED = 1 << 31
BROKEN = {
    "no such request": (77, b""),
    "cut off": (Operation.LAUNCH, b"123"),
    "empty code object": (Operation.LOAD, image(b"")),
    "no code object": (Operation.LOAD, image(b"\x7fELF" + bytes(range(200)))),
    "bundle that ends early": (Operation.LOAD, image(b"__CLANG_OFFLOAD_BUNDLE__\xff\xff\xff\xff")),
    "damaged compressed bundle": (Operation.LOAD, image(b"CCOB\x02\x00\x01\x00" + b"\xff" * 40)),
    "no such module": (Operation.FUNCTION, protocol.MODULE.pack(UNUSED, 0) + b"add"),
    "a name that is no text": (Operation.SYMBOL, protocol.MODULE.pack(UNUSED, 0) + b"\xff\xfe"),
    "place what is not there": (Operation.PLACE, protocol.PLACE.pack(9, 0, 1 << 63)),
    "unload what is not there": (Operation.UNLOAD, protocol.MODULE.pack(UNUSED, 0)),
    "kernels of no module": (Operation.KERNELS, protocol.MODULE.pack(UNUSED, 0)),
    "no such kernel": (Operation.LAUNCH, launch(UNUSED)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_requests_are_refused(client: Client, name: str) -> None:
    status, text = client.request(*BROKEN[name])
    assert status
    assert text
    assert b"internal" not in text
    client.load()  # the server still works


@pytest.mark.parametrize(
    "request_",
    [
        launch(0, grid=(0, 1, 1)),
        launch(0, block=(2**32 - 1,) * 3),
        launch(0, block=(0, 1, 1)),
        launch(0, lds=2**32 - 1),
        launch(0, arguments=bytes(1 << 17)),
    ],
    ids=["no workgroup", "many threads", "no thread", "much LDS", "many arguments"],
)
def test_launches_that_cannot_be(client: Client, request_: bytes) -> None:
    number = struct.pack("<I", client.load())
    status, text = client.request(Operation.LAUNCH, number + request_[4:])
    assert status == Status.INVALID_CONFIGURATION
    assert b"internal" not in text


@pytest.mark.parametrize(
    "entries",
    [
        [(0, 4096, 1)],
        [(protocol.HEAP, 2**64 - 1, 1)],
        [(protocol.HEAP + 8192, 4096, 1)] * 2,
        [(protocol.HEAP, 0, 1)],
        [(2**63, 4096, 1)],
        [(protocol.HEAP + 8192, 1, 1), (protocol.HEAP, 1, 1)],
    ],
)
def test_a_damaged_table_is_refused(client: Client, entries: list) -> None:
    function = client.load()
    client.table(*entries)
    status, text = client.request(Operation.LAUNCH, launch(function, arguments=bytes(32)))
    assert (status, text) == (Status.INVALID_VALUE, b"the table of allocations is damaged")
    client.table(count=2**63)
    assert b"entries" in client.request(Operation.LAUNCH, launch(function, arguments=bytes(32)))[1]


def test_a_full_table_of_views_is_read(client: Client) -> None:
    request = launch(client.load(), arguments=arrays(client)[1])
    count = (protocol.HEAP - protocol.VIEWS) // protocol.VIEW.itemsize
    views = np.zeros(count, protocol.VIEW)
    views["address"] = 4096 * np.arange(1, count + 1)
    views["offset"] = protocol.HEAP
    views["size"] = 1
    client.pool[protocol.VIEWS : protocol.HEAP] = views.view(np.uint8)
    number_of_views = client.pool[16:24].view(np.uint64)
    try:
        number_of_views[0] = count
        assert client.request(Operation.LAUNCH, request)[0] == Status.SUCCESS
        number_of_views[0] = count + 1
        message = f"the table of views has {count + 1} entries".encode()
        assert client.request(Operation.LAUNCH, request) == (Status.INVALID_VALUE, message)
    finally:
        number_of_views[0] = 0


def test_a_request_without_sense_ends_the_server() -> None:
    client = start_and_greet()
    client.socket.sendall(protocol.REQUEST.pack(1, 0, 2**60))
    status, text = client.receive()
    assert status
    assert b"at most" in text
    assert client.process.wait(600) == 1
    assert client.finish() == ""


def test_a_client_that_stops_in_the_middle() -> None:
    client = start_and_greet()
    client.socket.sendall(protocol.REQUEST.pack(1, 0, 1000) + b"half")
    assert client.finish() == ""
    assert client.process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sealed": False}, b"sealed"),
        ({"size": 4096}, b"sealed"),
        ({llvm.VARIABLE: "/absent"}, b"/absent"),
    ],
)
def test_a_server_that_cannot_start_gives_the_reason(arguments: dict, words: bytes) -> None:
    """A pool that could shrink or is too small is refused, and so is a missing libLLVM."""
    client = start(**arguments)
    status, text = client.receive()
    assert status
    assert words in text
    assert client.finish() == ""


def test_libraries_whose_findings_are_notes() -> None:
    for name in ("librocblas.so.5", "libggml-hip.so", "ggml/backends0/libggml-hip.so.0.9"):
        assert report.is_upstream(f"/usr/lib/{name}")
    assert not report.is_upstream("/usr/lib/libmine-ggml-hip.so")
