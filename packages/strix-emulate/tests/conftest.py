# SPDX-License-Identifier: BSD-3-Clause
"""Skip these tests if there is no disassembler, without which kernels cannot be executed."""

import gc

import pytest
from strix_emulate.code import llvm
from strix_emulate.errors import DisassemblerError

# Decoded kernels stay in memory. With Python's default thresholds, the garbage collector would
# visit them so often that it takes a third of the CPU time.
gc.set_threshold(10_000, 10, 100)


@pytest.fixture(scope="session", autouse=True)
def disassembler() -> None:
    try:
        llvm.find_disassembler()
    except DisassemblerError as error:
        pytest.skip(str(error))
