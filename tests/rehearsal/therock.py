# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for AMD's archive: Debian's ROCm in TheRock's layout, its code unchanged.

What differs from AMD's: the version; libraries with code for all of Debian's GPUs, where AMD's have
one GPU's; no profiler and no CHOLMOD (empty libraries; libhipsolver is made to need the latter).
"""

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from rehearsal import debian, trees

# What torch, vLLM and bitsandbytes compile with; apt brings the rest.
PACKAGES = [
    "amd-smi",
    "hipcc",
    "libamd-comgr-dev",
    "libamd-smi-dev",
    "libamdhip64-dev",
    "libhipblas-dev",
    "libhipblaslt-dev",
    "libhipcub-dev",
    "libhipfft-dev",
    "libhiprand-dev",
    "libhipsolver-dev",
    "libhipsolver-fortran-dev",
    "libhipsparse-dev",
    "libhipsparselt-dev",
    "libhsa-runtime-dev",
    "libmiopen-dev",
    "librccl-dev",
    "librocblas-dev",
    "librocm-core-dev",
    "librocm-smi-dev",
    "librocprim-dev",
    "librocrand-dev",
    "librocsolver-dev",
    "librocsparse-dev",
    "librocthrust-dev",
    "libroctx-dev",
    "rocminfo",
    "clang-22",
    "lld-22",
    "llvm-22",
    "libclang-rt-22-dev",
]
# Source packages whose binary packages belong to the tree, where one of PACKAGES depends on them.
SOURCES = r"(roc|hip|miopen|amdsmi|rccl|llvm-toolchain-22|rocr|libhs|clr).*"
SYSDEPS = "lib/rocm_sysdeps/lib"
LIB = trees.MULTIARCH
MOVES: trees.Moves = [
    (r"usr/share/doc/([^/]+)/copyright", r"share/doc/\1/LICENSE.txt"),
    (r"usr/share/(doc|man|bug|lintian|bash-completion|doc-base)/.*", None),
    (r"usr/lib/python3.*", None),
    # a single GPU's archive has no other's kernels and databases; i386 has no ROCm
    (r"usr/.*/(library|db)/(.*[_.-])?gfx(?!1151)[0-9a-f]+.*", None),
    (r".*[-.]i386\..*", None),
    # LLVM's own tools for its developers
    (
        r"usr/lib/llvm-22/bin/(c-index-test|llvm-exegesis|bugpoint|llvm-stress|clang-(repl|tidy|query|"
        r"doc|refactor|include-.*|change-.*|reorder-.*|move|check|apply-.*))",
        None,
    ),
    # clang's device libraries, which Debian gives to each of its clangs
    (r"usr/lib/llvm-\d+/lib/clang/22/(?:lib/)?amdgcn/(.*)", r"lib/llvm/amdgcn/\1"),
    # links of whole folders to what llvm-22 has
    (r"usr/lib/clang/.*", None),
    (r"usr/lib/llvm-22/lib/libLLVM(.*)", r"lib/llvm/lib/libLLVM\1"),
    (r"usr/lib/llvm-22/(?:lib/cmake|share|build|lib/python3|include)/.*", None),
    (r"usr/lib/llvm-22/(.*)", r"lib/llvm/\1"),
    (rf"{LIB}/(lib(?:LLVM|clang).*\.so.*)", r"lib/llvm/lib/\1"),
    (rf"{LIB}/(.*)", r"lib/\1"),
    (r"usr/include/x86_64-linux-gnu/(.*)", r"include/\1"),
    # the names that end in a version, and what belongs to a distribution
    (r"usr/bin/.*-22", None),
    (r"usr/share/(rocm-smi-lib|amd-smi|amd_smi)/(.*)", r"share/amd_smi/\2"),
    (r"usr/(bin|include|lib|libexec|share)/(.*)", r"\1/\2"),
]
# A tree of TheRock's has these as well.
LINKS = {"llvm": "lib/llvm", "amdgcn": "lib/llvm/amdgcn"}
STUBS = {
    "lib/host-math/lib/libcholmod.so": "libcholmod.so.5",
    "lib/librocprofiler-sdk.so": "librocprofiler-sdk.so.1",
}
GLIBC = re.compile(
    r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|resolv|util|anl|BrokenLocale|mvec))\.so\.\d"
)
RUNTIME = {"libstdc++.so.6", "libgcc_s.so.1"}


def make(tree: Path, commit: str, version: str) -> None:
    """Lays the tree out in an empty folder. Raises debian.Missing."""
    names = {
        name for package in debian.closure(PACKAGES, SOURCES) for name in debian.files(package)
    }
    trees.lay_out(sorted(names), MOVES, tree)
    trees.mend_cmake(tree)
    for name, target in LINKS.items():
        (tree / name).symlink_to(target)
    for name, soname in STUBS.items():
        stub(tree / name, soname)
    solver = next(tree.glob("lib/libhipsolver.so.*.*"))
    subprocess.run(["patchelf", "--add-needed", "libcholmod.so.5", solver], check=True)
    bundle(tree)
    for name, text in manifest(commit, version).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


def manifest(commit: str, version: str) -> dict[str, str]:
    """The files by which a tree of TheRock's says what it is."""
    named = {"the_rock_commit": commit, "rehearsal": f"Debian's ROCm {debian.version('hipcc')}"}
    return {
        ".info/version": f"{version}\n",
        "share/therock/therock_manifest.json": json.dumps(named),
    }


def stub(path: Path, soname: str) -> None:
    """A library without a symbol, and the linker's name for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    library = path.with_name(soname)
    command = ["gcc", "-shared", "-nostartfiles", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}"]
    subprocess.run([*command, "-o", library], check=True)
    path.symlink_to(library.name)


def needed(path: Path) -> set[str]:
    """DT_NEEDED of an ELF file; empty for anything else."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            return set()
        dynamic = ELFFile(stream).get_section_by_name(".dynamic")
        return {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")} if dynamic else set()


def bundle(tree: Path) -> None:
    """Brings Debian's libraries that the tree needs below SYSDEPS, and has each file find them."""
    elves = {p: needed(p) for p in tree.rglob("*") if p.is_file() and not p.is_symlink()}
    own = {path.name for path in tree.rglob("*.so*")}
    todo = set().union(*elves.values()) - own - RUNTIME
    (tree / SYSDEPS).mkdir(parents=True, exist_ok=True)
    done = set[str]()
    while todo:
        name = todo.pop()
        done.add(name)
        if GLIBC.fullmatch(name):
            continue
        source = debian.ROOT / LIB / name
        if not source.exists():
            raise debian.Missing(f"the tree needs {name}, and no Debian package has brought it")
        copy = tree / SYSDEPS / name
        copy.write_bytes(source.read_bytes())
        copy.chmod(0o755)
        license_of(source, tree)
        elves[copy] = needed(copy)
        todo |= elves[copy] - own - RUNTIME - done
    for path, needs in elves.items():
        if needs or path.suffix == ".so" or ".so." in path.name:
            find_beside(path, tree)


def find_beside(path: Path, tree: Path) -> None:
    """RUNPATH of one ELF file: its own folder, and those of the tree's libraries."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF" or not ELFFile(stream).get_section_by_name(".dynamic"):
            return
    folders = ["lib", "lib/llvm/lib", SYSDEPS, "lib/host-math/lib"]
    ways = [os.path.relpath(tree / folder, path.parent) for folder in folders]
    text = ":".join("$ORIGIN" if way == "." else f"$ORIGIN/{way}" for way in ways)
    subprocess.run(["patchelf", "--set-rpath", text, path], check=True)


def license_of(library: Path, tree: Path) -> None:
    """The copyright file of the package that a library comes from."""
    package = debian.owner(library.resolve())
    text = debian.ROOT / "usr/share/doc" / package / "copyright"
    if package and text.exists():
        target = tree / "share/doc" / package / "LICENSE.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.read_bytes())


def pack(tree: Path, archive: Path) -> Path:
    """A tarball without a top folder, as AMD's is: equal trees give equal bytes."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    partial = archive.with_suffix(".partial")
    gzip = ["gzip", "--no-name", "-1"]
    with partial.open("wb") as out:
        packer = subprocess.Popen(gzip, stdin=subprocess.PIPE, stdout=out)
        with tarfile.open(fileobj=packer.stdin, mode="w|") as tar:
            for path in sorted(tree.iterdir()):
                tar.add(path, path.name, filter=plain)
        packer.stdin.close()
        if packer.wait():
            raise SystemExit(f"gzip failed: is the disk of {archive.parent} full?")
    return partial.rename(archive)
