# SPDX-License-Identifier: BSD-3-Clause
"""What the stand-in runtime (hip/protocol.h has the same numbers) and the server say to each other.

A request is a header and bytes; so is its reply. Integers are little-endian, addresses are offsets
in the pool, the memory that both sides map. Nothing that a client sends is trusted.
"""

import struct
from enum import IntEnum

import numpy as np

VERSION = 4
#: Address of the pool in the client, where what a launch needs is kept in it, and allocations.
BASE, LAUNCH, HEAP = 0x2000_0000_0000, 1 << 20, 2 << 20
HEADER = 64
#: Bytes of a request, at most: a code object with everything that rocBLAS has in one file.
REQUEST_LIMIT = 1 << 30

REQUEST, REPLY = struct.Struct("<2IQ"), struct.Struct("<2IQ")
HELLO, LOADED, PLACE = struct.Struct("<2I"), struct.Struct("<2IQ"), struct.Struct("<2IQ")
ORIGIN = struct.Struct("<2I")
MODULE, FUNCTION, ARGUMENT = struct.Struct("<2I"), struct.Struct("<8I"), struct.Struct("<2I")
IMPORTED = struct.Struct("<3Q")
SYMBOL, LAUNCHED = struct.Struct("<2Q"), struct.Struct("<11I")
#: Bytes of the pool that stand at another address: pinned memory of the host, virtual memory.
VIEWS = LAUNCH + (768 << 10)
#: Behind the pool: what processes map of other processes' pools.
ROOM = 1 << 40
VIEW = np.dtype([("address", "<u8"), ("size", "<u8"), ("offset", "<u8"), ("access", "<u4"),
                 ("unused", "<u4")])  # fmt: skip
ENTRY = np.dtype(
    [("offset", "<u8"), ("size", "<u8"), ("kind", "<u4"), ("device", "<u2"), ("memory_pool", "<u2")]
)


class Operation(IntEnum):
    """Numbers of requests."""

    LOAD = 1
    PLACE = 2
    UNLOAD = 3
    FUNCTION = 4
    SYMBOL = 5
    LAUNCH = 6
    IMPORT = 7
    KERNELS = 8


class Kind(IntEnum):
    """What an allocation is."""

    DEVICE = 1
    HOST = 2
    MANAGED = 4
    IMAGE = 8
    PHYSICAL = 16
    REGISTERED = 32
    FOREIGN = 64
    GRAPH = 128


class Status(IntEnum):
    """hipError_t, with HIP's numbers."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_CONFIGURATION = 9
    INVALID_IMAGE = 200
    NO_BINARY = 209
    NOT_FOUND = 500
    ILLEGAL_ADDRESS = 700
    LAUNCH_FAILURE = 719
    COOPERATIVE_TOO_LARGE = 720
    NOT_SUPPORTED = 801
    UNKNOWN = 999


class Refused(Exception):
    """A request that is answered with an error: status, and the client's line on standard error.

    lasting: every later call of the client fails. So do all errors that a GPU would not give, so
    that nothing is computed with what was not done.
    """

    def __init__(self, status: Status, message: str, lasting: bool = False) -> None:
        super().__init__(message)
        self.status, self.lasting = status, lasting


def unpack(form: struct.Struct, data: bytes) -> tuple:
    """Return the fields at the start of the bytes. Raise Refused if there are too few."""
    if len(data) < form.size:
        raise Refused(Status.INVALID_VALUE, f"a request of {len(data)} bytes is cut off")
    return form.unpack_from(data)


def reply(status: Status, data: bytes, lasting: bool = False) -> bytes:
    """Return the bytes of a reply."""
    return REPLY.pack(status, lasting, len(data)) + data
