# SPDX-License-Identifier: BSD-3-Clause
"""Attention by torch and flash-attn: the calls that are checked, and what they must return.

Its modules, imported where they are needed:

* ``behaviour``: properties of `scaled_dot_product_attention` that one comparison cannot show.
* ``flash``: `FlashCall`, a call of flash-attn, and functions that build one with what it must
  return.
* ``flash_cases``: `cases`, the calls of flash-attn that the tier attention makes, and tables of
  those that are compiled or executed under emulation.
* ``sdpa``: torch's `scaled_dot_product_attention` by one backend (`forced`), and its checks.
* ``sdpa_problem``: `Problem`, the inputs of a shape and what attention must make of them.
* ``sdpa_shapes``: `SHAPES`, the shapes that torch is checked with.
"""

__all__ = ["behaviour", "flash", "flash_cases", "sdpa", "sdpa_problem", "sdpa_shapes"]
