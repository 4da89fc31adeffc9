# SPDX-License-Identifier: BSD-3-Clause
"""Lay out in PREFIX/opt/rocm what one package gets of TheRock's distribution.

usage: tree.py ARCHIVE PREFIX core|libraries|devel COMMIT LICENSES. The archive is removed. Every
licence text goes to the folder LICENSES.

ELF files stay as AMD built them: kpack-split libraries do not survive patchelf or strip. Which file
goes where is decided here alone, so each is in exactly one package, and SHA256SUMS, which covers
every file, travels with the core package for later verification.

Each package unpacks the archive itself, and then holds its own files alone. A tree that is staged
once for all is on the disk four times while the largest package is made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import posixpath
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from checks import elf
from checks.loaded_from import is_glibc
from checks.target import ARCH

ROOT = "opt/rocm"
MANIFEST = "share/therock/therock_manifest.json"
SUMS = "share/therock/SHA256SUMS"
TOP = {".info", ".kpack", "amdgcn", "bin", "clients", "include", "lib", "libexec", "llvm", "share"}
TOP |= {"libhipcxx", "src", "tests"}  # of 7.x
LICENSE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|COPYRIGHT)", re.IGNORECASE)
# A path of AMD's build machine in CMake and pkg-config files. TheRock installs each component into
# a folder `stage` or `dist` of its own, and these together become the tree.
START, REST = r"(?<![\w$}.)\]/])(?P<flag>-[LI])?", r"""[^\s;"'<>)]"""
BUILD_PATH = re.compile(
    rf"{START}/(?:[\w.+-]+/)+?(?:stage|dist(?:/rocm)?)(?P<tail>/{REST}*|(?!{REST}))"
)
# Of the system there: an include folder or library that another machine lacks, or has another of.
# In a list it goes; /usr/lib64/libc.so and /usr/include/libdrm were the first.
SYSTEM = rf"(?:-[LI])?/usr/(?:local/)?(?:include|lib\d*)(?:/{REST}+|(?!{REST}))"
SYSTEM_ENTRY = re.compile(rf'(?<=");?{SYSTEM};|;{SYSTEM}(?=[;"])')
# What is left outside of the prefix is refused. These are not: /opt/rocm, where CMake files look
# last of all, programs such as /usr/bin/env, and the comments of COMMENT.
LEFTOVER = re.compile(
    rf"{START}/(?:__w|home|root|github|therock|workspace|build|usr/(?:local|include|lib\d*))/{REST}*"
)
COMMENT = re.compile(r"^\s*#.*", re.MULTILINE)
# what a CMake target's file checks for, and calls fatal
TARGET_FILES = re.compile(r"list\(APPEND _cmake_import_check_files_for_\S+ ([^)]*)\)")
TEXT = 1 << 20  # bytes; what is larger is no text that anybody wrote
SYSDEPS = "lib/rocm_sysdeps/lib"
# where AMD's libraries look for the C++ runtime, and have to find conda's
RUNTIME_LINKS = [f"{SYSDEPS}/{name}" for name in ("libstdc++.so.6", "libgcc_s.so.1")]
RUNTIME_LINKS += [f"lib/llvm/lib/{name}" for name in ("libstdc++.so.6", "libgcc_s.so.1")]

# The first pattern that matches decides; `*` crosses folders, as in fnmatch. A link `lib/x.so` is
# for the linker and so devel, a file of such a name is a plugin and so libraries.
RULES: list[tuple[str, str]] = [
    # folders of older trees, of no use at run time or to a compiler
    ("drop", "libhipcxx/*"), ("drop", "src/*"), ("drop", "tests/*"),
    # GPL-3.0, and linked to five Pythons of the host
    ("drop", "bin/*gdb*"), ("drop", "share/*gdb/*"), ("drop", "libexec/*gdb*"),
    ("drop", "include/gdb/*"), ("drop", "share/info/*"), ("drop", "share/locale/*"),
    # tests, clients and samples: many of them with absolute RUNPATHs
    ("drop", "clients/*"), ("drop", "lib/rocrtst/*"), ("drop", "lib/test_plugins/*"),
    ("drop", "lib/libtest_linking_lib*"), ("drop", "bin/*test*"), ("drop", "bin/*bench*"),
    ("drop", "bin/*-client*"), ("drop", "bin/*.hip"), ("drop", "share/*/test/*"),
    ("drop", "share/*/tests/*"), ("drop", "share/*/samples/*"), ("drop", "share/*/examples/*"),
    # the data centre tool: gRPC with its headers, code objects of other GPUs
    ("drop", "lib/rdc/*"), ("drop", "lib/librdc*"), ("drop", "lib/cmake/rdc/*"),
    ("drop", "bin/rdc*"), ("drop", "include/rdc/*"), ("drop", "share/rdc/*"),
    ("drop", "libexec/rdc/*"),
    # terminals of the debugger; the profiler's database modules, compiled for four other Pythons
    ("drop", "lib/rocm_sysdeps/share/terminfo/*"), ("drop", "lib/python*"), ("drop", "bin/rocpd*"),
    # FFTW, for the tests: GPL-2.0-or-later. What would need it is found by require_loadable.
    ("drop", "lib/libfftw*"), ("drop", "lib/cmake/fftw*"), ("drop", "lib/pkgconfig/fftw*"),
    ("drop", "include/fftw*"), ("drop", "bin/fftw*"),
    # what a HIP program needs to run
    ("core", ".info/*"), ("core", "share/therock/*"), ("core", "share/doc/*"),
    ("core", f"{SYSDEPS}/*.so*"), ("core", "lib/rocm_sysdeps/share/*"),
    ("core", "lib/llvm/lib/*.so*"), ("core", "lib/llvm/bin/lld"), ("core", "lib/llvm/bin/ld.lld"),
    ("core", "lib/llvm/amdgcn/*"), ("core", "lib/llvm/lib/clang/*/lib/amdgcn/*"),
    ("core", "amdgcn"), ("core", "amdgcn/*"), ("core", "lib/.hipInfo"),
    ("core", "lib/libamdhip64.so*"),
    *[("core", f"lib/lib{name}.so.*") for name in (
        "hiprtc", "hiprtc-builtins", "hsa-runtime64", "amd_comgr", "rocprofiler-register",
        "rocm_kpack", "rocm-core", "rocm_smi64", "oam", "OpenCL")],
    # opened by the name without a version, as those of OPENED are
    *[("core", f"lib/lib{name}.so*") for name in (
        "amd_smi", "hsa-amd-aqlprofile64", "rocprofiler-sdk", "rocprofiler-sdk-attach")],
    ("core", "share/amd_smi/*"), ("core", "libexec/amdsmi_cli/*"),
    ("core", "bin/amd-smi"), ("core", "bin/rocminfo"), ("core", "bin/rocm_agent_enumerator"),
    # what links against them, the compiler, and the profilers
    ("devel", "llvm"), ("devel", "lib/cmake/*"), ("devel", "*/cmake/*"), ("devel", "*/pkgconfig/*"),
    ("devel", "lib/*/include/*"), ("devel", "lib/rocprofiler-*"), ("devel", "lib/librocprof-sys*"),
    ("devel", "lib/libprofiler-hub*"),
    ("devel", "*.a"), ("devel", "lib/llvm/*"), ("devel", "lib/rocm_sysdeps/*"),
    ("devel", "include/*"), ("devel", "bin/*"), ("devel", "libexec/*"),
    # kernels and libraries of the math, machine learning and communication components
    ("libraries", ".kpack/*"), ("libraries", "share/miopen/*"), ("libraries", "share/rccl/*"),
    ("libraries", "lib/*"),
    ("devel", "share/*"),
]  # fmt: skip
PARTS = ("core", "libraries", "devel")
# Links of the linker's form that are opened at run time: by HIP, by the Python module and torch's
# c10d, by MIOpen, by HSA (ROCm/TheRock#7085), and by rocprofiler-register.
OPENED = (
    "lib/libamdhip64", "lib/libamd_smi", "lib/libMIOpen", "lib/libhsa-amd-aqlprofile64",
    "lib/librocprofiler-sdk.so", "lib/librocprofiler-sdk-attach",
)  # fmt: skip
# Bundled libraries that no file needs, because they are opened at run time: VA-API's drivers, by
# libva for rocDecode and rocJPEG, and libnuma, by rocSHMEM.
OPENED_SYSDEPS = ("*_drv_video.so", "*numa.so*")
# SuiteSparse's sparse Cholesky: up to 10.0 at least, TheRock builds it with its GPL-2.0-or-later
# modules (no CHOLMOD_GPL=OFF), and libhipsolver against it (BUILD_WITH_SPARSE=ON).
CHOLMOD = "lib/host-math/lib/libcholmod.so"
# What other packages need of the tree: torch's c10d includes the header and opens the library, and
# kineto links the profiler.
EXPECTED = (
    "include/amd_smi/amdsmi.h", "lib/cmake/amd_smi/*", "lib/libamd_smi.so",
    "lib/librocprofiler-sdk.so", "lib/libMIOpen.so.*",
)  # fmt: skip
CONFIG_FILES = (".cmake", ".pc")


class Refused(SystemExit):
    """The tree is not what the rules were written for."""


def gather(checks: Iterable[Callable[[], list[str]]]) -> list[str]:
    """Run all checks and return their warnings. Raises Refused with the faults of all of them."""
    warnings, faults = list[str](), list[str]()
    for check in checks:
        try:
            warnings += check()
        except Refused as refused:
            faults.append(str(refused))
    if faults:
        raise Refused("\n".join(faults))
    return warnings


def refuse(faults: list[str]) -> None:
    """Raise Refused if there are faults; of many, the first twenty are named."""
    if len(faults) > 20:
        faults = [*faults[:20], f"and {len(faults) - 20} more like these"]
    if faults:
        raise Refused("\n".join(faults))


def part_of(name: str, is_link: bool) -> str:
    """The package (or `drop`) of one path relative to the tree. Raises Refused if none fits."""
    if name.partition("/")[0] in TOP:
        if is_link and re.fullmatch(r"lib/lib[^/]+\.so", name) and not name.startswith(OPENED):
            return "devel"
        for part, pattern in RULES:
            if fnmatchcase(name, pattern):
                return part
    raise Refused(f"{name}: no rule in tree.py assigns it to a package")


def files_below(root: Path) -> dict[str, Path]:
    """Relative name -> path of every file and link, sorted; links are never followed."""
    found = {}
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder, name)
            found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def unpack(archive: Path, tree: Path) -> None:
    """Unpack the archive and remove it. Raises Refused if it cannot be unpacked."""
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # since CPython 3.11.4
            tar.extractall(tree, numeric_owner=True)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise Refused(f"{archive} cannot be unpacked: {error}") from None
    archive.unlink()  # room for the package: rattler-build keeps the work folder while it packs
    open_tree(tree)


def open_tree(tree: Path) -> None:
    """Let all read every file and folder, and the owner write to the folders.

    In some builds of AMD's only the owner may read MIOpen's data (ROCm/TheRock#4954).
    """
    for place, folders, files in os.walk(tree):
        for path in [Path(place, name) for name in [*folders, *files]]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)


def check_manifest(tree: Path, commit: str) -> list[str]:
    """Raises Refused unless the tree was built from the TheRock commit that the recipe names."""
    try:
        found = json.loads((tree / MANIFEST).read_text())["the_rock_commit"]
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"{MANIFEST} is not a TheRock manifest: {error!r}") from None
    if found != commit:
        raise Refused(f"{MANIFEST} names TheRock commit {found}, the recipe {commit}")
    return []


def check_names(tree: Path) -> list[str]:
    """Raises Refused for files that no rule assigns, and links of the tree that lead out of it."""
    faults = []
    for name, path in files_below(tree).items():
        try:
            part = part_of(name, path.is_symlink())
        except Refused as refused:
            faults.append(str(refused))
            continue
        if path.is_symlink() and part != "drop":
            target = path.readlink()
            if target.is_absolute() or not path.exists():
                faults.append(f"{name} is a link to {target}, which is not in the tree")
    refuse(faults)
    return []


def needed(path: Path) -> set[str]:
    """DT_NEEDED of an ELF file; empty for anything else."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            return set()
    return set(elf.dynamic(path).needed)


def prune(tree: Path) -> list[str]:
    """Removes what is dropped, then bundled libraries that none of the rest loads.

    The debugger and the tests needed those: gmp, mpfr, ncurses and the like. So with CHOLMOD, for
    its licence.
    """
    gone = []

    def remove(name: str, path: Path) -> None:
        path.unlink()
        gone.append(name)

    for name, path in files_below(tree).items():
        if part_of(name, path.is_symlink()) == "drop":
            remove(name, path)
    for name, path in unloaded(files_below(tree)).items():
        remove(name, path)
    # links to what went; a link to such a link only dangles in the next round
    while dangling := [(n, p) for n, p in files_below(tree).items() if not p.exists()]:
        for name, path in dangling:
            remove(name, path)
    return gone


def unloaded(found: dict[str, Path]) -> dict[str, Path]:
    """The bundled libraries that none of the other files loads, also through another one."""
    optional = re.compile(rf"{SYSDEPS}/[^/]+\.so|{CHOLMOD}")
    bundled = {n: p for n, p in found.items() if optional.match(n)}
    rest = [p for n, p in found.items() if n not in bundled and not p.is_symlink()]
    names = {p.name for p in bundled.values()}
    opened = {n for n in names if any(fnmatchcase(n, pattern) for pattern in OPENED_SYSDEPS)}
    wanted, todo = set(), opened.union(*map(needed, rest))
    while todo:
        wanted |= todo
        paths = [p.resolve() for p in bundled.values() if p.name in todo]
        todo = set().union(*map(needed, paths)) - wanted
    loaded = {p.resolve() for p in bundled.values() if p.name in wanted}
    return {n: p for n, p in bundled.items() if not p.is_symlink() and p not in loaded}


def mend_paths(tree: Path) -> list[str]:
    """Makes paths of AMD's build machine relative to the file; returns the names of changed files.

    CMake refuses include folders that do not exist, and pkg-config passes them on.
    """
    changed = []
    for name, path in files_below(tree).items():
        if path.suffix not in CONFIG_FILES or path.is_symlink():
            continue
        here = "${pcfiledir}" if path.suffix == ".pc" else "${CMAKE_CURRENT_LIST_DIR}"
        root = "/".join([here, *[".."] * name.count("/")])

        def inside(match: re.Match[str], root: str = root) -> str:
            tail = posixpath.normpath(match["tail"] or "/").rstrip("/")  # some have `..` in them
            return f"{match['flag'] or ''}{root}{tail}"

        text = path.read_text(errors="surrogateescape")
        new = SYSTEM_ENTRY.sub("", BUILD_PATH.sub(inside, text))
        if new != text:
            path.write_text(new, errors="surrogateescape")
            changed.append(name)
    return changed


def check_paths(tree: Path) -> list[str]:
    """Find paths of AMD's build machine that are left, after mend_paths.

    Raises Refused for one in a CMake or pkg-config file; returns a line for each other text file,
    such as a script: nothing reads it before a user calls that. Documents may name what they like.
    """
    faults, warnings = list[str](), list[str]()
    for name, path in files_below(tree).items():
        is_config = path.suffix in CONFIG_FILES
        if path.is_symlink():
            continue
        if not is_config and (name.startswith("share/doc/") or path.stat().st_size > TEXT):
            continue
        data = path.read_bytes()
        text = "" if b"\0" in data else COMMENT.sub("", data.decode(errors="replace"))
        left = LEFTOVER.search(text)
        if left and is_config:
            faults.append(f"{name} names {left[0]}, of AMD's build machine and not of the prefix")
        elif left:
            warnings.append(f"{name} names {left[0]}, which is not in the prefix")
    refuse(faults)
    return warnings


def unmet_targets(tree: Path) -> list[str]:
    """A line for each file of a CMake target that is not in the tree.

    find_package then fails in whatever is compiled with the SDK. A warning: AMD's own archive may
    come with such a target in a package that nothing here looks for.
    """
    lines = []
    for name, path in files_below(tree).items():
        if path.suffix != ".cmake" or path.is_symlink():
            continue
        for files in TARGET_FILES.findall(path.read_text(errors="replace")):
            named = re.findall(r'"\$\{_IMPORT_PREFIX\}/([^"]+)"', files)
            lines += [
                f"{name} names {file}, which is not in the tree: find_package fails"
                for file in sorted({*named})
                if not (tree / file).exists()
            ]
    return lines


def require_loadable(files: dict[str, Path]) -> list[str]:
    """Finds needed libraries that neither the packages nor conda's C++ runtime have.

    Raises Refused if a file of core or libraries needs one; returns a line for each of devel, where
    one tool less is no reason to have no SDK.
    """
    have, lines = {Path(name).name for name in RUNTIME_LINKS}, list[str]()
    for part in PARTS:
        own = {n: p for n, p in files.items() if part_of(n, p.is_symlink()) == part}
        have |= {path.name for path in own.values()}
        lines = [
            f"{part}: {name} needs {library}, which no package has"
            for name, path in own.items()
            for library in (sorted(needed(path)) if path.is_file() else ())
            if library not in have and not is_glibc(library)
        ]
        if part != "devel":
            refuse(lines)
    return lines


def check_contents(tree: Path) -> list[str]:
    """Raises Refused if the tree lacks what other packages need, or a place of link_runtime."""
    faults = [
        f"the tree has no {pattern}, which other packages need"
        for pattern in EXPECTED
        if not any(tree.glob(pattern))
    ]
    if not any(tree.glob(f"{CHOLMOD}*")):
        faults.append(f"nothing needs {CHOLMOD}: take its GPL out of rocm-sdk-libraries' licence")
    for name in RUNTIME_LINKS:
        if os.path.lexists(tree / name):
            faults.append(f"{name} already exists; its rule in tree.py is out of date")
    refuse(faults)
    if any(tree.glob(f"share/miopen/db/{ARCH}*.fdb.txt")):
        return []
    return [f"no find-db of MIOpen for {ARCH}: it searches each convolution at its first use"]


def link_runtime(tree: Path, prefix: Path) -> None:
    """Links to conda's libstdc++ and libgcc_s, so that no host library is found first."""
    for name in RUNTIME_LINKS:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(prefix / "lib" / path.name, path.parent))


def collect_licenses(tree: Path, target: Path) -> int:
    """Copies every licence text to `target`; returns how many. Raises Refused if there is none."""
    texts = [(n, p) for n, p in files_below(tree).items() if LICENSE.match(p.name)]
    for name, path in texts:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
    if not texts:
        raise Refused("the tree has no licence text, and redistribution requires one")
    return len(texts)


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stage(prefix: Path, commit: str) -> list[str]:
    """Turn a distribution, unpacked in PREFIX/opt/rocm, into the tree of all packages.

    Returns what changed, and warnings. Raises Refused with all that is wrong with it.
    """
    tree = prefix / ROOT
    gather([partial(check_manifest, tree, commit), partial(check_names, tree)])
    gone = prune(tree)
    changed = mend_paths(tree)
    checks = (check_contents, check_paths, unmet_targets)
    warnings = gather(
        [partial(require_loadable, files_below(tree)), *(partial(check, tree) for check in checks)]
    )
    link_runtime(tree, prefix)
    names = {n: p for n, p in files_below(tree).items() if n != SUMS and not p.is_symlink()}
    (tree / SUMS).write_text("".join(f"{sha256(path)}  {n}\n" for n, path in names.items()))
    return [
        f"{len(names)} files in {ROOT}, {len(gone)} files dropped:",
        *gone,
        f"changed: {' '.join(changed)}",
        *(f"warning: {line}" for line in warnings),
    ]


def keep(prefix: Path, part: str, licenses: Path) -> None:
    """Removes from the staged tree what belongs to the other packages."""
    texts, count = collect_licenses(prefix / ROOT, licenses), 0
    for name, path in files_below(prefix / ROOT).items():
        if name in RUNTIME_LINKS or name == SUMS:
            owner = "core"
        else:
            owner = part_of(name, path.is_symlink())
        if owner != part:
            path.unlink()
        count += owner == part
    if not count:
        raise Refused(f"no file of the tree belongs to {part}")
    print(f"{part}: {count} files, {texts} licence texts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("prefix", type=Path)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("commit")
    parser.add_argument("licenses", type=Path)
    options = parser.parse_args()
    unpack(options.archive, options.prefix / ROOT)
    report = stage(options.prefix, options.commit)
    if options.part == PARTS[0]:  # the others would say the same
        print(*report, sep="\n")
    keep(options.prefix, options.part, options.licenses)


if __name__ == "__main__":
    main()
