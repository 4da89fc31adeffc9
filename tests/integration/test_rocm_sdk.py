# SPDX-License-Identifier: BSD-3-Clause
"""The rocm-sdk recipe stages, drops and refuses files of a small tree with AMD's layout."""

import itertools
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import sdk_tree
from support.project import CHECKOUT, MiniProject
from support.recipe_checks import RECIPES, load, run

from forge.conda.package import Package
from forge.files import sha256_file

pytest.importorskip("elftools", reason="the package checks read ELF files with pyelftools")
RECIPE = RECIPES / "rocm-sdk"
tree = load("rocm-sdk", "tree")

# The files that no package gets.
DROPPED = {
    "bin/rocgdb",
    "bin/rocgdb-py3.12",
    "bin/test_hip_api",
    "clients/run",
    "include/gdb/jit-reader.h",
    "libexec/rocgdb/x",
    "share/rocgdb/syscalls.xml",
    "lib/rocm_sysdeps/lib/librocm_sysdeps_gmp.so.10",
    "lib/rocm_sysdeps/lib/librocm_sysdeps_gmp.so",
    "lib/rocm_sysdeps/lib/librocm_sysdeps_mpfr.so.6",
    "share/doc/rocgdb/COPYING3",
    "libhipcxx/include/cuda/std/array",
    "src/rocprofiler/main.cpp",
    "tests/run.sh",
    "tests/libc.so",
    "lib/rdc/grpc/include/absl/base/config.h",
    "lib/rdc/hsaco/gfx942/gpuReadWrite_kernels.hsaco",
    "lib/rocm_sysdeps/share/terminfo/x/xterm",
    "lib/python3.10/site-packages/rocpd/__init__.py",
    "include/fftw3.h",
    "lib/libfftw3.so",
    "lib/libfftw3.so.3",
}


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small tree, which no test changes."""
    return sdk_tree.make(tmp_path_factory.mktemp("made") / "therock")


@pytest.fixture
def source(sdk: Path, tmp_path: Path) -> Path:
    """A copy of the small tree, for one test."""
    subprocess.run(["cp", "-a", sdk, tmp_path], check=True)
    return tmp_path / sdk.name


def stage(source: Path, tmp_path: Path) -> Path:
    """Move a tree into a prefix, stage it, and return its folder."""
    folder = tmp_path / "prefix" / tree.ROOT
    folder.parent.mkdir(parents=True)
    source.rename(folder)
    tree.stage(tmp_path / "prefix", sdk_tree.COMMIT)
    return folder


def test_stage(source: Path, tmp_path: Path) -> None:
    digests = {}
    links = {}
    for name, path in tree.list_files(source).items():
        if path.is_file():
            digests[name] = sha256_file(path)
        if path.is_symlink():
            links[name] = path.readlink()
    staged = tree.list_files(stage(source, tmp_path))
    assert digests.keys() - staged.keys() == DROPPED
    kept = digests.keys() & staged.keys()
    changed = {name for name in kept if sha256_file(staged[name]) != digests[name]}
    assert changed == {"lib/cmake/rocm_smi/rocm_smiTargets.cmake"}
    text = staged[changed.pop()].read_text()
    include = "${CMAKE_CURRENT_LIST_DIR}/../../../lib/rocm_sysdeps/include"
    assert text == f'set(DIRS "{include}/libdrm;{include}")\n'
    assert staged.keys() - digests.keys() - links.keys() == {*tree.RUNTIME_LINKS, tree.SUMS}
    for name, target in links.items():
        if name not in DROPPED:
            assert staged[name].readlink() == target
    for name in tree.RUNTIME_LINKS:
        library = tmp_path / "prefix" / "lib" / Path(name).name
        library.parent.mkdir(exist_ok=True)
        library.touch()
        assert staged[name].resolve() == library.resolve()
    sums = staged[tree.SUMS].read_text().splitlines()
    files = {name for name, path in staged.items() if not path.is_symlink()}
    assert {line.split("  ", 1)[1] for line in sums} == files - {tree.SUMS}


def test_what_is_a_warning(source: Path, tmp_path: Path) -> None:
    """A missing library of a profiler and a missing find-db of MIOpen are only warnings."""
    shutil.rmtree(source / "share/miopen")
    (tmp_path / "prefix/opt").mkdir(parents=True)
    source.rename(tmp_path / "prefix" / tree.ROOT)
    report = tree.stage(tmp_path / "prefix", sdk_tree.COMMIT)
    name = "lib/librocprof-sys.so.1"
    assert f"warning: devel: {name} needs libdyninst.so.13, which it cannot find" in report
    (line,) = [line for line in report if "MIOpen" in line]
    assert line.startswith("warning: no find-db for gfx1151")


def test_all_faults_are_named_at_once(source: Path, tmp_path: Path) -> None:
    """One run names all faults, because each run unpacks 1.8 GB."""
    (source / "include/amd_smi/amdsmi.h").unlink()
    (source / "lib/cmake/hip/hip-config.cmake").write_text('set(A "/home/runner/x")\n')
    sdk_tree.library(source / "lib/libamd_comgr.so.3", ["libtinfo.so.6"])
    with pytest.raises(SystemExit) as error:
        stage(source, tmp_path)
    for message in ("no include/amd_smi/amdsmi.h", "names /home/runner/x", "needs libtinfo.so.6"):
        assert message in str(error.value)


def test_files_that_no_rule_knows_are_counted(source: Path, tmp_path: Path) -> None:
    """The message names some files without a rule, and counts the others.

    A new release of TheRock may have a new folder with thousands of files. The message also names
    the commit of the tree, because another commit is the likely reason.
    """
    for number in range(1000):
        (source / f"surprise-{number:03}").touch()
    (source / tree.MANIFEST).write_text(json.dumps({"the_rock_commit": "0" * 40}))
    with pytest.raises(SystemExit) as error:
        stage(source, tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0].endswith(f"the recipe names {sdk_tree.COMMIT}") and len(lines) == 22
    assert lines[1].startswith("surprise-000: no rule") and lines[-1] == "and 980 more like these"


def test_the_archive_is_unpacked_and_removed(sdk: Path, tmp_path: Path) -> None:
    archive = sdk_tree.pack(sdk, tmp_path / "therock.tar.gz")
    prefix = tmp_path / "prefix"
    done = run(RECIPE / "tree.py", archive, prefix, "core", sdk_tree.COMMIT, tmp_path / "licenses")
    assert done.returncode == 0, done.stderr
    assert "files dropped:" in done.stdout and "core: " in done.stdout
    assert not archive.exists()
    files = tree.list_files(prefix / tree.ROOT)
    parts = {tree.find_part(name, path.is_symlink()) for name, path in files.items()}
    assert parts == {"core"}


@pytest.mark.parametrize("size", [0, 1000, -1000])
def test_a_damaged_archive(sdk: Path, tmp_path: Path, size: int) -> None:
    """An archive that is cut after some bytes, or before its last bytes, is refused and kept."""
    archive = sdk_tree.pack(sdk, tmp_path / "therock.tar.gz")
    if size < 0:
        size += archive.stat().st_size
    os.truncate(archive, size)
    with pytest.raises(SystemExit, match="therock.tar.gz cannot be unpacked: "):
        tree.unpack(archive, tmp_path / "tree")
    assert archive.exists()


def test_each_file_is_in_one_package(source: Path, tmp_path: Path) -> None:
    """Each staged file is in exactly one package."""
    staged = stage(source, tmp_path)
    parts = {}
    for part in tree.PARTS:
        copy = tmp_path / part
        subprocess.run(["cp", "-a", tmp_path / "prefix", copy], check=True)
        tree.keep_part(copy, part, tmp_path / f"{part}-licenses")
        assert (tmp_path / f"{part}-licenses/share/doc/hip/LICENSE.txt").read_text() == "MIT\n"
        parts[part] = set(tree.list_files(copy / tree.ROOT))
    assert sorted(itertools.chain(*parts.values())) == sorted(tree.list_files(staged))
    assert parts["core"] >= {
        "lib/libamdhip64.so",
        "lib/llvm/lib/libLLVM.so.23.0",
        "lib/librocprofiler-sdk.so.1",
        "lib/rocm_sysdeps/share/libdrm/amdgpu.ids",
        "amdgcn",
        tree.SUMS,
        # Programs open these links at run time.
        "lib/libamd_smi.so",
        "lib/libhsa-amd-aqlprofile64.so",
        "lib/librocprofiler-sdk.so",
        "lib/librocprofiler-sdk-attach.so",
        # The driver of VA-API, a link to it, and the library that it requires.
        f"{tree.SYSDEPS}/librocm_sysdeps_gallium_drv_video.so",
        f"{tree.SYSDEPS}/radeonsi_drv_video.so",
        f"{tree.SYSDEPS}/librocm_sysdeps_drm.so.2",
        # rocSHMEM opens this library at run time.
        f"{tree.SYSDEPS}/libnuma.so",
        f"{tree.SYSDEPS}/librocm_sysdeps_numa.so.1",
    }
    assert parts["libraries"] >= {
        ".kpack/blas_gfx1151.kpack",
        "lib/rocblas/library/Kernels_gfx1151.co",
        "lib/librocblas.so.5",
        "lib/libplugin.so",
        "lib/host-math/lib/libcholmod.so.5",
        # Programs open these links at run time.
        "lib/libMIOpen.so",
        "lib/libMIOpenCKGroupedConv_gfx1151.so",
    }
    assert parts["devel"] >= {
        "bin/clang",
        "bin/hipcc",
        "include/amd_smi/amdsmi.h",
        "lib/cmake/amd_smi/amd_smi-config.cmake",
        "lib/host-math/include/suitesparse/cholmod.h",
        "lib/librocblas.so",
        "llvm",
    }


def link_library(name: str, *needs: str) -> Callable[[Path], object]:
    """Return a function that links a library of a tree again, so that it requires only `needs`."""
    return lambda source: sdk_tree.library(source / name, [*needs])


# Faults of a tree: a function that makes the fault, and a part of the message. A library of FFTW is
# in no package. Libraries of the package `core` must load without the other packages.
SPOILED_TREES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another commit": (
        lambda s: (s / tree.MANIFEST).write_text(json.dumps({"the_rock_commit": "0" * 40})),
        f"names TheRock commit {'0' * 40}, the recipe names {sdk_tree.COMMIT}",
    ),
    "no manifest": (lambda s: (s / tree.MANIFEST).unlink(), "is not a TheRock manifest"),
    "dangling": (
        lambda s: (s / "lib/libgone.so.1").symlink_to("libgone.so.1.0"),
        "lib/libgone.so.1 is a link to libgone.so.1.0, which is not in the tree",
    ),
    "absolute": (
        lambda s: (s / "lib/libhost.so").symlink_to("/lib/x86_64-linux-gnu/libc.so.6"),
        "lib/libhost.so is a link to /lib",
    ),
    "unexpected": (lambda s: (s / "surprise").touch(), "surprise: no rule"),
    "cut": (
        lambda s: os.truncate(s / "lib/librocblas.so.5.0", 70),
        "librocblas.so.5.0 is not a readable ELF file",
    ),
    "own runtime": (lambda s: (s / tree.RUNTIME_LINKS[0]).touch(), "already exists"),
    "no header": (
        lambda s: (s / "include/amd_smi/amdsmi.h").unlink(),
        "the tree has no include/amd_smi/amdsmi.h",
    ),
    "foreign in core": (
        link_library("lib/libamd_comgr.so.3", "libtinfo.so.6"),
        "core: lib/libamd_comgr.so.3 needs libtinfo.so.6, which it cannot find",
    ),
    "foreign in libraries": (
        link_library("lib/librocfft.so.0", "libfftw3.so.3"),
        "libraries: lib/librocfft.so.0 needs libfftw3.so.3, which it cannot find",
    ),
    "of a later package": (
        link_library("lib/libamd_comgr.so.3", "librocblas.so.5"),
        "core: lib/libamd_comgr.so.3 needs librocblas.so.5",
    ),
    "no cholmod": (
        link_library("lib/libhipsolver.so.1"),
        "no lib/host-math/lib/libcholmod.so: if no library needs it any more, remove the GPL",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED_TREES.values(), ids=SPOILED_TREES)
def test_refused(
    source: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(source)
    with pytest.raises(SystemExit, match=re.escape(message)):
        stage(source, tmp_path)


def test_unlicensed_is_refused(source: Path, tmp_path: Path) -> None:
    staged = stage(source, tmp_path)
    (staged / "share/doc/hip/LICENSE.txt").unlink()
    with pytest.raises(SystemExit, match="no licence text"):
        tree.keep_part(tmp_path / "prefix", "core", tmp_path / "licenses")


@pytest.fixture
def installed(source: Path, tmp_path: Path) -> Path:
    """The prefix with every package installed, and conda's C++ runtime."""
    stage(source, tmp_path)
    prefix = tmp_path / "prefix"
    for name in tree.RUNTIME_LINKS:
        (prefix / "lib").mkdir(exist_ok=True)
        (prefix / "lib" / Path(name).name).touch()
    return prefix


def check_package(prefix: Path) -> subprocess.CompletedProcess[str]:
    return run(RECIPE / "check_package.py", "all", PREFIX=prefix)


def test_check_of_an_installed_package(installed: Path) -> None:
    done = check_package(installed)
    assert done.returncode == 0 and "nothing missing" in done.stdout, done.stderr


def remove_library(root: Path) -> None:
    """Remove a library and its line in SHA256SUMS, so that only other libraries name it."""
    name = "lib/rocm_sysdeps/lib/librocm_sysdeps_elf.so.1"
    (root / name).unlink()
    lines = (root / tree.SUMS).read_text().splitlines()
    (root / tree.SUMS).write_text("\n".join(line for line in lines if not line.endswith(name)))


# Faults of an installed package: a function that makes the fault, and a part of the message.
SPOILED_PACKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed file": (
        lambda root: (root / "bin/hipcc").write_text("#!/bin/false\n"),
        "bin/hipcc is not the file that was staged",
    ),
    "lost file": (lambda root: (root / "bin/hipcc").unlink(), "missing {'bin/hipcc'}"),
    "stray file": (lambda root: (root / "bin/stray").touch(), "unexpected {'bin/stray'}"),
    "lost link": (
        lambda root: (root / tree.RUNTIME_LINKS[0]).unlink(),
        "libstdc++.so.6 is a dangling link",
    ),
    "dangling link": (
        lambda root: (root / "lib/libhip.so").symlink_to("nowhere"),
        "dangling links: ['lib/libhip.so']",
    ),
    "lost library": (remove_library, "needs librocm_sysdeps_elf.so.1, which it cannot find"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED_PACKAGES.values(), ids=SPOILED_PACKAGES)
def test_check_of_a_spoiled_package(
    installed: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(installed / tree.ROOT)
    done = check_package(installed)
    assert done.returncode == 1 and message in done.stderr, done.stderr


def copy_host_library(name: str) -> str:
    """Return a build script that copies a library of this machine's gcc."""
    return f"""\
mkdir -p "$PREFIX/lib"
cp -L "$(gcc -print-file-name={name})" "$PREFIX/lib/"
"""


@pytest.fixture
def sdk_project(project: MiniProject, sdk: Path, tmp_path: Path) -> MiniProject:
    """A project with the real recipe, whose source is an archive of the small tree."""
    (project.root / "build" / "sources").unlink()
    project.recipe("libstdcxx", script=copy_host_library("libstdc++.so.6"))
    project.recipe("libgcc", script=copy_host_library("libgcc_s.so.1"))
    target = project.root / "recipes" / "rocm-sdk"
    subprocess.run(["cp", "-a", RECIPE, RECIPES / "checks", target.parent], check=True)
    (project.root / "LICENSE").write_text("BSD\n")
    archive = sdk_tree.pack(sdk, tmp_path / "therock-dist-linux-gfx1151-10.0.0.tar.gz")
    recipe = target / "recipe.yaml"
    text, count = re.subn(r"4feabd9f\w+", sha256_file(archive), recipe.read_text())
    assert count == 1
    # The small tree's hipcc cannot compile, so the test of the compilers is removed.
    text, count = re.subn(
        r" +- script:\n +# as in a user's environment.*?compiler_test/\]\n", "", text, flags=re.S
    )
    assert count == 1
    recipe.write_text(text)
    project.forge("sources", "add", str(archive))
    return project


def test_packages(sdk_project: MiniProject) -> None:
    """The recipe's packages are built and tested, and added to the channel."""
    sdk_project.forge("build", "rocm-sdk")
    names = {name.split("-10.0.0")[0] for name in sdk_project.packages() if "rocm" in name}
    assert names == {"rocm-sdk", "rocm-sdk-core", "rocm-sdk-libraries", "rocm-sdk-devel"}
    log = (sdk_project.root / "build/logs/rocm-sdk.log").read_text()
    assert log.count("nothing missing") == 4
    for line in ("files dropped:", "$PREFIX core", "$PREFIX libraries", "$PREFIX devel"):
        assert log.count(line) == 1, log
    (metapackage,) = sdk_project.channel.glob("*/rocm-sdk-10.0.0-*.conda")
    assert not any(name.startswith(tree.ROOT) for name in Package(metapackage).payload)
    (libraries,) = sdk_project.channel.glob("*/rocm-sdk-libraries-*.conda")
    package = Package(libraries)
    names = {name.partition("rocm/")[2] for name in package.payload}
    assert "lib/host-math/lib/libcholmod.so.5" in names
    assert "GPL-2.0-or-later" in package.index["license"].split()
    assert b"GNU GENERAL PUBLIC LICENSE" in package.info["licenses/GPL-2.0.txt"]


def configure(
    tmp_path: Path, missing: tuple[str, ...], elsewhere: str
) -> subprocess.CompletedProcess[str]:
    """Configure compiler_test with an empty config file for each CMake package.

    Args:
        tmp_path: The folder to work in.
        missing: Packages without a config file.
        elsewhere: A package outside of ROCm's folder, or an empty string.
    """
    rocm = tmp_path / "prefix/opt/rocm"
    other = tmp_path / "other"
    for name in read_cmake_packages():
        root = other if name == elsewhere else rocm
        config = root / "lib/cmake" / name / f"{name}-config.cmake"
        if name not in missing:
            config.parent.mkdir(parents=True)
            config.touch()
    if "roctx64" not in missing:
        (rocm / "lib/libroctx64.so").touch()
    return subprocess.run(
        ["cmake", "-S", RECIPE / "compiler_test", "-B", tmp_path / "found"],
        env=os.environ | {"ROCM_PATH": str(rocm), "CMAKE_PREFIX_PATH": f"{other}:{rocm}"},
        text=True,
        capture_output=True,
        check=False,
    )


def read_cmake_packages() -> list[str]:
    """Return the packages that compiler_test requests from CMake."""
    text = (RECIPE / "compiler_test/CMakeLists.txt").read_text()
    return re.search(r"foreach\(name IN ITEMS ([^)]*)\)", text)[1].split()


def test_cmake_is_asked_for_what_torch_asks_for(host_base: None) -> None:
    """compiler_test requests the same CMake packages as LoadHIP.cmake in torch's wheel.

    The test reads the wheel from which the host base's torch is made.
    """
    (version,) = yaml.safe_load((CHECKOUT / "variants.yaml").read_text())["pytorch"]
    (wheel,) = CHECKOUT.glob(f"build/sources/*/torch-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("torch/share/cmake/Caffe2/public/LoadHIP.cmake").decode()
    required = set(re.findall(r"find_package_and_print_version\((\S+) REQUIRED", text))
    assert len(required) == 18 and required | {"rccl"} == set(read_cmake_packages())
    assert "find_library(ROCM_ROCTX_LIB roctx64 " in text


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
@pytest.mark.parametrize(
    ("missing", "elsewhere", "messages"),
    [
        (("rocthrust", "hiprtc"), "", ["rocthrust is not found", "hiprtc is not found"]),
        (("roctx64",), "", ["libroctx64.so is not found"]),
        ((), "hipfft", ["hipfft is found in ", ", not below "]),
        ((), "", []),
    ],
)
def test_what_cmake_finds(
    tmp_path: Path, missing: tuple[str, ...], elsewhere: str, messages: list[str]
) -> None:
    done = configure(tmp_path, missing, elsewhere)
    errors = " ".join(done.stderr.split())
    assert done.returncode == bool(messages), errors
    for message in messages:
        assert message in errors
