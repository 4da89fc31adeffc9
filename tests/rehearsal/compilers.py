# SPDX-License-Identifier: BSD-3-Clause
"""Packages of Debian's compilers with conda-forge's triple, sysroot and activation variables."""

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
    """The host compiler: g++ with conda-forge's options, or clang without optimization."""

    GXX = "g++"
    CLANG = "clang-O0"


@dataclass(frozen=True)
class Package:
    """A package of a compiler or of the C library.

    Attributes:
        name: The name of the package.
        version: Its version.
        needs: Its run requirements.
        exports: Its run_exports, or None.
        texts: Texts of scripts, by path in the prefix.
        links: Targets of links to files of this machine, by path in the prefix.
        build: The build string.
    """

    name: str
    version: str
    needs: list[str]
    exports: Any
    texts: dict[str, str]
    links: dict[str, str]
    build: str = "rehearsal_0"

    def write(self, folder: Path) -> Path:
        """Write the files of the package to a new folder, and return the folder."""
        folder.mkdir(parents=True)
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        for name, target in self.links.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)
        return folder


def make_wrapper(host: Host, gcc: str, clang: str) -> str:
    """Return a script that runs a host compiler. Queries such as -print-file-name always run GCC.

    Args:
        host: The host compiler.
        gcc: GCC's name of the program.
        clang: clang's name of the program.
    """
    run = f'exec /usr/bin/{gcc}-{GCC} "$@"'
    if host is Host.CLANG:
        # clang does not find GCC's files by conda's triple, so it gets their folder. Of several -O
        # options, the last one is in effect.
        flags = f'--gcc-install-dir=/usr/lib/gcc/x86_64-linux-gnu/{GCC} "$@" -O0'
        # Warnings about GCC's options and pragmas would fill the logs.
        no_warnings = "-Wno-unused-command-line-argument -Wno-unknown-pragmas"
        # torch.compile passes this option to any compiler called g++, and clang refuses it.
        is_refused = '[ "$word" = -fno-tree-loop-vectorize ]'
        filter_words = f'for word do shift; {is_refused} || set -- "$@" "$word"; done'
        # Debian's clang 22 has no omp.h, so the file in the environment is used.
        header = '-idirafter "${0%/*}/../include"'
        run = f"{filter_words}\nexec /usr/bin/{clang}-22 {flags} {header} {no_warnings}"
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


def list_packages(host: Host) -> list[Package]:
    """Return the packages of the compilers and of the C library, with conda-forge's names."""
    version = debian.read_version(f"g++-{GCC}")
    gcc_links = {f"bin/{TRIPLE}-{name}": f"/usr/bin/{name}" for name in BINUTILS}
    for path in sorted(Path(f"/usr/lib/gcc/x86_64-linux-gnu/{GCC}").glob("*")):
        if path.is_file():
            gcc_links[f"lib/gcc/{TRIPLE}/{version}/{path.name}"] = str(path)
    headers = f"lib/gcc/{TRIPLE}/{version}/include/c++"
    gxx_links = {f"{headers}/{TRIPLE}": f"/usr/include/x86_64-linux-gnu/c++/{GCC}"}
    for path in Path(f"/usr/include/c++/{GCC}").iterdir():
        gxx_links.setdefault(f"{headers}/{path.name}", str(path))
    gcc = make_wrapper(host, "gcc", "clang")
    gxx = make_wrapper(host, "g++", "clang++")
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
                f"bin/{TRIPLE}-gcc": gcc,
                f"bin/{TRIPLE}-cc": gcc,
                f"{activate}/activate-gcc_linux-64.sh": C_ACTIVATION,
            },
            gcc_links,
        ),
        Package(
            "gxx_linux-64",
            version,
            ["gcc_linux-64"],
            {"strong": ["libstdcxx >=14", "libgcc >=14"]},
            {
                f"bin/{TRIPLE}-g++": gxx,
                f"bin/{TRIPLE}-c++": gxx,
                f"{activate}/activate-gxx_linux-64.sh": CXX_ACTIVATION,
            },
            gxx_links,
        ),
        Package("gxx", version, ["gxx_linux-64"], None, {"bin/g++": gxx}, {}),
        Package("gcc", version, ["gcc_linux-64"], None, {"bin/gcc": gcc}, {}),
    ]
