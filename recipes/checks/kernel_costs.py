# SPDX-License-Identifier: BSD-3-Clause
"""The cost of packaged kernels against a committed list: a kernel may not become more expensive.

A row of the list is a kernel, the problem that it is compiled for, its configuration (tile, warps,
stages), and its cost: registers, spills, scratch, LDS, waves per SIMD, matrix instructions. The
costs come from the package's kernels.json; strix_validate.precompiled.costs says what each is.

    python kernel_costs.py check LIST PACKAGE
    python kernel_costs.py write LIST PACKAGE
    python kernel_costs.py compare PACKAGE PACKAGE

PACKAGE is the name of an installed package of kernels, or a kernels.json. check and compare exit
with status 1 if a kernel of the second costs more than in the first, or is missing there.
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

# Constants that choose a tile, and not what is computed.
_TILE = re.compile(
    r"BLOCK_(SIZE_)?[A-Z]\d?|BLOCK(_SIZE|_ROW|_Q)?|BLK_SLICE_FACTOR|TILE(_SIZE)?(_[A-Z]+)?|"
    r"GROUP_SIZE_M|SPLIT_K|PRE_LOAD_V|NUM_SEGMENTS_PER_SEQ|B[A-Z]"
)
_MORE_IS_WORSE = ("scratch", "vgpr_spills", "sgpr_spills", "vgprs", "sgprs", "lds")
_LESS_IS_WORSE = ("waves", "wmma")
COSTS = ("vgprs", "sgprs", "vgpr_spills", "sgpr_spills", "scratch", "lds", "waves", "wmma")


@dataclass(frozen=True, order=True)
class Kernel:
    """A compiled kernel of a package or of a list.

    Attributes:
        name: The kernel's name.
        problem: The constants that say what is computed, and a digest of all argument types.
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
    """Read the kernels of an installed package or of a kernels.json, in the order of the list."""
    file = Path(package)
    if file.suffix != ".json":
        file = Path(sys.base_prefix, "share/triton-kernels", package, "kernels.json")
    listed = json.loads(file.read_text())["kernels"].values()
    return sorted({_describe(entry) for entry in listed})


def _describe(entry: dict) -> Kernel:
    constants = entry["constants"]
    tile = {name: value for name, value in constants.items() if _TILE.fullmatch(name)}
    rest = {name: value for name, value in constants.items() if name not in tile}
    digest = hashlib.sha256(json.dumps([entry["types"], rest], sort_keys=True).encode())
    # strides of 1 and arguments that are off say nothing to a reader; the digest has them
    shown = [
        f"{name}={value}"
        for name, value in sorted(rest.items())
        if value not in ("None", "False") and "stride" not in name.lower()
    ]
    chosen = sorted((tile | entry["options"]).items())
    return Kernel(
        entry["name"],
        " ".join([*shown, digest.hexdigest()[:8]]),
        " ".join(f"{name}={value}" for name, value in chosen),
        tuple(entry["cost"][name] for name in COSTS),
    )


def read_list(file: Path) -> list[Kernel]:
    """Read a committed list. Ends the program if a line is not a kernel with its costs."""
    kernels = []
    with file.open(newline="") as stream:
        for row in list(csv.reader(stream, delimiter="\t"))[1:]:
            costs = row[3:]
            if len(costs) != len(COSTS) or not all(cost.isdecimal() for cost in costs):
                raise SystemExit(f"{file}: not a kernel with its {len(COSTS)} costs: {row}")
            kernels.append(Kernel(*row[:3], tuple(map(int, costs))))
    return kernels


def write_list(file: Path, kernels: Iterable[Kernel]) -> None:
    """Write a list, to be committed."""
    names = [field.name for field in fields(Kernel)][:-1]
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
        writer.writerow([*names, *COSTS])
        for kernel in kernels:
            *described, costs = astuple(kernel)
            writer.writerow([*described, *costs])


def find_growth(old: Iterable[Kernel], new: Iterable[Kernel]) -> list[str]:
    """Return a line for each kernel of `old` that is missing from `new` or costs more there.

    A kernel whose configuration changed is compared with the worst old configuration of its
    problem. Problems that `old` lacks are not compared.
    """
    before, after = _by_problem(old), _by_problem(new)
    lines = []
    for (name, problem), known in before.items():
        present = after.get((name, problem), [])
        if not present:
            lines.append(f"{name}: no kernel for {problem}")
        for kernel in present:
            same = [k for k in known if k.configuration == kernel.configuration]
            growth = _compare(same or known, kernel)
            if growth:
                tiles = ", ".join(sorted({k.configuration for k in same or known}))
                change = "" if same else f" (listed: {tiles})"
                lines.append(f"{name} {kernel.configuration}{change}: {growth}; for {problem}")
    return lines


def _by_problem(kernels: Iterable[Kernel]) -> dict[tuple[str, str], list[Kernel]]:
    groups = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name, kernel.problem].append(kernel)
    return groups


def _compare(known: list[Kernel], kernel: Kernel) -> str:
    """Say which costs of a kernel are worse than the worst of the known ones."""
    changes = []
    for name in _MORE_IS_WORSE:
        limit = max(k.cost(name) for k in known)
        if kernel.cost(name) > limit:
            changes.append(f"{name} {limit} -> {kernel.cost(name)}")
    for name in _LESS_IS_WORSE:
        limit = min(k.cost(name) for k in known)
        if kernel.cost(name) < limit:
            changes.append(f"{name} {limit} -> {kernel.cost(name)}")
    return ", ".join(changes)


def count_unlisted(listed: Iterable[Kernel], kernels: Iterable[Kernel]) -> int:
    """Count the kernels whose problem no row of the list has."""
    known = _by_problem(listed)
    return sum((kernel.name, kernel.problem) not in known for kernel in kernels)


def main(action: str, first: str, second: str) -> int:
    """Check, write or compare; return the exit status."""
    kernels = read_package(second)
    if action == "write":
        write_list(Path(first), kernels)
        return 0
    listed = read_package(first) if action == "compare" else read_list(Path(first))
    growth = find_growth(listed, kernels)
    for line in growth:
        print(line)
    unlisted = count_unlisted(listed, kernels)
    print(f"{len(kernels)} kernels: {len(growth)} cost more than in {first}, {unlisted} not in it")
    return int(bool(growth))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
