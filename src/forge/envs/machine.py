# SPDX-License-Identifier: BSD-3-Clause
"""What this machine must have for an environment: virtual packages, as pixi checks them."""

import rattler
from rattler import MatchSpec, PackageRecord, RepoDataRecord

from forge.envs.bindings import CHECKED, BuildString
from forge.envs.manifest import PLATFORM
from forge.errors import ForgeError


def require_machine(records: list[RepoDataRecord]) -> None:
    """Raise ForgeError unless this machine has what packages depend on, as pixi's install does.

    See docs/stacks.md.
    """
    overrides = rattler.VirtualPackageOverrides.from_env()
    machine = [p.into_generic() for p in rattler.VirtualPackage.detect(overrides)]
    here = [
        PackageRecord(
            p.name.normalized, str(p.version), BuildString(str(p.build_string)), 0, PLATFORM
        )
        for p in machine
    ]
    for record in records:
        for spec in (MatchSpec(d) for d in record.depends if d.split(" ")[0] in CHECKED):
            if not any(spec.matches(package) for package in here):
                raise ForgeError(
                    f"{record.file_name} requires {spec}, and this machine has "
                    f"{', '.join(map(str, machine))}; CONDA_OVERRIDE_NAME=VERSION pretends"
                )
