# SPDX-License-Identifier: BSD-3-Clause
"""Compare the cost of packaged kernels with a committed list: no kernel may cost more than listed.

A row of the list has the name of a kernel, the problem that it is compiled for, its configuration
(tile, warps, stages), and its costs: registers, spills, scratch, LDS, waves per SIMD and matrix
instructions. The costs come from the package's kernels.json, and
strix_validate.precompiled.costs describes each of them.

    python kernel_costs.py check LIST PACKAGE
    python kernel_costs.py write LIST PACKAGE
    python kernel_costs.py compare PACKAGE PACKAGE

PACKAGE is the name of an installed package of kernels, or the path of a kernels.json. The actions
`check` and `compare` exit with status 1 if a kernel costs more in the second argument than in the
first, or if the second has no kernel for a problem of the first.
"""

import csv
import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

# Names of constants that determine the tile, but not the result of the kernel.
_TILE = re.compile(
    r"BLOCK_(SIZE_)?[A-Z]\d?|BLOCK(_SIZE|_ROW|_Q)?|BLK_SLICE_FACTOR|TILE(_SIZE)?(_[A-Z]+)?|"
    r"GROUP_SIZE_M|SPLIT_K|PRE_LOAD_V|NUM_SEGMENTS_PER_SEQ|B[A-Z]"
)
_MORE_IS_WORSE = (
    "scratch",
    "vgpr_spills",
    "sgpr_spills",
    "vgprs",
    "sgprs",
    "lds",
)
_LESS_IS_WORSE = ("waves", "wmma")
COSTS = (
    "vgprs",
    "sgprs",
    "vgpr_spills",
    "sgpr_spills",
    "scratch",
    "lds",
    "waves",
    "wmma",
)


@dataclass(frozen=True, order=True)
class Kernel:
    """A compiled kernel of a package or of a list.

    Attributes:
        name: The kernel's name.
        problem: The constants that determine the result, and a digest that includes all argument
            types.
        configuration: The tile and Triton's options.
        costs: One number for each name in COSTS.
    """

    name: str
    problem: str
    configuration: str
    costs: tuple[int, ...]

    def cost(self, name: str) -> int:
        """Return one of the costs by its name."""
        return self.costs[COSTS.index(name)]


def read_package(package: str) -> list[Kernel]:
    """Read the kernels of an installed package or of a kernels.json, and sort them."""
    file = Path(package)
    if file.suffix != ".json":
        file = Path(sys.base_prefix, "share/triton-kernels", package, "kernels.json")
    entries = json.loads(file.read_text())["kernels"].values()
    return sorted({_describe(entry) for entry in entries})


def _describe(entry: dict) -> Kernel:
    """Return the kernel of an entry of kernels.json."""
    tile = {}
    constants = {}
    for name, value in entry["constants"].items():
        if _TILE.fullmatch(name):
            tile[name] = value
        else:
            constants[name] = value
    inputs = json.dumps([entry["types"], constants], sort_keys=True)
    digest = hashlib.sha256(inputs.encode()).hexdigest()[:8]
    # Leave out strides and unused arguments, which do not help a reader. The digest includes them.
    words = []
    for name, value in sorted(constants.items()):
        if value not in ("None", "False") and "stride" not in name.lower():
            words.append(f"{name}={value}")
    options = sorted((tile | entry["options"]).items())
    return Kernel(
        name=entry["name"],
        problem=" ".join([*words, digest]),
        configuration=" ".join(f"{name}={value}" for name, value in options),
        costs=tuple(entry["cost"][name] for name in COSTS),
    )


def read_list(file: Path) -> list[Kernel]:
    """Read a committed list. Raise SystemExit if a line is not a kernel with its costs."""
    kernels = []
    with file.open(newline="") as stream:
        for row in list(csv.reader(stream, delimiter="\t"))[1:]:
            costs = row[3:]
            if len(costs) != len(COSTS) or not all(cost.isdecimal() for cost in costs):
                raise SystemExit(f"{file}: this row is not a kernel with {len(COSTS)} costs: {row}")
            kernels.append(Kernel(*row[:3], tuple(map(int, costs))))
    return kernels


def write_list(file: Path, kernels: Iterable[Kernel]) -> None:
    """Write a list to commit."""
    names = [field.name for field in fields(Kernel)][:-1]
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
        writer.writerow([*names, *COSTS])
        for kernel in kernels:
            *described, costs = astuple(kernel)
            writer.writerow([*described, *costs])


def find_growth(old: Iterable[Kernel], new: Iterable[Kernel]) -> list[str]:
    """Return a line for each kernel of `new` that costs more than in `old`.

    There is also a line for each problem of `old` for which `new` has no kernel. If `old` lacks the
    configuration of a kernel, each cost of the kernel is compared with the worst in `old` for its
    problem. Problems that are not in `old` are not compared.
    """
    new_kernels = _by_problem(new)
    lines = []
    for (name, problem), old_kernels in _by_problem(old).items():
        if (name, problem) not in new_kernels:
            lines.append(f"{name}: no kernel for {problem}")
            continue
        for kernel in new_kernels[name, problem]:
            configuration = kernel.configuration
            same = [other for other in old_kernels if other.configuration == configuration]
            growth = _describe_growth(same or old_kernels, kernel)
            if not growth:
                continue
            if not same:
                listed = sorted({other.configuration for other in old_kernels})
                configuration += f" (listed: {', '.join(listed)})"
            lines.append(f"{name} {configuration}: {growth}; for {problem}")
    return lines


def _by_problem(kernels: Iterable[Kernel]) -> dict[tuple[str, str], list[Kernel]]:
    groups = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name, kernel.problem].append(kernel)
    return groups


def _describe_growth(old_kernels: list[Kernel], kernel: Kernel) -> str:
    """Return the costs of a kernel that are worse than in all old kernels; "" if none is worse."""
    changes = []
    for name in _MORE_IS_WORSE:
        limit = max(old.cost(name) for old in old_kernels)
        if kernel.cost(name) > limit:
            changes.append(f"{name} {limit} -> {kernel.cost(name)}")
    for name in _LESS_IS_WORSE:
        limit = min(old.cost(name) for old in old_kernels)
        if kernel.cost(name) < limit:
            changes.append(f"{name} {limit} -> {kernel.cost(name)}")
    return ", ".join(changes)


def count_unlisted(listed: Iterable[Kernel], kernels: Iterable[Kernel]) -> int:
    """Count the kernels whose problem is not in the list."""
    problems = _by_problem(listed)
    return sum((kernel.name, kernel.problem) not in problems for kernel in kernels)


def main(action: str, first: str, second: str) -> int:
    """Run the action `check`, `write` or `compare`, and return the exit status."""
    kernels = read_package(second)
    if action == "write":
        write_list(Path(first), kernels)
        return 0
    listed = read_package(first) if action == "compare" else read_list(Path(first))
    growth = find_growth(listed, kernels)
    for line in growth:
        print(line)
    unlisted = count_unlisted(listed, kernels)
    print(f"{len(kernels)} kernels")
    print(f"kernels that cost more than in {first}, and problems without a kernel: {len(growth)}")
    print(f"kernels whose problem is not in {first}: {unlisted}")
    return int(bool(growth))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
