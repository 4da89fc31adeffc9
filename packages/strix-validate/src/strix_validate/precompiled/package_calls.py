# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the packages in triton_packages whose kernels are shipped."""

from strix_validate.precompiled.deferred import DeferredCall
from strix_validate.triton_packages import fla, liger, sage
from strix_validate.triton_packages.package_call import require

#: Packages whose kernels are shipped. conch's are few, and vLLM calls them at its start.
SHIPPING = (fla, liger, sage)


def shipped_calls(name: str) -> list[DeferredCall]:
    """Return a set of calls of the packages in triton_packages: what each one's SHIPPED has.

    Raises:
        CannotRun: one of them is not installed.
    """
    calls = []
    for package in SHIPPING:
        require(package.MODULE)
        for build, dtype in package.SHIPPED[name]:
            said = " ".join(f"{key}={value}" for key, value in build.keywords.items())
            calls.append(
                DeferredCall(f"{package.PACKAGE} {build.func.__name__} {said}", build, dtype)
            )
    return calls
