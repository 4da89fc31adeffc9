# SPDX-License-Identifier: BSD-3-Clause
"""What py-rattler 0.26 renamed. requirements.txt has a later one, pixi.lock an earlier one."""

try:
    from rattler import BuildString, Subdir
except ImportError:
    from rattler import Platform as Subdir

    BuildString = str

__all__ = ["BuildString", "Subdir"]
