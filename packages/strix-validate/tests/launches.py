# SPDX-License-Identifier: BSD-3-Clause
"""What a call launches in Triton's interpreter: flags, arguments, grid axes and trips of loops."""

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

_FEW = 8
#: What stands between a check and the library's function.
_BETWEEN = ("torch.", "contextlib", "functools")


@dataclass
class Launches:
    """What one case launched.

    Attributes:
        modules: prefixes of the names of modules whose functions are noted.
        kernels: by name the flags, grid axes and loops of a kernel, see coverage.json.
        functions: by name the arguments of a library's function.
        kernel: the name of the kernel that runs.
    """

    modules: tuple[str, ...]
    kernels: dict[str, dict] = field(default_factory=dict)
    functions: dict[str, dict] = field(default_factory=dict)
    kernel: str = ""

    def add_kernel(self, function: Any, constants: list[str], values: dict[str, Any]) -> None:
        """Note a launch."""
        # kernels of one name are in several modules
        self.kernel = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        source = _source_of(function)
        empty: dict = {"flags": {}, "compared": {}, "grid": {}, "loops": {}}
        own = self.kernels.setdefault(self.kernel, empty)
        for name, value in values.items():
            if name in constants:
                _note(own["flags"], name, _describe_constant(value))
            else:
                _note(own["flags"], name, "None" if value is None else "given")
        constants_of = _compared(source).items()
        own["compared"] = {name: values for name, values in constants_of if name in constants}
        for axis in _axes(source):
            own["grid"].setdefault(str(axis), 0)

    def add_grid(self, *sizes: int) -> None:
        """Note how many programs a launch has on each axis that the kernel asks for."""
        axes = self.kernels[self.kernel]["grid"]
        for axis, programs in axes.items():
            axes[axis] = max(programs, int(sizes[int(axis)]))

    def add_loop(self, frame: Any, trips: int) -> None:
        """Note how often a loop runs; frame: of the function that has it."""
        code = frame.f_code
        text = " ".join(linecache.getline(code.co_filename, frame.f_lineno).split("#")[0].split())
        # the loop's lines move with what is above the function
        name = f"{code.co_name}+{frame.f_lineno - code.co_firstlineno} {text.rstrip(':')}"
        loops = self.kernels[self.kernel]["loops"]
        loops[name] = max(loops.get(name, 0), trips)

    def add_call(self, frame: Any) -> None:
        """Note the arguments of a library's function."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        function = _function_of(frame)
        parameters = inspect.signature(function).parameters if function else {}
        own = self.functions.setdefault(f"{frame.f_globals['__name__']}.{code.co_qualname}", {})
        for name in names:
            if name in ("self", "cls", "ctx"):
                continue
            parameter = parameters.get(name)
            default = parameter.default if parameter else inspect.Parameter.empty
            _note(own, name, _describe(frame.f_locals[name], default))
            text = str(parameter.annotation) if parameter else ""
            if "int" in text and "Tensor" in text:
                for kind in ("a tensor", "a number"):
                    own[name].setdefault(kind, False)


def _note(own: dict[str, dict[str, bool]], name: str, value: str) -> None:
    own.setdefault(name, {})[value] = True


def _describe_constant(value: Any) -> str:
    value = getattr(value, "value", value)
    is_plain = isinstance(value, bool | int | float | str) or value is None
    return str(value) if is_plain else getattr(value, "name", str(value))[:60]


def _describe(value: Any, default: Any) -> str:
    """Return what kind of value an argument has: numbers differ in whether they are the default."""
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


def _function_of(frame: Any) -> Any:
    """Return the function that a frame runs, without its decorators, or None."""
    value: Any = frame.f_globals
    for name in frame.f_code.co_qualname.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    value = inspect.unwrap(value) if callable(value) else None
    return value if getattr(value, "__code__", None) is frame.f_code else None


@cache
def _source_of(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _compared(source: ast.AST) -> dict[str, list[str]]:
    """Return by name the constants that it is compared with."""
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


def _axes(source: ast.AST) -> list[int]:
    """Return the axes of the grid that a kernel asks for."""
    axes = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "program_id":
            axis = node.args[0] if node.args else node.keywords[0].value
            if isinstance(axis, ast.Constant):
                axes.add(axis.value)
    return sorted(axes)


def _ends(numbers: range) -> list[int]:
    """Return the first number and the last one."""
    return sorted({*numbers[:1], *numbers[-1:]})


def _few_programs(numbers: range, frame: Any) -> list[int]:
    """Return the programs of a grid's axis that run: the first of all axes, and the last of all.

    Of the first axis, all of a few run: what a kernel reads may decide how many trips it makes.

    Args:
        frame: of the loops over the axes, at the one of this axis.
    """
    axis = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()[1]
    sizes = dict(zip("xyz", frame.f_locals["grid"], strict=True))
    outer = [frame.f_locals[name] for name in "xyz" if name < axis and sizes[name] > 1]
    if outer:
        return [numbers[-1] if outer[0] else numbers[0]]
    return list(numbers) if len(numbers) <= _FEW else _ends(numbers)


def watch(launches: Launches, whole: bool) -> None:
    """Note what this process's interpreter runs; whole: all programs and all trips run."""
    from triton.runtime import interpreter

    # after interpreter.complete, which gives the module a range of its own
    counted, execute = interpreter.range, interpreter.GridExecutor.__call__
    own_file = interpreter.__file__

    def numbers(*limits: Any) -> Iterable:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_new_range":
            frame = frame.f_back
        trips = range(*(int(x) for x in limits))
        if frame.f_code.co_filename == own_file:
            is_grid = frame.f_code.co_qualname == "GridExecutor.__call__"
            return _few_programs(trips, frame) if is_grid and not whole else trips
        launches.add_loop(frame, len(trips))
        if whole:
            return counted(*limits)
        # as the interpreter gives them: numbers, or tensors where a limit is one
        first = next(iter(counted(*limits)), 0)
        few = _ends(trips)
        return few if isinstance(first, int) else [interpreter._implicit_cvt(x) for x in few]

    def call(self: Any, *args: Any, **options: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        own = {name: x for name, x in options.items() if name in names}
        sys.setprofile(None)
        launches.add_kernel(self.fn, self.constexprs, inspect.getcallargs(self.fn, *args, **own))
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
    """Note a call from the validator into a library; a function for sys.setprofile."""
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
    """Return whether a function passes on what it is given: torch's, and decorators."""
    name = frame.f_globals.get("__name__", "")
    is_decorator = not frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
    return name == "torch" or name.startswith(_BETWEEN) or (not _is_ours(frame) and is_decorator)
