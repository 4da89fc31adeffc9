# SPDX-License-Identifier: BSD-3-Clause
"""Channels: the local one, what may be published, the published ones, and their verification."""
