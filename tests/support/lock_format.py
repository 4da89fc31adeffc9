# SPDX-License-Identifier: BSD-3-Clause
"""What pixi writes into a lock file."""

from pathlib import Path

# The keys of one conda package in a version 7 lock file, in pixi's order.
PACKAGE_KEYS = [
    "conda", "noarch", "build_number", "subdir", "sha256", "md5", "depends", "constrains",
    "channel", "track_features", "license", "license_family", "purls", "run_exports", "size",
    "timestamp", "indexed_timestamp", "python_site_packages_path",
]  # fmt: skip


def text_of(lock: Path) -> str:
    """A lock file but for `indexed_timestamp`, which newer versions than pixi 0.77 write."""
    lines = lock.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("  indexed_timestamp:"))
