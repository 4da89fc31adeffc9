# SPDX-License-Identifier: BSD-3-Clause
"""What real layers look like: the one table that all tiers read, warm and the sets of kernels.

Its modules, imported where they are needed:

* ``pairs``: `pairwise`, few rows of a table that hold each pair of its values.
* ``table``: `MODELS`, the models of ``models.toml``, with their layers, and the few heads of those
  that checks compute.
"""

__all__ = ["pairs", "table"]
