# SPDX-License-Identifier: BSD-3-Clause
"""The packages of the host base are host-bound, and recipes get the machine's compilers."""

import json
import platform
import subprocess

from support.project import MiniProject

from forge.conda.local import LocalChannel


def test_base_channel_is_host_bound_and_recorded(project: MiniProject) -> None:
    folder = project.root / "build" / "host-base"
    records = LocalChannel(folder).records()
    names = {"python", "python_abi", "pytorch", "pytorch-cuda-stubs", "hostgcc_linux-64", "numpy"}
    assert names <= {record.name for record in records}
    assert all(record.build.startswith("hostbound_") for record in records)
    versions = {record.name: str(record.version) for record in records}
    compiler = subprocess.check_output(["gcc", "-dumpfullversion"], text=True).strip()
    assert versions["hostgcc_linux-64"] == versions["hostgxx_linux-64"] == compiler
    assert versions["hostsysroot_linux-64"] == platform.libc_ver()[1]
    assert versions["pytorch"] == "2.13.0"
    wheels = json.loads((folder / "base.json").read_text())["wheels"]
    assert all(len(wheel["sha256"]) == 64 and wheel["purl"] for wheel in wheels)


def test_compilers_resolve_unchanged(project: MiniProject) -> None:
    """A recipe's compiler('c') and stdlib('c'), unchanged, resolve to this machine's compilers."""
    recipe = project.recipe("hello", test="hello | grep -q 42 && hello-cxx | grep -q 42")
    text = (recipe / "recipe.yaml").read_text().replace("  noarch: generic\n", "")
    names = [f'"${{{{ {name} }}}}"' for name in ("compiler('c')", "compiler('cxx')", "stdlib('c')")]
    build = f"  build: [{', '.join(names)}]"
    (recipe / "recipe.yaml").write_text(text.replace("requirements:", f"requirements:\n{build}"))
    (recipe / "h.c").write_text('#include <stdio.h>\nint main(void) { puts("42"); return 0; }\n')
    (recipe / "h.cc").write_text("#include <iostream>\nint main() { std::cout << 42; }\n")
    (recipe / "build.sh").write_text(
        'mkdir -p "$PREFIX/bin"\ncp "$RECIPE_DIR"/h.c* .\n'
        '"$CC" $CFLAGS h.c $LDFLAGS -o "$PREFIX/bin/hello"\n'
        '"$CXX" $CXXFLAGS h.cc $LDFLAGS -o "$PREFIX/bin/hello-cxx"\n'
    )
    project.forge("build-all")
    assert len(list(project.channel.glob("linux-64/hello-*.conda"))) == 1
