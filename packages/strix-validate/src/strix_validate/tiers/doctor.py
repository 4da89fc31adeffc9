# SPDX-License-Identifier: BSD-3-Clause
"""Is this machine ready for the GPU? What is wrong, why it matters, and the command that fixes it.

A finding of severity error fails its check; a warning costs speed, memory or stability and leaves
it passed.
Needs no torch. Source: ROCm's documentation, "AMD Strix Halo system optimization", 2026.
"""

from collections.abc import Callable, Iterator
from functools import partial

from strix_validate.checks import Body, Check, Result, RunOptions, described, named
from strix_validate.doctor import (
    access,
    copies,
    environment,
    hardware,
    memory,
    packages,
    settings,
)
from strix_validate.doctor.tree import Tree
from strix_validate.tiers import run_each


def checks() -> list[Check]:
    """List one check for each finding that there may be."""
    return list(_bodies(Tree()))


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers."""
    yield from examine(wanted, Tree(options.root), options.weights)


def examine(wanted: list[Check], tree: Tree, weights: int = 0) -> Iterator[Result]:
    """Yield one result per wanted check, about the tree's host and a model of so many bytes."""
    return run_each(wanted, RunOptions(root=tree.root, weights=weights), _bodies(tree))


def _bodies(tree: Tree) -> dict[Check, Body]:
    known = described("doctor", named(*_FINDINGS))
    return {check: partial(_find, find, tree) for check, find in known.items()}


def _find(find: Callable[..., Result], tree: Tree, options: RunOptions) -> Result:
    return find(tree, options) if find is memory.vllm_memory else find(tree)


#: The checks, in the order in which they are printed.
_FINDINGS: tuple[Callable[..., Result], ...] = (
    hardware.gpu,
    hardware.pixi,
    hardware.driver,
    hardware.kernel,
    hardware.firmware,
    access.kfd,
    access.render,
    access.groups,
    memory.carve_out,
    memory.gtt,
    memory.container,
    memory.vllm_memory,
    settings.options,
    settings.power,
    settings.iommu,
    copies.copies,
    environment.environment,
    environment.stray_rocm,
    packages.packages,
    packages.runtime,
    environment.kernels,
    environment.caches,
    environment.two_machines,
    environment.glibc,
    environment.disk,
)
