# SPDX-License-Identifier: BSD-3-Clause
"""Download source files, verify them, and keep them in a cache."""
