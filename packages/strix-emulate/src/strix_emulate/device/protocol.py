# SPDX-License-Identifier: BSD-3-Clause
"""The messages between the stand-in runtime and the server. hip/protocol.h has the same numbers.

A request is a header and bytes, and so is its reply. Integers are little-endian. Places in memory
are offsets in the pool, which is the memory that both sides map. Only the place of a variable is an
offset in its module's image. The server checks all values that a client sends.
"""

import struct
from enum import IntEnum

import numpy as np

VERSION = 5
#: Address of the pool in the client.
BASE = 0x2000_0000_0000
#: Offsets in the pool: of a launch's data, and of the allocations.
LAUNCH = 1 << 20
HEAP = 2 << 20
#: Offset in the pool of the table of allocations.
HEADER = 64
#: Offset in the pool of the table of views. A view is a part of the pool that has another address,
#: too: pinned memory of the host, or virtual memory.
VIEWS = LAUNCH + (768 << 10)
#: Bytes of address space after the pool, for memory of other processes' pools.
ROOM = 1 << 40
#: Maximum bytes of a request. rocBLAS's largest code object is smaller.
REQUEST_LIMIT = 1 << 30

REQUEST = struct.Struct("<2IQ")
REPLY = struct.Struct("<2IQ")
HELLO = struct.Struct("<2I")
LOADED = struct.Struct("<2IQ")
PLACE = struct.Struct("<2IQ")
ORIGIN = struct.Struct("<2I")
MODULE = struct.Struct("<2I")
FUNCTION = struct.Struct("<8I")
ARGUMENT = struct.Struct("<2I")
IMPORTED = struct.Struct("<3Q")
SYMBOL = struct.Struct("<2Q")
LAUNCHED = struct.Struct("<11I")
VIEW = np.dtype(
    [
        ("address", "<u8"),
        ("size", "<u8"),
        ("offset", "<u8"),
        ("access", "<u4"),
        ("unused", "<u4"),
    ]
)
ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u8"),
        ("kind", "<u4"),
        ("device", "<u2"),
        ("memory_pool", "<u2"),
        ("flags", "<u4"),
        ("unused", "<u4"),
    ]
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
    """Kinds of allocations."""

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
    """A request that is answered with an error. The client prints the message, if it has one.

    Attributes:
        status: The error that the client's call returns.
        lasting: Whether every later call of the client fails too. This is so for traps, for code
            that the emulator does not support, and for failures of the emulator, so that no program
            continues with missing results.
    """

    def __init__(
        self,
        status: Status,
        message: str,
        lasting: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.lasting = lasting


def unpack(form: struct.Struct, data: bytes) -> tuple:
    """Return the fields at the start of a request.

    Raises:
        Refused: The request is too short.
    """
    if len(data) < form.size:
        raise Refused(Status.INVALID_VALUE, f"a request of {len(data)} bytes is cut off")
    return form.unpack_from(data)


def reply(status: Status, data: bytes, lasting: bool = False) -> bytes:
    """Return the bytes of a reply."""
    return REPLY.pack(status, lasting, len(data)) + data
