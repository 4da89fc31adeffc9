# SPDX-License-Identifier: BSD-3-Clause
"""Code objects: files, metadata, and instructions as LLVM prints them."""
