# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run: written as evidence, shown in the terminal and as a page.

Its modules, imported where they are needed:

* ``page``: `render`, one HTML page of several records.
* ``plots``: `write`, charts of a record; needs matplotlib.
* ``record``: `Record` and its parts: the JSON that a run writes and `load` reads.
* ``terminal_table``: `show`, a record in the terminal.
"""

__all__ = ["page", "plots", "record", "terminal_table"]
