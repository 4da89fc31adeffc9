# SPDX-License-Identifier: BSD-3-Clause
"""Without a disassembler nothing can be executed: then these tests are skipped, and say why."""

import pytest
from strix_emulate.code import llvm
from strix_emulate.errors import DisassemblerError


@pytest.fixture(scope="session", autouse=True)
def disassembler() -> None:
    try:
        llvm.find_disassembler()
    except DisassemblerError as error:
        pytest.skip(str(error))
