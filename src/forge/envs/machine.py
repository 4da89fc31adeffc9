# SPDX-License-Identifier: BSD-3-Clause
"""What the solver knows of this machine."""

import rattler
from rattler import GenericVirtualPackage


def virtual_packages() -> list[GenericVirtualPackage]:
    """Detect its glibc, GPUs and so on, as pixi does; CONDA_OVERRIDE_NAME=VERSION pretends another.

    py-rattler 0.25 cannot detect AMD GPUs.
    """
    overrides = rattler.VirtualPackageOverrides.from_env()
    return [found.into_generic() for found in rattler.VirtualPackage.detect(overrides)]
