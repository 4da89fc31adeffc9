# SPDX-License-Identifier: BSD-3-Clause
"""Repeated launches of one program, and launches that do not end."""

import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import strix_emulate
from selftest import PLAIN, code, kernel
from strix_emulate.code import encodings
from strix_emulate.code.decode import decode
from strix_emulate.errors import Trap
from strix_emulate.memory.arena import READ_ONLY, WRITABLE, Arena
from strix_emulate.run import program
from strix_emulate.run.machine import Machine, Options
from strix_emulate.run.program import Program
from test_checks import LOAD, STORE, execute

#: numpy executes the flat atomic even if C is installed.
BODY = (
    LOAD
    + """
global_load_b32 v3, v1, s[4:5]
s_waitcnt vmcnt(0)
v_lshlrev_b32 v2, 1, v3
v_add_co_u32 v4, vcc_lo, s4, v1
v_add_co_ci_u32 v5, vcc_lo, s5, 0, vcc_lo
flat_atomic_or_b32 v[4:5], v3
"""
    + STORE
)


def launch(shared: Program, data: np.ndarray, length: int, **options):
    """Return the numbers that the 64 threads store, and a weak reference to the arena."""
    plain_kernel = replace(PLAIN, kernarg=16)
    arena = Arena(8192, shared.cell, True, False)
    source = arena.place(data.astype(np.uint32).view(np.uint8), WRITABLE)
    target = arena.place(np.zeros(4 * length, np.uint8), WRITABLE)
    pointers = np.array([source, target], np.uint64).view(np.uint8)
    machine = Machine(plain_kernel, shared, arena, Options(**options), 0)
    machine.run(arena.place(pointers, READ_ONLY), (1, 1, 1), (64, 1, 1))
    return arena.fetch(target, 4 * length).view(np.uint32), weakref.ref(arena)


def test_the_first_registers_have_the_pointers_that_the_descriptor_requests():
    """The kernel adds the number of threads in the dispatch packet and a word of the queue."""
    body = """
    s_load_b32 s10, s[0:1], 0xc
    s_load_b32 s11, s[2:3], 0x0
    s_load_b64 s[6:7], s[4:5], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    s_add_u32 s10, s10, s11
    v_mov_b32 v2, s10
    """
    pointers = (("dispatch", 2), ("queue", 2), ("kernarg", 2))
    out = np.zeros(32, np.uint32)
    strix_emulate.launch(
        kernel(body + STORE, pointers=1, user_sgprs=pointers),
        (3,),
        [strix_emulate.Buffer(out)],
        threads=32,
    )
    assert (out == 96).all()


@pytest.mark.parametrize("native", [False, True])
def test_a_program_is_compiled_once(monkeypatch, native):
    steps = []
    make_step = program._step

    def count_step(*arguments):
        steps.append(arguments)
        return make_step(*arguments)

    monkeypatch.setattr(program, "_step", count_step)
    shared = Program(decode(code(BODY)))
    for start in range(3):
        got, arena = launch(shared, np.arange(64) + start, 64, native=native)
        assert (got == 2 * (np.arange(64) + start)).all()
        assert arena() is None, "a cached program must not keep the memory of its last launch"
    assert len(steps) == len(shared.instructions) - 1  # s_endpgm is no step
    # After a launch that traps, the program still gives correct results.
    with pytest.raises(Trap, match="bounds"):
        launch(shared, np.arange(64), 60, native=native)
    assert (launch(shared, np.arange(64), 64, native=native)[0] == 2 * np.arange(64)).all()


def test_equal_instructions_are_read_and_made_once(monkeypatch):
    """In unoptimised code, nine of ten instructions occur more than once."""
    read = []
    compiled_instructions = []
    read_fields = encodings.fields
    compile_instruction = program._compile

    def count_read(*arguments):
        read.append(arguments)
        return read_fields(*arguments)

    def count_compile(*arguments):
        compiled_instructions.append(arguments[0])
        return compile_instruction(*arguments)

    monkeypatch.setattr(encodings, "fields", count_read)
    monkeypatch.setattr(program, "_compile", count_compile)
    line = "v_add_nc_u32_e32 v7, 0x1234567, v7\n"
    instructions = decode(code(20 * line + BODY))
    assert [ins.address for ins in instructions[:20]] == list(range(0, 160, 8))
    assert sum(name == "v_add_nc_u32" for _, name, _ in read) <= 1
    launch(Program(instructions), np.arange(64), 64, native=False)
    # The instruction is compiled once to learn its properties, and once for the launch's memories.
    assert sum(ins.name == "v_add_nc_u32" for ins in compiled_instructions) <= 2


def test_a_launch_that_hangs_is_ended_by_the_clock(monkeypatch):
    """A mock clock advances each time it is read, so the speed of the machine does not matter."""
    looks = itertools.count()
    monkeypatch.setattr("strix_emulate.run.machine.time.monotonic", lambda: next(looks) / 100)
    forever = LOAD + "again:\ns_nop 0\ns_branch again\n" + STORE
    with pytest.raises(Trap) as trap:
        execute(forever, threads=64, seconds=0.05, budget=10**12)
    assert trap.value.kind == "budget"
    # The message names the kernel, the program counter and the wave.
    assert "test at 0x" in str(trap.value)
    assert "more than 0.05 seconds; wave 0 of workgroup 0 is at 0x" in str(trap.value)
