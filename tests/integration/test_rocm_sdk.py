# SPDX-License-Identifier: BSD-3-Clause
"""The rocm-sdk recipe on a small tree of the same shape: what is staged, dropped and refused."""

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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sdk_tree.make(tmp_path_factory.mktemp("made") / "therock")


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", made, tmp_path], check=True)
    return tmp_path / made.name


def stage(source: Path, tmp_path: Path, commit: str = sdk_tree.COMMIT) -> Path:
    staged = tmp_path / "prefix" / tree.ROOT
    staged.parent.mkdir(parents=True)
    source.rename(staged)
    tree.stage(tmp_path / "prefix", commit)
    return staged


def test_stage(source: Path, tmp_path: Path) -> None:
    before = {n: sha256_file(p) for n, p in tree.list_files(source).items() if p.is_file()}
    links = {n: p.readlink() for n, p in tree.list_files(source).items() if p.is_symlink()}
    staged = tree.list_files(stage(source, tmp_path))
    gone = set(before) - set(staged)
    assert gone == DROPPED
    changed = {n for n in set(before) & set(staged) if sha256_file(staged[n]) != before[n]}
    assert changed == {"lib/cmake/rocm_smi/rocm_smiTargets.cmake"}
    text = staged[changed.pop()].read_text()
    include = "${CMAKE_CURRENT_LIST_DIR}/../../../lib/rocm_sysdeps/include"
    assert text == f'set(DIRS "{include}/libdrm;{include}")\n'
    assert set(staged) - set(before) - set(links) == {*tree.RUNTIME_LINKS, tree.SUMS}
    for name, target in links.items():
        if name not in DROPPED:
            assert staged[name].readlink() == target
    for name in tree.RUNTIME_LINKS:
        library = tmp_path / "prefix" / "lib" / Path(name).name
        library.parent.mkdir(exist_ok=True)
        library.touch()
        assert staged[name].resolve() == library.resolve()
    sums = (staged[tree.SUMS]).read_text().splitlines()
    files = {n for n, p in staged.items() if not p.is_symlink()} - {tree.SUMS}
    assert {line.split("  ", 1)[1] for line in sums} == files


def test_what_is_a_warning(source: Path, tmp_path: Path) -> None:
    """A profiler of devel needs what nobody has, MIOpen has no database: no reason to stop."""
    shutil.rmtree(source / "share/miopen")
    (tmp_path / "prefix/opt").mkdir(parents=True)
    source.rename(tmp_path / "prefix" / tree.ROOT)
    report = tree.stage(tmp_path / "prefix", sdk_tree.COMMIT)
    name = "lib/librocprof-sys.so.1"
    assert f"warning: devel: {name} needs libdyninst.so.13, which no package has" in report
    (line,) = [line for line in report if "MIOpen" in line]
    assert line.startswith("warning: no find-db for gfx1151")


def test_all_faults_are_named_at_once(source: Path, tmp_path: Path) -> None:
    """Each costs the download of 1.8 GB and a start otherwise."""
    (source / "include/amd_smi/amdsmi.h").unlink()
    (source / "lib/cmake/hip/hip-config.cmake").write_text('set(A "/home/runner/x")\n')
    sdk_tree.library(source / "lib/libamd_comgr.so.3", ["libtinfo.so.6"])
    with pytest.raises(SystemExit) as refused:
        stage(source, tmp_path)
    for part in ("no include/amd_smi/amdsmi.h", "names /home/runner/x", "needs libtinfo.so.6"):
        assert part in str(refused.value)


def test_files_that_no_rule_knows_are_counted(source: Path, tmp_path: Path) -> None:
    """With the commit, which is the likely reason; a release may bring a folder of thousands."""
    for number in range(1000):
        (source / f"surprise-{number:03}").touch()
    (source / tree.MANIFEST).write_text(json.dumps({"the_rock_commit": "0" * 40}))
    with pytest.raises(SystemExit) as refused:
        stage(source, tmp_path)
    lines = str(refused.value).splitlines()
    assert lines[0].endswith(f"the recipe {sdk_tree.COMMIT}") and len(lines) == 22
    assert lines[1].startswith("surprise-000: no rule") and lines[-1] == "and 980 more like these"


def test_the_archive_is_unpacked_and_removed(made: Path, tmp_path: Path) -> None:
    archive = sdk_tree.pack(made, tmp_path / "therock.tar.gz")
    prefix = tmp_path / "prefix"
    done = run(RECIPE / "tree.py", archive, prefix, "core", sdk_tree.COMMIT, tmp_path / "licenses")
    assert done.returncode == 0, done.stderr
    assert "files dropped:" in done.stdout and "core: " in done.stdout
    assert not archive.exists()
    present = tree.list_files(prefix / tree.ROOT)
    assert present and {tree.find_part(n, p.is_symlink()) for n, p in present.items()} == {"core"}


@pytest.mark.parametrize("size", [0, 1000, -1000])
def test_a_damaged_archive(made: Path, tmp_path: Path, size: int) -> None:
    archive = sdk_tree.pack(made, tmp_path / "therock.tar.gz")
    os.truncate(archive, size if size >= 0 else archive.stat().st_size + size)
    with pytest.raises(SystemExit, match="therock.tar.gz cannot be unpacked: "):
        tree.unpack(archive, tmp_path / "tree")
    assert archive.exists()


def test_each_file_is_in_one_package(source: Path, tmp_path: Path) -> None:
    """The union of the packages is the staged tree, and none is in two."""
    staged = stage(source, tmp_path)
    whole = set(tree.list_files(staged))
    parts = {}
    for part in tree.PARTS:
        copy = tmp_path / part
        subprocess.run(["cp", "-a", tmp_path / "prefix", copy], check=True)
        tree.keep_part(copy, part, tmp_path / f"{part}-licenses")
        assert (tmp_path / f"{part}-licenses/share/doc/hip/LICENSE.txt").read_text() == "MIT\n"
        parts[part] = set(tree.list_files(copy / tree.ROOT))
    assert sorted(n for names in parts.values() for n in names) == sorted(whole)
    assert {"lib/libamdhip64.so", "lib/llvm/lib/libLLVM.so.23.0", tree.SUMS} <= parts["core"]
    kernels = {".kpack/blas_gfx1151.kpack", "lib/rocblas/library/Kernels_gfx1151.co"}
    assert kernels | {"lib/librocblas.so.5", "lib/libplugin.so"} <= parts["libraries"]
    opened = {"lib/libMIOpen.so", "lib/libMIOpenCKGroupedConv_gfx1151.so"}
    assert opened <= parts["libraries"]
    opened = ("amd_smi", "hsa-amd-aqlprofile64", "rocprofiler-sdk", "rocprofiler-sdk-attach")
    assert {f"lib/lib{name}.so" for name in opened} | {"amdgcn"} <= parts["core"]
    assert {"lib/librocprofiler-sdk.so.1", "lib/rocm_sysdeps/share/libdrm/amdgpu.ids"} <= parts[
        "core"
    ]
    devel = {"lib/librocblas.so", "bin/hipcc", "bin/clang", "include/amd_smi/amdsmi.h", "llvm"}
    devel |= {"lib/cmake/amd_smi/amd_smi-config.cmake"}
    assert devel | {"lib/host-math/include/suitesparse/cholmod.h"} <= parts["devel"]
    assert "lib/host-math/lib/libcholmod.so.5" in parts["libraries"]
    driver = ("librocm_sysdeps_gallium_drv_video.so", "radeonsi_drv_video.so")
    needs = ("librocm_sysdeps_drm.so.2", "libnuma.so", "librocm_sysdeps_numa.so.1")
    assert {f"{tree.SYSDEPS}/{name}" for name in (*driver, *needs)} <= parts["core"]


def library(name: str, *needs: str) -> Callable[[Path], object]:
    """Link a library of a tree anew."""
    return lambda source: sdk_tree.library(source / name, [*needs])


# what is done to a tree, and what is said of it; FFTW is left out, and core is installed alone
SPOILED_TREES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another commit": (
        lambda s: (s / tree.MANIFEST).write_text(json.dumps({"the_rock_commit": "0" * 40})),
        f"names TheRock commit {'0' * 40}, but the recipe {sdk_tree.COMMIT}",
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
        library("lib/libamd_comgr.so.3", "libtinfo.so.6"),
        "core: lib/libamd_comgr.so.3 needs libtinfo.so.6, which no package has",
    ),
    "foreign in libraries": (
        library("lib/librocfft.so.0", "libfftw3.so.3"),
        "libraries: lib/librocfft.so.0 needs libfftw3.so.3, which no package has",
    ),
    "of a later package": (
        library("lib/libamd_comgr.so.3", "librocblas.so.5"),
        "core: lib/libamd_comgr.so.3 needs librocblas.so.5",
    ),
    "no cholmod": (
        library("lib/libhipsolver.so.1"),
        "nothing needs lib/host-math/lib/libcholmod.so: remove the GPL",
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


def check_package(prefix: Path):
    return run(RECIPE / "check_package.py", "all", PREFIX=prefix)


def test_check_of_an_installed_package(installed: Path) -> None:
    done = check_package(installed)
    assert done.returncode == 0 and "nothing missing" in done.stdout, done.stderr


def lost_library(root: Path) -> None:
    """One that was never staged, so that only its dependents tell."""
    name = "lib/rocm_sysdeps/lib/librocm_sysdeps_elf.so.1"
    (root / name).unlink()
    lines = (root / tree.SUMS).read_text().splitlines()
    (root / tree.SUMS).write_text("\n".join(line for line in lines if not line.endswith(name)))


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
    "lost library": (lost_library, "needs librocm_sysdeps_elf.so.1, which no package has"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED_PACKAGES.values(), ids=SPOILED_PACKAGES)
def test_check_of_a_spoiled_package(
    installed: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(installed / tree.ROOT)
    done = check_package(installed)
    assert done.returncode == 1 and message in done.stderr, done.stderr


def host_library(name: str) -> str:
    return f"""\
mkdir -p "$PREFIX/lib"
cp -L "$(gcc -print-file-name={name})" "$PREFIX/lib/"
"""


@pytest.fixture
def sdk_project(project: MiniProject, made: Path, tmp_path: Path) -> MiniProject:
    """The real recipe, its archive replaced by the small tree's."""
    (project.root / "build" / "sources").unlink()
    project.recipe("libstdcxx", script=host_library("libstdc++.so.6"))
    project.recipe("libgcc", script=host_library("libgcc_s.so.1"))
    target = project.root / "recipes" / "rocm-sdk"
    subprocess.run(["cp", "-a", RECIPE, RECIPES / "checks", target.parent], check=True)
    (project.root / "LICENSE").write_text("BSD\n")
    archive = sdk_tree.pack(made, tmp_path / "therock-dist-linux-gfx1151-10.0.0.tar.gz")
    recipe = target / "recipe.yaml"
    text, count = re.subn(r"4feabd9f\w+", sha256_file(archive), recipe.read_text())
    assert count == 1
    # the tree's hipcc is a text
    text, count = re.subn(
        r" +- script:\n +# as in an environment.*?compiler_test/\]\n", "", text, flags=re.S
    )
    assert count == 1
    recipe.write_text(text)
    project.forge("sources", "add", str(archive))
    return project


def test_packages(sdk_project: MiniProject) -> None:
    """The recipe through rattler-build: built, tested and placed."""
    sdk_project.forge("build", "rocm-sdk")
    names = {name.split("-10.0.0")[0] for name in sdk_project.packages() if "rocm" in name}
    assert names == {"rocm-sdk", "rocm-sdk-core", "rocm-sdk-libraries", "rocm-sdk-devel"}
    log = (sdk_project.root / "build/logs/rocm-sdk.log").read_text()
    assert log.count("nothing missing") == 4
    for line in ("files dropped:", "$PREFIX core", "$PREFIX libraries", "$PREFIX devel"):
        assert log.count(line) == 1, log
    (whole,) = sdk_project.channel.glob("*/rocm-sdk-10.0.0-*.conda")
    assert not [name for name in Package(whole).payload if name.startswith(tree.ROOT)]
    (libraries,) = sdk_project.channel.glob("*/rocm-sdk-libraries-*.conda")
    package = Package(libraries)
    assert "lib/host-math/lib/libcholmod.so.5" in {n.partition("rocm/")[2] for n in package.payload}
    assert "GPL-2.0-or-later" in package.index["license"].split()
    assert b"GNU GENERAL PUBLIC LICENSE" in package.info["licenses/GPL-2.0.txt"]


def configured(tmp_path: Path, *lost: str, elsewhere: str = "") -> subprocess.CompletedProcess[str]:
    """Configure compiler_test with files of packages that say nothing, without those `lost`."""
    rocm, other = tmp_path / "prefix/opt/rocm", tmp_path / "other"
    for name in cmake_packages():
        place = other if name == elsewhere else rocm
        config = place / "lib/cmake" / name / f"{name}-config.cmake"
        if name not in lost:
            config.parent.mkdir(parents=True)
            config.touch()
    if "roctx64" not in lost:
        (rocm / "lib/libroctx64.so").touch()
    return subprocess.run(
        ["cmake", "-S", RECIPE / "compiler_test", "-B", tmp_path / "found"],
        env=os.environ | {"ROCM_PATH": str(rocm), "CMAKE_PREFIX_PATH": f"{other}:{rocm}"},
        text=True,
        capture_output=True,
        check=False,
    )


def cmake_packages() -> list[str]:
    """The packages that compiler_test asks CMake for."""
    text = (RECIPE / "compiler_test/CMakeLists.txt").read_text()
    return re.search(r"foreach\(name IN ITEMS ([^)]*)\)", text)[1].split()


def test_cmake_is_asked_for_what_torch_asks_for(host_base: None) -> None:
    """By the LoadHIP.cmake of torch's own wheel, which the host base is made of."""
    (version,) = yaml.safe_load((CHECKOUT / "variants.yaml").read_text())["pytorch"]
    (wheel,) = CHECKOUT.glob(f"build/sources/*/torch-{version}-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        text = opened.read("torch/share/cmake/Caffe2/public/LoadHIP.cmake").decode()
    required = set(re.findall(r"find_package_and_print_version\((\S+) REQUIRED", text))
    assert len(required) == 18 and required | {"rccl"} == set(cmake_packages())
    assert "find_library(ROCM_ROCTX_LIB roctx64 " in text


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
@pytest.mark.parametrize(
    ("lost", "elsewhere", "message"),
    [
        (("rocthrust", "hiprtc"), "", ["rocthrust is not found", "hiprtc is not found"]),
        (("roctx64",), "", ["libroctx64.so is not found"]),
        ((), "hipfft", ["hipfft is found in ", ", not below "]),
        ((), "", []),
    ],
)
def test_what_cmake_finds(
    tmp_path: Path, lost: tuple[str, ...], elsewhere: str, message: list[str]
) -> None:
    done = configured(tmp_path, *lost, elsewhere=elsewhere)
    said = " ".join(done.stderr.split())
    assert done.returncode == bool(message), said
    for part in message:
        assert part in said
