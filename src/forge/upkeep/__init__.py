# SPDX-License-Identifier: BSD-3-Clause
"""What keeps the recipes in shape: patches, moving pins, and recipes as conda-forge feedstocks."""
