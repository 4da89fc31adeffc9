# SPDX-License-Identifier: BSD-3-Clause
"""The process that owns the emulator: serves one client over a socket until either ends.

usage: python -m strix_emulate.device.server SOCKET POOL     numbers of open files
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
from strix_emulate.code import bundles, hidden, loader
from strix_emulate.code.kernel import Kernel
from strix_emulate.code.target import DEFAULT, Target, named
from strix_emulate.device import protocol
from strix_emulate.device.hostcall import HEAP, START, Heap, Hostcalls
from strix_emulate.device.pool import DeviceMemory, Pool
from strix_emulate.device.protocol import BASE, LAUNCH, Operation, Refused, Status, unpack
from strix_emulate.device.report import Tally, is_of_headers, is_upstream
from strix_emulate.errors import EmulatorError, LoadError, Trap, Unsupported
from strix_emulate.memory.findings import CHECKS, parse
from strix_emulate.run.machine import Machine, Options
from strix_emulate.run.program import Program
from strix_emulate.statistics import occupancy

# What ROCm's headers compile into a program's own kernels would end it: grid.sync() empties the
# caches before its barrier and not behind it, and rocPRIM's block_scan reads padding of LDS that
# nothing wrote, and does not use it. What is used is NaN, and shows in the results.
_NOTED = frozenset({"stale", "uninitialised"})
#: Offsets of what a launch needs, and the most bytes of arguments, which hostcalls follow.
_PACKET, _QUEUE, _ARGUMENTS = LAUNCH + (1 << 19), LAUNCH + (1 << 19) + 4096, START - LAUNCH


@dataclass
class _Module:
    contents: loader.Module
    lenient: bool
    offset: int = 0


@dataclass
class _Function:
    kernel: Kernel
    module: _Module

    @cached_property
    def program(self) -> Program:
        """Decoded before the first launch."""
        return Program.of(self.kernel)


class Server:
    """Answers requests as the device of a target. off, budget, cores, seconds: see
    :class:`run.machine.Options`."""

    def __init__(
        self, pool: Pool, off: frozenset[str] = frozenset(), budget: int = 0, log: bool = False,
        cores: int = 1, strict: bool = False, seconds: float = 0, target: Target = DEFAULT,
    ) -> None:  # fmt: skip
        self.pool, self.log, self.strict, self.target = pool, log, strict, target
        self.options = Options(
            checks=off != set(CHECKS), off=off, budget=budget or Options.budget, cores=cores,
            seconds=seconds or Options.seconds,
        )  # fmt: skip
        self.tally = Tally(off)
        self.modules: dict[int, _Module] = {}
        self.functions: dict[int, _Function] = {}
        self.number = 0
        self.heap: Heap | None = None

    def handle(self, operation: int, data: bytes) -> bytes:
        """Return the bytes of the reply to a request. Raise Refused."""
        answers = {
            Operation.LOAD: self.load, Operation.PLACE: self.place, Operation.UNLOAD: self.unload,
            Operation.FUNCTION: self.function, Operation.SYMBOL: self.symbol,
            Operation.LAUNCH: self.launch, Operation.IMPORT: self.add_memory,
            Operation.KERNELS: self.kernels,
        }  # fmt: skip
        if operation not in answers:
            raise Refused(Status.INVALID_VALUE, f"no request has the number {operation}")
        try:
            return answers[Operation(operation)](data)
        except Trap as trap:
            aborted = trap.kind == "abort"
            status = Status.LAUNCH_FAILURE if aborted else Status.ILLEGAL_ADDRESS
            raise Refused(status, f"trap in {trap}", lasting=True) from trap
        except Unsupported as error:
            raise Refused(Status.NOT_SUPPORTED, str(error), lasting=True) from error
        except LoadError as error:
            raise Refused(Status.INVALID_IMAGE, str(error)) from error
        except EmulatorError as error:
            raise Refused(Status.INVALID_CONFIGURATION, str(error)) from error
        except MemoryError as error:
            text = "the emulator is out of memory"
            raise Refused(Status.OUT_OF_MEMORY, text, lasting=True) from error

    def load(self, data: bytes) -> bytes:
        """Read a code object or a bundle; return its number and its image's size in bytes."""
        size, _ = unpack(protocol.ORIGIN, data)
        start = protocol.ORIGIN.size + size
        origin, data = data[protocol.ORIGIN.size : start], data[start:]
        if data[:4] == b"CCOB" or data.startswith(bundles.BUNDLE):
            try:
                data = bundles.unbundle(data, "module", self.target)[0][1]
            except LoadError as error:
                raise Refused(Status.NO_BINARY, str(error)) from error
        number = self._new()
        lenient = not self.strict and is_upstream(origin.decode(errors="replace"))
        module = loader.parse_module(data, "module")
        for kernel in module.kernels.values():
            if kernel.target != self.target:
                made = f"made for another GPU ({kernel.target.name})"
                raise LoadError(f"module: {made}, the device is a {self.target.name}")
        self.modules[number] = _Module(module, lenient)
        return protocol.LOADED.pack(number, 0, len(self.modules[number].contents.image.data))

    def place(self, data: bytes) -> bytes:
        """Put a loaded module at its address, its pointers relocated."""
        number, _, offset = unpack(protocol.PLACE, data)
        module = self._module(number)
        image = module.contents.image
        raw = self.pool.image(offset, len(image.data))
        raw[:] = np.frombuffer(image.data, np.uint8)
        for at in image.pointers:
            value = int.from_bytes(image.data[at : at + 8], "little") + BASE + offset
            raw[at : at + 8] = np.frombuffer((value % (1 << 64)).to_bytes(8, "little"), np.uint8)
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
        """Return the number of a kernel by name, and what a launch must know of it."""
        module, name = self._named(data)
        kernel = module.contents.kernels.get(name)
        if kernel is None:
            if name in module.contents.refused:
                raise Unsupported(module.contents.refused[name])
            # looked for in one module after the other: no message
            raise Refused(Status.NOT_FOUND, "")
        number = self._new()
        self.functions[number] = _Function(kernel, module)
        declared = [a for a in kernel.arguments if not a.kind.startswith("hidden")]
        waves = occupancy(self.target, kernel.vgprs, 0, kernel.max_threads, kernel.width)[
            "registers"
        ]
        facts = protocol.FUNCTION.pack(
            number, kernel.kernarg, kernel.lds, kernel.scratch, kernel.max_threads, kernel.vgprs,
            waves, len(declared),
        )  # fmt: skip
        return facts + b"".join(protocol.ARGUMENT.pack(a.offset, a.size) for a in declared)

    def kernels(self, data: bytes) -> bytes:
        """Return the names of a module's kernels, each with a zero behind it."""
        number, _ = unpack(protocol.MODULE, data)
        names = sorted(self._module(number).contents.kernels)
        return b"".join(name.encode() + b"\0" for name in names)

    def symbol(self, data: bytes) -> bytes:
        """Return address and size of a variable by name."""
        module, name = self._named(data)
        found = module.contents.variables.get(name)
        if found is None:
            raise Refused(Status.NOT_FOUND, "")
        return protocol.SYMBOL.pack(*found)

    def launch(self, data: bytes) -> bytes:
        """Execute a kernel; return what it printed."""
        number, *sizes, lds, cooperative, stack, heap = unpack(protocol.LAUNCHED, data)
        function = self.functions.get(number)
        if function is None or not function.module.offset:
            raise Refused(Status.INVALID_VALUE, f"no kernel has the number {number}")
        kernel, grid, block = function.kernel, tuple(sizes[:3]), tuple(sizes[3:])
        kernel = kernel.with_stack(min(stack, self.target.stack))
        groups, threads = (math.prod(map(int, size)) for size in (grid, block))
        options = self._options(kernel, grid, block, lds, cooperative)
        lenient = function.module.lenient or (not self.strict and is_of_headers(kernel.name))
        options, program = replace(options, lenient=lenient), function.program
        pointers = {}
        if any(a.kind == "hidden_heap_v1" for a in kernel.arguments) and self._has_heap(heap):
            pointers["hidden_heap_v1"] = BASE + HEAP
        hostcalls = Hostcalls(self.pool.views[8], self.heap)
        pointers["hidden_hostcall_buffer"] = hostcalls.address
        if cooperative:
            pointers["hidden_multigrid_sync_arg"] = hostcalls.grid(groups, groups * threads)
        given = data[protocol.LAUNCHED.size :]
        self._write_arguments(kernel, given, grid, block, lds, pointers)
        memory = DeviceMemory(self.pool, program.cell, options.checks, program.whole_words)
        code = BASE + function.module.offset + (kernel.image.entry if kernel.image else 0)
        machine = Machine(
            kernel, program, memory, options, kernel.lds + lds, code,
            BASE + _PACKET, BASE + _QUEUE,
        )  # fmt: skip
        started = time.process_time()
        if any(a.kind == "hidden_hostcall_buffer" for a in kernel.arguments):
            machine.service = hostcalls.serve
        try:
            done = machine.run(BASE + LAUNCH, grid, block)
        except Trap:
            # no reply will have it
            sys.stderr.buffer.write(hostcalls.text)
            raise
        self.tally.add(kernel.name, done.notes)
        if self.log:
            seconds = time.process_time() - started + done.seconds
            print(f"strix-emulate: {kernel.name} grid {grid} block {block}: {done.executed} "
                  f"wave-instructions, {seconds:.2f} CPU s, cores: {done.cores}",
                  file=sys.stderr)  # fmt: skip
        return hostcalls.text

    def _options(self, kernel: Kernel, grid, block, lds: int, cooperative: bool) -> Options:
        """Return how such a launch is run. Raise EmulatorError where it cannot be."""
        groups, threads = (math.prod(map(int, size)) for size in (grid, block))
        if min(grid) < 1 or not 1 <= threads <= kernel.max_threads:
            raise EmulatorError(
                f"{kernel.name}: grid {grid} with {block} threads cannot be launched, a workgroup "
                f"has at most {kernel.max_threads}"
            )
        if kernel.lds + lds > self.target.lds:
            raise EmulatorError(
                f"{kernel.name}: {kernel.lds + lds} bytes of LDS, a workgroup has {self.target.lds}"
            )
        options = replace(self.options, noted=frozenset() if self.strict else _NOTED)
        if not cooperative:
            return options
        waves = -(-threads // kernel.width) * groups
        if waves > self.target.resident:
            raise Refused(Status.COOPERATIVE_TOO_LARGE, f"{kernel.name}: {waves} waves at a time")
        return replace(options, batch=self.target.resident, cores=1, cooperative=True)

    def add_memory(self, data: bytes) -> bytes:
        """Map memory of another process, as the client did."""
        offset, size, start = unpack(protocol.IMPORTED, data)
        path = data[protocol.IMPORTED.size :].decode(errors="replace")
        self.pool.add(offset, size, path, start)
        return b""

    def _has_heap(self, pages: int) -> bool:
        """Return whether kernels can call malloc; the first one that may decides how much."""
        if self.heap is None:
            size = max(pages * 4096 >> 21, 1) << 21
            start = self.pool.allocate(size, 2 << 20)
            self.heap = Heap(BASE + start, size) if start else None
        return self.heap is not None

    def _write_arguments(
        self, kernel: Kernel, given: bytes, grid, block, lds: int, pointers: dict[str, int]
    ) -> None:
        if max(kernel.kernarg, len(given)) > _ARGUMENTS:
            raise EmulatorError(f"{kernel.name}: more than {_ARGUMENTS} bytes of arguments")
        raw = bytearray(max(kernel.kernarg, len(given), 8))
        raw[: len(given)] = given
        hidden.write(raw, kernel, grid, block, pointers)
        packet = launches.packet(kernel, grid, block, kernel.lds + lds, BASE + LAUNCH)
        for offset, data in ((LAUNCH, np.frombuffer(bytes(raw), np.uint8)), (_PACKET, packet)):
            self.pool.bytes[offset : offset + len(data)] = data

    def _new(self) -> int:
        self.number += 1
        return self.number

    def _module(self, number: int) -> _Module:
        if number not in self.modules:
            raise Refused(Status.INVALID_VALUE, f"no module has the number {number}")
        return self.modules[number]

    def _named(self, data: bytes) -> tuple[_Module, str]:
        number, _ = unpack(protocol.MODULE, data)
        return self._module(number), data[protocol.MODULE.size :].decode(errors="replace")


def serve(connection: socket.socket, server: Server) -> int:
    """Answer until the client closes; return 0, or 1 after a request without sense."""
    stream = connection.makefile("rb")
    connection.sendall(protocol.reply(Status.SUCCESS, protocol.HELLO.pack(protocol.VERSION, 0)))
    while len(head := stream.read(protocol.REQUEST.size)) == protocol.REQUEST.size:
        operation, _, size = protocol.REQUEST.unpack(head)
        if size > protocol.REQUEST_LIMIT:
            text = f"a request of {size} bytes, at most {protocol.REQUEST_LIMIT} are taken"
            connection.sendall(protocol.reply(Status.INVALID_VALUE, text.encode()))
            return 1
        data = stream.read(size)
        if len(data) < size:
            break
        try:
            answer = protocol.reply(Status.SUCCESS, server.handle(operation, data))
        except Refused as refusal:
            answer = protocol.reply(refusal.status, str(refusal).encode(), refusal.lasting)
        except Exception as error:
            # a fault of ours, or an input that found one
            text = f"internal error ({type(error).__name__}: {error})"
            answer = protocol.reply(Status.UNKNOWN, text.encode(), lasting=True)
        connection.sendall(answer)
    return 0


def _end_with(connection: socket.socket, server: Server) -> None:
    """End this process when the client's end closes, even in the middle of a kernel."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    server.tally.report()
    os._exit(0)


def main() -> int:
    """Serve the client on the two open files whose numbers are the arguments."""
    # an interrupt from the terminal is the client's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    environment = os.environ.get
    try:
        server = Server(
            Pool(int(sys.argv[2])),
            parse(environment("STRIX_EMULATE_NO_CHECKS") or ""),
            int(environment("STRIX_EMULATE_BUDGET") or 0),
            environment("STRIX_EMULATE_LOG", "0") != "0",
            int(environment("STRIX_EMULATE_CORES") or 1),
            environment("STRIX_EMULATE_STRICT", "0") != "0",
            float(environment("STRIX_EMULATE_SECONDS") or 0),
            named(environment("STRIX_EMULATE_TARGET") or DEFAULT.name),
        )
        decode_check()
    except (Refused, ValueError, EmulatorError) as error:
        connection.sendall(protocol.reply(Status.UNKNOWN, str(error).encode()))
        return 1
    threading.Thread(target=_end_with, args=(connection, server), daemon=True).start()
    try:
        status = serve(connection, server)
    except OSError:
        # the client has gone while it was answered
        status = 0
    server.tally.report()
    return status


def decode_check() -> None:
    """Raise DisassemblerError where no suitable libLLVM is found, before anything is launched."""
    from strix_emulate.code import llvm

    llvm.find_disassembler()


if __name__ == "__main__":
    sys.exit(main())
