# SPDX-License-Identifier: BSD-3-Clause
"""Source files: downloaded, verified and kept."""
