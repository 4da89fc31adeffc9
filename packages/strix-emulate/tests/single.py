# SPDX-License-Identifier: BSD-3-Clause
"""Run a few instructions on given registers."""

import numpy as np
import selftest
from strix_emulate.code.decode import EXEC
from strix_emulate.memory.waves import LANES, SCALARS

LANE = np.arange(LANES, dtype=np.uint32)
FULL = 0xFFFFFFFF


def run(text: str, exec_mask: int = FULL, scalars=None, waves: int = 1, mode=None, **registers):
    """Execute assembly, and return the waves.

    A register is set by an argument such as v0, an array of 32 uint32 or float32.
    """
    V = np.full((64, waves, LANES), 0xDEADBEEF, np.uint32)
    S = np.full((SCALARS, waves, 1), 0xDEADBEEF, np.uint32)
    S[EXEC] = exec_mask
    for name, value in registers.items():
        value = np.asarray(value)
        V[int(name[1:])] = (
            value.view(np.uint32) if value.dtype.itemsize == 4 else value.astype(np.uint32)
        )
    for index, value in (scalars or {}).items():
        S[index] = value
    return selftest.execute(text, selftest.waves(V, S), **(mode or {}))


def f32(x) -> np.ndarray:
    return np.broadcast_to(np.asarray(x, np.float32), LANES).copy()
