# SPDX-License-Identifier: BSD-3-Clause
"""The same kernels on each GPU, and features that only some GPUs have."""

import ast
import re
from pathlib import Path

import fixtures
import numpy as np
import pytest
import selftest
import strix_emulate
from device_support import HIP
from strix_emulate import TARGETS, Buffer, EmulatorError, launch, statistics
from strix_emulate.code import llvm
from strix_emulate.code.decode import decode
from strix_emulate.code.target import find_target

#: GPUs whose code differs.
DIFFERENT = ("gfx1151", "gfx1150", "gfx1100")


@pytest.mark.parametrize("gpu", DIFFERENT)
def test_matrix_products_are_right_on_each(gpu: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(size).astype(np.float16) for size in ((70, 72), (72, 50)))
    out = np.zeros((70, 50), np.float32)
    arguments = [Buffer(a, "in"), Buffer(b, "in"), Buffer(out, "out"), 70, 50, 72]
    done = launch(fixtures.kernel("matmul", gpu), (3, 2), arguments, threads=128)
    assert np.abs(out - a.astype(float) @ b.astype(float)).max() < 1e-5
    facts = statistics.describe_kernel(done.kernel, done.instructions)
    assert (facts["target"], facts["unsupported"]) == (gpu, [])
    assert facts["lds"] > 0
    assert facts["waves_per_simd"]["bound"] >= 1
    assert statistics.describe_launch(done)["classes"]["wmma"] > 0


def test_gfx1152_and_gfx1153_execute_gfx1150s_code() -> None:
    """gfx1152 and gfx1153 have gfx1150's code, so facts about this code hold for them, too."""
    kernel = fixtures.kernel("attention", "gfx1150")
    for name in ("gfx1152", "gfx1153"):
        same_code = fixtures.kernel("attention", name)
        assert (same_code.code, same_code.target.name) == (kernel.code, name)
        assert same_code.code != fixtures.kernel("attention", "gfx1151").code
        changed = {
            key
            for key, value in vars(same_code.target).items()
            if value != getattr(kernel.target, key)
        }
        assert changed <= {"name", "mach", "version", "product", "processors", "l2", "clock"}


def test_gfx1100_has_no_scalar_floats() -> None:
    source = "s_mul_f32 s0, s1, s2\n"
    code = selftest.code(source, target=TARGETS["gfx1150"])
    names = {gpu: decode(code, target=target)[0].name for gpu, target in TARGETS.items()}
    assert names == dict.fromkeys(TARGETS, "s_mul_f32") | {"gfx1100": "?"}
    with pytest.raises(EmulatorError, match="not supported on this GPU"):
        llvm.assemble(source, target=TARGETS["gfx1100"])


def test_registers_bound_occupancy() -> None:
    waves = {
        name: statistics.occupancy(gpu, 256, 0, 256)["registers"] for name, gpu in TARGETS.items()
    }
    assert waves == dict.fromkeys(TARGETS, 4) | {"gfx1151": 5, "gfx1100": 5}


def test_another_name_is_refused() -> None:
    message = "GPU gfx906 is not supported; supported are gfx1151, .*, gfx1100"
    with pytest.raises(EmulatorError, match=message):
        find_target("gfx906")


def _strings(source: str) -> list[str]:
    """Return the strings in code, without docstrings."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def test_functions_have_at_most_fifty_lines() -> None:
    """Ruff limits the statements of functions, but not their lines. Docstrings do not count."""
    long_functions = []
    for path in Path(strix_emulate.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                docstring = (ast.get_docstring(node, clean=False) or "").count("\n")
                if node.end_lineno - node.lineno - docstring > 49:
                    long_functions.append(node.name)
    assert long_functions == []


def test_no_gpu_is_named_elsewhere() -> None:
    home = Path(strix_emulate.__file__).parent
    files = {
        path.name
        for path in home.rglob("*.py")
        if any(re.search(r"gfx1\d", text) for text in _strings(path.read_text()))
    }
    assert files == {"target.py"}
    for path in HIP.glob("*.[ch]"):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        assert not re.search(r"gfx1\d|Radeon", code), path
