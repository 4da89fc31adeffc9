# SPDX-License-Identifier: BSD-3-Clause
"""Launches that strix-emulate executes for a library: autotuned, and with pointers in tensors."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from strix_emulate import DisassemblerError, find_disassembler
from strix_validate.checks import CannotRun
from strix_validate.triton import modes as triton_modes
from strix_validate.triton import stand_in

PROGRAM = """
import torch, triton
import triton.language as tl
from strix_validate.triton import emulation, stand_in

stand_in.install()
done = []
stand_in.intercept(lambda x: None if x.is_warmup else done.append(emulation.execute(x)))


@triton.autotune([triton.Config({"BLOCK": n}) for n in (64, 128)], key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def sums(pointers, sizes, out, BLOCK: tl.constexpr):
    g, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(pointers + g).to(tl.pointer_type(tl.float32))
    n = tl.load(sizes + g)
    tl.store(out + g, tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0))


x, out = torch.arange(100.0), torch.zeros(100)
double[lambda m: (triton.cdiv(100, m["BLOCK"]),)](x, out, 100)
assert (out == 2 * x).all(), out
assert len(done) == 1, done
groups = [torch.randn(n) for n in (5, 64, 17)]
pointers = torch.tensor([g.data_ptr() for g in groups])
sizes, out = torch.tensor([len(g) for g in groups], dtype=torch.int32), torch.zeros(3)
sums[(3,)](pointers, sizes, out, BLOCK=64)
assert torch.allclose(out, torch.stack([g.sum() for g in groups]), atol=1e-5), out
del groups[1]
"""


def test_autotune_and_pointers_in_tensors(tmp_path, monkeypatch):
    try:
        find_disassembler()
    except DisassemblerError as error:
        pytest.skip(str(error))
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Asks:
    """A call that answers whether the child process has the cache of the caller."""

    dtype = torch.float32

    def prepare(self) -> str:
        return "none"

    def execute(self, device: str) -> dict[str, torch.Tensor]:
        shared = os.environ["TRITON_CACHE_DIR"] == "/of/the/caller"
        return {"shared": torch.tensor(shared)}


@pytest.mark.parametrize("mode", ["compile", "emulate"])
def test_each_run_has_a_cache_of_its_own(mode, monkeypatch):
    """A kernel that no longer compiles would be found in the caller's."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/caller")
    try:
        (answer,) = triton_modes.run([Asks()], mode).calls
    except CannotRun as reason:
        pytest.skip(str(reason))
    assert answer.error is None and not answer.tensors["shared"]


def test_asserts_of_aiter_alone_are_dropped(tmp_path, monkeypatch):
    """aiter asserts that tensors are on a GPU; what others assert still holds."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [stand_in.KernelLibraries, *sys.meta_path])
    for name in ("aiter", "another_library"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("assert False, 'no GPU'\nSIZE = 2\n")
    assert importlib.import_module("aiter").SIZE == 2
    with pytest.raises(AssertionError, match="no GPU"):
        importlib.import_module("another_library")
    monkeypatch.delitem(sys.modules, "aiter")
