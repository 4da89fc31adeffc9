# SPDX-License-Identifier: BSD-3-Clause
"""Move what is not Python out of site-packages/torch, to where conda-forge's libtorch has it.

usage: lay_out.py SITE_PACKAGES/torch PREFIX SOURCE_TREE

Links stay in site-packages, for torch finds its parts there. The link of lib is one of the folder,
not of each library: glibc takes $ORIGIN from the path by which a library was found, and `..` from a
linked folder leads back into the prefix. So $ORIGIN/../opt/rocm/lib holds for both paths, and
AOTriton finds its images beside its library.
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
# Copies that torch's build made of the aotriton package; with wildcards to find dangling links too.
COPIES = ["lib/libaotriton*", "lib/aotriton*", "include/aotriton*"]


def lay_out(torch: Path, prefix: Path, source_tree: Path) -> None:
    """Lay out an installed torch.

    Args:
        torch: The folder site-packages/torch.
        prefix: The prefix.
        source_tree: The folder of the build.

    Raises:
        SystemExit: A part is missing, a file is in the way, or a text names the source tree.
    """
    _remove_copies(torch)
    for folder, patterns in PARTS.items():
        for pattern in patterns:
            paths = sorted((torch / folder).glob(pattern))
            if not paths:
                sys.exit(f"{torch / folder} has no {pattern}: torch installs something else now")
            for path in paths:
                _move(path, prefix / folder / path.name)
    # bundled static libraries and tools, which no extension uses, go with the folders
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
        sys.exit(f"{target} is there already: another package of the host environment has it")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)


def _link(path: Path, target: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__.split("\n\n")[1])
    lay_out(*map(Path, sys.argv[1:]))
