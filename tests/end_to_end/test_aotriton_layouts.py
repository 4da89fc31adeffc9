# SPDX-License-Identifier: BSD-3-Clause
"""The argument layouts of AOTriton's code objects; the images' package test runs the kernels."""

import json
import subprocess
from pathlib import Path

from support.project import CHECKOUT

PYTHON = "build/stacks/attention/.pixi/envs/default/bin/python"
#: Lays out arguments whose values are their own names: stdin is a list of kernel, [(kind, size)],
#: causal; of one that is refused it prints why.
SCRIPT = """
import json, sys
from strix_emulate import Argument, EmulatorError, Kernel
import emulated_kernels

words = " ".join(emulated_kernels.LAYOUTS.values()).replace("[", "").replace("]", "").split()
values = {word[:-2]: word[:-2] for word in words}

def lay_out(name, kinds, causal):
    kinds += [("global_buffer", 8), ("global_buffer", 8), ("hidden_none", 8)]
    declared = tuple(Argument("", 8 * i, size, kind) for i, (kind, size) in enumerate(kinds))
    try:
        return emulated_kernels.arguments(Kernel(name, b"", arguments=declared), values, causal)
    except EmulatorError as error:
        return str(error)

print(json.dumps([lay_out(*case) for case in json.load(sys.stdin)]))
"""

_POINTER, _WORD, _WIDE = ("global_buffer", 8), ("by_value", 4), ("by_value", 8)
#: attn_fwd as compiled without and with its optional groups, up to Triton's two scratch pointers
_BASE = [_POINTER] * 3 + [_WORD] + [_POINTER] * 2 + [_WIDE] * 12 + [_WORD] * 3 + [_POINTER] * 2
_BASE += [_WORD] * 2 + [_POINTER] * 2
_PADDED, _RANDOM = [_WORD] * 2, [_WORD, _POINTER, _POINTER, _WIDE, _POINTER, _POINTER]
_WINDOW, _PERSISTENT = [_WORD] * 2, [_POINTER, _WORD, _WORD]


#: and the last argument of each
LAYOUTS = [
    (_BASE, False, "ss_k"),
    (_BASE + _PADDED, False, "Hdim_vo"),
    (_BASE + _WINDOW, True, "Window_right"),
    (_BASE + _PADDED + _RANDOM + _WINDOW + _PERSISTENT, True, "Batch"),
    (_BASE + _RANDOM + [_WORD] * 2, False, "Batch"),
]


def test_layouts(attention_stack: Path) -> None:
    """Optional groups are found, and what is no known layout is refused."""
    cases = [("attn_fwd", kinds, causal) for kinds, causal, _ in LAYOUTS]
    cases += [("attn_fwd", [_POINTER, *_BASE], False), ("bwd_kernel_fuse", _BASE, False)]
    done = subprocess.run(
        [attention_stack / PYTHON, "-c", SCRIPT], cwd=CHECKOUT / "recipes" / "aotriton",
        input=json.dumps(cases), text=True, capture_output=True, check=True,
    )  # fmt: skip
    *given, unknown, other = json.loads(done.stdout)
    for (kinds, _, last), arguments in zip(LAYOUTS, given, strict=True):
        assert len(arguments) == len(kinds) and arguments[:4] == ["Q", "K", "V", "Sm_scale"]
        assert arguments[-1] == last
    assert "fit no known layout" in unknown and "not one of attn_fwd" in other
