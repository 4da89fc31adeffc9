# SPDX-License-Identifier: BSD-3-Clause
"""Compile the kernels of a package, in the format that doctor.kernel_lists describes. Usage::

python -m strix_validate.precompiled.packages flash-attn core FOLDER
python -m strix_validate.precompiled.packages vllm core FOLDER VLLM_SOURCE
python -m strix_validate.precompiled.packages triton-packages full FOLDER

The kernels are written to FOLDER. "core" and "full" are names of sets of calls.
"""

import hashlib
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from strix_validate.checks import CannotRun
from strix_validate.doctor.kernel_lists import FOLDER, LIST
from strix_validate.precompiled import costs
from strix_validate.precompiled.flash_calls import FLASH_SETS
from strix_validate.precompiled.vllm_calls import vllm_set
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call, DeferredCall, defer, require
from strix_validate.triton.modes import CallAnswer
from strix_validate.triton.stand_in import Lookup
from strix_validate.triton_packages import fla, liger, sage

#: Largest number of calls for one child process, unless it makes all calls. With a smaller number
#: there would be more processes, each of which takes seconds to import torch.
BATCH = 24
#: Packages besides flash-attn and vLLM whose kernels are shipped. conch's and vllm-gguf-plugin's
#: kernels are not shipped, because only models with 8-bit or GGUF weights need them.
SHIPPING = (fla, liger, sage)


class LostProduct(Exception):
    """A matrix product of a kernel does not use the matrix unit, and is slow on every GPU."""


#: A function that is called with new answers when they arrive.
_Progress = Callable[[Sequence[CallAnswer]], None]


def _ignore(answers: Sequence[CallAnswer]) -> None:
    pass


def has(module: str) -> bool:
    """Return whether a module is installed."""
    return importlib.util.find_spec(module) is not None


def look_up(
    calls: Sequence[Call],
    cache: Path,
    jobs: int | None = None,
    progress: _Progress = _ignore,
    in_one_process: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[CallAnswer]:
    """Find or compile the kernels that the calls of one library need.

    Args:
        calls: The calls.
        cache: The folder of Triton's cache.
        jobs: Number of parallel processes; None is one for each core.
        progress: Is called with new answers when they arrive.
        in_one_process: Whether one process makes all calls, as a user's program would.
        variables: Environment variables for the processes.

    Returns:
        The answers in the order of the calls.

    Raises:
        triton_modes.ChildError: A child process crashed, could not import the library, or exceeded
            its time limit.
    """
    jobs = jobs or len(os.sched_getaffinity(0))
    size = len(calls) if in_one_process else min(BATCH, math.ceil(len(calls) / jobs))
    count = math.ceil(len(calls) / max(1, size))

    def run(first: int) -> list[CallAnswer]:
        # The autotuned calls, which compile a hundred kernels each, follow each other. Successive
        # calls go to different batches, so that all batches take about the same time.
        answers = triton_modes.run(calls[first::count], "look up", cache, variables).calls
        progress(answers)
        return answers

    with ThreadPoolExecutor(jobs) as pool:
        batches = list(pool.map(run, range(count)))
    return [batches[i % count][i // count] for i in range(len(calls))]


def write(folder: Path, lookups: Iterable[Lookup]) -> int:
    """Write these kernels into a package's folder; return the number of kernels.

    Raises:
        LostProduct: A kernel has a product that could use the matrix unit, and does not.
    """
    kernels = {}
    for lookup in lookups:
        _require_matrix_unit(lookup)
        kernels[lookup.key] = {
            "name": lookup.name,
            "types": lookup.types,
            "constants": lookup.constants,
            "options": lookup.options,
            "cost": asdict(measure_lookup(lookup)),
            "files": _write_files(folder / lookup.key, lookup),
        }
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"kernels": dict(sorted(kernels.items()))}
    (folder / LIST).write_text(json.dumps(contents, indent=1))
    return len(kernels)


def _write_files(folder: Path, lookup: Lookup) -> dict[str, str]:
    """Write those of a kernel's files that Triton loads; return their sha256 by name."""
    digests = {}
    for name, path in lookup.files.items():
        if not name.endswith((".json", ".hsaco")):
            continue  # these are intermediate files of the compiler, which Triton does not load
        content = Path(path).read_bytes()
        if name.endswith(".json"):
            content = _remove_paths(content)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def _require_matrix_unit(lookup: Lookup) -> None:
    stages = {Path(path).suffix: Path(path) for path in lookup.files.values()}
    lost = costs.find_lost_products(stages[".ttgir"].read_text())
    if lost:
        constants = lookup.constants | lookup.options
        tile = " ".join(f"{name}={value}" for name, value in constants.items())
        numbers = ", ".join(sorted({*lost}))
        raise LostProduct(
            f"{lookup.name} {tile}: {len(lost)} products of {numbers} do not use the matrix unit, "
            "because a tile is too small for it"
        )


def measure_lookup(lookup: Lookup) -> costs.KernelCost:
    """Return the cost of a looked-up kernel, which was compiled for TARGET."""
    files = {Path(path).suffix: Path(path) for path in lookup.files.values()}
    metadata = json.loads(files[".json"].read_bytes())
    code = files[".hsaco"].read_bytes()
    assembly = files[".amdgcn"].read_text()
    return costs.measure(code, assembly, metadata["shared"], lookup.name)


def _remove_paths(content: bytes) -> bytes:
    """Return a kernel's metadata with the file names of device libraries instead of their paths."""
    metadata = json.loads(content)
    metadata["extern_libs"] = [[name, Path(path).name] for name, path in metadata["extern_libs"]]
    return json.dumps(metadata).encode()


def count_origins(answers: Iterable[CallAnswer], prefix: Path) -> Counter[str]:
    """Count the kernels by origin: "packages", "cache" or "compiled"."""
    packages = str(prefix / FOLDER)
    counts: Counter[str] = Counter()
    for answer in answers:
        for lookup in answer.lookups:
            if lookup.compiled:
                counts["compiled"] += 1
            elif any(path.startswith(packages) for path in lookup.files.values()):
                counts["packages"] += 1
            else:
                counts["cache"] += 1
    return counts


def _list_shipped_calls(set_name: str) -> list[DeferredCall]:
    """Return the calls of a set for all packages in SHIPPING; their tables SHIPPED list them.

    Raises:
        CannotRun: One of the packages is not installed.
    """
    # These packages have few kernels, so `core` is not smaller than `full`.
    table = "full" if set_name == "core" else set_name
    calls = []
    for package in SHIPPING:
        require(package.MODULE)
        for build, dtype in package.SHIPPED[table]:
            calls.append(defer(build, dtype))
    return calls


def list_calls(library: str, set_name: str, source: str) -> Sequence[Call]:
    """Return the calls of a library that are in a set; `source` is vLLM's folder.

    Raises:
        CannotRun: The library is not installed, or no folder of vLLM's source is given.
        ValueError: There is no such set, or the folder is not a source tree of vLLM.
        SystemExit: No kernels of the library are shipped.
    """
    if set_name not in FLASH_SETS:
        raise ValueError(
            f"there is no set {set_name!r} of kernels; the sets are: {', '.join(FLASH_SETS)}"
        )
    if library == "flash-attn":
        return list(FLASH_SETS[set_name]())
    if library == "vllm":
        # Path("") would be the current folder, which may be any folder.
        if not source:
            raise CannotRun(
                "vllm: no source was passed; append the folder of vLLM's source to the command"
            )
        return vllm_set(set_name, Path(source))
    if library == "triton-packages":
        return _list_shipped_calls(set_name)
    raise SystemExit(f"no kernels of {library} are shipped")


def _make_package(library: str, set_name: str, folder: str, source: str = "") -> None:
    try:
        calls = list_calls(library, set_name, source)
    except (CannotRun, ValueError) as error:
        raise SystemExit(str(error)) from error
    done = 0

    def progress(answers: Sequence[CallAnswer]) -> None:
        nonlocal done
        done += len(answers)
        print(f"{done} of {len(calls)} calls", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        answers = look_up(calls, Path(cache), progress=progress)
        lookups: list[Lookup] = []
        for call, answer in zip(calls, answers, strict=True):
            if answer.error:
                raise SystemExit(f"{call.name}: {': '.join(answer.error)}")
            lookups += answer.lookups
        try:
            number = write(Path(folder), lookups)
        except LostProduct as error:
            raise SystemExit(str(error)) from error
    print(f"{number} kernels")


if __name__ == "__main__":
    _make_package(*sys.argv[1:])
