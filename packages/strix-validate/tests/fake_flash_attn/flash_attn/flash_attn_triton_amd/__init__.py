# SPDX-License-Identifier: BSD-3-Clause
"""A mock of the built-in backend, which has only the table of tiles."""
