# SPDX-License-Identifier: BSD-3-Clause
"""The demo: compile flash-attn's kernels for gfx1151, and execute them on this machine's CPU.

The demo uses flash-attn's source with our patches, and those wheels of the host base that
flash-attn, the validator and the emulator need. It makes no package. Its downloads go to
build/sources, where builds use them too.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forge.conda.scratch import scratch
from forge.errors import Failed, NotAttempted
from forge.files import hold, read_text, sha256_file
from forge.hostbase.base import LOCK, require_compilers
from forge.hostbase.lock import fetch_wheels, read_pins
from forge.hostbase.wheels import Wheel, is_nvidia
from forge.project import Project
from forge.recipes.recipe import Recipe, list_patches, list_sources
from forge.sources import patching
from forge.sources.archives import unpack
from forge.sources.cache import Progress, SourceCache

Say = Callable[[str], None]
Record = dict[str, Any]
# The ids of two checks of the validator: one compiles kernels, the other executes them.
COMPILED = "kernels/d64"
EXECUTED = "emulated/d64-causal-float16"
# The results whose error the check EXECUTED measures, each with a description.
ERRORS = {
    "out": "output",
    "dq": "gradient of q",
    "dk": "gradient of k",
    "dv": "gradient of v",
}
ERROR_LINES = 9


def run(
    project: Project,
    flash_attn: Recipe,
    say: Say,
    progress: Progress,
) -> Record:
    """Compile and execute the kernels.

    Args:
        project: The checkout.
        flash_attn: The recipe of flash-attn.
        say: Called with a line for each stage and for each downloaded wheel.
        progress: Called with the progress of downloads.

    Returns:
        The validator's record.

    Raises:
        NotAttempted: A wheel or flash-attn's source cannot be fetched, or there is no compiler.
        Refused: The hash of a file differs from the pinned one.
        Failed: A patch does not apply, the stubs of CUDA's libraries cannot be made, or the
            validator ends without a record.
    """
    require_compilers()
    folder = project.build / "demo"
    with hold(folder, "running the demo in", say):
        return _run_in(folder, project, flash_attn, say, progress)


def _run_in(
    folder: Path,
    project: Project,
    flash_attn: Recipe,
    say: Say,
    progress: Progress,
) -> Record:
    """Compile and execute the kernels in a folder whose lock is held."""
    host_base = project.recipes / "bases" / "host"
    cache = SourceCache(project)
    wheels = {}
    for wheel in fetch_closure(project, host_base / LOCK, cache, say):
        wheels[wheel.name] = wheel
    say("demo: unpacking PyTorch and Triton")
    python_path = []
    for wheel in wheels.values():
        unpacked = folder / wheel.sha256
        if not unpacked.exists():
            unpack(wheel.file, unpacked)
        python_path.append(unpacked)
    with scratch(folder) as name:
        work = Path(name)
        program = host_base / "stub_cuda_libraries.py"
        stubs = stub_cuda(program, wheels, folder, work)
        tree = work / "flash-attn"
        patch_flash_attn(flash_attn, cache, tree, progress)
        python_path.append(tree)
        python_path += (project.root / "packages").glob("*/src")
        say("demo: compiling and executing flash-attn's kernels")
        return validate(python_path, stubs, work)


def fetch_closure(
    project: Project,
    lock: Path,
    cache: SourceCache,
    say: Say,
) -> Iterator[Wheel]:
    """Yield the wheels that the validator, the emulator and flash-attn need.

    Requirements of requirements are included. NVIDIA's wheels are left out.

    Args:
        project: The checkout.
        lock: The host base's list of pinned wheels.
        cache: The cache that the wheels are added to.
        say: Called with a line for each download.
    """
    pins = read_pins(lock)
    fetched: set[str] = set()
    names = {canonicalize_name(requirement.name) for requirement in list_requirements(project)}
    while names:
        fetched |= names
        chosen = [pins[name] for name in sorted(names)]
        wheels = []
        for path, source in fetch_wheels(chosen, lock, cache, say):
            wheels.append(Wheel.read(path, source, ""))
        yield from wheels
        names = set()
        for wheel in wheels:
            for requirement in wheel.metadata.requires_dist or []:
                name = canonicalize_name(requirement.name)
                is_new = name not in fetched and not is_nvidia(name)
                if is_new and applies(requirement):
                    names.add(name)


def list_requirements(project: Project) -> Iterator[Requirement]:
    """Yield what the validator, the emulator and flash-attn require from PyPI.

    The extra `attention` is included.
    """
    for product in ("strix-validate", "strix-emulate"):
        file = project.root / "packages" / product / "pyproject.toml"
        metadata = tomllib.loads(read_text(file))["project"]
        optional = metadata.get("optional-dependencies", {})
        for requirement in metadata["dependencies"] + optional.get("attention", []):
            yield Requirement(requirement)
    yield Requirement("einops")


def applies(requirement: Requirement) -> bool:
    """Return whether a requirement applies to this machine if no extra is selected."""
    marker = requirement.marker
    return marker is None or marker.evaluate({"extra": ""})


def stub_cuda(
    program: Path,
    wheels: dict[str, Wheel],
    folder: Path,
    work: Path,
) -> Path:
    """Make stubs of CUDA's libraries for the wheel of torch, unless they exist.

    Args:
        program: The program that makes the stubs.
        wheels: The wheels by name, including torch and pyelftools.
        folder: The folder for the stubs. They get a folder of their own in it.
        work: A folder for temporary files, on the same disk as `folder`.

    Returns:
        The folder of the stubs.

    Raises:
        Failed: The program fails.
    """
    torch = wheels["torch"]
    pyelftools = wheels["pyelftools"]
    key = f"{torch.sha256[:16]}-{sha256_file(program)[:16]}"
    stubs = folder / f"stubs-{key}"
    if stubs.exists():
        return stubs
    partial = work / "stubs"
    arguments = (program, torch.file, pyelftools.file, partial)
    result = subprocess.run(
        [sys.executable, "-I", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise Failed(f"{program} failed: {result.stderr.strip()}")
    partial.rename(stubs)
    return stubs


def patch_flash_attn(
    recipe: Recipe,
    cache: SourceCache,
    tree: Path,
    progress: Progress,
) -> None:
    """Unpack flash-attn's source to `tree` and apply the recipe's patches."""
    (source,) = list_sources(recipe)
    cache.fetch(source, progress)
    unpack(cache.path(source), tree)
    patches = list_patches(recipe, recipe.sources[0])
    problem = patching.apply_in_place(tree, patches)
    if problem:
        raise Failed(f"flash-attn: {problem}")


def validate(
    python_path: Iterable[Path],
    stubs: Path,
    work: Path,
) -> Record:
    """Run the checks COMPILED and EXECUTED of the validator.

    Args:
        python_path: The folders in which Python finds the packages.
        stubs: The folder with the stubs of CUDA's libraries.
        work: A folder for temporary files, in which the validator runs.

    Returns:
        The validator's record.

    Raises:
        Failed: The validator ends without a record.
    """
    command = [
        *(sys.executable, "-m", "strix_validate.cli", "run", "--json"),
        *("--tier", "kernels", "--tier", "emulated"),
        *("--only", COMPILED, "--only", EXECUTED),
    ]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    environment["LD_LIBRARY_PATH"] = str(stubs)
    environment["TRITON_CACHE_DIR"] = str(work / "triton")
    result = subprocess.run(
        command,
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        record: Record = json.loads(result.stdout)
    except ValueError:
        lines = result.stderr.strip().splitlines()[-ERROR_LINES:]
        reason = "\n".join(lines)
        raise Failed(f"strix-validate ended with {result.returncode}:\n{reason}") from None
    return record


def describe(record: Record) -> Iterator[str]:
    """Yield the lines that describe the validator's record.

    Raises:
        Failed: A check failed.
        NotAttempted: A check was skipped or is not in the record.
    """
    checks = {check["id"]: check for check in record["checks"]}
    versions = record["versions"]
    yield (
        f"flash-attn {versions['flash-attn']}, with our patches; "
        f"Triton {versions['triton']}, PyTorch {versions['torch']}"
    )
    yield from describe_compiled(require_passed(checks, COMPILED))
    yield from describe_executed(require_passed(checks, EXECUTED))
    yield "All results are correct. No GPU was used: an emulator executed gfx1151's instructions."


def require_passed(checks: Record, name: str) -> Record:
    """Return the measurements of a check.

    Raises:
        Failed: The check failed.
        NotAttempted: The check was skipped or is not in the record.
    """
    absent = {"state": "absent", "reason": "the validator did not run it"}
    check = checks.get(name, absent)
    if check["state"] == "passed":
        measured: Record = check["measured"]
        return measured
    message = f"{name} {check['state']}: {check['reason']}"
    if check["state"] == "failed":
        raise Failed(message)
    raise NotAttempted(message)


def describe_compiled(kernels: Record) -> Iterator[str]:
    """Yield a line for each compiled kernel."""
    yield "\nCompiled for gfx1151, attention forward and backward, head dimension 64:"
    for name, facts in kernels.items():
        kernel = name.partition("-")[2]
        spills = facts["vgpr_spills"] + facts["sgpr_spills"]
        yield (
            f"  {kernel:28} {facts['wmma']:3} matrix instructions (WMMA), "
            f"{facts['vgprs']} vector registers, {spills} spilled, "
            f"{facts['lds']} bytes of LDS"
        )


def describe_executed(measured: Record) -> Iterator[str]:
    """Yield a line for each executed kernel and for each result in ERRORS, with headings."""
    yield "\nExecuted on this CPU by an emulator of gfx1151; causal attention, 70 tokens, float16:"
    for name, facts in measured["kernels"].items():
        kernel = name.partition("-")[2]
        count = facts["wave_instructions"]
        yield f"  {kernel:28} {count:,} instructions of 32 lanes each"
    yield "  No data race, no missing wait, no access outside of an array."
    yield "\nCompared with attention in float64, computed by PyTorch on this CPU:"
    for key, meaning in ERRORS.items():
        error = measured[key]["error"]
        bound = measured[key]["bound"]
        yield f"  {meaning:28} largest error {error:.1e}, allowed {bound:.1e}"
    yield ""
