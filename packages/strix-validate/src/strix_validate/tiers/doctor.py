# SPDX-License-Identifier: BSD-3-Clause
"""Check whether this machine is set up for its GPU.

A finding names a problem, its effect, and what fixes it, usually a command. With a finding of
severity error, the check fails. With a warning (a loss of speed, memory or stability) or mere
information, it passes. This tier needs no torch. Source: ROCm's documentation, "AMD Strix Halo
system optimization", 2026.
"""

from collections.abc import Callable, Iterator
from functools import partial

from strix_validate.checks import Body, Check, Result, RunOptions, index_by_name, make_checks
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
from strix_validate.tiers import Tier, run_each


def checks() -> list[Check]:
    """List one check for each possible finding."""
    return list(_bodies(Tree()))


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check."""
    yield from examine(selected, Tree(options.root), options.weights)


def examine(selected: list[Check], tree: Tree, weights: int = 0) -> Iterator[Result]:
    """Yield one result per selected check about the machine that a tree describes.

    Args:
        selected: Checks of this tier.
        tree: The files of the machine.
        weights: Size of a model's weights in bytes, for which vLLM's memory flags are computed; 0
            if unknown.
    """
    options = RunOptions(root=tree.root, weights=weights)
    return run_each(selected, options, _bodies(tree))


def _bodies(tree: Tree) -> dict[Check, Body]:
    functions = make_checks("doctor", index_by_name(*_FINDINGS))
    return {check: partial(_find, function, tree) for check, function in functions.items()}


def _find(
    function: Callable[..., Result],
    tree: Tree,
    options: RunOptions,
) -> Result:
    if function is memory.vllm_memory:
        return function(tree, options)
    return function(tree)


#: The functions of the checks, in the order in which the checks are printed.
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

TIER = Tier(checks, run)
