# SPDX-License-Identifier: BSD-3-Clause
"""Debian's compilers as conda-forge lays them out: a triple, a sysroot, activation variables."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rehearsal import debian

TRIPLE = "x86_64-conda-linux-gnu"
GCC = "14"
BINUTILS = [
    "ar",
    "as",
    "ld",
    "nm",
    "objcopy",
    "objdump",
    "ranlib",
    "readelf",
    "size",
    "strings",
    "strip",
    "addr2line",
]


class Host(StrEnum):
    """What compiles for the host: as conda-forge does, or the cheapest that gives objects."""

    GXX = "g++"
    CLANG = "clang-O0"


@dataclass(frozen=True)
class Package:
    """One of the compiler packages; `texts` are its scripts, `links` lead out of the prefix."""

    name: str
    version: str
    needs: list[str]
    exports: Any
    texts: dict[str, str]
    links: dict[str, str]
    build: str = "rehearsal_0"

    def write(self, folder: Path) -> Path:
        """Writes its files to a folder, which it returns."""
        folder.mkdir(parents=True)
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        for name, target in self.links.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)
        return folder


def wrapper(host: Host, gcc: str, clang: str) -> str:
    """A script in a compiler's place. What is asked of GCC about itself, GCC answers."""
    run = f'exec /usr/bin/{gcc}-{GCC} "$@"'
    if host is Host.CLANG:
        # the last -O counts, and clang knows no triple of conda's; GCC's own pragmas fill logs
        flags = f'--gcc-install-dir=/usr/lib/gcc/x86_64-linux-gnu/{GCC} "$@" -O0'
        quiet = "-Wno-unused-command-line-argument -Wno-unknown-pragmas"
        # clang refuses what torch.compile asks of anything called g++
        unknown = '[ "$word" = -fno-tree-loop-vectorize ]'
        known = f'for word do shift; {unknown} || set -- "$@" "$word"; done'
        # and clang 22 of Debian has no omp.h, which is the environment's
        header = '-idirafter "${0%/*}/../include"'
        run = f"{known}\nexec /usr/bin/{clang}-22 {flags} {header} {quiet}"
    return f"""#!/bin/sh
case $1 in
    -dumpmachine) echo {TRIPLE}; exit ;;
    -dump*|-print-*) exec /usr/bin/{gcc}-{GCC} "$@" ;;
esac
{run}
"""


C_ACTIVATION = f"""\
export HOST={TRIPLE} BUILD={TRIPLE} CONDA_TOOLCHAIN_HOST={TRIPLE} CONDA_TOOLCHAIN_BUILD={TRIPLE}
_rehearsal_tools="${{CONDA_BUILD_SYSROOT_PREFIX:-$CONDA_PREFIX}}"
[ -n "${{BUILD_PREFIX:-}}" ] && [ "${{CONDA_BUILD:-0}}" = 1 ] && _rehearsal_tools="$BUILD_PREFIX"
export CONDA_BUILD_SYSROOT="$_rehearsal_tools/{TRIPLE}/sysroot"
_rehearsal_in="${{PREFIX:-$CONDA_PREFIX}}"
export CC="$_rehearsal_tools/bin/{TRIPLE}-gcc" GCC="$_rehearsal_tools/bin/{TRIPLE}-gcc"
for _rehearsal_tool in {" ".join(BINUTILS)}; do
    _rehearsal_name=$(echo "$_rehearsal_tool" | tr a-z A-Z)
    export "$_rehearsal_name=$_rehearsal_tools/bin/{TRIPLE}-$_rehearsal_tool"
done
export CPPFLAGS="-DNDEBUG -D_FORTIFY_SOURCE=2 -O2 -isystem $_rehearsal_in/include"
export CFLAGS="-march=nocona -mtune=haswell -ftree-vectorize -fPIC -fstack-protector-strong \
-fno-plt -O2 -ffunction-sections -pipe -isystem $_rehearsal_in/include"
export LDFLAGS="-Wl,-O2 -Wl,--sort-common -Wl,--as-needed -Wl,-z,relro -Wl,-z,now \
-Wl,--disable-new-dtags -Wl,--gc-sections -Wl,--allow-shlib-undefined \
-Wl,-rpath,$_rehearsal_in/lib -Wl,-rpath-link,$_rehearsal_in/lib -L$_rehearsal_in/lib"
_rehearsal_roots="$_rehearsal_in;$CONDA_BUILD_SYSROOT"
export CMAKE_ARGS="-DCMAKE_AR=$AR -DCMAKE_RANLIB=$RANLIB -DCMAKE_LINKER=$LD -DCMAKE_STRIP=$STRIP \
-DCMAKE_BUILD_TYPE=Release -DCMAKE_FIND_ROOT_PATH=$_rehearsal_roots \
-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY \
-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY -DCMAKE_INSTALL_PREFIX=$_rehearsal_in \
-DCMAKE_INSTALL_LIBDIR=lib"
unset _rehearsal_in _rehearsal_tool _rehearsal_name _rehearsal_roots
"""
CXX_ACTIVATION = f"""\
export CXX="$_rehearsal_tools/bin/{TRIPLE}-g++" GXX="$_rehearsal_tools/bin/{TRIPLE}-g++"
export CXXFLAGS="-fvisibility-inlines-hidden -fmessage-length=0 $CFLAGS"
unset _rehearsal_tools
"""


def packages(host: Host) -> list[Package]:
    """The compilers and the C library, under conda-forge's names."""
    version = debian.version(f"g++-{GCC}")
    headers = f"lib/gcc/{TRIPLE}/{version}/include/c++"
    library = {
        f"lib/gcc/{TRIPLE}/{version}/{path.name}": str(path)
        for path in sorted(Path(f"/usr/lib/gcc/x86_64-linux-gnu/{GCC}").glob("*"))
        if path.is_file()
    }
    cxx = {
        f"{headers}/{path.name}": str(path) for path in Path(f"/usr/include/c++/{GCC}").iterdir()
    }
    cxx[f"{headers}/{TRIPLE}"] = f"/usr/include/x86_64-linux-gnu/c++/{GCC}"
    tools = {f"bin/{TRIPLE}-{name}": f"/usr/bin/{name}" for name in BINUTILS}
    activate = "etc/conda/activate.d"
    return [
        Package(
            "sysroot_linux-64",
            "2.28",
            [],
            {"strong": ["__glibc >=2.28,<3.0.a0"]},
            {},
            {f"{TRIPLE}/sysroot": "/"},
        ),
        Package(
            "gcc_linux-64",
            version,
            ["sysroot_linux-64"],
            {"strong": ["libgcc >=14"]},
            {
                f"bin/{TRIPLE}-gcc": wrapper(host, "gcc", "clang"),
                f"bin/{TRIPLE}-cc": wrapper(host, "gcc", "clang"),
                f"{activate}/activate-gcc_linux-64.sh": C_ACTIVATION,
            },
            tools | library,
        ),
        Package(
            "gxx_linux-64",
            version,
            ["gcc_linux-64"],
            {"strong": ["libstdcxx >=14", "libgcc >=14"]},
            {
                f"bin/{TRIPLE}-g++": wrapper(host, "g++", "clang++"),
                f"bin/{TRIPLE}-c++": wrapper(host, "g++", "clang++"),
                f"{activate}/activate-gxx_linux-64.sh": CXX_ACTIVATION,
            },
            cxx,
        ),
        Package(
            "gxx",
            version,
            ["gxx_linux-64"],
            None,
            {"bin/g++": wrapper(host, "g++", "clang++")},
            {},
        ),
        Package(
            "gcc",
            version,
            ["gcc_linux-64"],
            None,
            {"bin/gcc": wrapper(host, "gcc", "clang")},
            {},
        ),
    ]
