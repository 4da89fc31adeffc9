# SPDX-License-Identifier: BSD-3-Clause
"""Helpers for tests of kernel calls: cached expected results, mock answers and skip marks."""

import inspect
from functools import cache
from importlib.util import find_spec

import pytest
from strix_emulate import DisassemblerError, find_disassembler
from strix_validate.checks import Check
from strix_validate.triton import cases
from strix_validate.triton.call import FunctionCall
from strix_validate.triton.modes import CallAnswer, ExecutedKernel

CHECK = Check("x")


def answer(tensors) -> CallAnswer:
    return CallAnswer(tensors, executed=(ExecutedKernel("kernel", "0123", 1, 0.0),))


def make(case, seed="seed"):
    """Return a case's call and expected results, as cases.make does, but cache the results.

    Raises:
        TypeError: The arguments of the call are not those of its function. In a run, such a call
            fails only where its library is installed.
    """
    call, expected = cases.make(seed, case)
    if isinstance(call, FunctionCall):
        inspect.signature(call.launch).bind(**call.tensors, **call.options)
    return call, cache(expected)


def skip_without(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def need_disassembler() -> None:
    """Skip the test if no disassembler is installed."""
    try:
        find_disassembler()
    except DisassemblerError as error:
        pytest.skip(str(error))
