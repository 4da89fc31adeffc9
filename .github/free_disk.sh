#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Remove what GitHub's image brings and nothing here uses: 14 GB are free in it, and rocm-sdk and pytorch
# need more. Never run this on a machine of your own.
set -euo pipefail
sudo rm -rf /usr/local/lib/android /usr/share/dotnet /usr/share/swift /usr/local/.ghcup /opt/ghc \
    /opt/hostedtoolcache/CodeQL /usr/local/share/boost /usr/local/julia* /usr/share/miniconda
df -h .
