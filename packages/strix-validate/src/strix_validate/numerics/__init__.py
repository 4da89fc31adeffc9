# SPDX-License-Identifier: BSD-3-Clause
"""What right numbers are: the reference in float64, and how far a kernel may be from it."""
