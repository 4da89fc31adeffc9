# SPDX-License-Identifier: BSD-3-Clause
"""Translation of numpy functions to C functions of one element.

The numpy function is called once, with symbols instead of arrays. The symbols record the operations
as C statements. So most operations are written only once, as the functions in the tables.
"""

import re
from collections.abc import Callable
from functools import wraps

import numpy as np

#: C's types by numpy's type characters. Computations with float16 are in float.
_C = {
    "?": "int",
    "b": "int8_t",
    "B": "uint8_t",
    "h": "int16_t",
    "H": "uint16_t",
    "i": "int32_t",
    "I": "uint32_t",
    "l": "int64_t",
    "L": "uint64_t",
    "e": "float",
    "f": "float",
    "d": "double",
}
#: C expressions for the larger or smaller of two numbers. The result is one of the two, so it needs
#: no cast. For NaN, the result is numpy's.
_PICKS = {
    "maximum": "(({0} >= {1}) ? {0} : {1})",
    "maximum f": "(({0} >= {1}) | ({0} != {0}) ? {0} : {1})",
    "fmax": "(({0} >= {1}) | ({1} != {1}) ? {0} : {1})",
    "minimum": "(({0} <= {1}) ? {0} : {1})",
    "minimum f": "(({0} <= {1}) | ({0} != {0}) ? {0} : {1})",
    "fmin": "(({0} <= {1}) | ({1} != {1}) ? {0} : {1})",
}
_OPERATORS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "equal": "==",
    "not_equal": "!=",
    "remainder u": "%",
}
#: Functions of C's library for double. Those for float have the suffix f.
_LIBRARY_FUNCTIONS = (
    "trunc",
    "floor",
    "ceil",
    "rint",
    "sqrt",
    "log2",
    "copysign",
    "ldexp",
)
#: C expressions by ufunc. A key is the name of a ufunc, which may be followed by the type character
#: or the kind of the result. In an expression, {0} and {1} are the sources, {all} is the list of
#: sources, and {name} is the name of the ufunc. {type} is C's type of the result, and {bits} its
#: number of bits. {f} becomes the suffix f of C's functions if the first source is a float in C,
#: and {l} becomes the suffix l if the first source has 64 bits.
_FORMS = {
    **{name: f"({{0}} {operator} {{1}})" for name, operator in _OPERATORS.items()},
    **dict.fromkeys(_LIBRARY_FUNCTIONS, "{name}{f}({all})"),
    **_PICKS,
    # C leaves shifts by large counts undefined. The next three expressions have numpy's results.
    "left_shift": "(({type})((uint64_t){1} < {bits} ? {0} << {1} : 0))",
    "right_shift": "(({type})((uint64_t){1} < {bits} ? {0} >> {1} : 0))",
    "right_shift i": "(({type})((uint64_t){1} < {bits} ? {0} >> {1} : ({0} < 0 ? -1 : 0)))",
    "isnan": "({0} != {0})",
    "isinf": "(fabs((double){0}) == INFINITY)",
    "isfinite": "(fabs((double){0}) < INFINITY)",
    "signbit": "(!!signbit({0}))",
    "invert": "(({type})~{0})",
    "invert ?": "(!{0})",
    "negative": "(-{0})",
    "absolute": "({0} < 0 ? -{0} : {0})",
    "absolute f": "fabs{f}({0})",
    "bitwise_count": "__builtin_popcount{l}({0})",
    "nextafter d": "next_double({all})",
}


class Untranslatable(Exception):
    """A function cannot be translated to C."""


class Symbol(np.ndarray):
    """The value of one element, as a C expression.

    Attributes:
        code: The expression.
        body: The C function in which it occurs.
    """

    code: str
    body: "Body"

    def __new__(cls, dtype, code: str, body: "Body"):
        """Return an array without dimensions that represents a value of this dtype."""
        self = np.zeros((), dtype).view(cls)
        self.code = code
        self.body = body
        return self

    def __array_finalize__(self, _other):
        pass

    def astype(self, dtype, **_):
        """Return a cast in C."""
        return self.body.cast(self, np.dtype(dtype))

    def view(self, *kind):
        """Return the same bits as another dtype. Raise Untranslatable if the sizes differ."""
        dtype = np.dtype(kind[0])
        if dtype.itemsize != self.dtype.itemsize:
            raise Untranslatable("a view whose elements have another size")
        return self.body.bits(self, dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, dtype=None, **kwargs):
        if method != "__call__" or kwargs:
            raise Untranslatable(f"{ufunc.__name__} {method} {sorted(kwargs)}")
        return self.body.ufunc(ufunc, inputs, dtype)

    def __array_function__(self, function, _types, args, kwargs):
        translation = _FUNCTIONS.get(function.__name__)
        if translation is None:
            raise Untranslatable(function.__name__)
        return translation(self.body, *args, **kwargs)

    def __bool__(self):
        raise Untranslatable("a Python branch or number that depends on the data")

    __int__ = __float__ = __index__ = __iter__ = __bool__

    def any(self, *_, **__):
        """Return True, so that code for special elements is always translated.

        The functions in the tables guard such code with `if condition.any()`. For a numpy array
        without special elements, they skip it.
        """
        return True


def in_c(name: str) -> Callable:
    """Mark a function that also exists in C, as `name`. Translations call the C function."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def run(*sources):
            for x in sources:
                if isinstance(x, Symbol):
                    return x.body.call(name, x.dtype, sources)
            return function(*sources)

        return run

    return decorate


class Body:
    """Statements of one C function. Each statement sets a new variable.

    Attributes:
        lines: The statements.
        before_rounding: Values before they were rounded to half precision. The key is the name of
            the variable with the rounded value.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._variables: dict[tuple[str, str], str] = {}
        self.before_rounding: dict[str, str] = {}

    def symbol(self, dtype, code: str) -> Symbol:
        """Return a variable with the value of an expression.

        Equal expressions of the same dtype share a variable.
        """
        dtype = np.dtype(dtype)
        key = (dtype.char, code)
        if key not in self._variables:
            variable = f"t{len(self.lines)}"
            self._variables[key] = variable
            self.lines.append(f"{_ctype(dtype)} {variable} = {code};")
            if code.startswith("float_to_half("):
                self.before_rounding[variable] = code.removeprefix("float_to_half")
        return Symbol(dtype, self._variables[key], self)

    def call(self, name: str, dtype, arguments) -> Symbol:
        """Return a call of a function of the C library or of emulate.c."""
        parts = [self.as_symbol(x, np.dtype(dtype)).code for x in arguments]
        return self.symbol(dtype, f"{name}({', '.join(parts)})")

    def cast(self, x, dtype: np.dtype) -> Symbol:
        """Return x converted to a dtype, as NumPy converts it."""
        if x.dtype == dtype:
            return x
        if dtype.char == "e":
            value = x.code if x.dtype.char == "f" else f"to_odd((double){x.code})"
            return self.symbol(dtype, f"float_to_half({value})")
        if dtype.char == "?":
            return self.symbol(dtype, f"({x.code} != 0)")
        return self.symbol(dtype, f"({_ctype(dtype)}){x.code}")

    def bits(self, x, dtype: np.dtype) -> Symbol:
        """Return the bits of x as a dtype of the same size."""
        if x.dtype == dtype:
            return x
        if x.dtype.char == "e":
            return self.cast(self.symbol(np.uint16, f"half_bits({x.code})"), dtype)
        if dtype.char == "e":
            return self.symbol(dtype, f"half_value((uint16_t){x.code})")
        if x.dtype.kind in "iu" and dtype.kind in "iu":
            return self.symbol(dtype, f"({_ctype(dtype)}){x.code}")
        return self.symbol(dtype, f"{dtype.char}_of_{x.dtype.char}({x.code})")

    def constant(self, value, dtype: np.dtype) -> Symbol:
        """Return a literal of a dtype. Raise Untranslatable if the value is an array."""
        if isinstance(value, np.ndarray):
            raise Untranslatable("an array that is not a symbol")
        value = np.asarray(value).astype(dtype)
        literal = _float_literal(float(value)) if dtype.kind == "f" else _integer_literal(value)
        return Symbol(dtype, f"(({_ctype(dtype)}){literal})", self)

    def as_symbol(self, x, dtype: np.dtype) -> Symbol:
        """Return a symbol or a plain number as a symbol of a dtype."""
        if isinstance(x, Symbol):
            return self.cast(x, dtype)
        return self.constant(x, dtype)

    def ufunc(self, ufunc, inputs, dtype=None):
        """Return the result of a ufunc, with the types that NumPy chooses, or with `dtype`.

        Raises:
            Untranslatable: The ufunc cannot be translated.
        """
        signature = tuple(_resolvable_type(x) for x in inputs) + (None,) * ufunc.nout
        if dtype is None:
            loop = ufunc.resolve_dtypes(signature)
        else:
            all_of_dtype = (np.dtype(dtype),) * len(signature)
            loop = ufunc.resolve_dtypes(signature, signature=all_of_dtype)
        sources = [self.as_symbol(x, d) for x, d in zip(inputs, loop, strict=False)]
        if ufunc.__name__ == "frexp":
            fraction = self.symbol(loop[1], f"fraction({sources[0].code})")
            return fraction, self.symbol(loop[2], f"power({sources[0].code})")
        return self._apply(ufunc.__name__, sources, loop[-1])

    def _apply(self, name: str, sources: list[Symbol], result: np.dtype) -> Symbol:
        """Return the result of a ufunc by name, on sources that have the right types."""
        source = sources[0].dtype
        for key in (f"{name} {result.char}", f"{name} {result.kind}", name):
            if key in _FORMS:
                break
        else:
            raise Untranslatable(name)
        codes = [x.code for x in sources]
        code = _FORMS[key].format(
            *codes,
            all=", ".join(codes),
            name=name,
            type=_ctype(result),
            bits=8 * result.itemsize,
            f="f" * (source.char in "ef"),
            l="l" * (source.itemsize == 8),
        )
        if key in _PICKS:
            return self.symbol(result, code)
        if result.char == "e":
            code = f"float_to_half({code})"
        elif result.kind in "iu" and result.itemsize < 4:
            code = f"({_ctype(result)}){code}"
        return self.symbol(result, code)


def _float_literal(number: float) -> str:
    if number != number:
        return "NAN"
    if number == np.inf:
        return "INFINITY"
    if number == -np.inf:
        return "-INFINITY"
    return number.hex()


def _integer_literal(value: np.ndarray) -> str:
    """Return C's literal for the number in an array without dimensions, with the array's type."""
    unsigned = "u" if value.dtype.kind == "u" else ""
    if value.dtype.itemsize == 8:
        # C has no decimal literal for the lowest int64.
        return f"0x{int(value) & (1 << 64) - 1:x}{unsigned}ll"
    if value.dtype.itemsize < 4:
        unsigned = ""
    return f"{int(value)}{unsigned}"


def _is_plain_number(x) -> bool:
    """Return whether x is a Python int or float. These take the dtype of the other operands."""
    return type(x) in (int, float)


def _resolvable_type(x):
    """Return the argument for ufunc.resolve_dtypes that describes a source."""
    return type(x) if _is_plain_number(x) else np.asarray(x).dtype


def _where(body: Body, condition, a, b) -> Symbol:
    dtype = np.result_type(*(x if _is_plain_number(x) else np.asarray(x).dtype for x in (a, b)))
    first = body.as_symbol(a, dtype)
    second = body.as_symbol(b, dtype)
    test = body.as_symbol(condition, np.dtype(bool))
    return body.symbol(dtype, f"({test.code} ? {first.code} : {second.code})")


def _select(body: Body, conditions, choices, default=0) -> Symbol:
    for condition, choice in reversed(list(zip(conditions, choices, strict=True))):
        default = _where(body, condition, choice, default)
    return default


#: Translations of the supported functions of numpy that are not ufuncs, by name.
_FUNCTIONS: dict[str, Callable] = {
    "where": _where,
    "select": _select,
    "clip": lambda _body, x, low, high: np.minimum(np.maximum(x, low), high),
    "broadcast_arrays": lambda _body, *arrays: arrays,
    "full_like": lambda body, like, value: body.constant(value, like.dtype),
    "zeros_like": lambda body, like: body.constant(0, like.dtype),
}


def _ctype(dtype: np.dtype) -> str:
    try:
        return _C[dtype.char]
    except KeyError:
        raise Untranslatable(f"type {dtype}") from None


def storage(dtype) -> str:
    """Return C's type for an element in memory."""
    dtype = np.dtype(dtype)
    if dtype.char == "e":
        return "uint16_t"
    if dtype.char == "?":
        return "uint32_t"
    return _ctype(dtype)


def loop(name: str, function: Callable, results, sources, each: str = "EACH") -> str:
    """Return a C function for n elements. Its parameter p has pointers to results, then sources.

    In the memory of results and sources, a bool is a uint32_t, and a float16 a uint16_t.

    Args:
        name: Name of the C function.
        function: Function on numpy arrays.
        results: dtypes of the results.
        sources: dtypes of the sources.
        each: Macro of emulate.c that loops over the elements.

    Raises:
        Untranslatable: The function cannot be translated. Only numpy can execute it.
    """
    results = [np.dtype(dtype) for dtype in results]
    sources = [np.dtype(dtype) for dtype in sources]
    body = Body()
    inputs = []
    for i, dtype in enumerate(sources):
        array = "h" if dtype.char == "e" else "s"
        inputs.append(body.symbol(dtype, f"{array}{i}[l]"))
    values = _call(name, function, inputs)
    assignments = _assign_results(body, values, results)
    statements = [*body.lines, *assignments]
    _require_effects(name, inputs, " ".join(statements))
    before, behind = _conversions_of_halves(results, sources)
    pointers = [f"{storage(dtype)} *d{i} = p[{i}];" for i, dtype in enumerate(results)]
    for i, dtype in enumerate(sources):
        pointers.append(f"const {storage(dtype)} *s{i} = p[{i + len(results)}];")
    head = "\n  ".join([*pointers, *before])
    inner = "\n    ".join(statements)
    tail = "".join(f"\n  {line}" for line in behind)
    return (
        f"static void {name}(void *const *p, long n)\n{{\n  {head}"
        f"\n  {each} {{\n    {inner}\n  }}{tail}\n}}\n"
    )


def _call(name: str, function: Callable, inputs: list[Symbol]) -> tuple:
    """Call a function with symbols, and return its results.

    Raises:
        Untranslatable: The function cannot be translated.
    """
    try:
        with np.errstate(all="ignore"):
            values = function(*inputs)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise Untranslatable(f"{name}: {error}") from error
    return values if isinstance(values, tuple) else (values,)


def _assign_results(body: Body, values: tuple, results: list[np.dtype]) -> list[str]:
    """Return statements that store the results."""
    assignments = []
    for i, (value, dtype) in enumerate(zip(values, results, strict=True)):
        if not isinstance(value, Symbol):
            value = body.constant(value, dtype)
        if value.dtype.itemsize == dtype.itemsize and value.dtype.kind in "iu" + dtype.kind:
            code = body.bits(value, dtype).code
        else:
            code = body.cast(value, dtype).code
        array = "d"
        if dtype.char == "e":
            # Store the unrounded value, because to_halves rounds it later.
            array = "r"
            code = body.before_rounding.get(code, code)
        assignments.append(f"{array}{i}[l] = {code};")
    return assignments


def _require_effects(name: str, inputs: list[Symbol], statements: str) -> None:
    """Raise Untranslatable if the statements do not use a source.

    numpy.asarray turns a symbol into a plain number, so the source is missing in the statements.
    """
    for x in inputs:
        if len(re.findall(rf"\b{x.code}\b", statements)) < 2:
            raise Untranslatable(f"{name}: a source has no effect")


def _conversions_of_halves(
    results: list[np.dtype], sources: list[np.dtype]
) -> tuple[list[str], list[str]]:
    """Return the statements that convert float16, before and after the main loop.

    They are loops of their own, which compilers can vectorize.
    """
    before = []
    behind = []
    for i, dtype in enumerate(sources):
        if dtype.char == "e":
            before.append(f"float h{i}[n]; from_halves(h{i}, s{i}, n);")
    for i, dtype in enumerate(results):
        if dtype.char == "e":
            before.append(f"float r{i}[n];")
            behind.append(f"to_halves(d{i}, r{i}, n);")
    return before, behind
