# SPDX-License-Identifier: BSD-3-Clause
"""What real layers look like: the one table that numerics, compiled kernels, warm and bench read.

Its modules, imported where they are needed:

* ``pairs``: `pairwise`, few rows of a table that hold each pair of its values.
* ``table``: `MODELS`, the models of ``models.toml``, with their layers.
"""

__all__ = ["pairs", "table"]
