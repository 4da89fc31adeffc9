# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# A compiler process for each CPU, but 2 GiB of memory for each: 2.05 GiB is the most that a file of
# torch took (C++; HIP 0.9). setup.py and ninja read MAX_JOBS.
gib=$(awk '/^MemTotal/ { print int($2 / 1048576) }' /proc/meminfo)
export MAX_JOBS=$((gib / 2 < CPU_COUNT ? (gib < 2 ? 1 : gib / 2) : CPU_COUNT))
