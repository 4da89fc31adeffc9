# SPDX-License-Identifier: BSD-3-Clause
"""What correct numbers are: the reference in float64, and how far a kernel may be from it.

Its modules, imported where they are needed:

* ``comparison``: `compare`, which judges tensors, and the bounds that it judges by.
* ``reference``: attention in float64, also as correct kernels of a dtype round it, and its terms'
  sizes.
"""

__all__ = ["comparison", "reference"]
