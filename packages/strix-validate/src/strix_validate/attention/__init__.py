# SPDX-License-Identifier: BSD-3-Clause
"""Attention by torch and flash-attn: its cases and their problems."""
