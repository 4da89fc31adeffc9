# SPDX-License-Identifier: BSD-3-Clause
"""Find the fastest configuration of kernels on this GPU, for the shapes of one model.

candidates.py has what is tried, and chooses by counts what is worth a measurement. session.py has
it measured by worker.py, in a process of its own. record.py keeps the result, and writes what
libraries read.
"""

__all__ = ["candidates", "command", "record", "session", "worker"]
