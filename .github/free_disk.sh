#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Remove unused software from GitHub's runner image. The image has 14 GB of free disk, and the builds of rocm-sdk
# and pytorch need more. Never run this on your own machine.
set -euo pipefail
sudo rm -rf /usr/local/lib/android /usr/share/dotnet /usr/share/swift /usr/local/.ghcup /opt/ghc \
    /opt/hostedtoolcache/CodeQL /usr/local/share/boost /usr/local/julia* /usr/share/miniconda
df -h .
