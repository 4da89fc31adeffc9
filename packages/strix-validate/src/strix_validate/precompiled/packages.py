# SPDX-License-Identifier: BSD-3-Clause
"""Make a package of kernels; see doctor.kernel_lists for its form::

python -m strix_validate.precompiled.packages flash-attn core FOLDER
python -m strix_validate.precompiled.packages vllm core FOLDER VLLM_SOURCE
python -m strix_validate.precompiled.packages triton-packages full FOLDER
"""

import hashlib
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from strix_validate.doctor.kernel_lists import FOLDER, LIST
from strix_validate.precompiled import costs
from strix_validate.precompiled.flash_calls import FLASH_SETS
from strix_validate.precompiled.vllm_calls import vllm_set
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call, DeferredCall, deferred, require
from strix_validate.triton.modes import CallAnswer
from strix_validate.triton.stand_in import Lookup
from strix_validate.triton_packages import fla, liger, sage

#: Calls of one child process at most, which takes seconds to import torch.
BATCH = 24
#: Packages whose kernels are shipped. conch's are few, and vLLM calls them at its start.
SHIPPING = (fla, liger, sage)


class LostProduct(Exception):
    """A kernel that is slow on every GPU; the message names it and its tile."""


#: Told the answers to some calls, as they come.
_Progress = Callable[[Sequence[CallAnswer]], None]


def has(module: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(module) is not None


def look_up(
    calls: Sequence[Call],
    cache: Path,
    jobs: int | None = None,
    progress: _Progress = lambda _: None,
    whole: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[CallAnswer]:
    """Find or compile the kernels of calls, those of one library; cache is Triton's.

    jobs: processes at a time, by default one for each core. whole: all calls in one process, as a
    program makes them. variables: of the environment, for the processes.

    Raises:
        triton_modes.ChildError: a child process ended without an answer.
    """
    jobs = jobs or len(os.sched_getaffinity(0))
    size = max(1, len(calls) if whole else min(BATCH, math.ceil(len(calls) / jobs)))
    count = math.ceil(len(calls) / size)

    def run(first: int) -> list[CallAnswer]:
        # neighbours in different batches: autotuned calls, of a hundred kernels each, are such
        answers = triton_modes.run(calls[first::count], "look up", cache, variables).calls
        progress(answers)
        return answers

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(run, range(count)))
    return [found[i % count][i // count] for i in range(len(calls))]


def write(folder: Path, lookups: Iterable[Lookup]) -> int:
    """Make a package's folder of these kernels; return how many there are.

    Raises:
        LostProduct: a kernel multiplies without the matrix unit what the unit could.
    """
    kernels = {}
    for found in lookups:
        _require_matrix_unit(found)
        files = {}
        for name, path in found.files.items():
            content = Path(path).read_bytes()
            if name.endswith(".json"):
                content = _without_paths(content)
            elif not name.endswith(".hsaco"):
                continue  # stages of the compiler, which nothing reads again
            file = folder / found.key / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            files[name] = hashlib.sha256(content).hexdigest()
        about = {name: getattr(found, name) for name in ("name", "types", "constants", "options")}
        kernels[found.key] = about | {"cost": asdict(measure_lookup(found)), "files": files}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIST).write_text(json.dumps({"kernels": dict(sorted(kernels.items()))}, indent=1))
    return len(kernels)


def _require_matrix_unit(lookup: Lookup) -> None:
    stages = {Path(path).suffix: Path(path) for path in lookup.files.values()}
    lost = costs.find_lost_products(stages[".ttgir"].read_text())
    if lost:
        constants = lookup.constants | lookup.options
        tile = " ".join(f"{name}={value}" for name, value in constants.items())
        numbers = ", ".join(sorted({*lost}))
        raise LostProduct(
            f"{lookup.name} {tile}: {len(lost)} products of {numbers} do not use the matrix unit: "
            "a tile is too small for it"
        )


def measure_lookup(lookup: Lookup) -> costs.KernelCost:
    """Return what a kernel costs that was found or compiled for gfx1151."""
    files = {Path(path).suffix: Path(path) for path in lookup.files.values()}
    metadata = json.loads(files[".json"].read_bytes())
    code, assembly = files[".hsaco"].read_bytes(), files[".amdgcn"].read_text()
    return costs.measure(code, assembly, metadata["shared"], lookup.name)


def _without_paths(metadata: bytes) -> bytes:
    """Return a kernel's metadata, with file names in place of the device libraries' paths."""
    found = json.loads(metadata)
    found["extern_libs"] = [[name, Path(path).name] for name, path in found["extern_libs"]]
    return json.dumps(found).encode()


def origins(answers: Iterable[CallAnswer], prefix: Path) -> Counter[str]:
    """Count the kernels that came from "packages", from the "cache", and were "compiled"."""
    packages = str(prefix / FOLDER)
    found: Counter[str] = Counter()
    for lookup in (lookup for answer in answers for lookup in answer.lookups):
        shipped = any(path.startswith(packages) for path in lookup.files.values())
        found["compiled" if lookup.compiled else "packages" if shipped else "cache"] += 1
    return found


def _shipped(name: str) -> Iterator[DeferredCall]:
    """Yield a set of calls of the packages in triton_packages: what each one's SHIPPED has.

    Raises:
        CannotRun: one of them is not installed.
    """
    for package in SHIPPING:
        require(package.MODULE)
        yield from (deferred(build, dtype) for build, dtype in package.SHIPPED[name])


def _make(library: str, name: str, folder: str, source: str = "") -> None:
    sets: dict[str, Callable[[], Sequence[Call]]] = {
        "flash-attn": lambda: list(FLASH_SETS[name]()),
        "vllm": lambda: vllm_set(name, Path(source)),
        "triton-packages": lambda: list(_shipped(name)),
    }
    calls, done = sets[library](), 0

    def progress(answers: Sequence[CallAnswer]) -> None:
        nonlocal done
        done += len(answers)
        print(f"{done} of {len(calls)} calls", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        answers = look_up(calls, Path(cache), progress=progress)
        for call, answer in zip(calls, answers, strict=True):
            if answer.error:
                raise SystemExit(f"{call.name}: {': '.join(answer.error)}")
        try:
            number = write(Path(folder), (found for answer in answers for found in answer.lookups))
        except LostProduct as error:
            raise SystemExit(str(error)) from error
    print(f"{number} kernels")


if __name__ == "__main__":
    _make(*sys.argv[1:])
