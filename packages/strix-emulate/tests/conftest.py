# SPDX-License-Identifier: BSD-3-Clause
"""Without a disassembler nothing can be executed: then these tests are skipped, and say why."""

import gc

import pytest
from strix_emulate.code import llvm
from strix_emulate.errors import DisassemblerError

# decoded kernels stay, and the collector walks all of them again and again: a third of the CPU time
gc.set_threshold(10_000, 10, 100)


@pytest.fixture(scope="session", autouse=True)
def disassembler() -> None:
    try:
        llvm.find_disassembler()
    except DisassemblerError as error:
        pytest.skip(str(error))
