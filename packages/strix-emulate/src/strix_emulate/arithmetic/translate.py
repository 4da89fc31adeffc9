# SPDX-License-Identifier: BSD-3-Clause
"""What a numpy function computes for one element, as C.

The function is called once with symbols in the place of arrays, which note what numpy would do. So
the tables of operations are the only description of what instructions compute: C comes from them.
"""

import re
from collections.abc import Callable
from functools import wraps

import numpy as np

_C = {"?": "int", "b": "int8_t", "B": "uint8_t", "h": "int16_t", "H": "uint16_t", "i": "int32_t",
      "I": "uint32_t", "l": "int64_t", "L": "uint64_t", "e": "float", "f": "float",
      "d": "double"}  # fmt: skip
#: The larger or smaller of two, without a cast; of one that is NaN, numpy's choice.
_PICKS = {
    key.format(name): f"(({{0}} {op} {{1}}){nan} ? {{0}} : {{1}})"
    for name, op in (("max", ">="), ("min", "<="))
    for key, nan in (("{}imum", ""), ("{}imum f", " | ({0} != {0})"), ("f{}", " | ({1} != {1})"))
}
#: By ufunc, and character or kind of the result: C of the sources, their list, the name, the
#: result's type and bits; f and l for functions of float and of 64 bits.
_FORMS = {
    **{name: f"({{0}} {op} {{1}})" for name, op in (
        ("add", "+"), ("subtract", "-"), ("multiply", "*"), ("divide", "/"), ("bitwise_and", "&"),
        ("bitwise_or", "|"), ("bitwise_xor", "^"), ("less", "<"), ("less_equal", "<="),
        ("greater", ">"), ("greater_equal", ">="), ("equal", "=="), ("not_equal", "!="),
        ("remainder u", "%"),
    )},
    # what numpy gives for counts that C leaves undefined
    "left_shift": "(({type})((uint64_t){1} < {bits} ? {0} << {1} : 0))",
    "right_shift": "(({type})((uint64_t){1} < {bits} ? {0} >> {1} : 0))",
    "right_shift i": "(({type})((uint64_t){1} < {bits} ? {0} >> {1} : ({0} < 0 ? -1 : 0)))",
    "isnan": "({0} != {0})", "isinf": "(fabs((double){0}) == INFINITY)",
    "isfinite": "(fabs((double){0}) < INFINITY)", "signbit": "(!!signbit({0}))",
    "invert": "(({type})~{0})", "invert ?": "(!{0})", "negative": "(-{0})",
    "absolute": "({0} < 0 ? -{0} : {0})", "absolute f": "fabs{f}({0})",
    "bitwise_count": "__builtin_popcount{l}({0})", "nextafter d": "next_double({all})",
    # C's library has these for double, and with an f for float
    **dict.fromkeys(("trunc", "floor", "ceil", "rint", "sqrt", "log2", "copysign", "ldexp"),
                    "{name}{f}({all})"), **_PICKS,
}  # fmt: skip


class Untranslatable(Exception):
    """The function does something for which this translator has no C."""


class Symbol(np.ndarray):
    """A value of one element: its dtype, the C expression, and the function it belongs to."""

    code: str
    body: "Body"

    def __new__(cls, dtype, code: str, body: "Body"):
        """Make an array without dimensions that stands for a value of that dtype."""
        self = np.zeros((), dtype).view(cls)
        self.code, self.body = code, body
        return self

    def __array_finalize__(self, _other):
        pass

    def astype(self, dtype, **_):
        """Return a cast, as C."""
        return self.body.cast(self, np.dtype(dtype))

    def view(self, *kind):
        """Return the same bits as another dtype. Raise Untranslatable for one of another size."""
        dtype = np.dtype(kind[0])
        if dtype.itemsize != self.dtype.itemsize:
            raise Untranslatable("a view of another size")
        return self.body.bits(self, dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, dtype=None, **kwargs):
        if method != "__call__" or kwargs:
            raise Untranslatable(f"{ufunc.__name__} {method} {sorted(kwargs)}")
        return self.body.ufunc(ufunc, inputs, dtype)

    def __array_function__(self, function, _types, args, kwargs):
        known = _FUNCTIONS.get(function.__name__)
        if known is None:
            raise Untranslatable(function.__name__)
        return known(self.body, *args, **kwargs)

    def __bool__(self):
        raise Untranslatable("a decision that depends on the data")

    __int__ = __float__ = __index__ = __iter__ = __bool__

    def any(self, *_, **__):
        """Return True: of shortcuts where no element needs the rest, some element might."""
        return True


def in_c(name: str) -> Callable:
    """Mark a function that C has, too, under that name: it is not taken apart."""

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
    """Statements of one C function, each of which sets a new variable."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[tuple[str, str], str] = {}
        #: of variables that hold what was rounded to half precision
        self.before_rounding: dict[str, str] = {}

    def symbol(self, dtype, code: str) -> Symbol:
        """Return a variable for the expression; equal ones share it."""
        dtype = np.dtype(dtype)
        key = (dtype.char, code)
        if key not in self._known:
            self._known[key] = f"t{len(self.lines)}"
            self.lines.append(f"{_ctype(dtype)} {self._known[key]} = {code};")
            if code.startswith("float_to_half("):
                self.before_rounding[self._known[key]] = code.removeprefix("float_to_half")
        return Symbol(dtype, self._known[key], self)

    def call(self, name: str, dtype, arguments) -> Symbol:
        """Return a call of a function of the C library or of emulate.c."""
        parts = [self._as(x, np.dtype(dtype)).code for x in arguments]
        return self.symbol(dtype, f"{name}({', '.join(parts)})")

    def cast(self, x, dtype: np.dtype) -> Symbol:
        """Convert x to a dtype, as NumPy converts."""
        if x.dtype == dtype:
            return x
        if dtype.char == "e":
            near = f"to_odd((double){x.code})" if x.dtype.char != "f" else x.code
            return self.symbol(dtype, f"float_to_half({near})")
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
        """Return a literal of a dtype. Raise Untranslatable for an array."""
        if isinstance(value, np.ndarray):
            raise Untranslatable("an array that is no symbol")
        value = np.asarray(value).astype(dtype)
        if dtype.kind == "f":
            number = float(value)
            text = "NAN" if number != number else "INFINITY" if number == np.inf else (
                "-INFINITY" if number == -np.inf else f"{number.hex()}")  # fmt: skip
            return Symbol(dtype, f"(({_ctype(dtype)}){text})", self)
        # the lowest int64 has no literal of its own
        text = f"0x{int(value) & (1 << 64) - 1:x}" if dtype.itemsize == 8 else str(int(value))
        suffix = "" if dtype.itemsize < 4 else {"u": "u", "i": "", "b": ""}[dtype.kind]
        suffix += "ll" if dtype.itemsize == 8 else ""
        return Symbol(dtype, f"(({_ctype(dtype)}){text}{suffix})", self)

    def _as(self, x, dtype: np.dtype) -> Symbol:
        return self.cast(x, dtype) if isinstance(x, Symbol) else self.constant(x, dtype)

    def ufunc(self, ufunc, inputs, dtype=None):
        """Return the call of a ufunc, in the loop that NumPy would choose. Raise Untranslatable."""
        signature = tuple(type(x) if type(x) in (int, float) else np.asarray(x).dtype
                          for x in inputs) + (None,) * ufunc.nout  # fmt: skip
        wanted = {} if dtype is None else {"signature": (np.dtype(dtype),) * len(signature)}
        loop = ufunc.resolve_dtypes(signature, **wanted)
        sources = [self._as(x, d) for x, d in zip(inputs, loop, strict=False)]
        if ufunc.__name__ == "frexp":
            return (self.symbol(loop[1], f"fraction({sources[0].code})"),
                    self.symbol(loop[2], f"power({sources[0].code})"))  # fmt: skip
        return self._apply(ufunc.__name__, sources, loop[-1])

    def _apply(self, name: str, sources: list[Symbol], result: np.dtype) -> Symbol:
        codes, source = [x.code for x in sources], sources[0].dtype
        keys = (f"{name} {result.char}", f"{name} {result.kind}", name)
        key = next((key for key in keys if key in _FORMS), None)
        if key is None:
            raise Untranslatable(name)
        code = _FORMS[key].format(
            *codes, all=", ".join(codes), name=name, type=_ctype(result), bits=8 * result.itemsize,
            f="f" * (source.char in "ef"), l="l" * (source.itemsize == 8),
        )  # fmt: skip
        if key in _PICKS:
            return self.symbol(result, code)
        if result.char == "e":
            code = f"float_to_half({code})"
        elif result.kind in "iu" and result.itemsize < 4:
            code = f"({_ctype(result)}){code}"
        return self.symbol(result, code)


def _where(body: Body, chosen, a, b) -> Symbol:
    dtype = np.result_type(*(x if type(x) in (int, float) else np.asarray(x).dtype
                             for x in (a, b)))  # fmt: skip
    first, second = body._as(a, dtype), body._as(b, dtype)
    return body.symbol(dtype, f"({body._as(chosen, np.dtype(bool)).code} ? {first.code} : "
                       f"{second.code})")  # fmt: skip


def _select(body: Body, conditions, choices, default=0) -> Symbol:
    for condition, choice in reversed(list(zip(conditions, choices, strict=True))):
        default = _where(body, condition, choice, default)
    return default


_FUNCTIONS: dict[str, Callable] = {
    "where": _where, "select": _select,
    "clip": lambda _body, x, low, high: np.minimum(np.maximum(x, low), high),
    "broadcast_arrays": lambda _body, *arrays: arrays,
    "full_like": lambda body, like, value: body.constant(value, like.dtype),
    "zeros_like": lambda body, like: body.constant(0, like.dtype),
}  # fmt: skip


def _ctype(dtype: np.dtype) -> str:
    try:
        return _C[dtype.char]
    except KeyError:
        raise Untranslatable(f"type {dtype}") from None


def storage(dtype) -> str:
    """Return C's type of an element in memory."""
    dtype = np.dtype(dtype)
    return "uint16_t" if dtype.char == "e" else "uint32_t" if dtype.char == "?" else _ctype(dtype)


def loop(name: str, function: Callable, results, sources, each: str = "EACH") -> str:
    """Write a C function over n elements: p holds pointers to the results and then the sources.

    results, sources: dtypes; a bool is a uint32_t in memory, a float16 a uint16_t. each: its loop,
    as emulate.c calls it.

    Raises:
        Untranslatable: numpy goes on.
    """
    body = Body()
    inputs = []
    for i, dtype in enumerate(sources):
        dtype = np.dtype(dtype)
        inputs.append(body.symbol(dtype, f"{'h' if dtype.char == 'e' else 's'}{i}[l]"))
    try:
        with np.errstate(all="ignore"):
            values = function(*inputs)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise Untranslatable(f"{name}: {error}") from error
    values = values if isinstance(values, tuple) else (values,)
    # halves are converted in loops of their own, which become vector code
    first = [f"float h{i}[n]; from_halves(h{i}, s{i}, n);"
             for i, dtype in enumerate(sources) if np.dtype(dtype).char == "e"]  # fmt: skip
    lines, last = [], []
    for i, (value, dtype) in enumerate(zip(values, results, strict=True)):
        dtype = np.dtype(dtype)
        value = value if isinstance(value, Symbol) else body.constant(value, dtype)
        if value.dtype.itemsize == dtype.itemsize and value.dtype.kind in "iu" + dtype.kind:
            code = body.bits(value, dtype).code
        else:
            code = body.cast(value, dtype).code
        if dtype.char == "e":
            first.append(f"float r{i}[n];")
            last.append(f"to_halves(d{i}, r{i}, n);")
            # rounded there
            code = body.before_rounding.get(code, code)
        lines.append(f"{'r' if dtype.char == 'e' else 'd'}{i}[l] = {code};")
    whole = " ".join([*body.lines, *lines])
    for x in inputs:
        # numpy.asarray, for one, makes a plain number of a symbol
        if len(re.findall(rf"\b{x.code}\b", whole)) < 2:
            raise Untranslatable(f"{name}: a source has no effect")
    pointers = [f"{storage(d)} *d{i} = p[{i}];" for i, d in enumerate(results)]
    pointers += [
        f"const {storage(d)} *s{i} = p[{i + len(results)}];" for i, d in enumerate(sources)
    ]
    inner = "\n    ".join([*body.lines, *lines])
    before, behind = "\n  ".join([*pointers, *first]), "".join(f"\n  {x}" for x in last)
    return (f"static void {name}(void *const *p, long n)\n{{\n  {before}"
            f"\n  {each} {{\n    {inner}\n  }}{behind}\n}}\n")  # fmt: skip
