# SPDX-License-Identifier: BSD-3-Clause
"""What pixi writes into a lock file."""

# The keys of one conda package in a version 7 lock file, in pixi's order.
PACKAGE_KEYS = [
    "conda", "noarch", "build_number", "subdir", "sha256", "md5", "depends", "constrains",
    "channel", "track_features", "license", "license_family", "purls", "run_exports", "size",
    "timestamp", "indexed_timestamp", "python_site_packages_path",
]  # fmt: skip
