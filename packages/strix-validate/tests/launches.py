# SPDX-License-Identifier: BSD-3-Clause
"""Record what a call launches in Triton's interpreter: flags, arguments, grid axes, loop trips."""

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

#: If the outermost axis has at most this many programs, all of them run.
_FEW = 8
#: Prefixes of the names of modules that pass a check's call on to the library's function.
_BETWEEN = ("torch.", "contextlib", "functools")


@dataclass
class Launches:
    """The launches of one case.

    Attributes:
        modules: prefixes of the names of modules whose functions are recorded.
        kernels: flags, grid axes and loops by kernel, in the format of coverage.json.
        functions: arguments by library function.
        kernel: the name of the running kernel.
    """

    modules: tuple[str, ...]
    kernels: dict[str, dict] = field(default_factory=dict)
    functions: dict[str, dict] = field(default_factory=dict)
    kernel: str = ""

    def add_kernel(self, function: Any, constants: list[str], values: dict[str, Any]) -> None:
        """Record a launch."""
        # Several modules may have kernels of the same name.
        self.kernel = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        source = _parse_source(function)
        empty: dict = {"flags": {}, "compared": {}, "grid": {}, "loops": {}}
        recorded = self.kernels.setdefault(self.kernel, empty)
        for name, value in values.items():
            if name in constants:
                _record(recorded["flags"], name, _describe_constant(value))
            else:
                _record(recorded["flags"], name, "None" if value is None else "given")
        compared = _list_compared_constants(source)
        recorded["compared"] = {name: x for name, x in compared.items() if name in constants}
        for axis in _list_axes(source):
            recorded["grid"].setdefault(str(axis), 0)

    def add_grid(self, *sizes: int) -> None:
        """Record the number of programs on each axis whose program id the kernel reads."""
        axes = self.kernels[self.kernel]["grid"]
        for axis, programs in axes.items():
            axes[axis] = max(programs, int(sizes[int(axis)]))

    def add_loop(self, frame: Any, trips: int) -> None:
        """Record how many trips a loop in a frame's function makes."""
        code = frame.f_code
        text = " ".join(linecache.getline(code.co_filename, frame.f_lineno).split("#")[0].split())
        # The name has a line number within the function, so that edits above the function do not
        # change it.
        name = f"{code.co_name}+{frame.f_lineno - code.co_firstlineno} {text.rstrip(':')}"
        loops = self.kernels[self.kernel]["loops"]
        loops[name] = max(loops.get(name, 0), trips)

    def add_call(self, frame: Any) -> None:
        """Record the arguments of a library's function."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        function = _find_function(frame)
        parameters = inspect.signature(function).parameters if function else {}
        recorded = self.functions.setdefault(
            f"{frame.f_globals['__name__']}.{code.co_qualname}", {}
        )
        for name in names:
            if name in ("self", "cls", "ctx"):
                continue
            parameter = parameters.get(name)
            default = parameter.default if parameter else inspect.Parameter.empty
            _record(recorded, name, _describe(frame.f_locals[name], default))
            text = str(parameter.annotation) if parameter else ""
            if "int" in text and "Tensor" in text:
                for kind in ("a tensor", "a number"):
                    recorded[name].setdefault(kind, False)


def _record(recorded: dict[str, dict[str, bool]], name: str, value: str) -> None:
    recorded.setdefault(name, {})[value] = True


def _describe_constant(value: Any) -> str:
    value = getattr(value, "value", value)
    is_plain = isinstance(value, bool | int | float | str) or value is None
    return str(value) if is_plain else getattr(value, "name", str(value))[:60]


def _describe(value: Any, default: Any) -> str:
    """Return an argument's value if it is a bool, str, dtype or None, and otherwise its kind.

    The kind of a number or list that equals the default is "its default".
    """
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if isinstance(value, torch.Tensor):
        return "a tensor"
    is_required = default is inspect.Parameter.empty
    if isinstance(value, int | float):
        return "a number" if is_required or value != default else "its default"
    if isinstance(value, tuple | list) and not is_required:
        return "its default" if tuple(value) == tuple(default or ()) else "another"
    return str(value) if isinstance(value, torch.dtype) else "a value"


def _find_function(frame: Any) -> Any:
    """Return the function that a frame runs, without its decorators, or None."""
    value: Any = frame.f_globals
    for name in frame.f_code.co_qualname.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    value = inspect.unwrap(value) if callable(value) else None
    return value if getattr(value, "__code__", None) is frame.f_code else None


@cache
def _parse_source(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _list_compared_constants(source: ast.AST) -> dict[str, list[str]]:
    """Return, by variable, the constants with which a kernel compares the variable."""
    constants: dict[str, set[str]] = {}
    for node in ast.walk(source):
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Name)
            and isinstance(node.ops[0], ast.Eq)
            and isinstance(node.comparators[0], ast.Constant)
        ):
            constants.setdefault(node.left.id, set()).add(str(node.comparators[0].value))
    return {name: sorted(values) for name, values in sorted(constants.items())}


def _list_axes(source: ast.AST) -> list[int]:
    """Return the axes of the grid whose program ids a kernel reads."""
    axes = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "program_id":
            axis = node.args[0] if node.args else node.keywords[0].value
            if isinstance(axis, ast.Constant):
                axes.add(axis.value)
    return sorted(axes)


def _ends(numbers: range) -> list[int]:
    """Return the first and the last number."""
    return sorted({*numbers[:1], *numbers[-1:]})


def _few_programs(numbers: range, frame: Any) -> list[int]:
    """Return the programs of one grid axis that run.

    On the outermost axis, the first and the last program run, or all programs if there are few,
    because data may decide how many trips a program makes. On an inner axis, the first program runs
    if the outermost axis is at its first program, and otherwise the last one. Axes of one program
    do not count as outer axes.

    Args:
        numbers: the programs of the axis.
        frame: the frame with the interpreter's loops over the axes, at the loop of this axis.
    """
    axis = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()[1]
    sizes = dict(zip("xyz", frame.f_locals["grid"], strict=True))
    outer = [frame.f_locals[name] for name in "xyz" if name < axis and sizes[name] > 1]
    if outer:
        return [numbers[-1] if outer[0] else numbers[0]]
    return list(numbers) if len(numbers) <= _FEW else _ends(numbers)


def watch(launches: Launches, run_all: bool) -> None:
    """Record what Triton's interpreter runs in this process.

    Args:
        launches: receives the record.
        run_all: Run every program of the grid and every trip of a loop, not only the first and the
            last.
    """
    from triton.runtime import interpreter

    # strix_validate.triton.interpreter.complete replaces interpreter.range, too. Call it first.
    interpreter_range = interpreter.range
    execute = interpreter.GridExecutor.__call__
    interpreter_file = interpreter.__file__

    def numbers(*limits: Any) -> Iterable:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_new_range":
            frame = frame.f_back
        trips = range(*(int(x) for x in limits))
        if frame.f_code.co_filename == interpreter_file:
            is_grid = frame.f_code.co_qualname == "GridExecutor.__call__"
            return _few_programs(trips, frame) if is_grid and not run_all else trips
        launches.add_loop(frame, len(trips))
        if run_all:
            return interpreter_range(*limits)
        # Like the interpreter's range, this function returns tensors if a limit is a tensor.
        first = next(iter(interpreter_range(*limits)), 0)
        few = _ends(trips)
        return few if isinstance(first, int) else [interpreter._implicit_cvt(x) for x in few]

    def call(self: Any, *args: Any, **options: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        arguments = {name: x for name, x in options.items() if name in names}
        sys.setprofile(None)
        launches.add_kernel(
            self.fn, self.constexprs, inspect.getcallargs(self.fn, *args, **arguments)
        )
        try:
            execute(self, *args, **options)
        finally:
            sys.setprofile(partial(profile, launches))

    set_grid = interpreter.interpreter_builder.set_grid_dim

    def grid(*sizes: int) -> None:
        launches.add_grid(*sizes)
        set_grid(*sizes)

    interpreter.range = numbers
    interpreter.GridExecutor.__call__ = call
    interpreter.interpreter_builder.set_grid_dim = grid


def profile(launches: Launches, frame: Any, event: str, _: Any) -> None:
    """Record a call from the validator into a library. This is a function for sys.setprofile."""
    code = frame.f_code
    if event != "call" or not code.co_argcount + code.co_kwonlyargcount or _is_between(frame):
        return
    name = frame.f_globals.get("__name__", "")
    if not name.startswith(launches.modules) or code.co_name.startswith("<"):
        return
    caller = frame.f_back
    while caller and _is_between(caller):
        caller = caller.f_back
    if caller and _is_ours(caller):
        launches.add_call(frame)


def _is_ours(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").startswith("strix_validate.")


def _is_between(frame: Any) -> bool:
    """Return whether a frame only passes arguments on, as decorators and modules in _BETWEEN do."""
    name = frame.f_globals.get("__name__", "")
    is_decorator = not frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
    return name == "torch" or name.startswith(_BETWEEN) or (not _is_ours(frame) and is_decorator)
