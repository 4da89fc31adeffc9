# SPDX-License-Identifier: BSD-3-Clause
"""Run the command line by `python -m strix_emulate`."""

from strix_emulate.cli import main

if __name__ == "__main__":
    main()
