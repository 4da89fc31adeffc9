# SPDX-License-Identifier: BSD-3-Clause
"""`python -m strix_forge`: the command line."""

from strix_forge.cli import main

main()
