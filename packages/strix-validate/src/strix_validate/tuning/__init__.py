# SPDX-License-Identifier: BSD-3-Clause
"""Find the fastest configuration of kernels on this GPU, for the shapes of one model.

candidates.py lists configurations, compiles them, and compares counts of their code, such as
spills, LDS and waves, to select those worth measuring. session.py runs worker.py, which measures
them in a process of its own. record.py stores the results, and writes the files that libraries
read.
"""

__all__ = ["candidates", "command", "record", "session", "worker"]
