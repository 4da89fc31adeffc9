# SPDX-License-Identifier: BSD-3-Clause
"""Unpack TheRock's distribution, and keep the files of one package in PREFIX/opt/rocm.

usage: tree.py ARCHIVE PREFIX core|libraries|devel COMMIT LICENSES. The archive is removed.
COMMIT is the commit of TheRock from which the archive must be built. Every licence text is copied
to the folder LICENSES.

ELF files are not changed, because patchelf and strip would break libraries whose kernels are in
.kpack files. Each file belongs to one package or is dropped: see RULES. The file SHA256SUMS, in the
package core, has the hash of every other file, so that the installed files can be verified later.

Each package unpacks the archive again, and keeps only its own files. If one tree were staged for
all packages, it would be on the disk four times while the largest package is made.
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
    # folders that only the distributions of ROCm 7 have
    "libhipcxx",
    "src",
    "tests",
}
LICENSE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|COPYRIGHT)", re.IGNORECASE)
# A path of AMD's build machine in CMake and pkg-config files. TheRock installs each component into
# its own folder `stage` or `dist`. The contents of these folders become the tree.
START, REST = r"(?<![\w$}.)\]/])(?P<flag>-[LI])?", r"""[^\s;"'<>)]"""
BUILD_PATH = re.compile(
    rf"{START}/(?:[\w.+-]+/)+?(?:stage|dist(?:/rocm)?)(?P<tail>/{REST}*|(?!{REST}))"
)
# An include folder or library of the build machine's system, such as /usr/include/libdrm. It is
# removed from lists, because another machine does not have it or has another version.
SYSTEM = rf"(?:-[LI])?/usr/(?:local/)?(?:include|lib\d*)(?:/{REST}+|(?!{REST}))"
SYSTEM_ENTRY = re.compile(rf'(?<=");?{SYSTEM};|;{SYSTEM}(?=[;"])')
# A path outside of the prefix. CMake and pkg-config files with such a path are refused. Three kinds
# of paths are allowed: /opt/rocm, where CMake files look last, programs such as /usr/bin/env, and
# paths in comments.
LEFTOVER = re.compile(
    rf"{START}/(?:__w|home|root|github|therock|workspace|build|usr/(?:local|include|lib\d*))/{REST}*"
)
COMMENT = re.compile(r"^\s*#.*", re.MULTILINE)
# The list of the files that a CMake target requires, in the CMake file that defines the target.
TARGET_FILES = re.compile(r"list\(APPEND _cmake_import_check_files_for_\S+ ([^)]*)\)")
# Maximum bytes of a searched text, except for CONFIG_FILES. Larger texts are generated data.
TEXT = 1 << 20
SYSDEPS = "lib/rocm_sysdeps/lib"
# The paths at which AMD's libraries look for the C++ runtime. They become links to conda's runtime.
RUNTIME_LINKS = [
    f"{SYSDEPS}/libstdc++.so.6",
    f"{SYSDEPS}/libgcc_s.so.1",
    "lib/llvm/lib/libstdc++.so.6",
    "lib/llvm/lib/libgcc_s.so.1",
]

# The package of each path, or "drop". The first matching pattern decides. As in fnmatch, `*` also
# matches slashes. A link `lib/libX.so` is for the linker, so it belongs to devel, unless OPENED has
# it (see find_part). A file, not a link, with such a name is a plugin. The patterns decide for it.
RULES: list[tuple[str, tuple[str, ...]]] = [
    # folders of older trees, which are not needed at run time or by a compiler
    ("drop", ("libhipcxx/*", "src/*", "tests/*")),
    # gdb, which is under GPL-3.0, and is linked to five Pythons of the build machine
    ("drop", ("bin/*gdb*", "share/*gdb/*", "libexec/*gdb*", "include/gdb/*")),
    ("drop", ("share/info/*", "share/locale/*")),
    # tests, clients and samples, many of which have absolute RUNPATHs
    ("drop", ("clients/*", "lib/rocrtst/*", "lib/test_plugins/*", "lib/libtest_linking_lib*")),
    ("drop", ("bin/*test*", "bin/*bench*", "bin/*-client*", "bin/*.hip")),
    ("drop", ("share/*/test/*", "share/*/tests/*", "share/*/samples/*", "share/*/examples/*")),
    # the data center tool and its headers, with gRPC and code objects for other GPUs
    ("drop", ("lib/rdc/*", "lib/librdc*", "lib/cmake/rdc/*", "bin/rdc*")),
    ("drop", ("include/rdc/*", "share/rdc/*", "libexec/rdc/*")),
    # terminfo of the debugger; the profiler's database modules, compiled for four other Pythons
    ("drop", ("lib/rocm_sysdeps/share/terminfo/*", "lib/python*", "bin/rocpd*")),
    # FFTW, under GPL-2.0-or-later, for the tests; require_loadable reports files that need it
    ("drop", ("lib/libfftw*", "lib/cmake/fftw*", "lib/pkgconfig/fftw*")),
    ("drop", ("include/fftw*", "bin/fftw*")),
    # files that a HIP program needs to run
    ("core", (".info/*", "share/therock/*", "share/doc/*")),
    ("core", (f"{SYSDEPS}/*.so*", "lib/rocm_sysdeps/share/*")),
    ("core", ("lib/llvm/lib/*.so*", "lib/llvm/bin/lld", "lib/llvm/bin/ld.lld")),
    ("core", ("lib/llvm/amdgcn/*", "lib/llvm/lib/clang/*/lib/amdgcn/*")),
    ("core", ("amdgcn", "amdgcn/*", "lib/.hipInfo", "lib/libamdhip64.so*")),
    ("core", ("lib/libhiprtc.so.*", "lib/libhiprtc-builtins.so.*", "lib/libhsa-runtime64.so.*")),
    ("core", ("lib/libamd_comgr.so.*", "lib/librocprofiler-register.so.*")),
    ("core", ("lib/librocm_kpack.so.*", "lib/librocm-core.so.*", "lib/librocm_smi64.so.*")),
    ("core", ("lib/liboam.so.*", "lib/libOpenCL.so.*")),
    # libraries that are opened by the name without a version; see OPENED
    ("core", ("lib/libamd_smi.so*", "lib/libhsa-amd-aqlprofile64.so*")),
    ("core", ("lib/librocprofiler-sdk.so*", "lib/librocprofiler-sdk-attach.so*")),
    ("core", ("share/amd_smi/*", "libexec/amdsmi_cli/*")),
    ("core", ("bin/amd-smi", "bin/rocminfo", "bin/rocm_agent_enumerator")),
    # files for linking, the compiler and the profilers
    ("devel", ("llvm", "lib/cmake/*", "*/cmake/*", "*/pkgconfig/*", "lib/*/include/*")),
    ("devel", ("lib/rocprofiler-*", "lib/librocprof-sys*", "lib/libprofiler-hub*")),
    ("devel", ("*.a", "lib/llvm/*", "lib/rocm_sysdeps/*")),
    ("devel", ("include/*", "bin/*", "libexec/*")),
    # kernels and libraries of the math, machine learning and communication components
    ("libraries", (".kpack/*", "share/miopen/*", "share/rccl/*", "lib/*")),
    ("devel", ("share/*",)),
]
PARTS = ("core", "libraries", "devel")
# Links `lib/libX.so` that are opened at run time, so they do not belong to devel.
OPENED = (
    "lib/libamdhip64",  # opened by HIP
    "lib/libamd_smi",  # opened by the Python module amdsmi, and by torch's c10d
    "lib/libMIOpen",  # opened by MIOpen
    "lib/libhsa-amd-aqlprofile64",  # opened by HSA (ROCm/TheRock#7085)
    "lib/librocprofiler-sdk.so",  # this and the next one: opened by rocprofiler-register
    "lib/librocprofiler-sdk-attach",
)
# Bundled libraries that no file names in DT_NEEDED, because they are opened at run time: VA-API's
# drivers (by libva, for rocDecode and rocJPEG) and libnuma (by rocSHMEM).
OPENED_SYSDEPS = ("*_drv_video.so", "*numa.so*")
# SuiteSparse's sparse Cholesky. Up to at least 10.0, TheRock builds it with its GPL-2.0-or-later
# modules (no CHOLMOD_GPL=OFF), and links libhipsolver with it (BUILD_WITH_SPARSE=ON).
CHOLMOD = "lib/host-math/lib/libcholmod.so"
# Files that other packages need. For example, torch's c10d includes amdsmi.h and opens
# libamd_smi.so, and kineto is linked with librocprofiler-sdk.so.
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
    """The distribution does not match the expectations of this program."""


def run_checks(checks: Iterable[Callable[[], list[str]]]) -> list[str]:
    """Run all checks and return their warnings. If there are faults, raise Refused with them."""
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
    """Raise Refused if there are faults. The message has at most the first MAX_FAULTS of them."""
    if len(faults) > MAX_FAULTS:
        more = len(faults) - MAX_FAULTS
        faults = [*faults[:MAX_FAULTS], f"and {more} more like these"]
    if faults:
        raise Refused("\n".join(faults))


def find_part(name: str, is_link: bool) -> str:
    """Return the package of a path, or "drop". Raise Refused if no rule matches.

    Args:
        name: The path relative to the tree.
        is_link: Whether the path is a symbolic link.
    """
    if name.partition("/")[0] in TOP:
        if is_link and re.fullmatch(r"lib/lib[^/]+\.so", name) and not name.startswith(OPENED):
            return "devel"
        for part, patterns in RULES:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return part
    raise Refused(f"{name}: no rule in tree.py assigns it to a package")


def list_files(root: Path) -> dict[str, Path]:
    """Return the path of every file and link by its relative name, sorted. Follow no links."""
    paths = {}
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder, name)
            paths[path.relative_to(root).as_posix()] = path
    return dict(sorted(paths.items()))


def unpack(archive: Path, tree: Path) -> None:
    """Unpack the archive and remove it. Raise Refused if it cannot be unpacked."""
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # since CPython 3.11.4
            tar.extractall(tree, numeric_owner=True)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise Refused(f"{archive} cannot be unpacked: {error}") from None
    archive.unlink()  # saves disk space, because rattler-build keeps the work folder until the end
    set_permissions(tree)


def set_permissions(tree: Path) -> None:
    """Make every file and folder readable for all users, and folders writable for their owner.

    In some of AMD's builds, only the owner can read MIOpen's data (ROCm/TheRock#4954).
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
        raise Refused(f"{MANIFEST} names TheRock commit {built_from}, the recipe names {commit}")
    return []


def check_names(tree: Path) -> list[str]:
    """Raise Refused if a file matches no rule, or if a link to keep is absolute or dangling."""
    faults = []
    for name, path in list_files(tree).items():
        try:
            part = find_part(name, path.is_symlink())
        except Refused as refused:
            faults.append(str(refused))
            continue
        if path.is_symlink() and part != "drop":
            target = path.readlink()
            if target.is_absolute() or not path.exists():
                faults.append(f"{name} is a link to {target}, which is not in the tree")
    refuse(faults)
    return []


def read_needed(path: Path) -> set[str]:
    """Return the entries of DT_NEEDED of an ELF file; empty for other files."""
    with path.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            return set()
    return set(elf.dynamic(path).needed)


def prune(tree: Path) -> list[str]:
    """Remove files that the rules drop, and then bundled libraries that no other file loads.

    Such libraries, for example gmp, mpfr and ncurses, are needed only by the debugger and the
    tests, which are dropped. CHOLMOD is removed if nothing needs it, because it is under the GPL.

    Returns:
        The names of the removed files and links.
    """
    removed = []

    def remove(name: str, path: Path) -> None:
        path.unlink()
        removed.append(name)

    for name, path in list_files(tree).items():
        if find_part(name, path.is_symlink()) == "drop":
            remove(name, path)
    for name, path in find_unloaded(list_files(tree)).items():
        remove(name, path)
    # Remove links to removed files. Removing a link can leave another link dangling, so repeat this
    # until no dangling link is left.
    while True:
        dangling = [(name, path) for name, path in list_files(tree).items() if not path.exists()]
        if not dangling:
            return removed
        for name, path in dangling:
            remove(name, path)


def find_unloaded(files: dict[str, Path]) -> dict[str, Path]:
    """Return the bundled libraries that no other file loads, directly or through other libraries.

    Args:
        files: The paths of all files and links by name.
    """
    optional = re.compile(rf"{SYSDEPS}/[^/]+\.so|{CHOLMOD}")
    bundled = {name: path for name, path in files.items() if optional.match(name)}
    pending = set()
    for name, path in files.items():
        if name not in bundled and not path.is_symlink():
            pending |= read_needed(path)
    for path in bundled.values():
        if any(fnmatchcase(path.name, pattern) for pattern in OPENED_SYSDEPS):
            pending.add(path.name)
    loaded = follow(pending, list(bundled.values()))
    return {
        name: path for name, path in bundled.items() if not path.is_symlink() and path not in loaded
    }


def follow(names: set[str], libraries: list[Path]) -> set[Path]:
    """Return the libraries with certain names, and all libraries that they need, transitively.

    Args:
        names: The names.
        libraries: The paths of libraries, and of links to libraries. Links are resolved.
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
                pending |= read_needed(library) - visited
    return loaded


def fix_paths(tree: Path) -> list[str]:
    """In CMake and pkg-config files, make paths of AMD's build machine relative to the file.

    System folders of that machine are removed from lists. CMake refuses include folders that do not
    exist, and pkg-config returns them to compilers.

    Returns:
        The names of the changed files.
    """
    changed = []
    for name, path in list_files(tree).items():
        if path.suffix not in CONFIG_FILES or path.is_symlink():
            continue
        folder = "${pcfiledir}" if path.suffix == ".pc" else "${CMAKE_CURRENT_LIST_DIR}"
        root = "/".join([folder, *[".."] * name.count("/")])

        def make_relative(match: re.Match[str], root: str = root) -> str:
            tail = posixpath.normpath(match["tail"] or "/").rstrip("/")  # some paths contain `..`
            return f"{match['flag'] or ''}{root}{tail}"

        text = path.read_text(errors="surrogateescape")
        new = SYSTEM_ENTRY.sub("", BUILD_PATH.sub(make_relative, text))
        if new != text:
            path.write_text(new, errors="surrogateescape")
            changed.append(name)
    return changed


def check_paths(tree: Path) -> list[str]:
    """Find paths of AMD's build machine that fix_paths did not change.

    Binary files are ignored. Documentation and files larger than TEXT are ignored, too, unless they
    are CMake or pkg-config files.

    Returns:
        A warning for each text file with such a path, except for CMake and pkg-config files. It is
        not a fault, because a script with such a path, for example, fails only if a user calls it.

    Raises:
        Refused: A CMake or pkg-config file has such a path.
    """
    faults: list[str] = []
    warnings: list[str] = []
    for name, path in list_files(tree).items():
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
            faults.append(f"{name} names {outside}, a path of AMD's build machine")
        else:
            warnings.append(f"{name} names {outside}, which is not in the prefix")
    refuse(faults)
    return warnings


def find_unmet_targets(tree: Path) -> list[str]:
    """Return a warning for each file that a CMake target requires and that is not in the tree.

    If such a file is missing, find_package fails. This is only a warning, because the target may
    belong to a CMake package that none of our packages uses.
    """
    lines = []
    for name, path in list_files(tree).items():
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
    """Find libraries that files need but cannot load.

    A file can load the libraries of its own package, of the packages before it in PARTS, of conda's
    C++ runtime and of glibc.

    Args:
        files: The paths of all files and links by name.

    Returns:
        A warning for each library that a file of devel cannot load. It is not a fault, because the
        SDK is useful even if one tool does not work.

    Raises:
        Refused: A file of core or libraries cannot load a library.
    """
    available = {Path(name).name for name in RUNTIME_LINKS}
    lines: list[str] = []
    for part in PARTS:
        members = {
            name: path for name, path in files.items() if find_part(name, path.is_symlink()) == part
        }
        available |= {path.name for path in members.values()}
        lines = []
        for name, path in members.items():
            libraries = sorted(read_needed(path)) if path.is_file() else []
            for library in libraries:
                if library not in available and not is_glibc(library):
                    lines.append(f"{part}: {name} needs {library}, which it cannot find")
        if part != "devel":
            refuse(lines)
    return lines


def check_contents(tree: Path) -> list[str]:
    """Return a warning if MIOpen's find-db for the GPU is missing.

    Raises:
        Refused: A file of EXPECTED or CHOLMOD is missing, or a path of RUNTIME_LINKS exists.
    """
    faults = []
    for pattern in EXPECTED:
        if not any(tree.glob(pattern)):
            faults.append(f"the tree has no {pattern}, which other packages need")
    if not any(tree.glob(f"{CHOLMOD}*")):
        faults.append(
            f"the tree has no {CHOLMOD}: if no library needs it any more, remove the GPL from the "
            "licence of rocm-sdk-libraries"
        )
    for name in RUNTIME_LINKS:
        if os.path.lexists(tree / name):
            faults.append(f"{name} already exists; its rule in tree.py is out of date")
    refuse(faults)
    if any(tree.glob(f"share/miopen/db/{ARCH}*.fdb.txt")):
        return []
    return [f"no find-db for {ARCH}: MIOpen searches for a solver at each convolution's first use"]


def link_runtime(tree: Path, prefix: Path) -> None:
    """Link to conda's libstdc++ and libgcc_s, so that no library of the system is found first."""
    for name in RUNTIME_LINKS:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        target = prefix / "lib" / path.name
        path.symlink_to(os.path.relpath(target, path.parent))


def collect_licenses(tree: Path, target: Path) -> int:
    """Copy every licence text to `target`, and return their number. Raise Refused if it is 0."""
    count = 0
    for name, path in list_files(tree).items():
        if LICENSE.match(path.name):
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            count += 1
    if not count:
        raise Refused("the tree has no licence text, but redistribution requires one")
    return count


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stage(prefix: Path, commit: str) -> list[str]:
    """Convert the distribution, unpacked in PREFIX/opt/rocm, to the tree of all packages.

    Args:
        prefix: The prefix.
        commit: The commit of TheRock.

    Returns:
        Lines about removed and changed files, and warnings.

    Raises:
        Refused: The distribution has faults. The message has up to MAX_FAULTS from each check.
    """
    tree = prefix / ROOT
    run_checks([partial(check_manifest, tree, commit), partial(check_names, tree)])
    removed = prune(tree)
    changed = fix_paths(tree)
    warnings = run_checks(
        [
            partial(require_loadable, list_files(tree)),
            partial(check_contents, tree),
            partial(check_paths, tree),
            partial(find_unmet_targets, tree),
        ]
    )
    link_runtime(tree, prefix)
    sums = []
    for name, path in list_files(tree).items():
        if name != SUMS and not path.is_symlink():
            sums.append(f"{sha256(path)}  {name}\n")
    (tree / SUMS).write_text("".join(sums))
    return [
        f"{len(sums)} files in {ROOT}, {len(removed)} files dropped:",
        *removed,
        f"changed: {' '.join(changed)}",
        *(f"warning: {line}" for line in warnings),
    ]


def keep_part(prefix: Path, part: str, licenses: Path) -> None:
    """Copy the licence texts, and remove the files of the other packages from the staged tree.

    Args:
        prefix: The prefix.
        part: The package whose files are kept.
        licenses: The folder to which every licence text is copied.

    Raises:
        Refused: The tree has no licence text, or no file of the package.
    """
    texts = collect_licenses(prefix / ROOT, licenses)
    count = 0
    for name, path in list_files(prefix / ROOT).items():
        if name in RUNTIME_LINKS or name == SUMS:
            owner = "core"
        else:
            owner = find_part(name, path.is_symlink())
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
    if options.part == PARTS[0]:  # the other packages would print the same report
        print(*report, sep="\n")
    keep_part(options.prefix, options.part, options.licenses)


if __name__ == "__main__":
    main()
