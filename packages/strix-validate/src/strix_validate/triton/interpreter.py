# SPDX-License-Identifier: BSD-3-Clause
"""What Triton's interpreter lacks of a compiled kernel's language. Changes the whole process."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy

#: Functions of triton.language.extra.libdevice, of which the interpreter computes none.
_LIBDEVICE: dict[str, Callable] = {
    "log1p": numpy.log1p,
    "rsqrt": lambda x: 1 / numpy.sqrt(x),
    "tanh": numpy.tanh,
}
#: The one instruction that kernels here write themselves (vLLM's weights of 4 bits, in fp16).
_AND_OR = re.compile(r"v_and_or_b32 \$0, \$1, \$2, (0x[0-9a-f]+)")


def complete() -> None:
    """Give the interpreter numbers and counters that are tensors, masks of flags, and functions."""
    from triton import language
    from triton.language import float32, tensor
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(arg: Any) -> Any:
        # compiled, a float is a tensor with a tensor's methods; interpreted, it is Python's own
        if not isinstance(arg, float):
            return convert(arg)
        handle = interpreter.TensorHandle(numpy.array([arg], numpy.float32), float32)
        return tensor(handle, float32)

    def elementwise(function: Callable) -> Callable:
        def apply(x: Any, **_: Any) -> Any:
            data = function(x.handle.data).astype(x.handle.data.dtype)
            return tensor(interpreter.TensorHandle(data, x.dtype.scalar), x.type)

        return apply

    def counted(*limits: Any) -> Iterable:
        # compiled, what a loop counts with is a tensor as well; kernels see the interpreter's names
        numbers = range(*map(int, limits))
        return map(convert, numbers) if any(isinstance(x, tensor) for x in limits) else numbers

    def instruction(asm: str, constraints: str, args: list, dtype: Any, **_: Any) -> Any:
        if not (found := _AND_OR.fullmatch(asm)):
            raise NotImplementedError(f"not interpreted: {asm}")
        x, mask = (arg.handle.data.astype(numpy.uint32) for arg in args)
        data = (x & mask) | numpy.uint32(int(found[1], 16))
        kind = language.block_type(dtype, args[0].shape)
        return tensor(interpreter.TensorHandle(data, dtype), kind)

    language.inline_asm_elementwise = instruction
    interpreter._implicit_cvt = converted
    interpreter.range = counted
    for name, function in _LIBDEVICE.items():
        setattr(libdevice, name, elementwise(function))
    _take_scalars_in_masks(interpreter)


def _take_scalars_in_masks(interpreter: Any) -> None:
    """Make masks of flags: a scalar's condition is spread over a block as numbers.

    Triton 3.9 refuses those.
    """

    def with_flags(method: Callable, place: int) -> Callable:
        def apply(self: Any, *args: Any) -> Any:
            mask = interpreter.TensorHandle(args[place].data.astype(bool), args[place].dtype)
            return method(self, *args[:place], mask, *args[place + 1 :])

        return apply

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = with_flags(builder.create_masked_load, 1)
    builder.create_masked_store = with_flags(builder.create_masked_store, 2)
