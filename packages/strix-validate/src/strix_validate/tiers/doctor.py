# SPDX-License-Identifier: BSD-3-Clause
"""Is this host ready for gfx1151? What is wrong, why it matters, and the command that fixes it.

A finding of severity error fails its check; a warning costs speed or memory and leaves it passed.
Needs no torch. Source: ROCm's documentation, "AMD Strix Halo system optimization", 2026.
"""

from collections.abc import Callable, Iterator
from functools import partial

from strix_validate import environment, machine
from strix_validate.checks import Check, Options, Result, reason_of, title_of
from strix_validate.tiers import run_each
from strix_validate.tree import Tree


def checks() -> list[Check]:
    return [
        Check(f"doctor/{name}", title_of(body), reason_of(body)) for name, body in BODIES.items()
    ]


def run(wanted: list[Check], options: Options) -> Iterator[Result]:
    """See strix_validate.tiers."""
    tree = Tree(options.root)
    yield from examine(wanted, tree, options.weights)


def examine(wanted: list[Check], tree: Tree, weights: int = 0) -> Iterator[Result]:
    """One result for each wanted check, about the host of the tree and a model of so many bytes."""
    bodies = {f"doctor/{name}": _bind(body, tree) for name, body in BODIES.items()}
    bodies["doctor/vllm-memory"] = partial(machine.vllm_memory, tree)
    return run_each(wanted, Options(root=tree.root, weights=weights), bodies)


def _bind(body: Callable[[Tree], Result], tree: Tree) -> Callable[[Options], Result]:
    return lambda options: body(tree)


BODIES: dict[str, Callable[..., Result]] = {
    "gpu": machine.gpu,
    "pixi": machine.pixi,
    "driver": machine.driver,
    "kernel": machine.kernel,
    "firmware": machine.firmware,
    "kfd": machine.kfd,
    "render": machine.render,
    "groups": machine.groups,
    "carve-out": machine.carve_out,
    "gtt": machine.gtt,
    "iommu": machine.iommu,
    "vllm-memory": machine.vllm_memory,
    "environment": environment.environment,
    "stray-rocm": environment.stray_rocm,
    "packages": environment.packages,
    "kernels": environment.kernels,
    "caches": environment.caches,
    "glibc": environment.glibc,
    "disk": environment.disk,
}
