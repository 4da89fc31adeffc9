# SPDX-License-Identifier: BSD-3-Clause
"""A first look: flash-attn's kernels, compiled for gfx1151 and executed on this machine's CPU.

It takes the few wheels of the host base that the validator needs, and flash-attn's source with our
patches, and makes no package. What it downloads stays in build/sources, for builds.
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

from forge.conda.package import scratch
from forge.errors import Failed, NotAttempted
from forge.files import hold, read_text, sha256_file
from forge.hostbase.base import LOCK, require_compilers
from forge.hostbase.lock import fetch_wheels, read_pins
from forge.hostbase.wheels import Wheel, is_nvidia
from forge.project import Project
from forge.recipes.recipe import Recipe, list_patches, sources_of
from forge.sources import patching
from forge.sources.archives import unpack
from forge.sources.cache import Progress, SourceCache

Say = Callable[[str], None]
COMPILED, EXECUTED = "kernels/d64", "emulated/d64-causal-float16"
ERRORS = {"out": "output", "dq": "gradient of q", "dk": "gradient of k", "dv": "gradient of v"}


def run(project: Project, flash_attn: Recipe, say: Say, progress: Progress) -> dict[str, Any]:
    """Compile and execute the kernels; returns the validator's record.

    Raises:
        NotAttempted: pip cannot fetch a wheel, or there is no compiler.
        Refused: A file is not what its hash says.
        Failed: A patch does not apply, or the validator ends without a record.
    """
    require_compilers()
    folder = project.build / "demo"
    with hold(folder, "running the demo in", say):
        return _run(project, flash_attn, folder, say, progress)


def _run(
    project: Project, flash_attn: Recipe, folder: Path, say: Say, progress: Progress
) -> dict[str, Any]:
    """Do what `run` does, with `folder` held."""
    bases, cache = project.recipes / "bases" / "host", SourceCache(project)
    wheels = {wheel.name: wheel for wheel in fetch_closure(project, bases / LOCK, cache, say)}
    say("demo: unpacks PyTorch and Triton")
    places = []
    for wheel in wheels.values():
        place = folder / wheel.sha256
        if not place.exists():
            unpack(wheel.file, place)
        places.append(place)
    with scratch(folder) as name:
        work = Path(name)
        program = bases / "stub_cuda_libraries.py"
        stubs = stub_cuda(program, wheels, folder, work)
        source = patch_flash_attn(flash_attn, cache, work / "flash-attn", progress)
        places += [source, *(project.root / "packages").glob("*/src")]
        say("demo: compiles and executes flash-attn's kernels")
        return validate(places, stubs, work)


def fetch_closure(project: Project, lock: Path, cache: SourceCache, say: Say) -> Iterator[Wheel]:
    """Yield the wheels of what both products and flash-attn require, without NVIDIA's."""
    pins = read_pins(lock)
    known: set[str] = set()
    names = {canonicalize_name(r.name) for r in required(project)}
    while names:
        known |= names
        wheels = [
            Wheel.read(path, source, "")
            for path, source in fetch_wheels([pins[n] for n in sorted(names)], lock, cache, say)
        ]
        yield from wheels
        requirements = [r for wheel in wheels for r in wheel.metadata.requires_dist or []]
        names = {canonicalize_name(r.name) for r in requirements if applies(r)} - known
        names = {name for name in names if not is_nvidia(name)}


def required(project: Project) -> Iterator[Requirement]:
    """Yield what the validator, the emulator and flash-attn require of PyPI."""
    for name in ("strix-validate", "strix-emulate"):
        file = project.root / "packages" / name / "pyproject.toml"
        data = tomllib.loads(read_text(file))["project"]
        optional = data.get("optional-dependencies", {})
        yield from map(Requirement, data["dependencies"] + optional.get("attention", []))
    yield Requirement("einops")


def applies(requirement: Requirement) -> bool:
    """Return whether a requirement holds here, without extras."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def stub_cuda(program: Path, wheels: dict[str, Wheel], folder: Path, work: Path) -> Path:
    """Return the folder of stubs of CUDA's libraries for this torch, made once."""
    torch, pyelftools = wheels["torch"], wheels["pyelftools"]
    stubs = folder / f"stubs-{torch.sha256[:16]}-{sha256_file(program)[:16]}"
    if not stubs.exists():
        paths = (program, torch.file, pyelftools.file, work / "stubs")
        command = [sys.executable, "-I", *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{program} failed: {done.stderr.strip()}")
        (work / "stubs").rename(stubs)
    return stubs


def patch_flash_attn(recipe: Recipe, cache: SourceCache, tree: Path, progress: Progress) -> Path:
    """Unpack flash-attn's source and apply the recipe's patches."""
    (source,) = sources_of(recipe)
    cache.fetch(source, progress)
    unpack(cache.path(source), tree)
    fault = patching.apply_in_place(tree, list_patches(recipe, recipe.sources[0]))
    if fault:
        raise Failed(f"flash-attn: {fault}")
    return tree


def validate(places: Iterable[Path], stubs: Path, work: Path) -> dict[str, Any]:
    """Run two checks of the validator; returns its record. Raises Failed without one."""
    command = [sys.executable, "-m", "strix_validate.cli", "run", "--json"]
    command += ["--tier", "kernels", "--tier", "emulated", "--only", COMPILED, "--only", EXECUTED]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "LD_LIBRARY_PATH": str(stubs),
        "TRITON_CACHE_DIR": str(work / "triton"),
    }
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    try:
        record: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = "\n".join(done.stderr.strip().splitlines()[-9:])
        raise Failed(f"strix-validate ended with {done.returncode}:\n{lines}") from None
    return record


def describe(record: dict[str, Any]) -> Iterator[str]:
    """Yield what a record says, in words.

    Raises:
        Failed: A check failed.
        NotAttempted: A check was skipped.
    """
    checks = {check["id"]: check for check in record["checks"]}
    versions = record["versions"]
    yield (
        f"flash-attn {versions['flash-attn']}, with our patches; Triton {versions['triton']}, "
        f"PyTorch {versions['torch']}"
    )
    yield from describe_compiled(require_passed(checks, COMPILED))
    yield from describe_executed(require_passed(checks, EXECUTED))
    yield "All results are right. No gfx1151 GPU took part: an emulator executed its instructions."


def require_passed(checks: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what a check measured. Raises Failed or NotAttempted if it did not pass."""
    check = checks.get(name, {"state": "absent", "reason": "the validator did not run it"})
    if check["state"] == "passed":
        measured: dict[str, Any] = check["measured"]
        return measured
    error = Failed if check["state"] == "failed" else NotAttempted
    raise error(f"{name} {check['state']}: {check['reason']}")


def describe_compiled(kernels: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each compiled kernel."""
    yield "\nCompiled for gfx1151, attention forward and backward, head dimension 64:"
    for name, facts in kernels.items():
        spills = facts["vgpr_spills"] + facts["sgpr_spills"]
        yield (
            f"  {name.partition('-')[2]:28} {facts['wmma']:3} matrix instructions (WMMA), "
            f"{facts['vgprs']} vector registers, {spills} spilled, {facts['lds']} bytes of LDS"
        )


def describe_executed(measured: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each executed kernel, and one for each result."""
    yield "\nExecuted on this CPU by an emulator of gfx1151; causal attention, 70 tokens, float16:"
    for name, facts in measured["kernels"].items():
        count = facts["wave_instructions"]
        yield f"  {name.partition('-')[2]:28} {count:,} instructions of 32 lanes each"
    yield "  No data race, no missing wait, no access outside of an array."
    yield "\nCompared with attention in float64, computed by PyTorch on this CPU:"
    for name, meaning in ERRORS.items():
        error, bound = measured[name]["error"], measured[name]["bound"]
        yield f"  {meaning:28} largest error {error:.1e}, allowed {bound:.1e}"
    yield ""
