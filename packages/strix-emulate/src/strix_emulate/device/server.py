# SPDX-License-Identifier: BSD-3-Clause
"""The server process, which executes kernels. It serves one client until one of the two ends.

Usage: python -m strix_emulate.device.server SOCKET POOL

SOCKET and POOL are the file descriptors of the connection to the client and of the shared memory.
"""

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from strix_emulate import launches
from strix_emulate.code import bundles, hidden, llvm, loader
from strix_emulate.code.kernel import Kernel
from strix_emulate.code.target import DEFAULT, Target, find_target
from strix_emulate.device import launcher, protocol
from strix_emulate.device.hostcall import HEAP, START, Heap, Hostcalls
from strix_emulate.device.pool import DeviceMemory, Pool
from strix_emulate.device.protocol import BASE, LAUNCH, Operation, Refused, Status, unpack
from strix_emulate.device.report import Tally, is_of_headers, is_upstream
from strix_emulate.errors import EmulatorError, LoadError, Trap, Unsupported
from strix_emulate.memory.findings import CHECKS, parse
from strix_emulate.run.machine import Machine
from strix_emulate.run.options import Options, Outcome
from strix_emulate.run.program import Program
from strix_emulate.statistics import occupancy

#: Checks whose findings end a launch only with the option `strict`. A program's own kernels may
#: contain code from ROCm's headers that has such findings. "stale": grid.sync() empties the caches
#: before its barrier and not after it. "uninitialised": rocPRIM's block_scan reads padding in the
#: LDS that no store wrote, but does not use the value. (An unwritten value is NaN, so its use in a
#: kernel shows in the results.)
_WARN_ONLY = frozenset({"stale", "uninitialised"})
#: Offsets of the dispatch packet and of the queue in the pool.
_PACKET = LAUNCH + (1 << 19)
_QUEUE = _PACKET + 4096
#: Maximum bytes of arguments. In the pool, the buffer of hostcalls follows the arguments.
_MAX_ARGUMENT_BYTES = START - LAUNCH
_SLAB = 2 << 20


@dataclass
class _Module:
    """A loaded code object.

    Attributes:
        contents: Its kernels, variables and image.
        lenient: Whether findings in its kernels do not end a launch.
        offset: Offset of its image in the pool, or 0 before it is placed.
    """

    contents: loader.Module
    lenient: bool
    offset: int = 0


@dataclass
class _Function:
    kernel: Kernel
    module: _Module

    @cached_property
    def program(self) -> Program:
        """The decoded kernel. It is decoded before its first launch."""
        return Program.from_kernel(self.kernel)


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the device.

    Attributes:
        disabled_checks: Checks that are not made.
        budget: Wave-instructions before a launch counts as hung, or 0 for the default.
        seconds: Seconds of wall-clock time before a launch counts as hung, or 0 for the default.
        cores: Maximum number of processor cores of a launch.
        log: Print a line for each launch.
        strict: Every finding ends a launch. Otherwise, findings in upstream libraries and headers,
            and those of _WARN_ONLY, are only noted.
        target: The GPU that is emulated.
    """

    disabled_checks: frozenset[str] = frozenset()
    budget: int = 0
    seconds: float = 0
    cores: int = 1
    log: bool = False
    strict: bool = False
    target: Target = DEFAULT

    @staticmethod
    def from_environment() -> "ServerOptions":
        """Read the settings from the variables that launcher.py sets.

        Raises:
            ValueError: A variable is not a number.
            EmulatorError: There is no such check or target.
        """
        variables = os.environ
        return ServerOptions(
            disabled_checks=parse(variables.get(launcher.NO_CHECKS_VARIABLE, "")),
            budget=int(variables.get(launcher.BUDGET_VARIABLE) or 0),
            seconds=float(variables.get(launcher.SECONDS_VARIABLE) or 0),
            cores=int(variables.get(launcher.CORES_VARIABLE) or 1),
            log=variables.get(launcher.LOG_VARIABLE, "0") != "0",
            strict=variables.get(launcher.STRICT_VARIABLE, "0") != "0",
            target=find_target(variables.get(launcher.TARGET_VARIABLE) or DEFAULT.name),
        )


@dataclass(frozen=True)
class _Request:
    """The client's request for a launch.

    Attributes:
        function: Number of the kernel.
        grid: Workgroups as (x, y, z).
        block: Threads of a workgroup as (x, y, z).
        lds: Bytes of LDS on top of the kernel's own.
        cooperative: Whether workgroups may wait for each other.
        stack: Bytes of a lane's stack.
        heap: Size of malloc's heap in pages of 4 KiB.
        arguments: Bytes of the kernel's arguments.
    """

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    lds: int
    cooperative: int
    stack: int
    heap: int
    arguments: bytes

    @staticmethod
    def unpack(data: bytes) -> "_Request":
        number, *sizes, lds, cooperative, stack, heap = unpack(protocol.LAUNCHED, data)
        grid = tuple(sizes[:3])
        block = tuple(sizes[3:])
        arguments = data[protocol.LAUNCHED.size :]
        return _Request(
            number,
            grid,
            block,
            lds,
            cooperative,
            stack,
            heap,
            arguments,
        )

    @property
    def groups(self) -> int:
        """Number of workgroups."""
        return math.prod(map(int, self.grid))

    @property
    def threads(self) -> int:
        """Number of threads of a workgroup."""
        return math.prod(map(int, self.block))


class Server:
    """Answers the requests of one client."""

    def __init__(self, pool: Pool, options: ServerOptions) -> None:
        self.pool = pool
        self.log = options.log
        self.strict = options.strict
        self.target = options.target
        self.options = Options(
            checks=options.disabled_checks != set(CHECKS),
            disabled_checks=options.disabled_checks,
            budget=options.budget or Options.budget,
            cores=options.cores,
            seconds=options.seconds or Options.seconds,
        )
        self.tally = Tally(options.disabled_checks)
        self.modules: dict[int, _Module] = {}
        self.functions: dict[int, _Function] = {}
        self.heap: Heap | None = None
        self._last_number = 0
        self._handlers = {
            Operation.LOAD: self.load,
            Operation.PLACE: self.place,
            Operation.UNLOAD: self.unload,
            Operation.FUNCTION: self.function,
            Operation.SYMBOL: self.symbol,
            Operation.LAUNCH: self.launch,
            Operation.IMPORT: self.add_memory,
            Operation.KERNELS: self.kernels,
        }

    def handle(self, operation: int, data: bytes) -> bytes:
        """Return the bytes of the reply to a request.

        Raises:
            Refused: The request fails.
        """
        if operation not in self._handlers:
            raise Refused(Status.INVALID_VALUE, f"no request has the number {operation}")
        try:
            return self._handlers[Operation(operation)](data)
        except Trap as trap:
            status = Status.ILLEGAL_ADDRESS
            if trap.kind == "abort":
                status = Status.LAUNCH_FAILURE
            raise Refused(status, f"trap in {trap}", lasting=True) from trap
        except Unsupported as error:
            raise Refused(
                Status.NOT_SUPPORTED,
                f"{error}; all later calls fail",
                lasting=True,
            ) from error
        except LoadError as error:
            raise Refused(Status.INVALID_IMAGE, str(error)) from error
        except EmulatorError as error:
            raise Refused(Status.INVALID_CONFIGURATION, str(error)) from error
        except MemoryError as error:
            message = "the emulator is out of memory"
            raise Refused(
                Status.OUT_OF_MEMORY,
                message,
                lasting=True,
            ) from error

    def load(self, data: bytes) -> bytes:
        """Load a code object, or the first one for the GPU in a bundle.

        Return its number and the size of its image.
        """
        size, _ = unpack(protocol.ORIGIN, data)
        start = protocol.ORIGIN.size + size
        origin = data[protocol.ORIGIN.size : start].decode(errors="replace")
        data = data[start:]
        if data[:4] == b"CCOB" or data.startswith(bundles.BUNDLE):
            try:
                data = bundles.unbundle(data, "module", self.target)[0][1]
            except LoadError as error:
                raise Refused(Status.NO_BINARY, str(error)) from error
        number = self._next_number()
        lenient = not self.strict and is_upstream(origin)
        module = loader.parse_module(data, "module")
        for kernel in module.kernels.values():
            if kernel.target != self.target:
                raise LoadError(
                    f"module: made for another GPU ({kernel.target.name}), the device is a "
                    f"{self.target.name}"
                )
        self.modules[number] = _Module(module, lenient)
        return protocol.LOADED.pack(number, 0, len(module.image.data))

    def place(self, data: bytes) -> bytes:
        """Copy a loaded module to its address, and relocate its pointers."""
        number, _, offset = unpack(protocol.PLACE, data)
        module = self._module(number)
        image = module.contents.image
        raw = self.pool.image(offset, len(image.data))
        raw[:] = np.frombuffer(image.data, np.uint8)
        for at in image.pointers:
            pointer = int.from_bytes(image.data[at : at + 8], "little") + BASE + offset
            relocated = (pointer % (1 << 64)).to_bytes(8, "little")
            raw[at : at + 8] = np.frombuffer(relocated, np.uint8)
        module.offset = offset
        return b""

    def unload(self, data: bytes) -> bytes:
        """Forget a module and its functions."""
        number, _ = unpack(protocol.MODULE, data)
        module = self._module(number)
        del self.modules[number]
        self.functions = {n: f for n, f in self.functions.items() if f.module is not module}
        return b""

    def function(self, data: bytes) -> bytes:
        """Find a kernel by name. Return its number, and the properties that a launch needs."""
        module, name = self._module_and_name(data)
        kernel = module.contents.kernels.get(name)
        if kernel is None:
            if name in module.contents.refused:
                raise Unsupported(module.contents.refused[name])
            # The runtime searches one module after the other. With an empty message, it prints
            # nothing.
            raise Refused(Status.NOT_FOUND, "")
        number = self._next_number()
        self.functions[number] = _Function(kernel, module)
        declared = [a for a in kernel.arguments if not a.kind.startswith("hidden")]
        waves = occupancy(
            self.target,
            kernel.vgprs,
            0,
            kernel.max_threads,
            kernel.width,
        )
        facts = protocol.FUNCTION.pack(
            number,
            kernel.kernarg,
            kernel.lds,
            kernel.scratch,
            kernel.max_threads,
            kernel.vgprs,
            waves["registers"],
            len(declared),
        )
        return facts + b"".join(protocol.ARGUMENT.pack(a.offset, a.size) for a in declared)

    def kernels(self, data: bytes) -> bytes:
        """Return the names of a module's supported kernels, each followed by a zero byte."""
        number, _ = unpack(protocol.MODULE, data)
        names = sorted(self._module(number).contents.kernels)
        return b"".join(name.encode() + b"\0" for name in names)

    def symbol(self, data: bytes) -> bytes:
        """Return the offset of a variable in its module's image, and its size."""
        module, name = self._module_and_name(data)
        variable = module.contents.variables.get(name)
        if variable is None:
            raise Refused(Status.NOT_FOUND, "")
        return protocol.SYMBOL.pack(*variable)

    def launch(self, data: bytes) -> bytes:
        """Execute a kernel. Return the text that it printed to standard output."""
        request = _Request.unpack(data)
        function = self.functions.get(request.function)
        if function is None or not function.module.offset:
            message = f"no kernel of a placed module has the number {request.function}"
            raise Refused(Status.INVALID_VALUE, message)
        kernel = function.kernel.with_stack(min(request.stack, self.target.stack))
        options = self._launch_options(kernel, function.module, request)
        has_heap = _has_argument(kernel, "hidden_heap_v1") and self._make_heap(request.heap)
        hostcalls = Hostcalls(self.pool.views[8], self.heap)
        pointers = {"hidden_hostcall_buffer": hostcalls.address}
        if has_heap:
            pointers["hidden_heap_v1"] = BASE + HEAP
        if request.cooperative:
            threads = request.groups * request.threads
            pointers["hidden_multigrid_sync_arg"] = hostcalls.grid(request.groups, threads)
        self._write_arguments(kernel, request, pointers)
        program = function.program
        memory = DeviceMemory(
            self.pool,
            program.cell,
            options.checks,
            program.whole_words,
        )
        machine = Machine(
            kernel,
            program,
            memory,
            options,
            lds=kernel.lds + request.lds,
            code=BASE + function.module.offset + (kernel.image.entry if kernel.image else 0),
            packet=BASE + _PACKET,
            queue=BASE + _QUEUE,
        )
        if _has_argument(kernel, "hidden_hostcall_buffer"):
            machine.service = hostcalls.serve
        started = time.process_time()
        try:
            outcome = machine.run(BASE + LAUNCH, request.grid, request.block)
        except Trap:
            # The reply is an error, so it cannot contain the text that the kernel has printed.
            sys.stderr.buffer.write(hostcalls.text)
            raise
        self.tally.add(kernel.name, outcome.notes)
        if self.log:
            seconds = time.process_time() - started + outcome.seconds
            _print_launch(kernel, request, outcome, seconds)
        return hostcalls.text

    def _launch_options(
        self,
        kernel: Kernel,
        module: _Module,
        request: _Request,
    ) -> Options:
        """Return the options of a launch.

        Raises:
            EmulatorError: The GPU cannot execute a launch of that size.
            Refused: The launch is cooperative and has too many waves.
        """
        threads = request.threads
        if min(request.grid) < 1 or not 1 <= threads <= kernel.max_threads:
            raise EmulatorError(
                f"{kernel.name}: grid {request.grid} with {request.block} threads cannot be "
                "launched: each size must be at least 1, and a workgroup can have at most "
                f"{kernel.max_threads} threads"
            )
        if not launches.fits_packet(request.grid, request.block):
            raise EmulatorError(
                f"{kernel.name}: grid {request.grid} with {request.block} threads cannot be "
                "launched: a dimension can have at most 2**32 - 1 threads"
            )
        lds = kernel.lds + request.lds
        if lds > self.target.lds:
            raise EmulatorError(
                f"{kernel.name}: {lds} bytes of LDS, but a workgroup can have at most "
                f"{self.target.lds}"
            )
        lenient = module.lenient
        warn_only = _WARN_ONLY
        if self.strict:
            warn_only = frozenset()
        elif is_of_headers(kernel.name):
            lenient = True
        options = replace(self.options, lenient=lenient, warn_only=warn_only)
        if not request.cooperative:
            return options
        waves = -(-threads // kernel.width) * request.groups
        if waves > self.target.resident:
            raise Refused(
                Status.COOPERATIVE_TOO_LARGE,
                f"{kernel.name}: a cooperative launch of {waves} waves, but the GPU holds "
                f"{self.target.resident}",
            )
        return replace(
            options,
            batch=self.target.resident,
            cores=1,
            cooperative=True,
        )

    def add_memory(self, data: bytes) -> bytes:
        """Map memory of another process at the offset at which the client maps it."""
        offset, size, start = unpack(protocol.IMPORTED, data)
        path = data[protocol.IMPORTED.size :].decode(errors="replace")
        self.pool.add(offset, size, path, start)
        return b""

    def _make_heap(self, pages: int) -> bool:
        """Make malloc's heap if there is none. Return False if the memory does not suffice.

        The first launch of a kernel that can call malloc sets the heap's size.
        """
        if self.heap is None:
            size = max(pages * 4096 // _SLAB, 1) * _SLAB
            start = self.pool.allocate(size, _SLAB)
            if start:
                self.heap = Heap(BASE + start, size)
        return self.heap is not None

    def _write_arguments(
        self,
        kernel: Kernel,
        request: _Request,
        pointers: dict[str, int],
    ) -> None:
        """Write arguments and dispatch packet into the pool."""
        explicit = request.arguments
        size = max(kernel.kernarg, len(explicit))
        if size > _MAX_ARGUMENT_BYTES:
            raise EmulatorError(
                f"{kernel.name}: more than {_MAX_ARGUMENT_BYTES} bytes of arguments"
            )
        raw = bytearray(max(size, 8))
        raw[: len(explicit)] = explicit
        hidden.write(raw, kernel, request.grid, request.block, pointers)
        lds = kernel.lds + request.lds
        packet = launches.make_packet(
            kernel,
            request.grid,
            request.block,
            lds,
            BASE + LAUNCH,
        )
        self._write(LAUNCH, np.frombuffer(bytes(raw), np.uint8))
        self._write(_PACKET, packet)

    def _write(self, offset: int, data: np.ndarray) -> None:
        self.pool.bytes[offset : offset + len(data)] = data

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _module(self, number: int) -> _Module:
        if number not in self.modules:
            raise Refused(Status.INVALID_VALUE, f"no module has the number {number}")
        return self.modules[number]

    def _module_and_name(self, data: bytes) -> tuple[_Module, str]:
        number, _ = unpack(protocol.MODULE, data)
        name = data[protocol.MODULE.size :].decode(errors="replace")
        return self._module(number), name


def _has_argument(kernel: Kernel, kind: str) -> bool:
    return any(argument.kind == kind for argument in kernel.arguments)


def _print_launch(
    kernel: Kernel,
    request: _Request,
    outcome: Outcome,
    seconds: float,
) -> None:
    print(
        f"strix-emulate: {kernel.name} grid {request.grid} block {request.block}: "
        f"{outcome.executed} wave-instructions, {seconds:.2f} CPU s, cores: {outcome.cores}",
        file=sys.stderr,
    )


def serve(connection: socket.socket, server: Server) -> int:
    """Answer requests until the client closes its end. Return the exit status.

    It is 0, or 1 after a request that is too large.
    """
    stream = connection.makefile("rb")
    hello = protocol.HELLO.pack(protocol.VERSION, 0)
    connection.sendall(protocol.reply(Status.SUCCESS, hello))
    while True:
        head = stream.read(protocol.REQUEST.size)
        if len(head) < protocol.REQUEST.size:
            return 0
        operation, _, size = protocol.REQUEST.unpack(head)
        if size > protocol.REQUEST_LIMIT:
            message = f"a request of {size} bytes, but at most {protocol.REQUEST_LIMIT} are allowed"
            connection.sendall(protocol.reply(Status.INVALID_VALUE, message.encode()))
            return 1
        data = stream.read(size)
        if len(data) < size:
            return 0
        connection.sendall(_answer(server, operation, data))


def _answer(server: Server, operation: int, data: bytes) -> bytes:
    try:
        return protocol.reply(Status.SUCCESS, server.handle(operation, data))
    except Refused as refusal:
        message = str(refusal).encode()
        return protocol.reply(refusal.status, message, refusal.lasting)
    except Exception as error:
        # The emulator has a bug. A damaged request may have revealed it.
        message = f"internal error ({type(error).__name__}: {error})".encode()
        return protocol.reply(Status.UNKNOWN, message, lasting=True)


def _exit_with_client(connection: socket.socket, server: Server) -> None:
    """End this process when the client closes its end, even in the middle of a kernel."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    server.tally.report()
    os._exit(0)


def main() -> int:
    """Serve the client. The two arguments are the file descriptors of connection and pool."""
    # The server ignores an interrupt from the terminal, because the client handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        pool = Pool(int(sys.argv[2]))
        server = Server(pool, ServerOptions.from_environment())
        # Without a suitable libLLVM, no kernel can be launched, so end with an error now.
        llvm.find_disassembler()
    except (Refused, ValueError, EmulatorError) as error:
        connection.sendall(protocol.reply(Status.UNKNOWN, str(error).encode()))
        return 1
    arguments = (connection, server)
    threading.Thread(
        target=_exit_with_client,
        args=arguments,
        daemon=True,
    ).start()
    try:
        status = serve(connection, server)
    except OSError:
        # The client closed its end during an answer.
        status = 0
    server.tally.report()
    return status


if __name__ == "__main__":
    sys.exit(main())
