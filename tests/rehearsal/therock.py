# SPDX-License-Identifier: BSD-3-Clause
"""Make an archive that replaces AMD's, from Debian's ROCm in TheRock's layout.

The files have Debian's code, unchanged. The archive differs from AMD's in these points:

- The version of ROCm is another one.
- Libraries have code for all GPUs that Debian supports. AMD's have code for one GPU.
- The profiler and CHOLMOD are empty libraries. libhipsolver is changed so that it requires CHOLMOD.
"""

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from rehearsal import debian, trees

# Debian's packages with which torch, vLLM and bitsandbytes are compiled. apt also installs the
# packages that they depend on.
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
# Dependencies of PACKAGES belong to the tree if they are from these source packages.
SOURCES = r"(roc|hip|miopen|amdsmi|rccl|llvm-toolchain-22|rocr|libhs|clr).*"
SYSDEPS = "lib/rocm_sysdeps/lib"
LIB = trees.MULTIARCH
# The paths of Debian's files in the tree.
MOVES: trees.Moves = [
    (r"usr/share/doc/([^/]+)/copyright", r"share/doc/\1/LICENSE.txt"),
    (r"usr/share/(doc|man|bug|lintian|bash-completion|doc-base)/.*", None),
    (r"usr/lib/python3.*", None),
    # Kernels and databases of other GPUs are left out, because AMD's archive for one GPU does not
    # have them.
    (r"usr/.*/(library|db)/(.*[_.-])?gfx(?!1151)[0-9a-f]+.*", None),
    # Files for i386 are left out, because ROCm does not support i386.
    (r".*[-.]i386\..*", None),
    # These are tools for developers of LLVM.
    (
        r"usr/lib/llvm-22/bin/(c-index-test|llvm-exegesis|bugpoint|llvm-stress|clang-(repl|tidy|query|"
        r"doc|refactor|include-.*|change-.*|reorder-.*|move|check|apply-.*))",
        None,
    ),
    # Each version of Debian's clang has the device libraries.
    (r"usr/lib/llvm-\d+/lib/clang/22/(?:lib/)?amdgcn/(.*)", r"lib/llvm/amdgcn/\1"),
    # usr/lib/clang has only links to folders of llvm-22.
    (r"usr/lib/clang/.*", None),
    (r"usr/lib/llvm-22/lib/libLLVM(.*)", r"lib/llvm/lib/libLLVM\1"),
    (r"usr/lib/llvm-22/(?:lib/cmake|share|build|lib/python3|include)/.*", None),
    (r"usr/lib/llvm-22/(.*)", r"lib/llvm/\1"),
    (rf"{LIB}/(lib(?:LLVM|clang).*\.so.*)", r"lib/llvm/lib/\1"),
    (rf"{LIB}/(.*)", r"lib/\1"),
    (r"usr/include/x86_64-linux-gnu/(.*)", r"include/\1"),
    # These are second names of LLVM's programs.
    (r"usr/bin/.*-22", None),
    (r"usr/share/(rocm-smi-lib|amd-smi|amd_smi)/(.*)", r"share/amd_smi/\2"),
    (r"usr/(bin|include|lib|libexec|share)/(.*)", r"\1/\2"),
]
# Links that TheRock's tree has, too.
LINKS = {"llvm": "lib/llvm", "amdgcn": "lib/llvm/amdgcn"}
# Libraries that are empty here: their sonames by path.
STUBS = {
    "lib/host-math/lib/libcholmod.so": "libcholmod.so.5",
    "lib/librocprofiler-sdk.so": "librocprofiler-sdk.so.1",
}
GLIBC = re.compile(
    r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|resolv|util|anl|BrokenLocale|mvec))\.so\.\d"
)
RUNTIME = {"libstdc++.so.6", "libgcc_s.so.1"}


def make(tree: Path, commit: str, version: str) -> None:
    """Lay out the tree in an empty folder.

    Args:
        tree: The folder.
        commit: The commit of TheRock that the tree states.
        version: The version of ROCm that the tree states.

    Raises:
        debian.Missing: A package or a library is missing.
    """
    names: set[str] = set()
    for package in debian.list_with_dependencies(PACKAGES, SOURCES):
        names.update(debian.list_files(package))
    trees.lay_out(sorted(names), MOVES, tree)
    trees.mend_cmake(tree)
    for name, target in LINKS.items():
        (tree / name).symlink_to(target)
    for name, soname in STUBS.items():
        link_stub(tree / name, soname)
    solver = next(tree.glob("lib/libhipsolver.so.*.*"))
    subprocess.run(["patchelf", "--add-needed", "libcholmod.so.5", solver], check=True)
    bundle_libraries(tree)
    for name, text in make_manifest(commit, version).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


def make_manifest(commit: str, version: str) -> dict[str, str]:
    """Return the texts of the files that state the version and the commit of a tree, by name."""
    debian_version = debian.read_version("hipcc")
    manifest = {"the_rock_commit": commit, "rehearsal": f"Debian's ROCm {debian_version}"}
    return {
        ".info/version": f"{version}\n",
        "share/therock/therock_manifest.json": json.dumps(manifest),
    }


def link_stub(path: Path, soname: str) -> None:
    """Link a library without symbols, and make a link `path` to it for the linker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    library = path.with_name(soname)
    command = ["gcc", "-shared", "-nostartfiles", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}"]
    subprocess.run([*command, "-o", library], check=True)
    path.symlink_to(library.name)


def read_needed(path: Path) -> set[str]:
    """Return the names in DT_NEEDED of a file. A file that is not an ELF file has none."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            return set()
        dynamic = ELFFile(stream).get_section_by_name(".dynamic")
        if dynamic is None:
            return set()
        return {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}


def bundle_libraries(tree: Path) -> None:
    """Add to SYSDEPS the Debian libraries that the tree needs, and set the tree's search paths.

    Libraries, and programs that need libraries, get a search path.

    Raises:
        debian.Missing: This machine does not have a library.
    """
    needed_by_file = {}
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            needed_by_file[path] = read_needed(path)
    own_names = {path.name for path in tree.rglob("*.so*")}
    pending = set().union(*needed_by_file.values()) - own_names - RUNTIME
    (tree / SYSDEPS).mkdir(parents=True, exist_ok=True)
    done: set[str] = set()
    while pending:
        name = pending.pop()
        done.add(name)
        if GLIBC.fullmatch(name):
            continue
        source = debian.ROOT / LIB / name
        if not source.exists():
            raise debian.Missing(f"the tree needs {name}, which no installed Debian package has")
        copy = tree / SYSDEPS / name
        copy.write_bytes(source.read_bytes())
        copy.chmod(0o755)
        copy_license(source, tree)
        needed_by_file[copy] = read_needed(copy)
        pending |= needed_by_file[copy] - own_names - RUNTIME - done
    for path, needed in needed_by_file.items():
        if needed or path.suffix == ".so" or ".so." in path.name:
            set_search_path(path, tree)


def set_search_path(path: Path, tree: Path) -> None:
    """Set RUNPATH of an ELF file to the folders of the tree's libraries."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF" or not ELFFile(stream).get_section_by_name(".dynamic"):
            return
    entries = []
    for folder in ("lib", "lib/llvm/lib", SYSDEPS, "lib/host-math/lib"):
        relative = os.path.relpath(tree / folder, path.parent)
        entries.append("$ORIGIN" if relative == "." else f"$ORIGIN/{relative}")
    subprocess.run(["patchelf", "--set-rpath", ":".join(entries), path], check=True)


def copy_license(library: Path, tree: Path) -> None:
    """Copy the copyright file of the package that a library belongs to."""
    package = debian.find_owner(library.resolve())
    text = debian.ROOT / "usr/share/doc" / package / "copyright"
    if package and text.exists():
        target = tree / "share/doc" / package / "LICENSE.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.read_bytes())


def pack(tree: Path, archive: Path) -> Path:
    """Pack a tree into a tarball without a top folder, as AMD's is, and return the tarball.

    Equal trees have equal tarballs.
    """

    def normalize(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    partial = archive.with_suffix(".partial")
    gzip = ["gzip", "--no-name", "-1"]
    with partial.open("wb") as out:
        packer = subprocess.Popen(gzip, stdin=subprocess.PIPE, stdout=out)
        with tarfile.open(fileobj=packer.stdin, mode="w|") as tar:
            for path in sorted(tree.iterdir()):
                tar.add(path, path.name, filter=normalize)
        packer.stdin.close()
        if packer.wait():
            raise SystemExit(f"gzip failed: is the disk of {archive.parent} full?")
    return partial.rename(archive)
