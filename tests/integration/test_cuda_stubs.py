# SPDX-License-Identifier: BSD-3-Clause
"""Stubs of CUDA's libraries are made from the ELF files of a wheel, and PyPI's torch loads them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject, module
from support.wheels import write_wheel

from forge.conda.local import LocalChannel
from forge.conda.package import Package
from forge.hostbase.wheels import CUDA_STUBS

pytest.importorskip("elftools")
stubs = module(CHECKOUT / "recipes/bases/host/stub_cuda_libraries.py")

# Libraries as in NVIDIA's wheels: for each file name, a source and a version script. Symbols of the
# first library have versions, symbols of the second library have none, and the third library has
# no symbols.
NVIDIA = {
    "libcufake.so.13": (
        "int fakeOpen(int *n) { *n = 7; return 0; } int fakeTable[4] = {1, 2, 3, 4};"
        'const char *fakeGetErrorString(int e) { return "no error"; }',
        "libcufake.so.13 { global: fake*; local: *; };",
    ),
    "libncclplain.so.2": ("int plainSend(void) { return 0; }", ""),
    "libnvempty.so.1": ("", ""),
}
# A library that is on the machine and not in the wheel, such as libquadmath.so.0 for torch 2.15.
MACHINE = ("libquad.so.0", "int quad(int n) { return 4 * n; }", "libquad.so.0 { global: quad; };")
# Libraries as in torch's wheel. Some symbols that libtorch_cuda.so requires are defined by Python,
# and some by libtorch_cpu.so.
TORCH = {
    "libtorch_cpu.so": "int own(void) { return 42; }",
    "libtorch_cuda.so": (
        "#include <stdio.h>\n#include <math.h>\n"
        "int fakeOpen(int *); extern int fakeTable[4]; const char *fakeGetErrorString(int);\n"
        "int plainSend(void); int own(void); int quad(int); void *PyErr_Occurred(void);\n"
        "int call_open(void) { int n = 0; return fakeOpen(&n); }\n"
        "int call_send(void) { return plainSend(); }\n"
        "int call_own(void) { return own(); }\nint call_quad(void) { return quad(5); }\n"
        "int sum(void) { return fakeTable[0] + fakeTable[1] + fakeTable[2] + fakeTable[3]; }\n"
        "const char *text(void) { return fakeGetErrorString(1); }\n"
        'int unused(double x) { return PyErr_Occurred() ? printf("%f", cbrt(x)) : 0; }\n'
    ),
}
# This program prints the results of the functions of torch's library, except of the function
# `unused`. The first call of `unused` would look up PyErr_Occurred in the interpreter.
CALLS = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.text.restype = ctypes.c_char_p
names = ("call_open", "call_send", "call_own", "call_quad", "sum")
values = {name: getattr(library, name)() for name in names}
print(json.dumps(values | {"text": library.text().decode()}))
"""


def link(folder: Path, name: str, source: str, versions: str = "", *options: str) -> Path:
    """Link a shared library from a source in C and a version script, which may be empty."""
    (folder / "source.c").write_text(source)
    (folder / "versions").write_text(versions)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, "source.c", *options]
    command += ["-Wl,--version-script=versions"] if versions else []
    subprocess.run(command, cwd=folder, check=True)
    return folder / name


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """The libraries of TORCH. The libraries of NVIDIA and MACHINE are in other folders."""
    nvidia = tmp_path / "nvidia"
    machine = tmp_path / "machine"
    lib = tmp_path / "torch" / "lib"
    for folder in (nvidia, machine, lib):
        folder.mkdir(parents=True)
    for name, (source, versions) in NVIDIA.items():
        link(nvidia, name, source, versions)
    quad = link(machine, *MACHINE)
    cpu = link(lib, "libtorch_cpu.so", TORCH["libtorch_cpu.so"])
    libraries = [str(cpu), *(str(nvidia / name) for name in NVIDIA), str(quad)]
    options = [f"-Wl,--no-as-needed,-rpath,$ORIGIN:{machine}", *libraries, "-lm"]
    link(lib, "libtorch_cuda.so", TORCH["libtorch_cuda.so"], "", *options)
    for name in ("source.c", "versions"):
        (lib / name).unlink()
    return lib


def call_functions(library: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CALLS, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def make_stubs(lib: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run stub_cuda_libraries.py on a wheel that has the libraries in `lib`."""
    files = {f"torch/lib/{path.name}": path.read_bytes() for path in lib.iterdir()}
    wheel = write_wheel(folder.parent, "torch", files=files)
    pyelftools = Path(sys.modules["elftools"].__path__[0]).parent
    program = CHECKOUT / "recipes/bases/host/stub_cuda_libraries.py"
    command = [sys.executable, "-I", program, wheel, pyelftools, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_stubs_stand_for_the_libraries(torch: Path, tmp_path: Path) -> None:
    """torch's library loads only with the stubs, whose functions return the error for no GPU."""
    cuda = torch / "libtorch_cuda.so"
    done = call_functions(cuda)
    assert done.returncode and "libcufake.so.13: cannot open shared object" in done.stderr
    done = make_stubs(torch, tmp_path / "stubs")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "stubs").iterdir()} == NVIDIA.keys()
    for path in (tmp_path / "stubs").iterdir():
        shutil.copy(path, torch)
    done = call_functions(cuda)
    assert done.returncode == 0 and not done.stderr, done.stderr
    values = json.loads(done.stdout)
    text = values.pop("text")
    assert values == {"call_open": 100, "call_send": 100, "call_own": 42, "call_quad": 20, "sum": 0}
    assert text == f"libcufake.so.13 is a stub from the package {CUDA_STUBS}"


def test_a_stub_defines_nothing_else(torch: Path) -> None:
    """No stub defines a symbol of Python, of the C library, or of torch's other libraries."""
    libraries = {path.name: stubs.read_library(path) for path in torch.iterdir()}
    plan = stubs.plan_stubs(libraries)
    version = "libcufake.so.13"
    assert plan == {
        "libcufake.so.13": stubs.Stub(
            {"fakeOpen": version, "fakeGetErrorString": version}, {"fakeTable": version}
        ),
        # plainSend has no version, so the ELF file does not say which library defines it. The stubs
        # of both libraries without versions define it.
        "libncclplain.so.2": stubs.Stub({"plainSend": ""}),
        "libnvempty.so.1": stubs.Stub({"plainSend": ""}),
    }


@pytest.mark.parametrize(
    "name", ["libcuda.so.1", "libnvidia-ml.so.1", "libstdc++.so.6", "libquadmath.so.0"]
)
def test_what_is_not_in_nvidias_wheels_is_not_stubbed(name: str) -> None:
    """Libraries of the driver and the machine get no stub, because it would hide the real one."""
    library = stubs.Library([name], set(), [("init", "FUNC", "", ""), ("sinq", "FUNC", name, "Q")])
    assert stubs.plan_stubs({"libcaffe2_nvrtc.so": library}) == {}


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ([("state", "TLS", "libcux.so.1", "X")], "cannot make a stub of state, whose type is TLS"),
        (
            [("open", "FUNC", "libcux.so.1", "X_1"), ("open", "FUNC", "libcux.so.1", "X_2")],
            "open is required in two versions, X_1 and X_2",
        ),
    ],
)
def test_what_no_stub_can_have_is_refused(
    symbols: list[tuple[str, str, str, str]], message: str
) -> None:
    libraries = {"libtorch.so": stubs.Library(["libcux.so.1"], set(), symbols)}
    with pytest.raises(SystemExit, match=f"libcux.so.1: {message}"):
        stubs.plan_stubs(libraries)


# This program computes with torch on the CPU. Warnings are errors until the program has requested a
# GPU.
USE_TORCH = """
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
    """PyPI's torch works on the host base, which has stubs and no library of NVIDIA.

    The metadata of the host base's package of torch requires no package of NVIDIA either.
    """
    base = LocalChannel(project.root / "build" / "host-base")
    names = {record.name for record in base.records()}
    assert CUDA_STUBS in names
    assert not any(re.match("nvidia-|cuda-", name) for name in names)
    (torch,) = [base.path(record) for record in base.records() if record.name == "pytorch"]
    assert CUDA_STUBS in Package(torch).index["depends"]
    project.recipe("alpha")
    project.forge("build-all")
    project.stack("app", "python", "pip", "numpy", "pytorch", "alpha")
    project.forge("lock", "app")
    project.forge("install", "app")
    pip = project.forge("run", "app", "--", "python", "-m", "pip", "check")
    assert "No broken requirements found" in pip.stdout
    done = project.forge("run", "app", "--", "python", "-c", USE_TORCH)
    assert "is right" in done.stdout, done.stderr


def test_they_are_never_published(project: MiniProject, tmp_path: Path) -> None:
    (stub,) = (project.root / "build/host-base/linux-64").glob(f"{CUDA_STUBS}-*.conda")
    offered = tmp_path / "offered"
    (offered / "linux-64").mkdir(parents=True)
    shutil.copy(stub, offered / "linux-64")
    LocalChannel(offered).index()
    words = ("publish", "--output", str(offered), "--to", str(tmp_path / "public"))
    refusal = project.forge(*words, code=1).stderr
    assert f"{offered / 'linux-64' / stub.name} is host-bound" in refusal
