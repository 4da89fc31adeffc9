# SPDX-License-Identifier: BSD-3-Clause
"""Stubs of CUDA's libraries: made from what a wheel's ELF files require, and under PyPI's torch."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject, module
from support.wheels import write_wheel

from forge.conda.local import Channel
from forge.conda.package import Package
from forge.hostbase.wheels import CUDA_STUBS

pytest.importorskip("elftools")
stubs = module(CHECKOUT / "bases/host/stub_cuda_libraries.py")

# Libraries as NVIDIA's wheels have them: with versions, without versions, without any symbol used.
NVIDIA = {
    "libfakert.so.13": (
        "int fakeOpen(int *n) { *n = 7; return 0; } int fakeTable[4] = {1, 2, 3, 4};"
        'const char *fakeGetErrorString(int e) { return "no error"; }',
        "libfakert.so.13 { global: fake*; local: *; };",
    ),
    "libplain.so.2": ("int plainSend(void) { return 0; }", ""),
    "libempty.so.1": ("", ""),
}
# As torch's own libraries are: some symbols are defined by the other one, or by Python.
TORCH = {
    "libtorch_cpu.so": "int own(void) { return 42; }",
    "libtorch_cuda.so": (
        "#include <stdio.h>\n#include <math.h>\n"
        "int fakeOpen(int *); extern int fakeTable[4]; const char *fakeGetErrorString(int);\n"
        "int plainSend(void); int own(void); void *PyErr_Occurred(void);\n"
        "int call_open(void) { int n = 0; return fakeOpen(&n); }\n"
        "int call_send(void) { return plainSend(); }\n"
        "int call_own(void) { return own(); }\n"
        "int sum(void) { return fakeTable[0] + fakeTable[1] + fakeTable[2] + fakeTable[3]; }\n"
        "const char *text(void) { return fakeGetErrorString(1); }\n"
        'int unused(double x) { return PyErr_Occurred() ? printf("%f", cbrt(x)) : 0; }\n'
    ),
}
# What a program sees of torch's library. A lazy lookup of PyErr_Occurred finds the interpreter's.
CALLS = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.text.restype = ctypes.c_char_p
names = ("call_open", "call_send", "call_own", "sum")
values = {name: getattr(library, name)() for name in names}
print(json.dumps(values | {"text": library.text().decode()}))
"""


def link(folder: Path, name: str, source: str, *options: str) -> Path:
    """Link a shared library of C."""
    (folder / "source.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, "source.c", *options]
    subprocess.run(command, cwd=folder, check=True)
    return folder / name


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """The libraries of TORCH, linked with those of NVIDIA, which lie in another folder."""
    nvidia, lib = tmp_path / "nvidia", tmp_path / "torch" / "lib"
    nvidia.mkdir()
    lib.mkdir(parents=True)
    for name, (source, versions) in NVIDIA.items():
        (nvidia / "versions").write_text(versions)
        link(nvidia, name, source, *(["-Wl,--version-script=versions"] if versions else []))
    cpu, cuda = TORCH
    first = link(lib, cpu, TORCH[cpu])
    others = [str(nvidia / name) for name in NVIDIA]
    link(lib, cuda, TORCH[cuda], "-Wl,--no-as-needed,-rpath,$ORIGIN", str(first), *others, "-lm")
    (lib / "source.c").unlink()
    return lib


def call(library: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CALLS, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def make(lib: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program as the recipe runs it, on a wheel of these libraries."""
    files = {f"torch/lib/{path.name}": path.read_bytes() for path in lib.iterdir()}
    wheel = write_wheel(folder.parent, "torch", files=files)
    pyelftools = Path(sys.modules["elftools"].__path__[0]).parent
    program = CHECKOUT / "bases/host/stub_cuda_libraries.py"
    command = [sys.executable, "-I", program, wheel, pyelftools, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_stubs_stand_for_the_libraries(torch: Path, tmp_path: Path) -> None:
    """torch's library loads beside them, and each call returns that there is no GPU."""
    cuda = torch / "libtorch_cuda.so"
    refusal = call(cuda)
    assert refusal.returncode and "libfakert.so.13: cannot open shared object" in refusal.stderr
    made = make(torch, tmp_path / "stubs")
    assert made.returncode == 0, made.stderr
    assert {path.name for path in (tmp_path / "stubs").iterdir()} == NVIDIA.keys()
    for path in (tmp_path / "stubs").iterdir():
        shutil.copy(path, torch)
    done = call(cuda)
    assert done.returncode == 0 and not done.stderr, done.stderr
    values = json.loads(done.stdout)
    text = values.pop("text")
    assert values == {"call_open": 100, "call_send": 100, "call_own": 42, "sum": 0}
    assert text == f"libfakert.so.13 is a stub, of the package {CUDA_STUBS}"


def test_a_stub_defines_nothing_else(torch: Path) -> None:
    """No symbol of Python, of the C library, or of torch's other libraries."""
    libraries = {path.name: stubs.read_library(path) for path in torch.iterdir()}
    plan = stubs.plan_stubs(libraries)
    version = "libfakert.so.13"
    assert plan == {
        "libfakert.so.13": stubs.Stub(
            {"fakeOpen": version, "fakeGetErrorString": version}, {"fakeTable": version}
        ),
        # the file does not say whose it is
        "libplain.so.2": stubs.Stub({"plainSend": ""}),
        "libempty.so.1": stubs.Stub({"plainSend": ""}),
    }


def test_the_drivers_library_is_not_stubbed() -> None:
    """On a machine with a driver it would hide the real one."""
    needs = stubs.Library(["libcuda.so.1", "libstdc++.so.6"], set(), [("cuInit", "FUNC", "", "")])
    assert stubs.plan_stubs({"libcaffe2_nvrtc.so": needs}) == {}


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ([("state", "TLS", "libx.so.1", "X")], "cannot make a stub of state, whose type is TLS"),
        (
            [("open", "FUNC", "libx.so.1", "X_1"), ("open", "FUNC", "libx.so.1", "X_2")],
            "open is required in two versions, X_1 and X_2",
        ),
    ],
)
def test_what_no_stub_can_have_is_refused(
    symbols: list[tuple[str, str, str, str]], message: str
) -> None:
    libraries = {"libtorch.so": stubs.Library(["libx.so.1"], set(), symbols)}
    with pytest.raises(SystemExit, match=f"libx.so.1: {message}"):
        stubs.plan_stubs(libraries)


USE = """
import warnings
warnings.simplefilter("error")
import torch
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
try:
    torch.zeros(1, device="cuda")
except RuntimeError as error:
    assert "No CUDA GPUs are available" in str(error), error
warnings.simplefilter("default")
torch.manual_seed(0)
x = torch.randn(16, 16, requires_grad=True)
(torch.linalg.svdvals(x).sum() + torch.fft.fft(x).abs().sum()).backward()
assert x.grad.isfinite().all()
compiled = torch.compile(lambda a: torch.nn.functional.gelu(a @ a))
error = (compiled(x) - torch.nn.functional.gelu(x @ x)).abs().max().item()
assert error < 1e-5, error
with torch.profiler.profile() as profile:
    x @ x
assert profile.events()
print("torch", torch.__version__, "is right")
"""


def test_pypis_torch_works_beside_them(project: MiniProject) -> None:
    """On the host base, which has no library of NVIDIA; and its metadata asks for none."""
    base = Channel(project.root / "build" / "host-base")
    names = {record.name for record in base.records()}
    assert CUDA_STUBS in names and not [n for n in names if re.match("nvidia-|cuda-", n)]
    (torch,) = [base.path(record) for record in base.records() if record.name == "pytorch"]
    assert CUDA_STUBS in Package(torch).index["depends"]
    project.recipe("alpha")
    project.forge("build-all")
    project.stack("app", "python", "pip", "numpy", "pytorch", "alpha")
    project.forge("lock", "app")
    project.forge("install", "app")
    pip = project.forge("run", "app", "--", "python", "-m", "pip", "check")
    assert "No broken requirements found" in pip.stdout
    done = project.forge("run", "app", "--", "python", "-c", USE)
    assert "is right" in done.stdout, done.stderr


def test_they_are_never_published(project: MiniProject, tmp_path: Path) -> None:
    (stub,) = (project.root / "build/host-base/linux-64").glob(f"{CUDA_STUBS}-*.conda")
    offered = tmp_path / "offered"
    (offered / "linux-64").mkdir(parents=True)
    shutil.copy(stub, offered / "linux-64")
    Channel(offered).index()
    words = ("publish", "--output", str(offered), "--to", str(tmp_path / "public"))
    refusal = project.forge(*words, code=1).stderr
    assert f"{offered / 'linux-64' / stub.name} is host-bound" in refusal
