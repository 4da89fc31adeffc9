# SPDX-License-Identifier: BSD-3-Clause
"""Skip these tests, with the reason, if there is no disassembler: kernels cannot be executed."""

import gc

import pytest
from strix_emulate.code import llvm
from strix_emulate.errors import DisassemblerError

# decoded kernels stay in memory, and visiting them would take the collector a third of the CPU time
gc.set_threshold(10_000, 10, 100)


@pytest.fixture(scope="session", autouse=True)
def disassembler() -> None:
    try:
        llvm.find_disassembler()
    except DisassemblerError as error:
        pytest.skip(str(error))
