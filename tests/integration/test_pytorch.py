# SPDX-License-Identifier: BSD-3-Clause
"""The checks of the pytorch recipe: each on good input, and failing on bad input."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from support.pytorch_tree import COMMIT, LOG, NINJA, PINNED, RECIPE, binaries, configuration, pin

# --- the commit of AOTriton


def test_right_pin() -> None:
    assert pin.wrong(PINNED, COMMIT) == ""
    assert pin.wrong(f"set(__AOTRITON_CI_COMMIT {COMMIT})\n", COMMIT) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PINNED.replace("0123", "ffff", 1), "builds"),
        (PINNED.replace(COMMIT, "0.12b"), "no full commit"),
        (PINNED + PINNED, "2 lines"),
        ("set(__AOTRITON_VER 0.12b)\n", "0 lines"),
        (f"# set(__AOTRITON_CI_COMMIT {COMMIT})\n", "0 lines"),
    ],
)
def test_wrong_pin(text: str, why: str) -> None:
    assert why in pin.wrong(text, COMMIT)


def test_pin_from_the_command_line(tmp_path: Path) -> None:
    """What build.sh sees: the reason and a status, no traceback."""
    command = [sys.executable, RECIPE / "check_aotriton_pin.py", tmp_path / "aotriton.cmake"]
    done = subprocess.run([*command, COMMIT], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "does not exist" in done.stderr
    (tmp_path / "aotriton.cmake").write_text(PINNED)
    assert subprocess.run([*command, COMMIT], capture_output=True, check=False).returncode == 0
    done = subprocess.run([*command, "f" * 40], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and COMMIT in done.stderr and "Traceback" not in done.stderr


# --- the configuration


def test_right_configuration() -> None:
    assert configuration.wrong(NINJA, LOG, "/env") == []


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("--   USE_ROCM : ON", "--   USE_ROCM : OFF", "USE_ROCM is OFF"),
        ("--   USE_ROCM : ON", "", "USE_ROCM is not in the summary"),
        ("USE_FLASH_ATTENTION : ON", "USE_FLASH_ATTENTION : ", "USE_FLASH_ATTENTION is "),
        ("USE_CUDA : OFF", "USE_CUDA : 1", "USE_CUDA is 1"),
        ("Using Preinstalled AOTriton at", "Using AOTriton Runtime from", "not taken from our"),
        ("Found system Eigen", "Did not find system Eigen", "would be cloned"),
        ("gfx1151 ", "gfx1151 --offload-arch=gfx1100 ", "device code for"),
        ("--offload-arch=gfx1151", "", "device code for nothing"),
        ("-DUSE_FLASH_ATTENTION ", "", "-DUSE_FLASH_ATTENTION"),
        ("libaotriton_v2.so", "libother.so", "linked with libaotriton"),
        ("--gcc-install-dir=/source/gcc", "", "conda's GCC"),
        ("LINK torch_hip.dir", "LINK fbgemm.a libfbgemm_genai.a torch_hip.dir", "fbgemm_genai"),
        ("LINK torch_hip.dir", "LINK a/mslk.dir/x.o torch_hip.dir", "mslk is built"),
        (
            "build libtorch",
            "build a/aotriton_runtime-stamp/aotriton_runtime-download: X\nbuild libtorch",
            "aotriton_runtime would be downloaded",
        ),
        ("-I/env/opt/rocm/include", "-I/opt/rocm/include", "outside the environment"),
        ("/env/opt/rocm/lib/llvm/bin/clang++", "/usr/bin/clang++", "the HIP compiler"),
    ],
)
def test_wrong_configuration(old: str, new: str, why: str) -> None:
    ninja, log = NINJA.replace(old, new), LOG.replace(old, new)
    assert (ninja, log) != (NINJA, LOG)
    (reason,) = configuration.wrong(ninja, log, "/env")
    assert why in reason


# --- ELF files


def image(flags: int = 0x4A, machine: int = 224) -> bytes:
    """The 64-byte header of an AMDGPU code object."""
    header = struct.pack("<4sBBBB8xHHIQQQI", b"\x7fELF", 2, 1, 1, 64, 3, machine, 1, 0, 0, 0, flags)
    return header.ljust(64, b"\0")


def bundle(parts: dict[str, bytes]) -> bytes:
    """An offload bundle as clang-offload-bundler writes it."""
    heads, bodies = b"", b""
    start = 32 + sum(24 + len(target) for target in parts)
    for target, data in parts.items():
        heads += struct.pack("<QQQ", start + len(bodies), len(data), len(target)) + target.encode()
        bodies += data
    return binaries.MAGIC + struct.pack("<Q", len(parts)) + heads + bodies


GOOD = bundle({"host-x86_64-unknown-linux-gnu-": b"", "hipv4-amdgcn-amd-amdhsa--gfx1151": image()})


def compressed(data: bytes, version: int = 3) -> bytes:
    """A bundle as clang's --offload-compress writes it."""
    body = zstandard.compress(data)
    head = {2: "<4sHHIIQ", 3: "<4sHHQQQ"}[version]
    size = struct.calcsize(head) + len(body)
    return struct.pack(head, b"CCOB", version, 1, size, len(data), 7) + body


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "env/lib").mkdir(parents=True)
    return tmp_path / "env"


def library(prefix: Path, name: str, fatbin: bytes = b"", needs: tuple[str, ...] = (),
            rpath: str = "$ORIGIN", folder: str = "lib") -> Path:  # fmt: skip
    """Link a shared library with this .hip_fatbin, soname, RUNPATH and libraries needed."""
    (prefix / folder).mkdir(parents=True, exist_ok=True)
    path, source = prefix / folder / name, prefix / f"{name}.S"
    (prefix / "fatbin").write_bytes(fatbin)
    section = f'.section .hip_fatbin,"a"\n.incbin "{prefix}/fatbin"\n' if fatbin else ""
    source.write_text(f'.globl f\nf: ret\n{section}.section .note.GNU-stack,""\n')
    command = ["gcc", "-shared", "-nostdlib", "-Wl,--no-as-needed", f"-Wl,-soname,{name}"]
    found = [next(p for p in prefix.rglob(need) if p.is_file()) for need in needs]
    command += [f"-Wl,-rpath,{rpath}"] if rpath else []
    subprocess.run([*command, "-o", path, source, *found], check=True)
    source.unlink()
    return path


@pytest.mark.parametrize(
    ("fatbin", "count"),
    [
        (GOOD, 1),
        # the linker puts the objects' sections behind each other, aligned to pages
        (GOOD.ljust(4096, b"\0") + compressed(GOOD) + b"\0" * 77 + compressed(GOOD, 2), 3),
    ],
)
def test_right_images(prefix: Path, fatbin: bytes, count: int) -> None:
    path = library(prefix, "libtorch_hip.so", fatbin)
    assert binaries.check([path], prefix, count, False) == []
    (reason,) = binaries.check([path], prefix, count + 1, False)
    assert f"{count} device images in all" in reason


@pytest.mark.parametrize(
    ("fatbin", "why"),
    [
        (bundle({"hipv4-amdgcn-amd-amdhsa--gfx1100": image()}), "image for hipv4"),
        (compressed(bundle({"hip-amdgcn-amd-amdhsa--gfx1150": image()})), "gfx1150"),
        (GOOD + bundle({"hipv4-amdgcn-amd-amdhsa--gfx1151": image(0x41)}), "is for 224, 0x41"),
        (bundle({"hipv4-amdgcn-amd-amdhsa--gfx1151": image(machine=62)}), "is for 62"),
        (bundle({"hipv4-amdgcn-amd-amdhsa--gfx1151": b""}), "(0 bytes) is no 64-bit ELF"),
        (GOOD + b"HIPK", "no offload bundle"),
        (compressed(GOOD)[:-9], "does not unpack"),
        (b"CCOB" + struct.pack("<HH", 9, 1) + bytes(24), "version 9"),
    ],
)
def test_wrong_images(prefix: Path, fatbin: bytes, why: str) -> None:
    (reason,) = binaries.check([library(prefix, "libtorch_hip.so", fatbin)], prefix, 0, False)
    assert why in reason


def test_closure(prefix: Path) -> None:
    """libtorch_hip, AOTriton beside it, and a library of the SDK's tree."""
    library(prefix, "libamdhip64.so.7", folder="opt/rocm/lib")
    library(prefix, "libaotriton_v2.so.0.12.0", needs=("libamdhip64.so.7",),
            rpath="$ORIGIN/../opt/rocm/lib")  # fmt: skip
    hip = library(prefix, "libtorch_hip.so", needs=("libaotriton_v2.so.0.12.0",))
    assert binaries.check([hip], prefix, 0, True) == []
    other = library(prefix, "libc10.so")
    assert "no file needs libaotriton_v2" in binaries.check([other], prefix, 0, True)[0]
    # a library that only another one needs
    (prefix / "opt/rocm/lib/libamdhip64.so.7").unlink()
    (reason,) = binaries.check([hip], prefix, 0, True)
    assert reason.startswith(str(prefix / "lib/libaotriton")) and "needs libamdhip64" in reason


def test_libraries_of_other_packages(prefix: Path) -> None:
    """Their search paths are not ours to judge, and a library that is loaded already will do."""
    library(prefix, "libstdc++.so.6")
    library(prefix, "libroctx64.so.4", needs=("libstdc++.so.6",), rpath="/opt/rocm/lib",
            folder="opt/rocm/lib")  # fmt: skip
    needs, rpath = ("libroctx64.so.4", "libstdc++.so.6"), "$ORIGIN:$ORIGIN/../opt/rocm/lib"
    cpu = library(prefix, "libtorch_cpu.so", needs=needs, rpath=rpath)
    assert binaries.check([cpu], prefix, 0, False) == []
    cpu = library(prefix, "libtorch_cpu.so", needs=needs[:1], rpath=rpath)
    (reason,) = binaries.check([cpu], prefix, 0, False)
    assert "libroctx64.so.4: needs libstdc++.so.6" in reason


def test_aotriton_of_another_folder(prefix: Path) -> None:
    """The images lie beside the library of lib, so a copy elsewhere would find none."""
    library(prefix, "libaotriton_v2.so.0.12.0", folder="lib/torch")
    needs = ("libaotriton_v2.so.0.12.0",)
    hip = library(prefix, "libtorch_hip.so", needs=needs, rpath="$ORIGIN/torch")
    assert "no file needs libaotriton_v2" in binaries.check([hip], prefix, 0, True)[0]


@pytest.mark.parametrize(
    ("rpath", "why"),
    [
        ("$ORIGIN:/home/build/work/build/lib", "of the machine that built it"),
        ("/opt/rocm/lib", "of the machine that built it"),
        ("$ORIGIN/../../other", "out of the environment"),
        ("$ORIGIN/../opt/aotriton/lib", "only builds have"),
    ],
)
def test_wrong_rpath(prefix: Path, rpath: str, why: str) -> None:
    (reason,) = binaries.check([library(prefix, "libc10.so", rpath=rpath)], prefix, 0, False)
    assert why in reason


def test_no_elf_file(prefix: Path) -> None:
    (prefix / "lib/libc10.so").write_text("INPUT(libc10.so.1)")
    command = [sys.executable, RECIPE / "check_binaries.py", prefix, prefix / "lib/libc10.so"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Magic number" in done.stderr
    assert "Traceback" not in done.stderr
