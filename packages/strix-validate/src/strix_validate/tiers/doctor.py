# SPDX-License-Identifier: BSD-3-Clause
"""Is this machine ready for gfx1151? What is wrong, why it matters, and the command that fixes it.

A finding of severity error fails its check; a warning costs speed or memory and leaves it passed.
Needs no torch. Source: ROCm's documentation, "AMD Strix Halo system optimization", 2026.
"""

from collections.abc import Callable, Iterator
from functools import partial

from strix_validate.checks import Check, Result, RunOptions, reason_of, title_of
from strix_validate.doctor import environment, hardware
from strix_validate.doctor.tree import Tree
from strix_validate.tiers import run_each


def checks() -> list[Check]:
    """List one check for each finding that there may be."""
    return [
        Check(f"doctor/{name}", title_of(body), reason_of(body)) for name, body in BODIES.items()
    ]


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers."""
    tree = Tree(options.root)
    yield from examine(wanted, tree, options.weights)


def examine(wanted: list[Check], tree: Tree, weights: int = 0) -> Iterator[Result]:
    """Yield one result per wanted check, about the tree's host and a model of so many bytes."""
    bodies = {f"doctor/{name}": _bind(body, tree) for name, body in BODIES.items()}
    bodies["doctor/vllm-memory"] = partial(hardware.vllm_memory, tree)
    return run_each(wanted, RunOptions(root=tree.root, weights=weights), bodies)


def _bind(body: Callable[[Tree], Result], tree: Tree) -> Callable[[RunOptions], Result]:
    return lambda options: body(tree)


BODIES: dict[str, Callable[..., Result]] = {
    "gpu": hardware.gpu,
    "pixi": hardware.pixi,
    "driver": hardware.driver,
    "kernel": hardware.kernel,
    "firmware": hardware.firmware,
    "kfd": hardware.kfd,
    "render": hardware.render,
    "groups": hardware.groups,
    "carve-out": hardware.carve_out,
    "gtt": hardware.gtt,
    "iommu": hardware.iommu,
    "vllm-memory": hardware.vllm_memory,
    "environment": environment.environment,
    "stray-rocm": environment.stray_rocm,
    "packages": environment.packages,
    "kernels": environment.kernels,
    "caches": environment.caches,
    "two-machines": environment.two_machines,
    "glibc": environment.glibc,
    "disk": environment.disk,
}
