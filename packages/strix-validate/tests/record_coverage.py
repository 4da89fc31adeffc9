# SPDX-License-Identifier: BSD-3-Clause
"""Write coverage.json, which lists what the quick checks of Triton kernels launch.

Run this program with the libraries installed, after a change of cases or of a library.
test_coverage.py reads coverage.json.

    python packages/strix-validate/tests/record_coverage.py [LIBRARY...] --vllm FOLDER --keep FOLDER

Each case runs in Triton's interpreter, in a process of its own. The case's results do not matter,
because only the first and the last program of each grid axis run, and only the first and the last
trip of each loop. If a case fails in this way, for example because a kernel reads indices from
missing results, it runs again with all programs and trips.
"""

import argparse
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import coverage_cases
import launches
import torch

RECORD = Path(__file__).with_name("coverage.json")
#: coverage.json has this word instead of the name of a case if several cases have the same value.
SEVERAL = "several"
_SECONDS = 600
#: Kinds of values of a required argument. It is no gap if an argument can have only one of these
#: kinds.
REQUIRED = {"a tensor", "a number", "a value"}
#: Cases that run in full, because their first and last programs do nothing. Those programs have
#: tokens without an adapter, or adapters without tokens.
_IN_FULL = ("lora-prompt",)
#: The parts of a kernel's record: flags, constants that flags are compared with, grid axes, loops.
_PARTS = ("flags", "compared", "grid", "loops")


def run_case(call: Any, modules: tuple[str, ...], run_all: bool, descriptor: int) -> None:
    """Make a call, and write what it launched to a file descriptor."""
    recorded = launches.Launches(modules)
    launches.watch(recorded, run_all)
    sys.setprofile(partial(launches.profile, recorded))
    try:
        call.execute("cpu")
        error = ""
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    sys.setprofile(None)
    with os.fdopen(descriptor, "wb") as pipe:
        # The parent imports these modules, too, because importing torch._dynamo in each case takes
        # two seconds.
        imported = [name for name in sys.modules if name.startswith((*modules, "torch._"))]
        record = {"kernels": recorded.kernels, "functions": recorded.functions}
        pickle.dump((record, error, imported), pipe)


def run_in_child(call: Any, modules: tuple[str, ...], run_all: bool) -> tuple[dict, str]:
    """Run a case in a child process, because a kernel that reads missing results may crash."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(_SECONDS)
        run_case(call, modules, run_all, write)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    if not data:
        return {}, "the case crashed or took too long"
    record, error, imported = pickle.loads(data)
    for name in imported:
        # The child may have a stand-in for a package that is not installed.
        with suppress(ImportError):
            importlib.import_module(name)
    return record, error


def record_library(library: str, vllm: Path | None, keep: Path) -> None:
    """Write a record of each quick check of a library to a file in the folder `keep`.

    A case whose file has the same version of the library and the same digest does not run again.
    """
    from strix_validate.attention import flash
    from strix_validate.triton import interpreter, stand_in

    if library == "flash":
        # flash-attn uses its built-in kernels if it cannot import amd-aiter.
        sys.modules["aiter"] = None  # type: ignore[assignment]
    stand_in.install()
    interpreter.complete()
    # If only some trips of a loop run, results are arbitrary, and numpy warns about them.
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    backend = coverage_cases.BACKENDS.get(library)
    if backend and backend != flash.backend():
        raise SystemExit(f"{library}: flash-attn uses the kernels {flash.backend()}")
    modules = (coverage_cases.LIBRARIES[library],)
    version = ""
    for case in coverage_cases.quick_cases(library):
        call = case.make_call()
        file = keep / library / f"{case.name}.json"
        if library == "vllm":
            call = replace(call, source=vllm)
        version = version or call.prepare()
        origin = {"version": version, "digest": case.digest()}
        if file.exists() and json.loads(file.read_text())["of"] == origin:
            continue
        record, error = run_in_child(call, modules, run_all=case.name in _IN_FULL)
        if error and error.split(":")[0] not in case.refusals:
            print(
                f"{library} {case.name}: runs again in full, because of {error[:150]}", flush=True
            )
            record, error = run_in_child(call, modules, run_all=True)
        if error and error.split(":")[0] not in case.refusals:
            raise SystemExit(f"{library} {case.name}: {error}")
        print(f"{library} {case.name}", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"of": origin, **record}))


def merge(records: dict[str, dict]) -> dict:
    """Return the merged record of a library, in which each value has its case's name or SEVERAL.

    Args:
        records: the records by case.
    """
    merged: dict[str, dict] = {"kernels": {}, "functions": {}}
    for case, record in records.items():
        for name, kernel in record["kernels"].items():
            entry = merged["kernels"].setdefault(name, {part: {} for part in _PARTS})
            entry["compared"] = kernel["compared"]
            for flag, values in kernel["flags"].items():
                _add_values(entry["flags"].setdefault(flag, {}), values, case)
            for part in ("grid", "loops"):
                for key, count in kernel[part].items():
                    entry[part][key] = _merge_count(entry[part].get(key, [0, ""]), count, case)
        for name, arguments in record["functions"].items():
            entry = merged["functions"].setdefault(name, {})
            for argument, values in arguments.items():
                _add_values(entry.setdefault(argument, {}), values, case)
    return _drop_constant_values(merged)


def _drop_constant_values(merged: dict) -> dict:
    """Remove the flags that are only sizes or always given, and arguments without a gap.

    These arguments have only kinds in REQUIRED, and cases have all of these kinds.
    """
    kernels = {}
    for name, kernel in merged["kernels"].items():
        flags = {
            flag: values
            for flag, values in kernel["flags"].items()
            if flag in kernel["compared"] or not all(map(_is_size, values))
        }
        kernels[name] = kernel | {"flags": {f: v for f, v in flags.items() if set(v) != {"given"}}}
    functions = {
        name: {a: v for a, v in arguments.items() if not set(v) <= REQUIRED or "" in v.values()}
        for name, arguments in merged["functions"].items()
    }
    functions = {name: arguments for name, arguments in functions.items() if arguments}
    return {"kernels": kernels, "functions": functions}


def _is_size(value: str) -> bool:
    """Return whether a flag's value is a number, such as a tile size or a model's dimension."""
    return re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value) is not None


def _add_values(owners: dict[str, str], values: dict[str, bool], case: str) -> None:
    for value, is_passed in values.items():
        if not is_passed:
            owners.setdefault(value, "")
        else:
            owners[value] = SEVERAL if owners.get(value) else case


def _merge_count(entry: list, count: int, case: str) -> list:
    """Return the larger count, and the case that has a count above 1, or SEVERAL such cases."""
    largest, owner = entry
    if count > 1:
        owner = SEVERAL if owner else case
    return [max(largest, count), owner]


def write_record(libraries: Iterable[str], keep: Path) -> None:
    """Replace the records of these libraries in coverage.json by those in the folder `keep`."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for library in libraries:
        cases = {case.name: case.digest() for case in coverage_cases.quick_cases(library)}
        files = {name: keep / library / f"{name}.json" for name in cases}
        records = {name: json.loads(file.read_text()) for name, file in files.items()}
        version = next(iter(records.values()))["of"]["version"]
        record[library] = {"version": version, "cases": cases, **merge(records)}
    RECORD.write_text(_format(record) + "\n")


def _format(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each case, flag, argument, axis and loop."""
    is_line = not isinstance(value, dict) or not value or depth == 5
    if is_line or (depth == 4 and not any(isinstance(x, dict | list) for x in value.values())):
        return json.dumps(value, sort_keys=True)
    indent = " " * (depth + 1)
    lines = (
        f"{indent}{json.dumps(key)}: {_format(value[key], depth + 1)}" for key in sorted(value)
    )
    return "{\n" + ",\n".join(lines) + f"\n{' ' * depth}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", nargs="*", default=list(coverage_cases.LIBRARIES))
    parser.add_argument("--vllm", type=Path, help="a folder of vLLM's source")
    parser.add_argument("--keep", type=Path, required=True, help="a folder for each case's record")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        record_library(options.library[0], options.vllm, options.keep)
        return
    for library in options.library:
        command = [sys.executable, __file__, "--child", library, "--keep", str(options.keep)]
        command += ["--vllm", str(options.vllm)] if options.vllm else []
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True)
    write_record(options.library, options.keep)


if __name__ == "__main__":
    main()
