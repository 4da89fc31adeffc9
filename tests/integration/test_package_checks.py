# SPDX-License-Identifier: BSD-3-Clause
"""The checks that run inside packages can fail: each is shown a good file and bad ones."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import CHECKOUT, need_pyelftools

CHECKS = CHECKOUT / "recipes" / "checks"
AMDSMI = CHECKOUT / "recipes" / "amdsmi" / "__init__.py"
GFX1151, GFX1100 = 0x4A, 0x41
ID = "hipv4-amdgcn-amd-amdhsa--"


def code_object(mach: int, machine: int = 224) -> bytes:
    """An ELF header of AMDGPU code for one processor, and nothing behind it."""
    ident = b"\x7fELF\x02\x01\x01\x40" + bytes(8)
    return ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, 0, mach, 64, 56, 0, 64, 0, 0)


def bundle(*entries: tuple[str, bytes]) -> bytes:
    """Clang's offload bundle, with the empty host entry that it always starts with."""
    entries = (("host-x86_64-unknown-linux-gnu-", b""), *entries)
    magic = b"__CLANG_OFFLOAD_BUNDLE__"
    offset = len(magic) + 8 + sum(24 + len(name) for name, _ in entries)
    head, body = magic + struct.pack("<Q", len(entries)), b""
    for name, image in entries:
        head += struct.pack("<3Q", offset + len(body), len(image), len(name)) + name.encode()
        body += image
    return head + body


def library(folder: Path, fatbin: bytes) -> Path:
    """A real shared library that carries `fatbin` as compiled HIP code does."""
    (folder / "fatbin").write_bytes(fatbin)
    source = folder / "a.s"
    source.write_text(f'.section .hip_fatbin,"a"\n.incbin "{folder}/fatbin"\n')
    subprocess.run(["cc", "-shared", "-o", folder / "a.so", source], check=True)
    return folder / "a.so"


def run(script: Path, *arguments: str | Path, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, **options
    )


def test_binaries_of_a_package(tmp_path: Path) -> None:
    """A package is searched without importing it; an absent one is no success."""
    need_pyelftools()
    check = CHECKOUT / "recipes" / "pytorch" / "check_binaries.py"
    package = tmp_path / "compiled"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    library(package / "deep", bundle((f"{ID}gfx1151", code_object(GFX1151))))
    options = {"env": {"PYTHONPATH": str(tmp_path)}, "check": False}
    done = run(check, tmp_path, "compiled", "--least", "1", **options)
    assert "1 images for gfx1151" in done.stdout, done.stderr
    library(package / "deep", bundle((f"{ID}gfx1151", code_object(GFX1100))))
    done = run(check, tmp_path, "compiled", **options)
    assert done.returncode == 1 and "is for 224, 0x41" in done.stderr
    absent = run(check, tmp_path, "absent", **options)
    assert absent.returncode == 1 and "neither a file nor an installed package" in absent.stderr


def test_loaded_from(tmp_path: Path) -> None:
    """A library from outside the environment is named; those of the environment are not."""
    library(tmp_path, b"")
    (tmp_path / "foreign.py").write_text(f"import ctypes; ctypes.CDLL('{tmp_path}/a.so')")
    options = {"env": {"PYTHONPATH": str(tmp_path)}, "check": False}
    done = run(CHECKS / "loaded_from.py", "foreign", **options)
    assert done.returncode == 1 and f"from outside: {tmp_path}/a.so" in done.stdout
    sys.path.insert(0, str(CHECKS))
    from loaded_from import foreign

    maps = "7f00-7f01 r-xp 00000000 00:01 1 {}\n"
    inside, c_library = f"{tmp_path}/lib/libhip.so.7", "/lib/x86_64-linux-gnu/libc.so.6"
    text = "".join(maps.format(file) for file in (inside, c_library, "/opt/rocm/lib/libhip.so.7"))
    assert foreign(text + "7f02-7f03 rw-p 0 0:0 0 [heap]\n", tmp_path) == [
        "/opt/rocm/lib/libhip.so.7"
    ]


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """A prefix with our amdsmi and a tree of the SDK's shape; libamd_smi needs a hidden library."""
    prefix = tmp_path / "prefix"
    site = prefix / "lib" / "python3.12" / "site-packages" / "amdsmi"
    module, lib = (prefix / "opt/rocm" / part for part in ("share/amd_smi/amdsmi", "lib"))
    for folder in (site, module, lib / "rocm_sysdeps" / "lib"):
        folder.mkdir(parents=True)
    (site / "__init__.py").write_text(AMDSMI.read_text())
    (module / "__init__.py").write_text("from .amdsmi_wrapper import which\n")
    # what AMD's own generated wrapper does: a KeyError where no library loads
    (module / "amdsmi_wrapper.py").write_text(
        "import ctypes, os\n"
        "libraries = {}\n"
        "for folder in (os.environ['ROCM_HOME'] + '/lib', '/opt/rocm/lib'):\n"
        "    try:\n"
        "        libraries['smi'] = ctypes.CDLL(folder + '/libamd_smi.so')\n"
        "        break\n"
        "    except OSError as error:\n"
        "        print(error)\n"
        "which = libraries['smi'].which\n"
    )
    make_smi(lib, 1)
    return prefix


def make_smi(lib: Path, answer: int) -> None:
    hidden = lib / "rocm_sysdeps" / "lib"
    hidden.mkdir(parents=True, exist_ok=True)
    (lib / "a.c").write_text(f"int hidden(void) {{ return {answer}; }}")
    (lib / "b.c").write_text("int hidden(void); int which(void) { return hidden(); }")
    compile_ = ["cc", "-shared", "-fPIC"]
    subprocess.run([*compile_, "-o", hidden / "libhidden.so", lib / "a.c"], check=True)
    link = ["-L", hidden, "-lhidden", "-Wl,-rpath,$ORIGIN/rocm_sysdeps/lib"]
    subprocess.run([*compile_, "-o", lib / "libamd_smi.so", lib / "b.c", *link], check=True)


TELL = "import os, amdsmi; print(amdsmi.which(), os.environ.get('ROCM_HOME'))"
AS_TORCH = "try:\n import amdsmi\nexcept ImportError as error:\n print('survived:', error)"


def python(prefix: Path, code: str, **environment: str) -> str:
    site = next(prefix.glob("lib/python*/site-packages"))
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(site)} | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_amdsmi_takes_its_own_library(sdk: Path, tmp_path: Path) -> None:
    """Also when the user's environment names another ROCm, and that setting is left as it was."""
    other = tmp_path / "other"
    make_smi(other / "lib", 2)
    assert python(sdk, TELL) == "1 None\n"
    assert python(sdk, TELL, ROCM_HOME=str(other)) == f"1 {other}\n"


def test_amdsmi_never_breaks_torch(sdk: Path) -> None:
    """torch survives an ImportError alone; AMD's module raises KeyError."""
    (sdk / "opt/rocm/lib/rocm_sysdeps/lib/libhidden.so").unlink()
    said = python(sdk, AS_TORCH)
    assert "survived: the AMD SMI library in" in said and "KeyError('smi')" in said
    (sdk / "lib/python3.12/site-packages/amdsmi/__init__.py").write_text(
        f"__path__ = ['{sdk}/opt/rocm/share/amd_smi/amdsmi']\nfrom .amdsmi_wrapper import which\n"
    )
    assert "survived" not in python(sdk, AS_TORCH)  # without our wrapper it would not
