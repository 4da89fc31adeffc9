# SPDX-License-Identifier: BSD-3-Clause
"""The rocm-sdk recipe on a small tree of the same shape: what is staged, dropped and refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import sdk_tree
from support.project import CHECKOUT, MiniProject, need_pyelftools

from forge.files import sha256_file

RECIPE = CHECKOUT / "recipes" / "rocm-sdk"
sys.path.insert(0, str(RECIPE))
need_pyelftools()
import tree  # noqa: E402

DROPPED = {
    "bin/rocgdb", "bin/rocgdb-py3.12", "bin/test_hip_api", "clients/run",
    "include/gdb/jit-reader.h", "libexec/rocgdb/x", "share/rocgdb/syscalls.xml",
    "lib/rocm_sysdeps/lib/librocm_sysdeps_gmp.so.10",
    "lib/rocm_sysdeps/lib/librocm_sysdeps_gmp.so",
    "lib/rocm_sysdeps/lib/librocm_sysdeps_mpfr.so.6",
    "share/doc/rocgdb/COPYING3",
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sdk_tree.make(tmp_path / "therock")


def stage(source: Path, tmp_path: Path, commit: str = sdk_tree.COMMIT) -> Path:
    tree.stage(source, tmp_path / "prefix", commit)
    return tmp_path / "prefix" / tree.ROOT


def test_stage(source: Path, tmp_path: Path) -> None:
    before = {n: sha256_file(p) for n, p in tree.files_below(source).items() if p.is_file()}
    links = {n: os.readlink(p) for n, p in tree.files_below(source).items() if p.is_symlink()}
    staged = tree.files_below(stage(source, tmp_path))
    gone = set(before) - set(staged)
    assert gone == DROPPED
    changed = {n for n in set(before) & set(staged) if sha256_file(staged[n]) != before[n]}
    assert changed == {"lib/cmake/rocm_smi/rocm_smiTargets.cmake"}
    text = staged[changed.pop()].read_text()
    include = "${_IMPORT_PREFIX}/lib/rocm_sysdeps/include"
    assert text == f'set(DIRS "{include}/libdrm;{include}")\n'
    assert set(staged) - set(before) == {*tree.RUNTIME_LINKS, tree.SUMS}
    for name, target in links.items():
        if name not in DROPPED:
            assert os.readlink(staged[name]) == target
    for name in tree.RUNTIME_LINKS:
        library = tmp_path / "prefix" / "lib" / Path(name).name
        library.parent.mkdir(exist_ok=True)
        library.touch()
        assert staged[name].resolve() == library.resolve()
    sums = (staged[tree.SUMS]).read_text().splitlines()
    files = {n for n, p in staged.items() if not p.is_symlink()} - {tree.SUMS}
    assert {line.split("  ", 1)[1] for line in sums} == files


def test_each_file_is_in_one_package(source: Path, tmp_path: Path) -> None:
    """The union of the packages is the staged tree, and none is in two."""
    staged = stage(source, tmp_path)
    whole = set(tree.files_below(staged))
    parts = {}
    for part in tree.PARTS:
        copy = tmp_path / part
        subprocess.run(["cp", "-a", tmp_path / "prefix", copy], check=True)
        tree.keep(copy, part, tmp_path / f"{part}-licenses")
        assert (tmp_path / f"{part}-licenses/share/doc/hip/LICENSE.txt").read_text() == "MIT\n"
        parts[part] = set(tree.files_below(copy / tree.ROOT))
    assert sorted(n for names in parts.values() for n in names) == sorted(whole)
    assert {"lib/libamdhip64.so", "lib/llvm/lib/libLLVM.so.23.0", tree.SUMS} <= parts["core"]
    kernels = {".kpack/blas_gfx1151.kpack", "lib/rocblas/library/Kernels_gfx1151.co"}
    assert kernels | {"lib/librocblas.so.5", "lib/libplugin.so"} <= parts["libraries"]
    assert {"lib/librocblas.so", "bin/hipcc", "bin/clang"} <= parts["devel"]


def other_commit(source: Path) -> str:
    (source / tree.MANIFEST).write_text(json.dumps({"the_rock_commit": "0" * 40}))
    return f"names TheRock {'0' * 40}, the recipe {sdk_tree.COMMIT}"


def no_manifest(source: Path) -> str:
    (source / tree.MANIFEST).unlink()
    return "is no TheRock manifest"


def dangling(source: Path) -> str:
    (source / "lib/libgone.so.1").symlink_to("libgone.so.1.0")
    return "lib/libgone.so.1 is a link to libgone.so.1.0, which is not in the tree"


def absolute(source: Path) -> str:
    (source / "lib/libhost.so").symlink_to("/lib/x86_64-linux-gnu/libc.so.6")
    return "lib/libhost.so is a link to /lib"


def unexpected(source: Path) -> str:
    (source / "surprise").mkdir()
    (source / "surprise/file").touch()
    return "surprise/file: no rule"


def broken(source: Path) -> str:
    path = source / "lib/librocblas.so.5.0"
    path.write_bytes(path.read_bytes()[:70])
    return "librocblas.so.5.0 is a broken ELF file"


def own_runtime(source: Path) -> str:
    (source / tree.RUNTIME_LINKS[0]).touch()
    return "is there already"


@pytest.mark.parametrize(
    "spoil", [other_commit, no_manifest, dangling, absolute, unexpected, broken, own_runtime]
)
def test_refused(source: Path, tmp_path: Path, spoil) -> None:
    message = spoil(source)
    with pytest.raises(SystemExit, match=re.escape(message)):
        stage(source, tmp_path)


def test_unlicensed_is_refused(source: Path, tmp_path: Path) -> None:
    staged = stage(source, tmp_path)
    (staged / "share/doc/hip/LICENSE.txt").unlink()
    with pytest.raises(SystemExit, match="no licence text"):
        tree.keep(tmp_path / "prefix", "core", tmp_path / "licenses")


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("had", [{}, {"ROCM_PATH": "/mine", "CMAKE_PREFIX_PATH": "/a;b c"}])
def test_activation_restores_what_it_changed(tmp_path: Path, shell: str, had: dict) -> None:
    """Also under `set -eu`, and with a sysroot, for which the compiler gets flags."""
    prefix = tmp_path / "a prefix"
    (prefix / "x86_64-conda-linux-gnu/sysroot").mkdir(parents=True)
    scripts = [
        RECIPE / "activation" / f"{part}-{when}.sh"
        for part, when in [
            ("core", "activate"), ("devel", "activate"),
            ("devel", "deactivate"), ("core", "deactivate"),
        ]
    ]  # fmt: skip
    sources = [f'. "{script}"\nenv -0 > {tmp_path}/{n}' for n, script in enumerate(scripts)]
    start = {"PATH": os.environ["PATH"], "HOME": "/home/me", "CONDA_PREFIX": str(prefix)} | had
    program = "set -eu\n" + "\n".join(sources)
    subprocess.run([shell, "-c", program], env=start, check=True)
    seen = [_environment(tmp_path / str(n)) for n in range(4)]
    assert seen[0]["AMD_COMGR_CACHE_DIR"].startswith("/home/me/.cache/comgr/rocm-")
    rocm = f"{prefix}/opt/rocm"
    assert seen[1]["ROCM_PATH"] == rocm and seen[1]["PATH"].startswith(f"{rocm}/bin:")
    assert seen[1]["CMAKE_PREFIX_PATH"].endswith(had.get("CMAKE_PREFIX_PATH", rocm))
    assert f"--sysroot={prefix}" in seen[1]["HIPCC_COMPILE_FLAGS_APPEND"]
    forbidden = {"HSA_OVERRIDE_GFX_VERSION", "LD_LIBRARY_PATH", "HIP_VISIBLE_DEVICES"}
    assert not forbidden & set(seen[1])
    assert seen[3] == start


def _environment(file: Path) -> dict[str, str]:
    pairs = dict(p.split("=", 1) for p in file.read_text().split("\0") if p)
    return {k: v for k, v in pairs.items() if k not in ("PWD", "SHLVL", "_", "OLDPWD")}


def test_users_own_cache_folder_stays(tmp_path: Path) -> None:
    scripts = [RECIPE / "activation" / f"core-{w}.sh" for w in ("activate", "deactivate")]
    program = "".join(f'. "{script}"\necho "$AMD_COMGR_CACHE_DIR"\n' for script in scripts)
    start = {"HOME": "/home/me", "AMD_COMGR_CACHE_DIR": "/mine"}
    done = subprocess.run(["sh", "-c", program], env=start, capture_output=True, text=True)
    assert done.stdout.split() == ["/mine", "/mine"]


def host_library(name: str) -> str:
    return f"""\
mkdir -p "$PREFIX/lib"
cp -L "$(gcc -print-file-name={name})" "$PREFIX/lib/"
"""


@pytest.fixture
def sdk_project(project: MiniProject, tmp_path: Path) -> MiniProject:
    """The real recipe, its archive replaced by the small tree's."""
    (project.root / "build" / "sources").unlink()
    project.recipe("libstdcxx", script=host_library("libstdc++.so.6"))
    project.recipe("libgcc", script=host_library("libgcc_s.so.1"))
    target = project.root / "recipes" / "rocm-sdk"
    subprocess.run(["cp", "-a", RECIPE, target], check=True)
    (project.root / "LICENSE").write_text("BSD\n")
    archive = sdk_tree.pack(
        sdk_tree.make(tmp_path / "tree"), tmp_path / "therock-dist-linux-gfx1151-10.0.0.tar.gz"
    )
    recipe = target / "recipe.yaml"
    text, count = re.subn(r"4feabd9f\w+", sha256_file(archive), recipe.read_text())
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
