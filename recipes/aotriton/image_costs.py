# SPDX-License-Identifier: BSD-3-Clause
"""Package test: compare the cost of AOTriton's kernels with a committed list.

    python image_costs.py check LIST FOLDER
    python image_costs.py write LIST FOLDER

FOLDER is aotriton.images. The list uses upstream's names. A problem is the part of an image's name
with the dtype, the head dimension and the values of kernel options. A configuration has the values
of the tile's constants, followed by Triton's options waves_per_eu, num_warps and num_stages.

The action `check` measures only images whose problem is in LIST, because measuring a kernel takes a
tenth of a CPU second, and there are up to 19,148 kernels. The exit status is 1 if a kernel costs
more than LIST states, or is missing. Without a disassembler, the numbers of matrix instructions are
not compared, and the reason is printed.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from check_images import kernels
from strix_emulate import (
    DisassemblerError,
    decode_kernel,
    describe_kernel,
    find_disassembler,
    load,
)

from checks import kernel_costs
from checks.verdict import require

# In file names, upstream uses this character instead of the * of a pointer type.
_TENSOR = "\uff0a"


def measure(image: Path, disassemble: bool) -> list[kernel_costs.Kernel]:
    """Return the kernels of one image with their costs.

    Args:
        image: The file.
        disassemble: Count matrix instructions. If False, their number is 0.

    Raises:
        CheckFailed: The file is not an image, or the emulator finds another number of kernels.
        strix_emulate.errors.EmulatorError: A kernel cannot be read.
    """
    names = [kernel.name for kernel in kernels(image.read_bytes())]
    loaded = load(image)
    require(len(names) == len(loaded), f"{image.name}: read {len(loaded)} of {len(names)} kernels")
    measured = []
    for name, kernel in zip(names, loaded, strict=True):
        instructions = decode_kernel(kernel) if disassemble else []
        facts = describe_kernel(kernel, instructions)
        facts["waves"] = facts["waves_per_simd"]["bound"]
        facts["wmma"] = facts["classes"].get("wmma", 0)
        family, _, choices = name.partition("-Sig-F__")
        problem, _, tile = choices.removeprefix(_TENSOR).partition("__P__")
        head_dim = problem.split("_")[1]
        measured.append(
            kernel_costs.Kernel(
                # docs/kernels.md has a row for each of these names of kernels.
                name=f"{family} D{head_dim}",
                problem=problem,
                configuration=tile.partition("--Arch_")[0].replace("__CO__", " "),
                costs=tuple(facts[cost] for cost in kernel_costs.COSTS),
            )
        )
    return measured


def select(folder: Path, listed: Iterable[kernel_costs.Kernel]) -> list[Path]:
    """Return the images whose kernel and problem are in the list."""
    problems = {(kernel.name.split()[0], kernel.problem) for kernel in listed}
    images = []
    for image in sorted(folder.rglob("*.aks2")):
        if (image.parent.name, _problem(image)) in problems:
            images.append(image)
    return images


def _problem(image: Path) -> str:
    """Return the problem, which is the middle part of an image's name."""
    return image.name.removeprefix("FONLY__" + _TENSOR).partition("___")[0]


def _without_wmma(kernel: kernel_costs.Kernel) -> kernel_costs.Kernel:
    return replace(kernel, costs=(*kernel.costs[:-1], 0))


def write(file: Path, folder: Path) -> None:
    """Write the list of all kernels. Raise DisassemblerError without a disassembler."""
    measured = []
    for image in sorted(folder.rglob("*.aks2")):
        measured += measure(image, disassemble=True)
    kernel_costs.write_list(file, sorted(measured))


def check(file: Path, folder: Path) -> int:
    """Print and count the kernels that cost more than listed, and the problems without a kernel."""
    listed = kernel_costs.read_list(file)
    images = select(folder, listed)
    disassemble = True
    try:
        find_disassembler()
    except DisassemblerError as error:
        print(f"SKIPPED, matrix instructions were not counted: {error}")
        disassemble = False
        listed = [_without_wmma(kernel) for kernel in listed]
    measured = []
    for image in images:
        measured += measure(image, disassemble)
    growth = kernel_costs.find_growth(listed, measured)
    for line in growth:
        print(line)
    total = len(list(folder.rglob("*.aks2")))
    print(f"{len(measured)} kernels of {len(images)} images")
    print(f"kernels that cost more than in {file}, and problems without a kernel: {len(growth)}")
    print(f"{total - len(images)} images are not in the list and were not measured")
    return len(growth)


def main(action: str, file: Path, folder: Path) -> int:
    """Run the action `check` or `write`, and return the exit status."""
    if action == "write":
        write(file, folder)
        return 0
    return int(check(file, folder) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
