# SPDX-License-Identifier: BSD-3-Clause
"""Make AMD's wheels of torch, as pip installed them, the files of our packages.

usage: from_wheels.py SITE_PACKAGES PREFIX SOURCE_TREE TORCH_VERSION TRITON_VERSION

AMD's libraries have no RPATH to ROCm, and patchelf damages those whose device code was split off.
Instead AMD's `torch/_rocm_init.py` loads ROCm's libraries by name before torch's own; the one that
is written here does so from opt/rocm. So a program without Python cannot use this libtorch.
"""

import re
import shutil
import sys
from pathlib import Path

from lay_out import lay_out

from checks import elf
from checks.loaded_from import is_glibc

# Beside torch's own libraries, from which they are found: the attention kernels of libaotriton, and
# the device code that was split off (../.kpack).
BESIDE = {"lib/aotriton.images": "lib/aotriton.images", ".kpack": ".kpack"}
KERNELS = [".kpack/*gfx1151*.kpack", "lib/aotriton.images/amd-gfx115x/**/*"]
ROCM = ["lib", "lib/rocm_sysdeps/lib", "lib/host-math/lib", "lib/llvm/lib"]
INIT = '''\
"""Loads ROCm's libraries from opt/rocm. Written by strix-forge in place of AMD's, which takes them
from AMD's wheels."""

import ctypes
import sys
from pathlib import Path

LIBRARIES = {libraries}


def initialize() -> None:
    for name in LIBRARIES:
        ctypes.CDLL(str(Path(sys.prefix, "opt/rocm", name)), mode=ctypes.RTLD_GLOBAL)
'''


def from_wheels(site: Path, prefix: Path, source: Path, torch: str, triton: str) -> None:
    """Raises SystemExit where the wheels are not those that the recipe means, or lack a part."""
    info = _info(site, torch)
    _require_kernels(site / "torch")
    _state_what_is_needed(info / "METADATA", triton)
    shutil.copytree(info / "licenses", source / "licenses")
    own = [path.name for path in (site / "torch/lib").glob("lib*.so*")]
    for name, target in BESIDE.items():
        (prefix / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(site / "torch" / name, prefix / target)
    # with a version in their name, which lay_out would take for what nobody needs
    for path in (site / "torch/lib").glob("lib*.so*"):
        if path.name.startswith("libaotriton") or path.suffix != ".so":
            shutil.move(path, prefix / "lib" / path.name)
    shutil.rmtree(site / "torch/include/pybind11", ignore_errors=True)  # the environment's
    lay_out(site / "torch", prefix, source)
    files = [*(prefix / "lib" / name for name in own), *(site / "torch").glob("*.so")]
    libraries = _rocm_libraries(files, prefix)
    text = INIT.format(libraries=repr(libraries).replace(", ", ",\n    "))
    (site / "torch/_rocm_init.py").write_text(text)


def _info(site: Path, torch: str) -> Path:
    found = sorted(site.glob("torch-*.dist-info"))
    if len(found) != 1 or not found[0].name.startswith(f"torch-{torch}+rocm"):
        names = ", ".join(path.name for path in found) or "nothing"
        sys.exit(f"the wheels hold {names}, and the recipe is for torch {torch}: see amd_wheel")
    return found[0]


def _require_kernels(torch: Path) -> None:
    """Without its device packages torch imports, and fails at the first kernel."""
    for pattern in KERNELS:
        if not any(path.is_file() for path in torch.glob(pattern)):
            sys.exit(f"{torch} has no {pattern}: a wheel of device code is missing or changed")


def _state_what_is_needed(metadata: Path, triton: str) -> None:
    """Requirements of AMD's own distributions become those of our packages."""
    text = metadata.read_text()
    text = re.sub(r"^Requires-Dist: (rocm|amd-torch-device)\b.*\n", "", text, flags=re.M | re.I)
    text = re.sub(r"^(Requires-Dist: triton)\b[^;\n]*", rf"\1=={triton}", text, flags=re.M)
    metadata.write_text(text)


def _rocm_libraries(files: list[Path], prefix: Path) -> list[str]:
    """What torch's files need of opt/rocm, as paths in it. Raises SystemExit if it is nowhere."""
    needs = {name: path.name for path in files for name in elf.dynamic(path).needed}
    libraries, missing = [], []
    for name in sorted(name for name in needs if not (prefix / "lib" / name).exists()):
        found = next((f"{f}/{name}" for f in ROCM if (prefix / "opt/rocm" / f / name).exists()), "")
        if found:
            libraries.append(found)
        elif not is_glibc(name):
            missing.append(f"{needs[name]} needs {name}")
    if missing:
        sys.exit(f"neither AMD's wheels nor the environment have it: {'; '.join(missing)}")
    return libraries


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__.split("\n\n")[1])
    from_wheels(*map(Path, sys.argv[1:4]), *sys.argv[4:])
