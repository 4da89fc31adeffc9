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
# What torch's build copied from the aotriton package, with wildcards to find dangling links too.
COPIES = ["lib/libaotriton*", "lib/aotriton*", "include/aotriton*"]


def lay_out(torch: Path, prefix: Path, source_tree: Path) -> None:
    """Raises SystemExit for a missing part, a file in the way, or a path of the build in a text."""
    for path in (path for pattern in COPIES for path in torch.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for folder, patterns in PARTS.items():
        for pattern in patterns:
            found = sorted((torch / folder).glob(pattern))
            if not found:
                sys.exit(f"{torch / folder} has no {pattern}: torch installs something else now")
            for path in found:
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
