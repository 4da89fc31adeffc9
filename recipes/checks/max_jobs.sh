# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# Allow one compiler process per CPU, but not more than one per 2 GiB of memory. The compiler needed up to 2.05 GiB for
# a C++ file of torch, and up to 0.9 GiB for a HIP file. setup.py and torch.utils.cpp_extension read MAX_JOBS. Other
# build scripts pass it to `cmake --parallel`.
gib=$(awk '/^MemTotal/ { print int($2 / 1048576) }' /proc/meminfo)
export MAX_JOBS=$((gib / 2 < CPU_COUNT ? (gib < 2 ? 1 : gib / 2) : CPU_COUNT))
