# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels on a machine without a GPU.

Its modules, imported where they are needed:

* ``call``: `Call`, the protocol of every call whose kernels are compiled, interpreted or
  executed.
* ``cases``: `Case`, a call to build, and `answered`, the results of many.
* ``emulation``: intercepted launches, executed by strix-emulate.
* ``interpreter``: what Triton's interpreter lacks.
* ``modes``: `run`, which makes calls in a child process in one of six modes, and its `CallAnswers`.
* ``stand_in``: a stand-in for the gfx1151 device, which intercepts launches.
"""

__all__ = ["call", "cases", "emulation", "interpreter", "modes", "stand_in"]
