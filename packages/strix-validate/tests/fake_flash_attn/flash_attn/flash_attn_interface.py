# SPDX-License-Identifier: BSD-3-Clause
"""Mocks of the operators that a call of flash-attn registers for the CPU."""

from unittest.mock import MagicMock

BACKEND = "built-in"
_flash_attn_forward = _flash_attn_varlen_forward = MagicMock()
_flash_attn_backward = _flash_attn_varlen_backward = MagicMock()
