# SPDX-License-Identifier: BSD-3-Clause
"""`python -m forge`: the command line."""

from forge.cli.main import main

main()
