# SPDX-License-Identifier: BSD-3-Clause
"""Check ELF files of an installed package: what they load, from where, and for which GPU they are.

Each library that a file needs, directly or through others, must be found inside the prefix by
RPATHs that begin with $ORIGIN; only glibc comes from outside. Each device image must be an AMDGPU
code object for gfx1151.

Offload bundles: clang's "Clang Offload Bundler" documentation; a compressed one starts with CCOB.
"""

import argparse
import importlib.util
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

ARCH = "gfx1151"
EF_AMDGPU_MACH, GFX1151 = 0xFF, 0x4A  # LLVM, AMDGPU usage, "AMDGPU Embedding e_flags"
MAGIC, COMPRESSED = b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"
GLIBC = {
    "ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0",
    "libresolv.so.2", "librt.so.1", "libutil.so.1",
}  # fmt: skip
# Folders of packages that only builds install.
BUILD_ONLY = ["opt/aotriton"]


class Wrong(Exception):
    """One finding, without the name of the file."""


def bundles(data: bytes) -> Iterator[bytes]:
    """The uncompressed offload bundles that follow each other in a .hip_fatbin section.

    Raises Wrong for anything between them but zeros.
    """
    at = 0
    while True:
        while at < len(data) and data[at] == 0:
            at += 1
        if at == len(data):
            return
        if data.startswith(MAGIC, at):
            size = _bundle_size(data[at:])
            yield data[at : at + size]
        elif data.startswith(COMPRESSED, at):
            size, bundle = _decompress(data[at:])
            yield bundle
        else:
            raise Wrong(f"no offload bundle at byte {at} of .hip_fatbin: {data[at : at + 8]!r}")
        at += size


def _decompress(data: bytes) -> tuple[int, bytes]:
    """The size of a compressed bundle with its header, and its content."""
    version, method = struct.unpack_from("<HH", data, 4)
    if version not in (2, 3):
        raise Wrong(f"a compressed bundle of version {version}; versions 2 and 3 are known")
    size, unpacked = struct.unpack_from("<II" if version == 2 else "<QQ", data, 8)
    body = data[24 if version == 2 else 32 : size]
    try:
        if method == 1:
            return size, zstandard.decompress(body, max_output_size=unpacked)
        return size, zlib.decompress(body)
    except (zlib.error, zstandard.ZstdError) as error:
        raise Wrong(f"a compressed bundle does not unpack: {error}") from None


def entries(bundle: bytes) -> Iterator[tuple[str, int, int]]:
    """(target id, offset, size) of the parts of an uncompressed bundle."""
    if not bundle.startswith(MAGIC):
        raise Wrong("a compressed bundle holds no bundle")
    (count,) = struct.unpack_from("<Q", bundle, len(MAGIC))
    at = len(MAGIC) + 8
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", bundle, at)
        yield bundle[at + 24 : at + 24 + length].decode(), offset, size
        at += 24 + length


def _bundle_size(data: bytes) -> int:
    return max((offset + size for _, offset, size in entries(data)), default=len(MAGIC) + 8)


def check_images(elf: ELFFile) -> int:
    """How many device images an ELF file has. Raises Wrong for one that is not for gfx1151."""
    section = elf.get_section_by_name(".hip_fatbin")
    found = 0
    for bundle in bundles(section.data()) if section else ():
        for target, offset, size in entries(bundle):
            if target.startswith("host"):
                continue
            if target.split(":")[0].rsplit("-", 1)[1] != ARCH:
                raise Wrong(f"a device image for {target}, wanted {ARCH} alone")
            image = bundle[offset : offset + size]
            if len(image) < 64 or image[:5] != b"\x7fELF\x02":
                raise Wrong(f"the device image for {target} ({size} bytes) is no 64-bit ELF file")
            (machine,) = struct.unpack_from("<H", image, 18)
            (flags,) = struct.unpack_from("<I", image, 48)
            if machine != 224 or flags & EF_AMDGPU_MACH != GFX1151:
                raise Wrong(f"an image says {target}, but is for {machine}, {flags & 0xFF:#x}")
            found += 1
    return found


def dynamic(elf: ELFFile) -> tuple[list[str], list[str]]:
    """The libraries that an ELF file needs, without glibc's, and its search paths as they stand."""
    section = elf.get_section_by_name(".dynamic")
    tags = list(section.iter_tags()) if section else []
    needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    paths = [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"]
    paths += [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
    return [n for n in needed if n not in GLIBC], ":".join(paths).split(":") if paths else []


def folder(text: str, path: Path, prefix: Path) -> Path:
    """Where an entry of a search path leads. Raises Wrong for one that a package must not have."""
    if not text.startswith("$ORIGIN"):
        raise Wrong(f"RPATH {text!r} is a path of the machine that built it")
    found = Path(text.replace("$ORIGIN", str(path.parent))).resolve()
    if not found.is_relative_to(prefix):
        raise Wrong(f"RPATH {text!r} leads out of the environment")
    for name in BUILD_ONLY:
        if found.is_relative_to(prefix / name):
            raise Wrong(f"RPATH {text!r} leads into {name}, which only builds have")
    return found


def check(files: list[Path], prefix: Path, least: int, aotriton: bool) -> list[str]:
    """What is wrong with the files, as lines for people; `least` device images are asked for.

    The files' search paths have to be right. Those of other packages' libraries are only followed,
    and what they do not find may be a library that another one has brought: the loader knows a
    library by its name.
    """
    wrong, images = [], 0
    waiting = {path.resolve() for path in files}
    ours, seen = frozenset(waiting), set()
    found: dict[str, Path] = {}
    missing: list[tuple[Path, str]] = []
    while waiting:
        path = waiting.pop()
        seen.add(path)
        try:
            with path.open("rb") as stream:
                elf = ELFFile(stream)
                names, texts = dynamic(elf)
                images += check_images(elf) if path in ours else 0
            folders = []
            for text in texts:
                try:
                    folders.append(folder(text, path, prefix))
                except Wrong:
                    if path in ours:
                        raise
        except (Wrong, ELFError, OSError) as error:
            wrong.append(f"{path}: {error}")
            continue
        for name in names:
            hits = [place / name for place in folders if (place / name).exists()]
            if hits:
                found.setdefault(name, hits[0])
                waiting |= {hits[0].resolve()} - seen
            else:
                missing.append((path, name))
    for path, name in missing:
        if path in ours or name not in found:
            wrong.append(f"{path}: needs {name}, which its RPATH does not find")
    if images < least and not wrong:
        wrong.append(f"{images} device images in all, expected {least} or more")
    libraries = [at for name, at in found.items() if name.startswith("libaotriton_v2.so.")]
    if aotriton and [at.parent for at in libraries] != [prefix / "lib"]:
        wrong.append(f"no file needs libaotriton_v2.so.VERSION of {prefix / 'lib'}")
    if not wrong:
        print(
            f"{len(ours)} files, {images} images for {ARCH}, {len(seen)} libraries in the closure"
        )
    return wrong


def files_of(name: str) -> list[Path]:
    """A file itself, or the shared libraries of an installed package, which is not imported.

    Raises SystemExit for what is neither.
    """
    if "/" in name:
        return [Path(name)]
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is neither a file nor an installed package")
    return sorted(f for d in spec.submodule_search_locations for f in Path(d).rglob("*.so*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("prefix", type=Path)
    parser.add_argument("files", nargs="+", help="paths with a slash, or names of packages")
    parser.add_argument("--least", type=int, default=0, help="device images that must be there")
    parser.add_argument("--aotriton", action="store_true", help="one file must need libaotriton")
    given = parser.parse_args()
    files = [file for name in given.files for file in files_of(name)]
    wrong = check(files, given.prefix.resolve(), given.least, given.aotriton)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
