# SPDX-License-Identifier: BSD-3-Clause
"""Make code objects and offload bundles byte by byte, and shared libraries with gcc."""

import struct
import subprocess
from pathlib import Path

import zstandard

GFX1151, GFX1100 = 0x4A, 0x41
HOST, TARGET = "host-x86_64-unknown-linux-gnu-", "hipv4-amdgcn-amd-amdhsa--gfx1151"


def code_object(processor: int = GFX1151, machine: int = 224, osabi: int = 64) -> bytes:
    """Return an AMDGPU code object that consists of an ELF header only."""
    ident = b"\x7fELF\x02\x01\x01" + bytes([osabi]) + bytes(8)
    fields = 3, machine, 1, 0, 0, 0, processor, 64, 56, 0, 64, 0, 0
    return ident + struct.pack("<HHIQQQIHHHHHH", *fields)


def bundle(parts: dict[str, bytes]) -> bytes:
    """Return an offload bundle in the format of clang-offload-bundler."""
    heads, bodies = b"", b""
    start = 32 + sum(24 + len(target) for target in parts)
    for target, data in parts.items():
        heads += struct.pack("<QQQ", start + len(bodies), len(data), len(target)) + target.encode()
        bodies += data
    return b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(parts)) + heads + bodies


GOOD = bundle({HOST: b"", TARGET: code_object()})


def compressed(data: bytes, version: int = 3) -> bytes:
    """Return a compressed bundle in the format of clang's --offload-compress."""
    body = zstandard.compress(data)
    head = {2: "<4sHHIIQ", 3: "<4sHHQQQ"}[version]
    size = struct.calcsize(head) + len(body)
    return struct.pack(head, b"CCOB", version, 1, size, len(data), 7) + body


def library(
    prefix: Path,
    name: str,
    fatbin: bytes = b"",
    needs: tuple[str, ...] = (),
    rpath: str = "$ORIGIN",
    folder: str = "lib",
    comment: str = "",
) -> Path:
    """Link a library and return its file.

    Args:
        prefix: The prefix.
        name: The file name, which is also the SONAME.
        fatbin: The content of .hip_fatbin.
        needs: The names in DT_NEEDED. These libraries must be below `prefix`.
        rpath: The RUNPATH.
        folder: The folder of the library, relative to `prefix`.
        comment: The content of .comment.
    """
    (prefix / folder).mkdir(parents=True, exist_ok=True)
    path, source = prefix / folder / name, prefix / f"{name}.S"
    (prefix / "fatbin").write_bytes(fatbin)
    text = '.globl f\nf: ret\n.section .note.GNU-stack,""\n'
    text += f'.section .hip_fatbin,"a"\n.incbin "{prefix}/fatbin"\n' if fatbin else ""
    text += f'.section .comment,"MS",@progbits,1\n.asciz "{comment}"\n' if comment else ""
    source.write_text(text)
    command = ["gcc", "-shared", "-nostdlib", "-Wl,--no-as-needed", f"-Wl,-soname,{name}"]
    needed = [next(p for p in prefix.rglob(need) if p.is_file()) for need in needs]
    command += [f"-Wl,-rpath,{rpath}"] if rpath else []
    subprocess.run([*command, "-o", path, source, *needed], check=True)
    source.unlink()
    return path
