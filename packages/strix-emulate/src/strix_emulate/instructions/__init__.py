# SPDX-License-Identifier: BSD-3-Clause
"""Instructions as functions on waves."""
