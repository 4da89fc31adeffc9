# SPDX-License-Identifier: BSD-3-Clause
"""The solver, with what it knows of this machine."""

import asyncio

import rattler
from rattler import GenericVirtualPackage, RepoDataRecord

from forge.project import SUBDIRS


def virtual_packages() -> list[GenericVirtualPackage]:
    """Detect its glibc, GPUs and so on, as pixi does; CONDA_OVERRIDE_NAME=VERSION pretends another.

    py-rattler 0.25 cannot detect AMD GPUs.
    """
    overrides = rattler.VirtualPackageOverrides.from_env()
    return [found.into_generic() for found in rattler.VirtualPackage.detect(overrides)]


def solve(channels: list[str], specs: list[str], gateway: rattler.Gateway) -> list[RepoDataRecord]:
    """Solve for this machine. Raises what the bindings raise."""
    machine = virtual_packages()
    asked = rattler.solve(channels, specs, gateway, platforms=SUBDIRS, virtual_packages=machine)
    return asyncio.run(asked)
