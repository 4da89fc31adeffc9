# SPDX-License-Identifier: BSD-3-Clause
"""Move torch's libraries, headers, program and CMake files from site-packages to the prefix.

usage: lay_out.py SITE_PACKAGES/torch PREFIX SOURCE_TREE

SOURCE_TREE is the folder of the build, which no installed text may name.

The new places are those of conda-forge's libtorch. Links remain in site-packages, because torch
looks for its parts there. site-packages/torch/lib is a single link to the folder lib of the prefix,
and not a folder of links to libraries. The reason is RPATH: glibc replaces $ORIGIN by the folder in
which it has found the library, and does not resolve links. The system resolves the link before it
follows `..`, so from site-packages/torch/lib, too, `..` leads to the prefix. So for a library that
is found in site-packages/torch/lib, $ORIGIN/../opt/rocm/lib is as right as for one that is found in
the prefix's lib. AOTriton, too, finds its images from both folders.
"""

import os
import shutil
import sys
from pathlib import Path

PARTS = {
    "bin": ["torch_shm_manager"],
    "include": ["ATen", "c10", "caffe2", "tensorpipe", "torch"],
    "lib": ["*.so"],
    "share/cmake": ["ATen", "Caffe2", "Tensorpipe", "Torch"],
}
# torch's build copies these files from the aotriton package. Some are dangling links, which glob
# finds only if the pattern has a wildcard.
COPIES = ["lib/libaotriton*", "lib/aotriton*", "include/aotriton*"]


def lay_out(torch: Path, prefix: Path, source_tree: Path) -> None:
    """Lay out an installed torch.

    Args:
        torch: The folder site-packages/torch.
        prefix: The prefix.
        source_tree: The folder of the build.

    Raises:
        SystemExit: A part is missing, a target already exists, or a text names the source tree.
    """
    _remove_copies(torch)
    for folder, patterns in PARTS.items():
        for pattern in patterns:
            paths = sorted((torch / folder).glob(pattern))
            if not paths:
                sys.exit(f"{torch / folder} has no {pattern}, which torch used to install")
            for path in paths:
                _move(path, prefix / folder / path.name)
    # Replace three folders by links. This also removes the static libraries and tools in these
    # folders, which no extension uses.
    for folder in ("bin", "lib", "share"):
        shutil.rmtree(torch / folder)
        _link(torch / folder, prefix / folder)
    for name in [*PARTS["include"], "pybind11"]:
        _link(torch / "include" / name, prefix / "include" / name)
    texts = [*torch.rglob("*.py"), *(prefix / "share/cmake").rglob("*.cmake")]
    for path in texts:
        if str(source_tree).encode() in path.read_bytes():
            sys.exit(f"{path} names the folder of this build, {source_tree}")


def _remove_copies(torch: Path) -> None:
    for pattern in COPIES:
        for path in list(torch.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _move(path: Path, target: Path) -> None:
    if target.exists():
        sys.exit(f"{target} already exists: another package of the host environment has it")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)


def _link(path: Path, target: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__.split("\n\n")[1])
    lay_out(*map(Path, sys.argv[1:]))
