# SPDX-License-Identifier: BSD-3-Clause
"""Record what the quick checks of Triton kernels launch: coverage.json, which test_coverage judges.

Run it with the libraries installed, after a change of cases or of a library:

    python packages/strix-validate/tests/record_coverage.py [LIBRARY...] --vllm FOLDER --keep FOLDER

Each case runs in Triton's interpreter, in a process of its own. What is computed does not matter:
of each grid axis the first and the last program run, of each loop the first and the last trip.
A kernel that needs the others' results, because it reads places from them, runs again in whole.
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
#: For a value that more than one case has: without any one of them it is still there.
SEVERAL = "several"
_SECONDS = 600
#: Kinds of values of an argument that has no others.
REQUIRED = {"a tensor", "a number", "a value"}
#: Cases whose first and last programs have nothing to do: tokens of no adapter, adapters of none.
_WHOLE = ("lora-prompt",)
#: Of each kernel, and of what has it: values of flags, and sizes of axes and trips of loops.
_PARTS = ("flags", "compared", "grid", "loops")


def run_case(call: Any, modules: tuple[str, ...], whole: bool, to: int) -> None:
    """Make a call, and write what it launched to a file descriptor."""
    seen = launches.Launches(modules)
    launches.watch(seen, whole)
    sys.setprofile(partial(launches.profile, seen))
    try:
        call.execute("cpu")
        error = ""
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    sys.setprofile(None)
    with os.fdopen(to, "wb") as pipe:
        # the parent imports them too, once for all cases: torch._dynamo takes two seconds
        imported = [name for name in sys.modules if name.startswith((*modules, "torch._"))]
        record = {"kernels": seen.kernels, "functions": seen.functions}
        pickle.dump((record, error, imported), pipe)


def run_apart(call: Any, modules: tuple[str, ...], whole: bool) -> tuple[dict, str]:
    """Do it in a child process: a kernel that reads results that are not there may crash."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(_SECONDS)
        run_case(call, modules, whole, write)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    if not data:
        return {}, "it crashed, or took too long"
    record, error, imported = pickle.loads(data)
    for name in imported:
        # what a check puts in a package's place is not there
        with suppress(ImportError):
            importlib.import_module(name)
    return record, error


def record_library(library: str, vllm: Path | None, keep: Path) -> None:
    """Write what each of a library's quick checks launches to a file in a folder.

    A case whose file is of the same call and of the same library does not run again.
    """
    from strix_validate.triton import interpreter, stand_in

    stand_in.install()
    interpreter.complete()
    # what is computed of a few trips alone may be any number
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    modules = (coverage_cases.LIBRARIES[library],)
    version = ""
    for case in coverage_cases.quick_cases(library):
        call, file = case.make_call(), keep / library / f"{case.name}.json"
        if library == "vllm":
            call = replace(call, source=vllm)
        version = version or call.prepare()
        of = {"version": version, "digest": case.digest()}
        if file.exists() and json.loads(file.read_text())["of"] == of:
            continue
        record, error = run_apart(call, modules, whole=case.name in _WHOLE)
        if error and error.split(":")[0] not in case.refusals:
            print(f"{library} {case.name}: whole, because of {error[:150]}", flush=True)
            record, error = run_apart(call, modules, whole=True)
        if error and error.split(":")[0] not in case.refusals:
            raise SystemExit(f"{library} {case.name}: {error}")
        print(f"{library} {case.name}", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"of": of, **record}))


def merge(records: dict[str, dict]) -> dict:
    """Return what the cases of a library launch together: each value with the case that has it.

    Args:
        records: by case what was recorded.
    """
    merged: dict[str, dict] = {"kernels": {}, "functions": {}}
    for case, record in records.items():
        for name, kernel in record["kernels"].items():
            own = merged["kernels"].setdefault(name, {part: {} for part in _PARTS})
            own["compared"] = kernel["compared"]
            for flag, values in kernel["flags"].items():
                _add_values(own["flags"].setdefault(flag, {}), values, case)
            for part in ("grid", "loops"):
                for key, count in kernel[part].items():
                    own[part][key] = _larger(own[part].get(key, [0, ""]), count, case)
        for name, arguments in record["functions"].items():
            own = merged["functions"].setdefault(name, {})
            for argument, values in arguments.items():
                _add_values(own.setdefault(argument, {}), values, case)
    return _told(merged)


def _told(merged: dict) -> dict:
    """Return what libraries launch without what is no choice: sizes, and arguments always there."""
    kernels = {}
    for name, kernel in merged["kernels"].items():
        flags = {
            flag: values
            for flag, values in kernel["flags"].items()
            if flag in kernel["compared"] or not all(map(_is_size, values))
        }
        kernels[name] = kernel | {"flags": {f: v for f, v in flags.items() if set(v) != {"given"}}}
    functions = {
        name: {argument: v for argument, v in arguments.items() if not set(v) <= REQUIRED}
        for name, arguments in merged["functions"].items()
    }
    return {"kernels": kernels, "functions": {name: own for name, own in functions.items() if own}}


def _is_size(value: str) -> bool:
    """Return whether a flag's value is a number: tiles are chosen, and sizes come from models."""
    return re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value) is not None


def _add_values(own: dict[str, str], values: dict[str, bool], case: str) -> None:
    for value, is_passed in values.items():
        if not is_passed:
            own.setdefault(value, "")
        else:
            own[value] = SEVERAL if own.get(value) else case


def _larger(known: list, count: int, case: str) -> list:
    """Return the largest count, and the case that alone has more than one."""
    most, owner = known
    if count > 1:
        owner = SEVERAL if owner else case
    return [max(most, count), owner]


def write_record(libraries: Iterable[str], keep: Path) -> None:
    """Write coverage.json: of these libraries what is in the folder, of the others what it had."""
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
