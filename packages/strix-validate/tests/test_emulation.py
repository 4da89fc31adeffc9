# SPDX-License-Identifier: BSD-3-Clause
"""strix-emulate executes a library's launches, also with autotuning or pointers in tensors."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from calls import need_disassembler
from strix_emulate import TARGETS
from strix_validate import GPUS, cli
from strix_validate.checks import CannotRun
from strix_validate.triton import modes as triton_modes
from strix_validate.triton import stand_in
from typer.testing import CliRunner

PROGRAM = """
import os, sys, torch, triton
import triton.language as tl

for gpu in sys.argv[1:]:  # each in a forked process, which need not repeat the imports
    os.environ["gpu_arch"] = gpu
    if not os.fork():
        break
    if os.wait()[1]:
        sys.exit(f"failed for {gpu}")
else:
    sys.exit()

from strix_emulate import statistics
from strix_validate.triton import emulation, stand_in

stand_in.install()
done = []
stand_in.intercept(lambda x: None if x.is_warmup else done.append(emulation.execute(x)[0]))


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


@triton.jit
def product(x, y, out):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)
    tl.store(out + i, tl.dot(tl.load(x + i), tl.load(y + i)))


a, b = torch.arange(256.0).view(16, 16).half() / 256, torch.eye(16).half().roll(1, 0)
out = torch.zeros(16, 16)
product[(1,)](a, b, out)
assert (out == a.roll(-1, 1).float()).all(), out
assert done[0].kernel.target.name == gpu, done
assert statistics.describe_launch(done.pop())["classes"]["wmma"], done
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

#: A kernel in which two waves sum numbers is executed three times: as compiled, without the wait
#: for the LDS store, and without the barrier.
PLANTED = """
import re, torch, triton
import triton.language as tl
from strix_emulate import Trap
from strix_validate.triton import emulation, stand_in

stand_in.install()
launches = []
stand_in.intercept(lambda launch: launch.is_warmup or launches.append(launch))


@triton.jit
def total(x, out):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, 64)), 0))


out = torch.zeros(1)
total[(1,)](torch.arange(64.0), out, num_warps=2)
(launch,) = launches
NOP, BARRIER = b"\\0\\0\\x80\\xbf", b"\\0\\0\\xbd\\xbf"  # s_nop, s_barrier
WAIT = b"\\x07.\\x89\\xbf((?:.{4}){,2}?" + BARRIER + b")"  # s_waitcnt of LDS, up to the barrier
asm = launch.compiled.asm
code = asm["hsaco"]
for lost in (b"^$", WAIT, b"()" + BARRIER):
    asm["hsaco"] = re.sub(lost, lambda match: NOP + match[1], code, flags=re.DOTALL)
    assert len(asm["hsaco"]) == len(code)
    out.zero_()
    try:
        message = emulation.execute(launch)[1]
    except Trap as trap:
        message = f"Trap: {trap}"
    print(out.item(), message)
"""


def execute(text, folder, *arguments):
    """Run a program from a file, because Triton needs the source; return the program's output."""
    need_disassembler()
    file = folder / "program.py"
    file.write_text(text)
    done = subprocess.run([sys.executable, file, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wait_that_llvm_lost_is_told_from_a_lost_barrier(tmp_path):
    """A restored wait gives the correct answer. If a barrier is lost, no wait helps."""
    unchanged, without_wait, without_barrier = execute(PLANTED, tmp_path).splitlines()
    assert unchanged == "2016.0 "
    assert without_wait.startswith("2016.0 total at")
    assert "race: LDS" in without_wait
    assert without_barrier.startswith("0.0 Trap: total at")
    assert "race: LDS" in without_barrier


def test_kernels_of_each_gpu(tmp_path):
    """The kernels use the matrix unit, autotuning, and pointers in tensors."""
    execute(PROGRAM, tmp_path, "gfx1151", "gfx1150", "gfx1100")


def test_another_gpu_is_refused(monkeypatch):
    # strix-validate and strix-emulate have a list each, because neither requires the other.
    assert [(name, gpu.processors) for name, gpu in TARGETS.items()] == list(GPUS.items())
    monkeypatch.setattr(cli, "TARGET", "gfx906")
    done = CliRunner().invoke(cli.app, ["list"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert (
        "gpu_arch is 'gfx906': set it to one of gfx1151, gfx1150, gfx1152, gfx1153, gfx1100"
        in done.output
    )


class InspectChild:
    """A call that checks the child process.

    It returns whether the child uses the caller's cache, and the results of the three matrix
    products of torch that liger-kernel calls.
    """

    dtype = torch.float32

    def prepare(self) -> str:
        return "none"

    def execute(self, device: str) -> dict[str, torch.Tensor]:
        shared = os.environ["TRITON_CACHE_DIR"] == "/of/the/caller"
        a = torch.ones(2, 3)
        b = torch.ones(3, 4)
        out = torch.zeros(2, 4)
        torch.mm(a, b, out=out)
        torch.addmm(out, a, b, out=out)
        return {"shared": torch.tensor(shared), "out": out, "product": a @ b}


@pytest.mark.parametrize(
    ("mode", "factor"), [("look up", 0), ("ask", 0), ("compile", 1), ("emulate", 1)]
)
def test_each_run_has_a_cache_of_its_own(mode, factor, monkeypatch):
    """In the caller's cache, a run would find a kernel that no longer compiles.

    When kernels are only counted, matrix products are not computed. The products for a vocabulary
    would take half a CPU minute, and nothing reads their results.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/caller")
    try:
        (answer,) = triton_modes.run([InspectChild()], mode).calls
    except CannotRun as reason:
        pytest.skip(str(reason))
    assert answer.error is None
    assert not answer.tensors["shared"]
    assert (answer.tensors["out"] == 6 * factor).all()
    assert (answer.tensors["product"] == torch.full((2, 4), 3.0 * factor)).all()


def test_a_clone_in_the_current_folder_is_not_imported(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    (tmp_path / "triton.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (answer,) = triton_modes.run([InspectChild()], "compile").calls
    assert answer.error is None


def test_asserts_of_aiter_alone_are_dropped(tmp_path, monkeypatch):
    """aiter asserts that tensors are on a GPU. The asserts of other modules stay."""
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
