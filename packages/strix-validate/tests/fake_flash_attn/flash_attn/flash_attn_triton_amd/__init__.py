# SPDX-License-Identifier: BSD-3-Clause
"""A mock of the built-in backend with nothing but the table of tiles."""
