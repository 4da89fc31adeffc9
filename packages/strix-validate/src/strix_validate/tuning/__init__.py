# SPDX-License-Identifier: BSD-3-Clause
"""Find the fastest configuration of kernels on this GPU, for the shapes of one model.

candidates.py lists configurations, and selects those worth measuring by counts of their compiled
code, such as spills, LDS and waves. session.py runs worker.py, which measures them in a
process of its own. record.py stores the results, and writes the files that libraries read.
"""

__all__ = ["candidates", "command", "record", "session", "worker"]
