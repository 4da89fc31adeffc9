# SPDX-License-Identifier: BSD-3-Clause
"""Which layout a code object of AOTriton has; its kernels themselves run where its images are."""

import pytest
from strix_emulate import aotriton
from strix_emulate.errors import EmulatorError
from strix_emulate.loader import Argument, Kernel

_POINTER, _WORD, _WIDE = ("global_buffer", 8), ("by_value", 4), ("by_value", 8)
#: attn_fwd as compiled without and with what is optional, up to Triton's two scratch pointers
_BASE = [_POINTER] * 3 + [_WORD] + [_POINTER] * 2 + [_WIDE] * 12 + [_WORD] * 3 + [_POINTER] * 2
_BASE += [_WORD] * 2 + [_POINTER] * 2
_PADDED, _RANDOM = [_WORD] * 2, [_WORD, _POINTER, _POINTER, _WIDE, _POINTER, _POINTER]
_WINDOW, _PERSISTENT = [_WORD] * 2, [_POINTER, _WORD, _WORD]


def kernel(kinds, name="attn_fwd") -> Kernel:
    declared = [*kinds, _POINTER, _POINTER, ("hidden_none", 8)]
    return Kernel(
        name, b"", arguments=tuple(Argument("", 8 * i, s, k) for i, (k, s) in enumerate(declared))
    )


VALUES = {
    name: name
    for layout in aotriton.LAYOUTS.values()
    for name in (word.strip("[]")[:-2] for word in layout.replace("]", "").split())
}


@pytest.mark.parametrize(
    ("kinds", "causal", "last"),
    [
        (_BASE, False, "ss_k"),
        (_BASE + _PADDED, False, "Hdim_vo"),
        (_BASE + _WINDOW, True, "Window_right"),
        (_BASE + _PADDED + _RANDOM + _WINDOW + _PERSISTENT, True, "Batch"),
        (_BASE + _RANDOM + [_WORD] * 2, False, "Batch"),
    ],
)
def test_optional_groups_are_found(kinds, causal, last):
    given = aotriton.arguments(kernel(kinds), VALUES, causal)
    assert (
        len(given) == len(kinds) and given[:4] == ["Q", "K", "V", "Sm_scale"] and given[-1] == last
    )


def test_unknown_layouts_are_refused():
    with pytest.raises(EmulatorError, match="fit no layout"):
        aotriton.arguments(kernel([_POINTER, *_BASE]), VALUES, False)
    with pytest.raises(EmulatorError, match="not one of attn_fwd"):
        aotriton.arguments(kernel(_BASE, "bwd_kernel_fuse"), VALUES, False)
