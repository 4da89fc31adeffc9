# SPDX-License-Identifier: BSD-3-Clause
"""The rehearsal's makers on a Debian of a few files: layout, run_exports, overlay, refusals."""

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


def library(path: Path, soname: str, *needs: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    gcc(path, soname, "-Wl,--no-as-needed", *needs)
    return path


@pytest.fixture
def small_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root folder with ROCm's shape of Debian's, ELF files of gcc, and no dpkg."""
    root = tmp_path / "debian"
    z = library(root / LIB / "libz.so.1", "libz.so.1")
    library(root / LIB / "libamdhip64.so.7.2", "libamdhip64.so.7", z)
    library(root / LIB / "libhipsolver.so.1.0", "libhipsolver.so.1")
    for name, target in {"libamdhip64.so.7": "libamdhip64.so.7.2"}.items():
        (root / LIB / name).symlink_to(target)
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
    links = [path for path in root.rglob("*") if path.is_symlink() or path.is_file()]
    names = sorted(path.relative_to(root).as_posix() for path in links)
    monkeypatch.setattr(debian, "ROOT", root)
    monkeypatch.setattr(debian, "closure", lambda *_: ["all"])
    monkeypatch.setattr(debian, "files", lambda _: [n for n in names if "libz" not in n])
    monkeypatch.setattr(debian, "version", lambda _: "7.2.4")
    monkeypatch.setattr(debian, "owner", lambda _: "")
    return root


def test_an_archive_in_therocks_layout(small_debian: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    therock.make(tree, checkout.COMMIT, "10.0.0")
    assert (tree / "lib/libamdhip64.so.7").readlink() == Path("libamdhip64.so.7.2")
    assert therock.needed(tree / "lib/libhipsolver.so.1.0") >= {"libcholmod.so.5"}
    assert (tree / "lib/rocm_sysdeps/lib/libz.so.1").is_file(), "what a library needs comes along"
    assert (tree / "lib/llvm/amdgcn/bitcode/ocml.bc").is_file() and (
        tree / "llvm/bin/clang"
    ).exists()
    assert [p.name for p in tree.glob("lib/rocblas/*/library/*")] == ["Kernels_gfx1151.hsaco"]
    assert (tree / "lib/llvm/lib/clang/22/include/stddef.h").is_file()
    assert not [p for p in tree.rglob("*") if p.is_symlink() and not p.exists()]
    assert not (tree / "lib/clang").exists(), "a part of it would be dangling"
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
    """The linker's name leads into the package that has the library; no static one is beside it."""
    part = conda_forge.PARTS[name]
    ((link, target),) = part.links.items()
    root = tmp_path / "debian" / LIB
    root.mkdir(parents=True)
    (root / f"{target}.9").touch()
    (root / Path(link).name).symlink_to(f"{target}.9")
    (root / Path(link).with_suffix(".a").name).touch()
    names = [f"{LIB}/{path.name}" for path in root.iterdir() if path.name != f"{target}.9"]
    monkeypatch.setattr(debian, "ROOT", tmp_path / "debian")
    monkeypatch.setattr(debian, "files", lambda _: names)
    conda_forge.fill(tmp_path / "made", part)
    assert (tmp_path / "made" / link).readlink() == Path(target)
    assert len([*(tmp_path / "made" / "lib").iterdir()]) == 1
    assert {*part.needs} & {*conda_forge.PARTS}


def test_a_package_has_its_run_exports(tmp_path: Path) -> None:
    """And every build string says what it is; a library looks for others beside itself."""
    places = {"lib/libx.so.1": "[$ORIGIN/]", "bin/python3": "[$ORIGIN/../lib]"}
    for name in places:
        library(tmp_path / "files" / name, "libx.so.1")
    exports = conda_forge.weak("libx >=1,<2")
    out = conda_forge.output("libx", "1.2", "rehearsal_0", [], exports, tmp_path / "files")
    recipe = tmp_path / "recipe.yaml"
    whole = {"schema_version": 1, "recipe": {"name": "c", "version": "1"}, "outputs": [out]}
    recipe.write_text(json.dumps(whole))
    build_recipes([recipe], output_dir=tmp_path / "out", channel=[], test="skip")
    (made,) = (tmp_path / "out" / "linux-64").glob("*.conda")
    assert Package(made).index["build"] == "rehearsal_0"
    extract(made, tmp_path / "unpacked")
    found = json.loads((tmp_path / "unpacked/info/run_exports.json").read_text())
    assert found == {"weak": ["libx >=1,<2"]}
    for name, path in places.items():
        words = ["readelf", "-d", tmp_path / "unpacked" / name]
        assert path in subprocess.check_output(words, text=True)
    assert {*conda_forge.PYTHON_NEEDS} < {*conda_forge.PARTS}
    for name, part in conda_forge.PARTS.items():
        assert conda_forge.MARK in part.build.format(mark=conda_forge.MARK), name


def test_recipes_and_stacks_say_which_wheels_there_are(tmp_path: Path) -> None:
    """No version of another form than pip's, and nothing that a recipe or another maker has."""
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
    assert conda_forge.asked(tmp_path) == wheels
    real = conda_forge.asked(CHECKOUT)
    assert {"huggingface_hub>=1.31.0", "pyelftools", "accelerate"} < {*real}
    own = {name for file in CHECKOUT.glob("recipes/*/recipe.yaml") for name in list_packages(file)}
    assert not own & {*map(parse_package_name, real)}
    assert not [name for name in real if "gfx1151" in name]


def test_a_folder_of_wheels_that_an_earlier_run_filled(tmp_path: Path) -> None:
    """The version that pip chose this time is taken, be it older."""
    for version in ("79.0.1", "81.0.0"):
        write_wheel(tmp_path, "setuptools", version)
    found = conda_forge.wheels_of({"setuptools": Version("79.0.1")}, tmp_path)
    assert [str(wheel.version) for wheel in found.values()] == ["79.0.1"]


@pytest.mark.parametrize(("name", "more"), [("fastapi", "uvloop"), ("pybind11", "pybind11-global")])
def test_what_conda_forges_package_requires_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: str
) -> None:
    """pip is asked for it too, which gives the wheel and says so in its report."""
    write_wheel(tmp_path, name, "1.0")
    report = {"install": [{"metadata": {"name": name, "version": "1.0"}}]}
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, json.dumps(report))

    monkeypatch.setattr(conda_forge.subprocess, "run", pip)
    (made,) = conda_forge.from_pypi([f"{name}>=0.1"], tmp_path, tmp_path)
    assert {f"{name}>=0.1", more} < {*asked[0]}
    assert more in Package(made).index["depends"]


def test_another_name_than_pypis(tmp_path: Path) -> None:
    """It asks for the wheel's package: the wheels' own requirements name that one."""
    names = ["prometheus_client", "ray-default", "ray", "rich"]
    assert conda_forge.other_names("prometheus-client", names) == {"prometheus_client"}
    assert conda_forge.other_names("ray", names) == {"ray-default"}
    wheel = Conversion("x.whl", "prometheus-client", "0.26.0", "rehearsal_py314h0_0", [], None, "")
    (made,) = conda_forge.renamed("prometheus_client", wheel, tmp_path)
    index = Package(made).index
    assert (index["name"], index["version"]) == ("prometheus_client", "0.26.0")
    assert index["depends"] == ["prometheus-client ==0.26.0"]
    assert conda_forge.MARK in index["build"]
    assert not [*conda_forge.renamed("prometheus_client", wheel, tmp_path)]


@pytest.mark.parametrize("host", compilers.Host)
def test_a_compiler_behind_conda_forges_name(host: compilers.Host, tmp_path: Path) -> None:
    """It says conda-forge's triple; only the cheap one is clang without optimization."""
    script = tmp_path / "g++"
    script.write_text(compilers.wrapper(host, "g++", "clang++"))
    said = subprocess.run(
        ["sh", script, "-dumpmachine"], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == compilers.TRIPLE
    # the compiler prints how it is called
    script.write_text(re.sub("exec .*?(-22|-14)", "exec echo", script.read_text()))
    words = ["sh", script, "-c", "a b.cc", "-fno-tree-loop-vectorize"]
    called = subprocess.check_output(words, text=True)
    assert "-c a b.cc" in called
    assert (f"-idirafter {tmp_path}/../include" in called) == (host is compilers.Host.CLANG)
    assert ("-fno-tree-loop-vectorize" in called) == (host is compilers.Host.GXX)
    assert ("-O0" in script.read_text()) == (host is compilers.Host.CLANG)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> checkout.Place:
    """The copy of a checkout that the overlay changes, and an archive of one byte."""
    monkeypatch.setattr(debian, "version", lambda _: "7.2.4+dfsg-1")
    place = checkout.Place.make(tmp_path / "rehearsal")
    ours = (checkout.RECIPE, checkout.BASES, checkout.GATE, checkout.VARIANTS, checkout.TORCH)
    thin = (thin_vllm.BUILD, thin_torch.OPTIONS, thin_torch.CHECK)
    for name in (*ours, *thin, "recipes/torchaudio/recipe.yaml"):
        (place.root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, place.root / name)
    place.archive_file.write_bytes(b"x")
    return place


@pytest.fixture
def launcher(place: checkout.Place) -> Path:
    """The launcher of compilers and linker of a thin torch."""
    place.overlay(thin_torch)
    return place.root / thin_torch.FOLDER / "thin.sh"


def test_the_overlay_is_printed_and_fits(place: checkout.Place) -> None:
    printed = place.overlay()
    added = [line for line in printed.splitlines() if line.startswith("+") and "+++" not in line]
    hash_of_x = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert len(added) == 10 and any(hash_of_x in line for line in added)
    # what requires a torch for ROCm takes that of a rehearsal
    builds = [line.split()[-1] for line in added if line.endswith(("rocm*", 'rocm*"'))]
    made = "rehearsal_rocm100_gfx1151_py314h0_0"
    assert len(builds) == 3 and all(fnmatch(made, build.strip('"')) for build in builds)
    assert any(line.endswith("python test_without_gpu.py 7.2.4") for line in added)
    assert any('"rehearsal_"' in line for line in added)
    assert any(line.endswith("if not build.startswith(REHEARSED):") for line in added)
    with pytest.raises(checkout.Refused, match="0 times what the overlay changes"):
        place.overlay()


def test_a_copy_is_the_checkout_of_now(tmp_path: Path) -> None:
    """What is gone from the checkout goes from the copy, and what the copy has made stays."""
    place = checkout.Place.make(tmp_path)
    root = place.copy()
    gone, made = root / "recipes/gone/recipe.yaml", root / "build/cache/object"
    for path in (gone, made):
        path.parent.mkdir(parents=True)
        path.write_text("")
    assert checkout.Place.at(tmp_path).copy() == root
    assert (root / "recipes/pytorch/recipe.yaml").exists() and made.exists() and not gone.exists()


def files_in(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def somebodys_checkout(folder: Path) -> dict[str, str]:
    """A clone of somebody's, with work in it that no commit has."""
    for name in ("recipes/mine/recipe.yaml", "patches/mine/0001.patch", "src/mine.py"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text("years of work")
    return files_in(folder)


def test_a_folder_of_somebody_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Its recipes, patches and src were deleted if it was called checkout."""
    before = somebodys_checkout(tmp_path / "checkout")
    with pytest.raises(checkout.Refused, match="holds checkout and was not made by a rehearsal"):
        checkout.Place.make(tmp_path)
    with pytest.raises(checkout.Refused, match="is no rehearsal's folder"):
        checkout.Place.at(tmp_path)
    assert files_in(tmp_path) == before


def test_a_checkout_of_somebody_in_a_rehearsals_folder_is_left_alone(tmp_path: Path) -> None:
    place = checkout.Place.make(tmp_path / "rehearsal")
    before = somebodys_checkout(place.root)
    with pytest.raises(checkout.Refused, match="holds patches and was not made by a rehearsal"):
        place.copy()
    assert files_in(place.root) == before


def test_a_link_out_of_a_rehearsals_folder_is_refused(tmp_path: Path) -> None:
    place = checkout.Place.make(tmp_path / "rehearsal")
    before = somebodys_checkout(tmp_path / "elsewhere")
    place.root.symlink_to(tmp_path / "elsewhere")
    for open_place in (checkout.Place.make, checkout.Place.at):
        with pytest.raises(checkout.Refused, match="checkout is a link"):
            open_place(place.folder)
    assert files_in(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("command", ["forge", "night", "user", "untested"])
def test_each_command_requires_the_mark(tmp_path: Path, command: str) -> None:
    before = somebodys_checkout(tmp_path / "checkout")
    words = [sys.executable, CHECKOUT / "tests" / "rehearsal", command, tmp_path, "flash-attn"]
    if command == "night":
        words.pop()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is no rehearsal's folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and files_in(tmp_path) == before


def test_a_thin_torch_says_what_it_lacks(place: checkout.Place) -> None:
    """What is switched off is printed, and is what the configuration is held against."""
    printed = place.overlay(thin_torch)
    added = " ".join(line for line in printed.splitlines() if line.startswith("+"))
    assert all(f" {name}=OFF" in added for name in {*thin_torch.OFF, "USE_KINETO", "USE_MKLDNN"})
    count = len(thin_torch.DEVICE_CODE.split())
    assert f"device code for {count} HIP files alone" in printed
    assert f"{count} of torch's 261 HIP files" in (CHECKOUT / "docs/rehearsal.md").read_text()
    check = module(place.root / thin_torch.CHECK)
    off = {name for name in check.SUMMARY if f" {name}=OFF" in added}
    assert len(off) == 4 and {check.SUMMARY[name] for name in off} == {"OFF"}
    faults = check.find_faults("", "", "/p", "gfx1151")
    assert not [fault for fault in faults if "Kineto" in fault]


def test_device_code_for_the_files_that_are_named(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's others are not compiled: each is an object with the code object made once."""
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1151")
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\necho "$@" >> said\nfor last; do :; done\ntouch "$last"\n')
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
    named, empty, other, more, gloo = (tmp_path / "said").read_text().splitlines()
    assert named == "-o torch_hip.dir/Copy.o -x hip -c hip/Copy.hip"
    assert gloo == "-o gloo_hip.dir/cuda.o -x hip -c hip/cuda.hip"
    assert "--offload-arch=gfx1151 --offload-device-only" in empty
    for name, line in (("TensorMode", other), ("CopyMore", more)):
        assert f"-MF torch_hip.dir/{name}.o.d -o torch_hip.dir/{name}.o -c " in line
        assert "-fcuda-include-gpubinary -Xclang empty.hipfb" in line and "hip/" not in line
    assert len({line.split("-DABSENT=")[1].split()[0] for line in (other, more)}) == 2


def test_device_code_for_a_few_files_of_vllm(
    place: checkout.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are compiled for the host, with the code object made once."""
    printed = place.overlay(thin_vllm)
    assert f"device code for {len(thin_vllm.DEVICE_CODE.split())} HIP files alone" in printed
    launcher = place.root / thin_vllm.FOLDER / "thin.sh"
    assert " -DCMAKE_HIP_COMPILER_LAUNCHER=$RECIPE_DIR/thin.sh" in printed
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1151")
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\necho "$@" >> said\ntouch empty.hipfb.$PPID\n')
    compiler.chmod(0o755)
    for words in ("-x hip -c a/sampler", "-x hip -c a/fp4", "-x hip -c a/sampler_x", "-c a/fp4"):
        subprocess.run([launcher, compiler, *f"{words}.hip".split()], cwd=tmp_path, check=True)
    named, empty, other, more, plain = (tmp_path / "said").read_text().splitlines()
    assert named == "-x hip -c a/sampler.hip" and plain == "-c a/fp4.hip"
    assert "--offload-arch=gfx1151 --offload-device-only" in empty
    host = "-O0 --offload-host-only -Xclang -fcuda-include-gpubinary -Xclang empty.hipfb"
    assert other == f"-x hip -c a/fp4.hip {host}" and more == f"-x hip -c a/sampler_x.hip {host}"


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
    """Only in the library with kernels: another one that lacks something must not load."""
    source = tmp_path / "missing.cpp"
    source.write_text(MISSING)
    made = f"{name}.so"
    command = [launcher, "g++", "-fPIC", "-fno-plt", "-shared", "-o", made, source.name]
    subprocess.run(command, cwd=tmp_path, check=True)
    load = f"import ctypes; print(ctypes.CDLL('./{made}', 2).call())"
    done = subprocess.run(
        [sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout == "7\n") == loads
    assert loads or "undefined symbol: _ZN" in done.stderr


def test_no_option_for_llvm_is_taken_for_an_output(launcher: Path, tmp_path: Path) -> None:
    """ccache reads the word after -mllvm as an option of its own, -openmp-opt-disable as -o."""
    command = [launcher, "echo", "-mllvm", "-openmp-opt-disable", "-o", "a.o", "-c", "a.cpp"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout == "-mllvm=-openmp-opt-disable -o a.o -c a.cpp\n"


def test_a_precompiled_header_is_known_by_its_headers(launcher: Path, tmp_path: Path) -> None:
    """It names its folder, so ccache has none for another one; the checksum there is the same."""
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
        place.refuse_elsewhere([word.format(own=place.folder) for word in words])
    place.refuse_elsewhere(["publish", "--to", f"{place.folder}/published"])


@pytest.mark.parametrize(
    "words",
    [
        ["forge", "publish", "--to", "/srv/channel"],
        ["forge", "--quiet", "publish", "--to=/srv/channel"],
        ["forge", "publish", "--to", "{own}/published"],
    ],
)
def test_a_user_publishes_nothing(place: checkout.Place, words: list[str]) -> None:
    """The copy's driver, whose gate admits what a rehearsal made, published it anywhere."""
    (place.folder / "published").mkdir()
    with pytest.raises(checkout.Refused, match="user publishes nothing"):
        place.user([word.format(own=place.folder) for word in words])


def test_a_recipe_without_its_tests(place: checkout.Place, tmp_path: Path) -> None:
    """It is built though its test fails and nobody has what it runs with; no channel gets it."""
    shutil.rmtree(place.root)
    project = MiniProject(place.root)
    for part in ("src", "tests/rehearsal"):
        shutil.copytree(CHECKOUT / part, place.root / part)
    project.recipe("lone", run=["nobody-has-this"], test="false")
    for subdir in ("linux-64", "noarch"):
        (place.conda_forge / subdir).mkdir(parents=True)
    write_index(place.conda_forge, write_shards=False)
    assert place.untested("absent", []) == 1
    assert place.untested("lone", ["python=3.14"]) == 0
    (package,) = place.folder.glob("untested/lone/*/*.conda")
    assert package.name.startswith("lone-1.0-") and not project.packages()
    assert "untested lone: exit 0" in (place.folder / "costs.txt").read_text()


READS = """\
import os, sys, tomllib, urllib.request
mirrors = tomllib.load(open(os.path.expanduser("~/.pixi/config.toml"), "rb"))["mirrors"]
for url in sys.argv[1:]:
    print(urllib.request.urlopen(mirrors[url][0] + "/who").read().decode(), file=open("said", "a"))
"""


def test_a_user_has_both_channels_under_their_public_addresses(place: checkout.Place) -> None:
    with pytest.raises(checkout.Refused, match="publish first"):
        place.user(["true"])
    (place.root / "stacks" / "one").mkdir(parents=True)
    for folder, who in ((place.folder / "published", "ours"), (place.conda_forge, "theirs")):
        folder.mkdir()
        (folder / "who").write_text(who)
    words = [sys.executable, "-c", READS, PUBLISHED, CONDA_FORGE]
    assert place.user(words) == 0 and place.user(["false"]) == 1
    assert (place.folder / "user" / "said").read_text() == "ours\ntheirs\n"
    assert (place.folder / "user" / "stacks" / "one").is_dir()
    shutil.rmtree(place.folder / "user" / "stacks")  # as a person does, to begin anew
    assert place.user(["true"]) == 0 and (place.folder / "user" / "stacks" / "one").is_dir()


def test_a_users_command_has_all_its_words(place: checkout.Place) -> None:
    """`forge run STACK -- COMMAND --option`: click took the `--`, and the driver the option."""
    (place.root / "stacks").mkdir(parents=True)
    for folder in (place.folder / "published", place.conda_forge):
        folder.mkdir()
    command = [sys.executable, CHECKOUT / "tests" / "rehearsal", "user", place.folder]
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "a", "--", "b", "--to"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    assert "['a', '--', 'b', '--to']" in done.stdout


def test_a_night_is_that_of_the_copy(place: checkout.Place) -> None:
    """It knows the stand-in as conda-forge, has no GPU, and stays in the rehearsal's folder."""
    place.conda_forge.mkdir()
    (place.conda_forge / "who").write_text("theirs")
    (place.root / "tools").mkdir(exist_ok=True)
    script = place.root / "tools" / "night.py"
    script.write_text(READS.replace("sys.argv[1:]", f'["{CONDA_FORGE}"]') + "print(sys.argv[1:])\n")
    command = [sys.executable, CHECKOUT / "tests" / "rehearsal", "night", place.folder]
    run = {"capture_output": True, "text": True, "cwd": place.folder}
    done = subprocess.run(command, **run, check=True)
    assert f"['--without-gpu', '--to', '{place.folder}/night']" in done.stdout
    assert (place.folder / "said").read_text() == "theirs\n"
    script.write_text("raise SystemExit(3)")
    assert subprocess.run(command, **run, check=False).returncode == 3


def test_another_debian_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = tmp_path / "debian_version"
    release.write_text("12.11\n")
    monkeypatch.setattr(debian, "RELEASE", release)
    with pytest.raises(debian.Missing, match=r"needs Debian sid, and this is 12\.11"):
        debian.require_sid()


def test_the_command_line_lists_what_it_needs() -> None:
    command = [sys.executable, CHECKOUT / "tests" / "rehearsal", "packages"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"hipcc", "g++-14", "patchelf", "ccache"} <= {*printed}


LOADED = """\
import sys
from importlib.metadata import packages_distributions
from rehearsal import __main__
by_module = packages_distributions()
own = [module for module in sys.modules if not module.startswith("_")]  # pip's hooks
print(*(name.lower().replace("_", "-") for module in own for name in by_module.get(module, ())))
"""


def test_the_page_makes_an_environment_with_all_that_is_imported() -> None:
    """`test` has pyelftools, which reads the archive's libraries, and `plan` has not."""
    page = (CHECKOUT / "docs" / "rehearsal.md").read_text()
    (command,) = re.findall(r"(?m)^\./forge (\w+)[^\n]*# makes the driver's environment", page)
    launcher = (CHECKOUT / "forge").read_text()
    (dev,) = re.findall(r"case \$\{1:-\} in (.*)\) environment=dev", launcher)
    lists = ["requirements.txt", *["requirements-dev.txt"] * (command in dev.split(" | "))]
    locked = {n for f in lists for n in re.findall(r"(?m)^(\S+)==", (CHECKOUT / f).read_text())}
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": f"{CHECKOUT / 'tests'}:{CHECKOUT / 'src'}"},
    )
    imported = {*done.stdout.split()}
    assert "pyelftools" in imported and imported <= locked
