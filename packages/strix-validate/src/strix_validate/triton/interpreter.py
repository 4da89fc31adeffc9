# SPDX-License-Identifier: BSD-3-Clause
"""Add to Triton's interpreter what the checked kernels need and only compiled kernels have.

The change affects the whole process.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy

#: Functions of triton.language.extra.libdevice that the checked kernels call but the interpreter
#: lacks.
_LIBDEVICE: dict[str, Callable] = {
    "log1p": numpy.log1p,
    "rsqrt": lambda x: 1 / numpy.sqrt(x),
    "tanh": numpy.tanh,
}
#: The only inline assembly in the checked kernels. It is in vLLM's kernel for 4-bit weights in
#: fp16.
_AND_OR = re.compile(r"v_and_or_b32 \$0, \$1, \$2, (0x[0-9a-f]+)")


def complete() -> None:
    """Make interpreted kernels behave like compiled ones.

    Floats become tensors, and so do counters of loops that have a tensor as a limit. Masks become
    Boolean. The functions of _LIBDEVICE and the inline instruction of _AND_OR are computed.
    """
    from triton import language
    from triton.language import float32, tensor
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert_original = interpreter._implicit_cvt

    def convert(arg: Any) -> Any:
        # In a compiled kernel a float is a tensor, with a tensor's methods. The interpreter leaves
        # it a Python float.
        if not isinstance(arg, float):
            return convert_original(arg)
        handle = interpreter.TensorHandle(numpy.array([arg], numpy.float32), float32)
        return tensor(handle, float32)

    def elementwise(function: Callable) -> Callable:
        def apply(x: Any, **_: Any) -> Any:
            data = x.handle.data
            computed = function(data).astype(data.dtype)
            return tensor(interpreter.TensorHandle(computed, x.dtype.scalar), x.type)

        return apply

    def count(*limits: Any) -> Iterable:
        # In a compiled kernel, a loop's counter is a tensor if one of its limits is a tensor. This
        # function replaces `range` in the interpreter's module, where kernels find it.
        numbers = range(*map(int, limits))
        if any(isinstance(limit, tensor) for limit in limits):
            return map(convert_original, numbers)
        return numbers

    def run_instruction(asm: str, constraints: str, args: list, dtype: Any, **_: Any) -> Any:
        match = _AND_OR.fullmatch(asm)
        if not match:
            raise NotImplementedError(f"the interpreter does not support inline assembly: {asm}")
        x, mask = (arg.handle.data.astype(numpy.uint32) for arg in args)
        literal = numpy.uint32(int(match[1], 16))
        data = (x & mask) | literal
        block_type = language.block_type(dtype, args[0].shape)
        return tensor(interpreter.TensorHandle(data, dtype), block_type)

    language.inline_asm_elementwise = run_instruction
    interpreter._implicit_cvt = convert
    interpreter.range = count
    for name, function in _LIBDEVICE.items():
        setattr(libdevice, name, elementwise(function))
    _accept_numeric_masks(interpreter)


def _accept_numeric_masks(interpreter: Any) -> None:
    """Make loads and stores convert their masks to Booleans.

    The interpreter turns a scalar condition into a block of numbers, which Triton 3.9 refuses as a
    mask.
    """

    def with_boolean_mask(method: Callable, position: int) -> Callable:
        def apply(self: Any, *args: Any) -> Any:
            mask = args[position]
            converted = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
            return method(self, *args[:position], converted, *args[position + 1 :])

        return apply

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = with_boolean_mask(builder.create_masked_load, 1)
    builder.create_masked_store = with_boolean_mask(builder.create_masked_store, 2)
