# SPDX-License-Identifier: BSD-3-Clause
"""The argument layouts of AOTriton's code objects; the images' package test runs the kernels."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.project import CHECKOUT

PYTHON = "build/stacks/attention/.pixi/envs/default/bin/python"
#: Lays out arguments whose values are their own names: stdin is kernel, [(kind, size)], causal.
SCRIPT = """
import json, sys
from strix_emulate import Argument, EmulatorError, Kernel
import emulated_kernels

name, kinds, causal = json.load(sys.stdin)
kinds += [("global_buffer", 8), ("global_buffer", 8), ("hidden_none", 8)]
declared = tuple(Argument("", 8 * i, size, kind) for i, (kind, size) in enumerate(kinds))
words = " ".join(emulated_kernels.LAYOUTS.values()).replace("[", "").replace("]", "").split()
try:
    values = {word[:-2]: word[:-2] for word in words}
    kernel = Kernel(name, b"", arguments=declared)
    print(json.dumps(emulated_kernels.arguments(kernel, values, causal)))
except EmulatorError as error:
    sys.exit(str(error))
"""

_POINTER, _WORD, _WIDE = ("global_buffer", 8), ("by_value", 4), ("by_value", 8)
#: attn_fwd as compiled without and with its optional groups, up to Triton's two scratch pointers
_BASE = [_POINTER] * 3 + [_WORD] + [_POINTER] * 2 + [_WIDE] * 12 + [_WORD] * 3 + [_POINTER] * 2
_BASE += [_WORD] * 2 + [_POINTER] * 2
_PADDED, _RANDOM = [_WORD] * 2, [_WORD, _POINTER, _POINTER, _WIDE, _POINTER, _POINTER]
_WINDOW, _PERSISTENT = [_WORD] * 2, [_POINTER, _WORD, _WORD]


def lay_out(
    stack: Path, kinds: list, causal: bool, name: str = "attn_fwd"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [stack / PYTHON, "-c", SCRIPT],
        cwd=CHECKOUT / "recipes" / "aotriton",
        input=json.dumps([name, kinds, causal]),
        text=True,
        capture_output=True,
        check=False,
    )


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
def test_optional_groups_are_found(
    attention_stack: Path, kinds: list, causal: bool, last: str
) -> None:
    given = json.loads(lay_out(attention_stack, kinds, causal).stdout)
    assert len(given) == len(kinds) and given[:4] == ["Q", "K", "V", "Sm_scale"]
    assert given[-1] == last


def test_unknown_layouts_are_refused(attention_stack: Path) -> None:
    assert "fit no known layout" in lay_out(attention_stack, [_POINTER, *_BASE], False).stderr
    assert "not one of attn_fwd" in lay_out(attention_stack, _BASE, False, "bwd_kernel_fuse").stderr
