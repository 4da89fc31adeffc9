# SPDX-License-Identifier: BSD-3-Clause
"""The programs of tests/rehearsal work with a simulated Debian of a few files.

The programs make an archive and a channel, change a copy of the checkout, and refuse to change
other folders.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.version import Version
from rattler.package_streaming import extract
from rehearsal import checkout, compilers, conda_forge, debian, therock, thin_torch, thin_vllm
from rehearsal.trees import MULTIARCH as LIB
from support.project import CHECKOUT, MiniProject, module
from support.sdk_tree import gcc
from support.wheels import write_wheel

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.conda.local import write_index
from forge.conda.package import Package
from forge.hostbase.wheels import Conversion
from forge.recipes.recipe import list_packages, parse_package_name
from forge.recipes.render import build_recipes

# A CMake file as in Debian's package of HIP.
TARGETS = """\
get_filename_component(_realCurr "${_IMPORT_PREFIX}" REALPATH)
get_filename_component(_realOrig "/usr/lib/x86_64-linux-gnu/cmake/hip" REALPATH)
if(_realCurr STREQUAL _realOrig)
endif()
unset(_realCurr)
get_filename_component(_IMPORT_PREFIX "${_IMPORT_PREFIX}" PATH)
get_filename_component(_IMPORT_PREFIX "${_IMPORT_PREFIX}" PATH)
get_filename_component(_IMPORT_PREFIX "${_IMPORT_PREFIX}" PATH)
get_filename_component(_IMPORT_PREFIX "${_IMPORT_PREFIX}" PATH)
get_filename_component(AMD_COMGR_PREFIX "${AMD_COMGR_PREFIX}" PATH)
get_filename_component(AMD_COMGR_PREFIX "${AMD_COMGR_PREFIX}" PATH)
get_filename_component(AMD_COMGR_PREFIX "${AMD_COMGR_PREFIX}" PATH)
get_filename_component(AMD_COMGR_PREFIX "${AMD_COMGR_PREFIX}" PATH)
if(_IMPORT_PREFIX STREQUAL "/")
set(DIRS "${_IMPORT_PREFIX}/include;/usr/include;/usr/include/libdrm")
set(FILE "${_IMPORT_PREFIX}/lib/x86_64-linux-gnu/libamdhip64.so.7.2")
get_filename_component(_IMPORT_PREFIX "${_DIR}/../../../../../" ABSOLUTE)
"""


def link_library(path: Path, soname: str, *needs: Path) -> Path:
    """Link an empty library that requires other ones, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    gcc(path, soname, "-Wl,--no-as-needed", *needs)
    return path


@pytest.fixture
def small_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root folder with files as in Debian's packages of ROCm. Fixed answers replace dpkg's."""
    root = tmp_path / "debian"
    z = link_library(root / LIB / "libz.so.1", "libz.so.1")
    link_library(root / LIB / "libamdhip64.so.7.2", "libamdhip64.so.7", z)
    link_library(root / LIB / "libhipsolver.so.1.0", "libhipsolver.so.1")
    (root / LIB / "libamdhip64.so.7").symlink_to("libamdhip64.so.7.2")
    (root / "usr/lib/clang/22.1.8").mkdir(parents=True)
    (root / "usr/lib/clang/22.1.8/include").symlink_to("../../llvm-22/lib/clang/22/include")
    texts = {
        "usr/lib/llvm-22/lib/clang/22/include/stddef.h": "",
        f"{LIB}/cmake/hip/hip-targets.cmake": TARGETS,
        f"{LIB}/rocblas/5.2/library/Kernels_gfx1151.hsaco": "ours",
        f"{LIB}/rocblas/5.2/library/Kernels_gfx90a.hsaco": "another's",
        "usr/lib/llvm-22/lib/clang/22/amdgcn/bitcode/ocml.bc": "bitcode",
        "usr/lib/llvm-22/bin/clang": "compiler",
        "usr/share/doc/hipcc/copyright": "MIT",
        "usr/share/man/man1/hipcc.1": "manual",
        "usr/include/hip/hip_runtime.h": "#pragma once\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    files = [path for path in root.rglob("*") if path.is_symlink() or path.is_file()]
    names = sorted(path.relative_to(root).as_posix() for path in files)
    # zlib is installed, but not among the packages of ROCm.
    names_of_rocm = [name for name in names if "libz" not in name]
    monkeypatch.setattr(debian, "ROOT", root)
    monkeypatch.setattr(debian, "list_with_dependencies", lambda *_: ["all"])
    monkeypatch.setattr(debian, "list_files", lambda _: names_of_rocm)
    monkeypatch.setattr(debian, "read_version", lambda _: "7.2.4")
    monkeypatch.setattr(debian, "find_owner", lambda _: "")
    return root


def test_an_archive_in_therocks_layout(small_debian: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    therock.make(tree, checkout.COMMIT, "10.0.0")
    assert (tree / "lib/libamdhip64.so.7").readlink() == Path("libamdhip64.so.7.2")
    assert therock.read_needed(tree / "lib/libhipsolver.so.1.0") >= {"libcholmod.so.5"}
    assert (tree / "lib/rocm_sysdeps/lib/libz.so.1").is_file(), (
        "a library that another one requires must be in the tree"
    )
    assert (tree / "lib/llvm/amdgcn/bitcode/ocml.bc").is_file()
    assert (tree / "llvm/bin/clang").exists()
    assert [p.name for p in tree.glob("lib/rocblas/*/library/*")] == ["Kernels_gfx1151.hsaco"]
    assert (tree / "lib/llvm/lib/clang/22/include/stddef.h").is_file()
    assert [p for p in tree.rglob("*") if p.is_symlink() and not p.exists()] == []
    assert not (tree / "lib/clang").exists(), (
        "the tree must not have this folder, in which links would be dangling"
    )
    assert (tree / "share/doc/hipcc/LICENSE.txt").read_text() == "MIT"
    assert not (tree / "share/man").exists()
    text = (tree / "lib/cmake/hip/hip-targets.cmake").read_text()
    assert "/usr" not in text and "x86_64" not in text
    assert text.count("PATH)") == 6 and '"${_DIR}/../../../../"' in text
    archive = therock.pack(tree, tmp_path / "a.tar.gz")
    first = archive.read_bytes()
    assert therock.pack(tree, archive).read_bytes() == first
    with tarfile.open(archive) as tar:
        assert "lib/libhipsolver.so.1.0" in tar.getnames()


def test_a_library_that_nothing_brought(small_debian: Path, tmp_path: Path) -> None:
    (small_debian / LIB / "libz.so.1").unlink()
    with pytest.raises(debian.Missing, match=r"needs libz\.so\.1"):
        therock.make(tmp_path / "tree", checkout.COMMIT, "10.0.0")


@pytest.mark.parametrize("name", ["zlib", "liblzma-devel"])
def test_headers_apart_from_their_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of headers has a link for the linker, and no static library.

    The link leads to the library, which is in another package.
    """
    part = conda_forge.PARTS[name]
    ((link, target),) = part.links.items()
    root = tmp_path / "debian" / LIB
    root.mkdir(parents=True)
    (root / f"{target}.9").touch()
    (root / Path(link).name).symlink_to(f"{target}.9")
    (root / Path(link).with_suffix(".a").name).touch()
    names = [f"{LIB}/{path.name}" for path in root.iterdir() if path.name != f"{target}.9"]
    monkeypatch.setattr(debian, "ROOT", tmp_path / "debian")
    monkeypatch.setattr(debian, "list_files", lambda _: names)
    folder = tmp_path / "made"
    conda_forge.lay_out_part(folder, part)
    assert (folder / link).readlink() == Path(target)
    assert len(list((folder / "lib").iterdir())) == 1
    assert {*part.needs} & {*conda_forge.PARTS}


def test_a_package_has_its_run_exports(tmp_path: Path) -> None:
    """A package of Debian's files has run_exports, a marked build string and relative RPATHs."""
    rpaths = {"lib/libx.so.1": "[$ORIGIN/]", "bin/python3": "[$ORIGIN/../lib]"}
    for name in rpaths:
        link_library(tmp_path / "files" / name, "libx.so.1")
    exports = conda_forge.weak_exports("libx >=1,<2")
    output = conda_forge.make_output("libx", "1.2", "rehearsal_0", [], exports, tmp_path / "files")
    recipe = tmp_path / "recipe.yaml"
    data = {"schema_version": 1, "recipe": {"name": "c", "version": "1"}, "outputs": [output]}
    recipe.write_text(json.dumps(data))
    build_recipes([recipe], output_dir=tmp_path / "out", channel=[], test="skip")
    (package,) = (tmp_path / "out" / "linux-64").glob("*.conda")
    assert Package(package).index["build"] == "rehearsal_0"
    extract(package, tmp_path / "unpacked")
    run_exports = json.loads((tmp_path / "unpacked/info/run_exports.json").read_text())
    assert run_exports == {"weak": ["libx >=1,<2"]}
    for name, rpath in rpaths.items():
        command = ["readelf", "-d", tmp_path / "unpacked" / name]
        assert rpath in subprocess.check_output(command, text=True)
    assert {*conda_forge.PYTHON_NEEDS} < {*conda_forge.PARTS}
    for name, part in conda_forge.PARTS.items():
        assert conda_forge.MARK in part.build.format(mark=conda_forge.MARK), name


def test_recipes_and_stacks_say_which_wheels_there_are(tmp_path: Path) -> None:
    """The channel gets a wheel for each requirement that pip can read in recipes and stacks.

    Packages that a recipe or another part of the channel provides need no wheel.
    """
    recipe = tmp_path / "recipes" / "a" / "recipe.yaml"
    recipe.parent.mkdir(parents=True)
    (tmp_path / "recipes" / "b").mkdir()
    (recipe.parents[1] / "b" / "recipe.yaml").write_text(
        "outputs: [{package: {name: 'b-${{ gpu_arch }}'}}]\n"
    )
    recipe.write_text("""
package: {name: a}
requirements:
  build: ["${{ compiler('c') }}", {if: linux, then: [regex, zlib], else: six}]
  run: [python >=3.12, a, "b-gfx1151 >=2", "lark >=1.2.2,<2", ffmpeg 8.* lgpl_*, "__glibc >=2.28"]
  run_constraints: [py-opencv]
tests: [{script: x, requirements: {run: [matplotlib-base, "pytorch ${{ pytorch }}.*"]}}]
""")
    stack = tmp_path / "stacks" / "s" / "pixi.toml"
    stack.parent.mkdir(parents=True)
    stack.write_text(
        '[dependencies]\na = "*"\npeft = "*"\ntrl = ">=1.10,<2"\n'
        '[feature.two.dependencies]\nray-default = ">=2"\n[feature.three]\n'
    )
    wheels = [
        "lark>=1.2.2,<2",
        "matplotlib-base",
        "peft",
        "ray-default>=2",
        "regex",
        "six",
        "trl>=1.10,<2",
    ]
    assert conda_forge.list_wheel_specs(tmp_path) == wheels
    specs = conda_forge.list_wheel_specs(CHECKOUT)
    assert {"huggingface_hub>=1.31.0", "pyelftools", "accelerate"} < {*specs}
    names = {parse_package_name(spec) for spec in specs}
    for file in CHECKOUT.glob("recipes/*/recipe.yaml"):
        assert not names & {*list_packages(file)}
    assert not any("gfx1151" in name for name in names)


def test_a_folder_of_wheels_that_an_earlier_run_filled(tmp_path: Path) -> None:
    """The version that pip has chosen is used, even if the folder of wheels has a newer one."""
    for version in ("79.0.1", "81.0.0"):
        write_wheel(tmp_path, "setuptools", version)
    wheels = conda_forge.read_wheels({"setuptools": Version("79.0.1")}, tmp_path)
    assert [str(wheel.version) for wheel in wheels.values()] == ["79.0.1"]


@pytest.mark.parametrize(
    ("name", "further"), [("fastapi", "uvloop"), ("pybind11", "pybind11-global")]
)
def test_what_conda_forges_package_requires_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, further: str
) -> None:
    """A package gets requirements that only conda-forge's package has, and pip resolves them."""
    write_wheel(tmp_path, name, "1.0")
    report = {"install": [{"metadata": {"name": name, "version": "1.0"}}]}
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, json.dumps(report))

    monkeypatch.setattr(conda_forge.subprocess, "run", run)
    (package,) = conda_forge.convert_wheels([f"{name}>=0.1"], tmp_path, tmp_path)
    assert {f"{name}>=0.1", further} < {*commands[0]}
    assert further in Package(package).index["depends"]


def test_another_name_than_pypis(tmp_path: Path) -> None:
    """If conda-forge and PyPI use different names, there is a package for each of the two names.

    The package that is made from the wheel keeps PyPI's name, because other wheels require that
    name. The package with conda-forge's name is empty and requires the other package.
    """
    names = ["prometheus_client", "ray-default", "ray", "rich"]
    assert conda_forge.find_other_names("prometheus-client", names) == {"prometheus_client"}
    assert conda_forge.find_other_names("ray", names) == {"ray-default"}
    wheel = Conversion("x.whl", "prometheus-client", "0.26.0", "rehearsal_py314h0_0", [], None, "")
    (package,) = conda_forge.make_alias("prometheus_client", wheel, tmp_path)
    index = Package(package).index
    assert (index["name"], index["version"]) == ("prometheus_client", "0.26.0")
    assert index["depends"] == ["prometheus-client ==0.26.0"]
    assert conda_forge.MARK in index["build"]
    assert list(conda_forge.make_alias("prometheus_client", wheel, tmp_path)) == []


@pytest.mark.parametrize("host", compilers.Host)
def test_a_compiler_behind_conda_forges_name(host: compilers.Host, tmp_path: Path) -> None:
    """Both host compilers print conda-forge's triple. Only clang compiles without optimization."""
    script = tmp_path / "g++"
    script.write_text(compilers.make_wrapper(host, "g++", "clang++"))
    triple = subprocess.check_output(["sh", script, "-dumpmachine"], text=True)
    assert triple.strip() == compilers.TRIPLE
    # From here on the script prints the options of the compiler.
    script.write_text(re.sub("exec .*?(-22|-14)", "exec echo", script.read_text()))
    command = ["sh", script, "-c", "a b.cc", "-fno-tree-loop-vectorize"]
    options = subprocess.check_output(command, text=True)
    is_clang = host is compilers.Host.CLANG
    assert "-c a b.cc" in options
    assert (f"-idirafter {tmp_path}/../include" in options) == is_clang
    assert ("-fno-tree-loop-vectorize" not in options) == is_clang
    assert ("-O0" in script.read_text()) == is_clang


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> checkout.Place:
    """A rehearsal with a small copy of the checkout, and an archive of one byte in place of AMD's.

    The copy has only files that overlays change. Of the recipes whose requirement `rocm*` is
    replaced, it has only torchaudio's.
    """
    monkeypatch.setattr(debian, "read_version", lambda _: "7.2.4+dfsg-1")
    place = checkout.Place.make(tmp_path / "rehearsal")
    names = [checkout.RECIPE, checkout.BASES, checkout.GATE, checkout.VARIANTS, checkout.TORCH]
    names += [thin_vllm.BUILD, thin_torch.OPTIONS, thin_torch.CHECK]
    names += ["recipes/torchaudio/recipe.yaml"]
    for name in names:
        (place.root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, place.root / name)
    place.archive_file.write_bytes(b"x")
    return place


@pytest.fixture
def launcher(place: checkout.Place) -> Path:
    """The program thin.sh, which launches a thin torch's compilers and linker."""
    place.apply_overlay(thin_torch)
    return place.root / thin_torch.FOLDER / "thin.sh"


def test_the_overlay_is_printed_and_fits(place: checkout.Place) -> None:
    printed = place.apply_overlay()
    added = [line for line in printed.splitlines() if line.startswith("+") and "+++" not in line]
    hash_of_x = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert len(added) == 10 and any(hash_of_x in line for line in added)
    # The build string of a rehearsal's torch matches the requirements for torch with ROCm.
    patterns = [line.split()[-1] for line in added if line.endswith(("rocm*", 'rocm*"'))]
    assert len(patterns) == 3
    for pattern in patterns:
        assert fnmatch("rehearsal_rocm100_gfx1151_py314h0_0", pattern.strip('"'))
    assert any(line.endswith("python test_without_gpu.py 7.2.4") for line in added)
    assert any('"rehearsal_"' in line for line in added)
    assert any(line.endswith("if not build.startswith(REHEARSED):") for line in added)
    with pytest.raises(checkout.Refused, match="but occurs 0 times"):
        place.apply_overlay()


def test_a_copy_is_the_checkout_of_now(tmp_path: Path) -> None:
    """A second copy removes files that the checkout does not have, and keeps built files."""
    place = checkout.Place.make(tmp_path)
    root = place.copy_checkout()
    removed_recipe = root / "recipes/gone/recipe.yaml"
    object_file = root / "build/cache/object"
    for path in (removed_recipe, object_file):
        path.parent.mkdir(parents=True)
        path.write_text("")
    assert checkout.Place.at(tmp_path).copy_checkout() == root
    assert (root / "recipes/pytorch/recipe.yaml").exists()
    assert object_file.exists() and not removed_recipe.exists()


def read_files(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def make_foreign_checkout(folder: Path) -> dict[str, str]:
    """Make the checkout of somebody who has not committed their work; return its files."""
    for name in ("recipes/mine/recipe.yaml", "patches/mine/0001.patch", "src/mine.py"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text("years of work")
    return read_files(folder)


def test_a_folder_of_somebody_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A folder that no rehearsal made is refused, and no file in it is changed.

    An earlier version deleted recipes, patches and src in any folder with the name checkout.
    """
    before = make_foreign_checkout(tmp_path / "checkout")
    with pytest.raises(checkout.Refused, match="contains checkout and was not made by a rehearsal"):
        checkout.Place.make(tmp_path)
    with pytest.raises(checkout.Refused, match="is not the folder of a rehearsal"):
        checkout.Place.at(tmp_path)
    assert read_files(tmp_path) == before


def test_a_checkout_of_somebody_in_a_rehearsals_folder_is_left_alone(tmp_path: Path) -> None:
    place = checkout.Place.make(tmp_path / "rehearsal")
    before = make_foreign_checkout(place.root)
    with pytest.raises(checkout.Refused, match="contains patches and was not made by a rehearsal"):
        place.copy_checkout()
    assert read_files(place.root) == before


def test_a_link_out_of_a_rehearsals_folder_is_refused(tmp_path: Path) -> None:
    place = checkout.Place.make(tmp_path / "rehearsal")
    before = make_foreign_checkout(tmp_path / "elsewhere")
    place.root.symlink_to(tmp_path / "elsewhere")
    for open_place in (checkout.Place.make, checkout.Place.at):
        with pytest.raises(checkout.Refused, match="checkout is a link"):
            open_place(place.folder)
    assert read_files(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("command", ["forge", "night", "user", "untested"])
def test_each_command_requires_the_mark(tmp_path: Path, command: str) -> None:
    before = make_foreign_checkout(tmp_path / "checkout")
    words = [sys.executable, CHECKOUT / "tests" / "rehearsal", command, tmp_path]
    if command != "night":
        words.append("flash-attn")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is not the folder of a rehearsal" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and read_files(tmp_path) == before


def test_a_thin_torch_says_what_it_lacks(place: checkout.Place) -> None:
    """The overlay prints which parts of torch it switches off, and torch's check expects this."""
    printed = place.apply_overlay(thin_torch)
    added = " ".join(line for line in printed.splitlines() if line.startswith("+"))
    for name in (*thin_torch.OFF, "USE_KINETO", "USE_MKLDNN"):
        assert f" {name}=OFF" in added
    count = len(thin_torch.DEVICE_CODE.split())
    assert f"only {count} HIP files get device code" in printed
    check = module(place.root / thin_torch.CHECK)
    off = {name for name in check.SUMMARY if f" {name}=OFF" in added}
    assert len(off) == 4 and {check.SUMMARY[name] for name in off} == {"OFF"}
    faults = check.find_faults("", "", "/p", "gfx1151")
    assert not any("Kineto" in fault for fault in faults)


def test_device_code_for_the_files_that_are_named(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the HIP files of the library torch_hip, only those in DEVICE_CODE are compiled.

    Each other HIP file of torch_hip becomes an object with an empty code object, which is made only
    once. HIP files of other libraries are compiled.
    """
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1151")
    # This compiler writes its options to a file.
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\necho "$@" >> calls\nfor last; do :; done\ntouch "$last"\n')
    compiler.chmod(0o755)
    (tmp_path / "hip").mkdir()
    for folder, name in (
        ("torch_hip.dir", "Copy"),
        ("torch_hip.dir", "TensorMode"),
        ("torch_hip.dir", "CopyMore"),
        ("gloo_hip.dir", "cuda"),
    ):
        command = [launcher, "env", compiler, "-o", f"{folder}/{name}.o", "-x", "hip", "-c"]
        subprocess.run([*command, f"hip/{name}.hip"], cwd=tmp_path, check=True)
    copy, empty, tensor_mode, copy_more, gloo = (tmp_path / "calls").read_text().splitlines()
    assert copy == "-o torch_hip.dir/Copy.o -x hip -c hip/Copy.hip"
    assert gloo == "-o gloo_hip.dir/cuda.o -x hip -c hip/cuda.hip"
    assert "--offload-arch=gfx1151 --offload-device-only" in empty
    for name, line in (("TensorMode", tensor_mode), ("CopyMore", copy_more)):
        assert f"-MF torch_hip.dir/{name}.o.d -o torch_hip.dir/{name}.o -c " in line
        assert "-fcuda-include-gpubinary -Xclang empty.hipfb" in line and "hip/" not in line
    kernels = {line.split("-DABSENT=")[1].split()[0] for line in (tensor_mode, copy_more)}
    assert len(kernels) == 2


def test_device_code_for_a_few_files_of_vllm(
    place: checkout.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HIP files of vLLM that are not in DEVICE_CODE are compiled for the host only.

    They get an empty code object, which is made only once.
    """
    printed = place.apply_overlay(thin_vllm)
    count = len(thin_vllm.DEVICE_CODE.split())
    assert f"only {count} HIP files get device code" in printed
    launcher = place.root / thin_vllm.FOLDER / "thin.sh"
    assert " -DCMAKE_HIP_COMPILER_LAUNCHER=$RECIPE_DIR/thin.sh" in printed
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1151")
    # This compiler writes its options to a file.
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\necho "$@" >> calls\ntouch empty.hipfb.$PPID\n')
    compiler.chmod(0o755)
    for options in ("-x hip -c a/sampler", "-x hip -c a/fp4", "-x hip -c a/sampler_x", "-c a/fp4"):
        command = [launcher, compiler, *f"{options}.hip".split()]
        subprocess.run(command, cwd=tmp_path, check=True)
    sampler, empty, fp4, sampler_x, not_hip = (tmp_path / "calls").read_text().splitlines()
    assert sampler == "-x hip -c a/sampler.hip" and not_hip == "-c a/fp4.hip"
    assert "--offload-arch=gfx1151 --offload-device-only" in empty
    host_only = "-O0 --offload-host-only -Xclang -fcuda-include-gpubinary -Xclang empty.hipfb"
    assert fp4 == f"-x hip -c a/fp4.hip {host_only}"
    assert sampler_x == f"-x hip -c a/sampler_x.hip {host_only}"


# A library whose function call() requires functions of torch that no library has.
MISSING = """\
#include <cstring>
#include <stdexcept>
namespace at { struct Kernel { virtual ~Kernel(); int run(); }; int f(); }
namespace c10d { int g(); }
extern "C" int call() {
  try { return c10d::g() + at::f(); }
  catch (const std::exception& e) { return std::strstr(e.what(), "left out") ? 7 : 8; }
}
extern "C" void* table() { return new at::Kernel(); }
"""


@pytest.mark.parametrize(("name", "loads"), [("libtorch_hip", True), ("libtorch_cpu", False)])
def test_what_was_left_out_of_a_thin_torch_throws(
    name: str, loads: bool, launcher: Path, tmp_path: Path
) -> None:
    """If torch's libraries of kernels lack functions, the launcher adds functions that throw.

    Another library that lacks functions must not load.
    """
    source = tmp_path / "missing.cpp"
    source.write_text(MISSING)
    library = f"{name}.so"
    command = [launcher, "g++", "-fPIC", "-fno-plt", "-shared", "-o", library, source.name]
    subprocess.run(command, cwd=tmp_path, check=True)
    load = f"import ctypes; print(ctypes.CDLL('./{library}', 2).call())"
    done = subprocess.run(
        [sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if loads:
        assert done.stdout == "7\n"
    else:
        assert done.stdout == "" and "undefined symbol: _ZN" in done.stderr


def test_no_option_for_llvm_is_taken_for_an_output(launcher: Path, tmp_path: Path) -> None:
    """The launcher joins `-mllvm` and the word after it.

    ccache would read the second word as an option of the compiler: `-openmp-opt-disable` as `-o`.
    """
    command = [launcher, "echo", "-mllvm", "-openmp-opt-disable", "-o", "a.o", "-c", "a.cpp"]
    printed = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert printed == "-mllvm=-openmp-opt-disable -o a.o -c a.cpp\n"


def test_a_precompiled_header_is_known_by_its_headers(launcher: Path, tmp_path: Path) -> None:
    """The checksum of a precompiled header depends on its headers, and not on its folder.

    A precompiled header contains the path of its folder, so ccache compares the checksum instead.
    """
    # This compiler writes its output and a dependency file.
    compiler = "out=$6; shift 6; touch $out; echo $out: $@ > $out.d"
    sums = []
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "one.h").write_text(text)
        command = [launcher, "false", "sh", "-c", compiler, "sh", "-Xclang", "-emit-pch", "-Xclang"]
        command += ["-include", "-o", "all.pch", f"{folder}/one.h", f"{folder}/one.h"]
        subprocess.run(command, cwd=folder, check=True)
        sums.append((folder / "all.pch.sum").read_text())
    assert sums[0] == sums[1] != sums[2]


def test_a_folder_in_the_checkout_is_refused() -> None:
    with pytest.raises(checkout.Refused, match="outside of it"):
        checkout.Place.make(CHECKOUT / "rehearsal")


@pytest.mark.parametrize(
    "words",
    [
        ["publish"],
        ["publish", "--to", "/srv/channel"],
        ["publish", "--to=https://repo.prefix.dev/strix-forge"],
        ["publish", "--to", "{own}/published", "--to", "/srv/channel"],
    ],
)
def test_publishing_elsewhere_is_refused(place: checkout.Place, words: list[str]) -> None:
    with pytest.raises(checkout.Refused, match="into its own folder"):
        place.require_own_target([word.format(own=place.folder) for word in words])
    place.require_own_target(["publish", "--to", f"{place.folder}/published"])


@pytest.mark.parametrize(
    "words",
    [
        ["forge", "publish", "--to", "/srv/channel"],
        ["forge", "--quiet", "publish", "--to=/srv/channel"],
        ["forge", "publish", "--to", "{own}/published"],
    ],
)
def test_a_user_publishes_nothing(place: checkout.Place, words: list[str]) -> None:
    """A user's command that publishes is refused.

    The copy's driver accepts a rehearsal's packages, and would publish them to any folder.
    """
    (place.folder / "published").mkdir()
    with pytest.raises(checkout.Refused, match="user cannot publish"):
        place.run_as_user([word.format(own=place.folder) for word in words])


def test_a_recipe_without_its_tests(place: checkout.Place) -> None:
    """`untested` builds a recipe although its test fails and its run requirement does not exist.

    The channel does not get the package.
    """
    shutil.rmtree(place.root)
    project = MiniProject(place.root)
    for part in ("src", "tests/rehearsal"):
        shutil.copytree(CHECKOUT / part, place.root / part)
    project.recipe("lone", run=["nobody-has-this"], test="false")
    for subdir in ("linux-64", "noarch"):
        (place.conda_forge / subdir).mkdir(parents=True)
    write_index(place.conda_forge, write_shards=False)
    assert place.build_untested("absent", []) == 1
    assert place.build_untested("lone", ["python=3.14"]) == 0
    (package,) = place.folder.glob("untested/lone/*/*.conda")
    assert package.name.startswith("lone-1.0-") and not project.packages()
    assert "untested lone: exit 0" in (place.folder / "costs.txt").read_text()


# This program reads the file `who` of each channel through the mirror of the channel's public URL,
# and appends the text to the file `answers`.
READ_WHO = """\
import os, sys, tomllib, urllib.request
mirrors = tomllib.load(open(os.path.expanduser("~/.pixi/config.toml"), "rb"))["mirrors"]
for url in sys.argv[1:]:
    answer = urllib.request.urlopen(mirrors[url][0] + "/who").read().decode()
    print(answer, file=open("answers", "a"))
"""


def test_a_user_has_both_channels_under_their_public_addresses(place: checkout.Place) -> None:
    with pytest.raises(checkout.Refused, match="publish first"):
        place.run_as_user(["true"])
    (place.root / "stacks" / "one").mkdir(parents=True)
    for folder, who in ((place.folder / "published", "ours"), (place.conda_forge, "theirs")):
        folder.mkdir()
        (folder / "who").write_text(who)
    words = [sys.executable, "-c", READ_WHO, PUBLISHED, CONDA_FORGE]
    assert place.run_as_user(words) == 0 and place.run_as_user(["false"]) == 1
    home = place.folder / "user"
    assert (home / "answers").read_text() == "ours\ntheirs\n"
    assert (home / "stacks" / "one").is_dir()
    # If a user removes the stacks, the next command copies them again.
    shutil.rmtree(home / "stacks")
    assert place.run_as_user(["true"]) == 0 and (home / "stacks" / "one").is_dir()


def test_a_users_command_has_all_its_words(place: checkout.Place) -> None:
    """A command such as `forge run STACK -- COMMAND --option` is passed on with all words.

    In an earlier version, click removed the `--`, and the driver read the option as its own.
    """
    (place.root / "stacks").mkdir(parents=True)
    for folder in (place.folder / "published", place.conda_forge):
        folder.mkdir()
    command = [sys.executable, CHECKOUT / "tests" / "rehearsal", "user", place.folder]
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "a", "--", "b", "--to"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    assert "['a', '--', 'b', '--to']" in done.stdout


def test_a_night_is_that_of_the_copy(place: checkout.Place) -> None:
    """The copy's tools/night.py uses the stand-in for conda-forge, and runs without a GPU.

    It writes only into the rehearsal's folder, and its exit code is passed on.
    """
    place.conda_forge.mkdir()
    (place.conda_forge / "who").write_text("theirs")
    (place.root / "tools").mkdir(exist_ok=True)
    script = place.root / "tools" / "night.py"
    text = READ_WHO.replace("sys.argv[1:]", f'["{CONDA_FORGE}"]')
    script.write_text(f"{text}print(sys.argv[1:])\n")
    command = [sys.executable, CHECKOUT / "tests" / "rehearsal", "night", place.folder]
    printed = subprocess.check_output(command, cwd=place.folder, text=True)
    assert f"['--without-gpu', '--to', '{place.folder}/night']" in printed
    assert (place.folder / "answers").read_text() == "theirs\n"
    script.write_text("raise SystemExit(3)")
    done = subprocess.run(command, cwd=place.folder, capture_output=True, check=False)
    assert done.returncode == 3


def test_another_debian_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = tmp_path / "debian_version"
    release.write_text("12.11\n")
    monkeypatch.setattr(debian, "RELEASE", release)
    with pytest.raises(debian.Missing, match=r"needs Debian sid, but this machine has 12\.11"):
        debian.require_sid()


def test_the_command_line_lists_what_it_needs() -> None:
    command = [sys.executable, CHECKOUT / "tests" / "rehearsal", "packages"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"hipcc", "g++-14", "patchelf", "ccache"} <= {*printed}


# This program imports all modules of tests/rehearsal, and prints the names of the distributions of
# all imported modules. A module whose name begins with "_" may be a hook that Python loads when it
# starts, such as _distutils_hack of setuptools.
PRINT_DISTRIBUTIONS = """\
import sys
from importlib.metadata import packages_distributions
from rehearsal import __main__
names_by_module = packages_distributions()
for module in list(sys.modules):
    if not module.startswith("_"):
        for name in names_by_module.get(module, ()):
            print(name.lower().replace("_", "-"))
"""


def test_the_page_makes_an_environment_with_all_that_is_imported() -> None:
    """The command of docs/rehearsal.md makes an environment with all that a rehearsal imports.

    A rehearsal needs pyelftools to read the archive's libraries. The environment of `./forge test`
    has pyelftools. The environment of `./forge plan`, for example, does not have it.
    """
    page = (CHECKOUT / "docs" / "rehearsal.md").read_text()
    (command,) = re.findall(r"(?m)^\./forge (\w+)[^\n]*# makes the driver's environment", page)
    launcher = (CHECKOUT / "forge").read_text()
    (dev_commands,) = re.findall(r"case \$\{1:-\} in (.*)\) environment=dev", launcher)
    requirements = (CHECKOUT / "requirements.txt").read_text()
    if command in dev_commands.split(" | "):
        requirements += (CHECKOUT / "requirements-dev.txt").read_text()
    locked = set(re.findall(r"(?m)^(\S+)==", requirements))
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT / 'tests'}:{CHECKOUT / 'src'}"}
    command = [sys.executable, "-c", PRINT_DISTRIBUTIONS]
    imported = set(subprocess.check_output(command, env=environment, text=True).split())
    assert "pyelftools" in imported and imported <= locked
