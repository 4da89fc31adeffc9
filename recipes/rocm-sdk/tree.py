# SPDX-License-Identifier: BSD-3-Clause
"""Lay out in PREFIX/opt/rocm the files that one package gets of TheRock's distribution.

usage: tree.py ARCHIVE PREFIX core|libraries|devel COMMIT LICENSES. The archive is removed. Every
licence text goes to the folder LICENSES.

ELF files stay as AMD built them: kpack-split libraries do not survive patchelf or strip. Only the
rules below decide to which package a file goes, so each is in exactly one package. SHA256SUMS
covers every file and is in the core package, for later verification.

Each package unpacks the archive itself and keeps its own files only. A tree that is staged once for
all packages would be on the disk four times while the largest one is made.
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
TOP = {
    ".info",
    ".kpack",
    "amdgcn",
    "bin",
    "clients",
    "include",
    "lib",
    "libexec",
    "llvm",
    "share",
    # in 7.x
    "libhipcxx",
    "src",
    "tests",
}
LICENSE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|COPYRIGHT)", re.IGNORECASE)
# A path of AMD's build machine in CMake and pkg-config files. TheRock installs each component into
# a folder `stage` or `dist` of its own, and these together become the tree.
START, REST = r"(?<![\w$}.)\]/])(?P<flag>-[LI])?", r"""[^\s;"'<>)]"""
BUILD_PATH = re.compile(
    rf"{START}/(?:[\w.+-]+/)+?(?:stage|dist(?:/rocm)?)(?P<tail>/{REST}*|(?!{REST}))"
)
# An include folder or library of the build machine's system. Another machine lacks it, or has
# another version. It is removed from lists; /usr/lib64/libc.so and /usr/include/libdrm were the
# first.
SYSTEM = rf"(?:-[LI])?/usr/(?:local/)?(?:include|lib\d*)(?:/{REST}+|(?!{REST}))"
SYSTEM_ENTRY = re.compile(rf'(?<=");?{SYSTEM};|;{SYSTEM}(?=[;"])')
# A path outside of the prefix that is refused. Allowed are /opt/rocm, where CMake files look last,
# programs such as /usr/bin/env, and the comments of COMMENT.
LEFTOVER = re.compile(
    rf"{START}/(?:__w|home|root|github|therock|workspace|build|usr/(?:local|include|lib\d*))/{REST}*"
)
COMMENT = re.compile(r"^\s*#.*", re.MULTILINE)
# The files that the file of a CMake target requires.
TARGET_FILES = re.compile(r"list\(APPEND _cmake_import_check_files_for_\S+ ([^)]*)\)")
TEXT = 1 << 20  # bytes; a larger file is no text that somebody wrote
SYSDEPS = "lib/rocm_sysdeps/lib"
# Where AMD's libraries look for the C++ runtime. These become links to conda's.
RUNTIME_LINKS = [
    f"{SYSDEPS}/libstdc++.so.6",
    f"{SYSDEPS}/libgcc_s.so.1",
    "lib/llvm/lib/libstdc++.so.6",
    "lib/llvm/lib/libgcc_s.so.1",
]

# The package of each path, or "drop": the first pattern that matches decides. `*` crosses folders,
# as in fnmatch. A link `lib/x.so` is for the linker and so devel; a file of such a name is a plugin
# and so libraries.
RULES: list[tuple[str, tuple[str, ...]]] = [
    # folders of older trees, of no use at run time or to a compiler
    ("drop", ("libhipcxx/*", "src/*", "tests/*")),
    # GPL-3.0, and linked to five Pythons of the host
    ("drop", ("bin/*gdb*", "share/*gdb/*", "libexec/*gdb*", "include/gdb/*")),
    ("drop", ("share/info/*", "share/locale/*")),
    # tests, clients and samples: many of them with absolute RUNPATHs
    ("drop", ("clients/*", "lib/rocrtst/*", "lib/test_plugins/*", "lib/libtest_linking_lib*")),
    ("drop", ("bin/*test*", "bin/*bench*", "bin/*-client*", "bin/*.hip")),
    ("drop", ("share/*/test/*", "share/*/tests/*", "share/*/samples/*", "share/*/examples/*")),
    # the data centre tool: gRPC with its headers, code objects of other GPUs
    ("drop", ("lib/rdc/*", "lib/librdc*", "lib/cmake/rdc/*", "bin/rdc*")),
    ("drop", ("include/rdc/*", "share/rdc/*", "libexec/rdc/*")),
    # terminals of the debugger; the profiler's database modules, compiled for four other Pythons
    ("drop", ("lib/rocm_sysdeps/share/terminfo/*", "lib/python*", "bin/rocpd*")),
    # FFTW, for the tests: GPL-2.0-or-later. require_loadable reports what would need it.
    ("drop", ("lib/libfftw*", "lib/cmake/fftw*", "lib/pkgconfig/fftw*")),
    ("drop", ("include/fftw*", "bin/fftw*")),
    # what a HIP program needs to run
    ("core", (".info/*", "share/therock/*", "share/doc/*")),
    ("core", (f"{SYSDEPS}/*.so*", "lib/rocm_sysdeps/share/*")),
    ("core", ("lib/llvm/lib/*.so*", "lib/llvm/bin/lld", "lib/llvm/bin/ld.lld")),
    ("core", ("lib/llvm/amdgcn/*", "lib/llvm/lib/clang/*/lib/amdgcn/*")),
    ("core", ("amdgcn", "amdgcn/*", "lib/.hipInfo", "lib/libamdhip64.so*")),
    ("core", ("lib/libhiprtc.so.*", "lib/libhiprtc-builtins.so.*", "lib/libhsa-runtime64.so.*")),
    ("core", ("lib/libamd_comgr.so.*", "lib/librocprofiler-register.so.*")),
    ("core", ("lib/librocm_kpack.so.*", "lib/librocm-core.so.*", "lib/librocm_smi64.so.*")),
    ("core", ("lib/liboam.so.*", "lib/libOpenCL.so.*")),
    # opened by the name without a version, as those of OPENED are
    ("core", ("lib/libamd_smi.so*", "lib/libhsa-amd-aqlprofile64.so*")),
    ("core", ("lib/librocprofiler-sdk.so*", "lib/librocprofiler-sdk-attach.so*")),
    ("core", ("share/amd_smi/*", "libexec/amdsmi_cli/*")),
    ("core", ("bin/amd-smi", "bin/rocminfo", "bin/rocm_agent_enumerator")),
    # what links against them, the compiler, and the profilers
    ("devel", ("llvm", "lib/cmake/*", "*/cmake/*", "*/pkgconfig/*", "lib/*/include/*")),
    ("devel", ("lib/rocprofiler-*", "lib/librocprof-sys*", "lib/libprofiler-hub*")),
    ("devel", ("*.a", "lib/llvm/*", "lib/rocm_sysdeps/*")),
    ("devel", ("include/*", "bin/*", "libexec/*")),
    # kernels and libraries of the math, machine learning and communication components
    ("libraries", (".kpack/*", "share/miopen/*", "share/rccl/*", "lib/*")),
    ("devel", ("share/*",)),
]
PARTS = ("core", "libraries", "devel")
# Links of the linker's form that are opened at run time: by HIP, by the Python module and torch's
# c10d, by MIOpen, by HSA (ROCm/TheRock#7085), and by rocprofiler-register.
OPENED = (
    "lib/libamdhip64",
    "lib/libamd_smi",
    "lib/libMIOpen",
    "lib/libhsa-amd-aqlprofile64",
    "lib/librocprofiler-sdk.so",
    "lib/librocprofiler-sdk-attach",
)
# Bundled libraries that no file needs, because they are opened at run time: VA-API's drivers, by
# libva for rocDecode and rocJPEG, and libnuma, by rocSHMEM.
OPENED_SYSDEPS = ("*_drv_video.so", "*numa.so*")
# SuiteSparse's sparse Cholesky: up to 10.0 at least, TheRock builds it with its GPL-2.0-or-later
# modules (no CHOLMOD_GPL=OFF), and libhipsolver against it (BUILD_WITH_SPARSE=ON).
CHOLMOD = "lib/host-math/lib/libcholmod.so"
# What other packages need of the tree: torch's c10d includes the header and opens the library, and
# kineto links the profiler.
EXPECTED = (
    "include/amd_smi/amdsmi.h",
    "lib/cmake/amd_smi/*",
    "lib/libamd_smi.so",
    "lib/librocprofiler-sdk.so",
    "lib/libMIOpen.so.*",
)
CONFIG_FILES = (".cmake", ".pc")
MAX_FAULTS = 20


class Refused(SystemExit):
    """The tree is not what the rules were written for."""


def gather(checks: Iterable[Callable[[], list[str]]]) -> list[str]:
    """Run all checks and return their warnings. Raises Refused with the faults of all of them."""
    warnings: list[str] = []
    faults: list[str] = []
    for check in checks:
        try:
            warnings += check()
        except Refused as refused:
            faults.append(str(refused))
    if faults:
        raise Refused("\n".join(faults))
    return warnings


def refuse(faults: list[str]) -> None:
    """Raise Refused if there are faults. Of many, the message has the first MAX_FAULTS."""
    if len(faults) > MAX_FAULTS:
        more = len(faults) - MAX_FAULTS
        faults = [*faults[:MAX_FAULTS], f"and {more} more like these"]
    if faults:
        raise Refused("\n".join(faults))


def part_of(name: str, is_link: bool) -> str:
    """Return the package of a path, or "drop". Raises Refused if no rule fits.

    Args:
        name: The path relative to the tree.
        is_link: Whether it is a symbolic link.
    """
    if name.partition("/")[0] in TOP:
        if is_link and re.fullmatch(r"lib/lib[^/]+\.so", name) and not name.startswith(OPENED):
            return "devel"
        for part, patterns in RULES:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return part
    raise Refused(f"{name}: no rule in tree.py assigns it to a package")


def files_below(root: Path) -> dict[str, Path]:
    """Map the relative name of every file and link to its path, sorted. No link is followed."""
    paths = {}
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder, name)
            paths[path.relative_to(root).as_posix()] = path
    return dict(sorted(paths.items()))


def unpack(archive: Path, tree: Path) -> None:
    """Unpack the archive and remove it. Raises Refused if it cannot be unpacked."""
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # since CPython 3.11.4
            tar.extractall(tree, numeric_owner=True)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise Refused(f"{archive} cannot be unpacked: {error}") from None
    archive.unlink()  # makes room: rattler-build keeps the work folder while it packs
    open_tree(tree)


def open_tree(tree: Path) -> None:
    """Make every file and folder readable for all, and folders writable for their owner.

    In some builds of AMD's only the owner may read MIOpen's data (ROCm/TheRock#4954).
    """
    for place, folders, files in os.walk(tree):
        for name in [*folders, *files]:
            path = Path(place, name)
            if path.is_symlink():
                continue
            if path.is_dir():
                path.chmod(0o755)
            else:
                path.chmod(path.stat().st_mode | 0o444)


def check_manifest(tree: Path, commit: str) -> list[str]:
    """Raise Refused unless the tree was built from the TheRock commit that the recipe names."""
    try:
        manifest = json.loads((tree / MANIFEST).read_text())
        built_from = manifest["the_rock_commit"]
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"{MANIFEST} is not a TheRock manifest: {error!r}") from None
    if built_from != commit:
        raise Refused(f"{MANIFEST} names TheRock commit {built_from}, the recipe {commit}")
    return []


def check_names(tree: Path) -> list[str]:
    """Raise Refused for files that no rule assigns, and links of the tree that lead out of it."""
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
    """Return DT_NEEDED of an ELF file; empty for anything else."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            return set()
    return set(elf.dynamic(path).needed)


def prune(tree: Path) -> list[str]:
    """Remove what is dropped, then bundled libraries that no other file loads.

    The debugger and the tests needed those: gmp, mpfr, ncurses and the like. CHOLMOD, which is one
    of them, must go for its licence.

    Returns:
        The names of the removed files.
    """
    removed = []

    def remove(name: str, path: Path) -> None:
        path.unlink()
        removed.append(name)

    for name, path in files_below(tree).items():
        if part_of(name, path.is_symlink()) == "drop":
            remove(name, path)
    for name, path in unloaded(files_below(tree)).items():
        remove(name, path)
    # Links to removed files. A link to such a link only dangles in the next round.
    while True:
        dangling = [(name, path) for name, path in files_below(tree).items() if not path.exists()]
        if not dangling:
            return removed
        for name, path in dangling:
            remove(name, path)


def unloaded(files: dict[str, Path]) -> dict[str, Path]:
    """Return the bundled libraries that no other file loads, be it through another library.

    Args:
        files: The paths of all files and links by name.
    """
    optional = re.compile(rf"{SYSDEPS}/[^/]+\.so|{CHOLMOD}")
    bundled = {name: path for name, path in files.items() if optional.match(name)}
    pending = set()
    for name, path in files.items():
        if name not in bundled and not path.is_symlink():
            pending |= needed(path)
    for path in bundled.values():
        if any(fnmatchcase(path.name, pattern) for pattern in OPENED_SYSDEPS):
            pending.add(path.name)
    loaded = follow(pending, list(bundled.values()))
    return {
        name: path for name, path in bundled.items() if not path.is_symlink() and path not in loaded
    }


def follow(names: set[str], libraries: list[Path]) -> set[Path]:
    """Return the libraries with some names, and those that they need; links are resolved.

    Args:
        names: The names.
        libraries: Libraries and links to them.
    """
    loaded = set()
    pending = set(names)
    visited = set()
    while pending:
        name = pending.pop()
        visited.add(name)
        for path in libraries:
            if path.name == name:
                library = path.resolve()
                loaded.add(library)
                pending |= needed(library) - visited
    return loaded


def mend_paths(tree: Path) -> list[str]:
    """Make paths of AMD's build machine relative to the file that has them.

    CMake refuses include folders that do not exist, and pkg-config passes them on.

    Returns:
        The names of the changed files.
    """
    changed = []
    for name, path in files_below(tree).items():
        if path.suffix not in CONFIG_FILES or path.is_symlink():
            continue
        folder = "${pcfiledir}" if path.suffix == ".pc" else "${CMAKE_CURRENT_LIST_DIR}"
        root = "/".join([folder, *[".."] * name.count("/")])

        def make_relative(match: re.Match[str], root: str = root) -> str:
            tail = posixpath.normpath(match["tail"] or "/").rstrip("/")  # some have `..` in them
            return f"{match['flag'] or ''}{root}{tail}"

        text = path.read_text(errors="surrogateescape")
        new = SYSTEM_ENTRY.sub("", BUILD_PATH.sub(make_relative, text))
        if new != text:
            path.write_text(new, errors="surrogateescape")
            changed.append(name)
    return changed


def check_paths(tree: Path) -> list[str]:
    """Find paths of AMD's build machine that mend_paths did not change. Documents may have any.

    Returns:
        A line for each text file with such a path, for example a script, which nothing reads before
        a user calls it.

    Raises:
        Refused: A CMake or pkg-config file has one.
    """
    faults: list[str] = []
    warnings: list[str] = []
    for name, path in files_below(tree).items():
        is_config = path.suffix in CONFIG_FILES
        if path.is_symlink():
            continue
        if not is_config and (name.startswith("share/doc/") or path.stat().st_size > TEXT):
            continue
        data = path.read_bytes()
        if b"\0" in data:
            continue
        leftover = LEFTOVER.search(COMMENT.sub("", data.decode(errors="replace")))
        if not leftover:
            continue
        outside = leftover[0]
        if is_config:
            faults.append(f"{name} names {outside}, of AMD's build machine and not of the prefix")
        else:
            warnings.append(f"{name} names {outside}, which is not in the prefix")
    refuse(faults)
    return warnings


def unmet_targets(tree: Path) -> list[str]:
    """Return a line for each file of a CMake target that is not in the tree.

    find_package then fails in whatever is compiled with the SDK. It is only a warning, because
    AMD's own archive may have such a target in a CMake package that nothing here looks for.
    """
    lines = []
    for name, path in files_below(tree).items():
        if path.suffix != ".cmake" or path.is_symlink():
            continue
        for files in TARGET_FILES.findall(path.read_text(errors="replace")):
            required = set(re.findall(r'"\$\{_IMPORT_PREFIX\}/([^"]+)"', files))
            for file in sorted(required):
                if not (tree / file).exists():
                    lines.append(
                        f"{name} names {file}, which is not in the tree: find_package fails"
                    )
    return lines


def require_loadable(files: dict[str, Path]) -> list[str]:
    """Find needed libraries that neither the packages nor conda's C++ runtime have.

    Args:
        files: The paths of all files and links by name.

    Returns:
        A line for each that a file of devel needs: one tool less is no reason to have no SDK.

    Raises:
        Refused: A file of core or libraries needs one.
    """
    available = {Path(name).name for name in RUNTIME_LINKS}
    lines: list[str] = []
    for part in PARTS:
        members = {
            name: path for name, path in files.items() if part_of(name, path.is_symlink()) == part
        }
        available |= {path.name for path in members.values()}
        lines = []
        for name, path in members.items():
            libraries = sorted(needed(path)) if path.is_file() else []
            for library in libraries:
                if library not in available and not is_glibc(library):
                    lines.append(f"{part}: {name} needs {library}, which no package has")
        if part != "devel":
            refuse(lines)
    return lines


def check_contents(tree: Path) -> list[str]:
    """Raise Refused if the tree lacks what other packages need, or has a file of RUNTIME_LINKS."""
    faults = []
    for pattern in EXPECTED:
        if not any(tree.glob(pattern)):
            faults.append(f"the tree has no {pattern}, which other packages need")
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
    """Link to conda's libstdc++ and libgcc_s, so that no host library is found first."""
    for name in RUNTIME_LINKS:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        target = prefix / "lib" / path.name
        path.symlink_to(os.path.relpath(target, path.parent))


def collect_licenses(tree: Path, target: Path) -> int:
    """Copy every licence text to `target`; return how many. Raises Refused if there is none."""
    count = 0
    for name, path in files_below(tree).items():
        if LICENSE.match(path.name):
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            count += 1
    if not count:
        raise Refused("the tree has no licence text, and redistribution requires one")
    return count


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stage(prefix: Path, commit: str) -> list[str]:
    """Turn a distribution, unpacked in PREFIX/opt/rocm, into the tree of all packages.

    Args:
        prefix: The prefix.
        commit: The commit of TheRock.

    Returns:
        Lines about what changed, and warnings.

    Raises:
        Refused: The distribution is wrong. The message has every fault.
    """
    tree = prefix / ROOT
    gather([partial(check_manifest, tree, commit), partial(check_names, tree)])
    removed = prune(tree)
    changed = mend_paths(tree)
    warnings = gather(
        [
            partial(require_loadable, files_below(tree)),
            partial(check_contents, tree),
            partial(check_paths, tree),
            partial(unmet_targets, tree),
        ]
    )
    link_runtime(tree, prefix)
    sums = []
    for name, path in files_below(tree).items():
        if name != SUMS and not path.is_symlink():
            sums.append(f"{sha256(path)}  {name}\n")
    (tree / SUMS).write_text("".join(sums))
    return [
        f"{len(sums)} files in {ROOT}, {len(removed)} files dropped:",
        *removed,
        f"changed: {' '.join(changed)}",
        *(f"warning: {line}" for line in warnings),
    ]


def keep(prefix: Path, part: str, licenses: Path) -> None:
    """Remove from the staged tree what belongs to the other packages.

    Args:
        prefix: The prefix.
        part: The package.
        licenses: A folder that gets every licence text.
    """
    texts = collect_licenses(prefix / ROOT, licenses)
    count = 0
    for name, path in files_below(prefix / ROOT).items():
        if name in RUNTIME_LINKS or name == SUMS:
            owner = "core"
        else:
            owner = part_of(name, path.is_symlink())
        if owner == part:
            count += 1
        else:
            path.unlink()
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
    if options.part == PARTS[0]:  # the others would print the same
        print(*report, sep="\n")
    keep(options.prefix, options.part, options.licenses)


if __name__ == "__main__":
    main()
