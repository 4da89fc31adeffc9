# SPDX-License-Identifier: BSD-3-Clause
"""What keeps the recipes in shape: patches and versions."""
