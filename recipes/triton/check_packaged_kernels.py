# SPDX-License-Identifier: BSD-3-Clause
"""Package test: Triton finds a kernel in a package, and takes nothing else for it.

Each compilation is a process of its own, with an empty cache of the user's.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from checks.verdict import require

MODULE = """
import triton
import triton.language as tl

@triton.jit
def scaled_exp(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(x + at, tl.extra.hip.libdevice.expm1(value) * 2.0, mask=at < n)
"""
COMPILE = """
import hashlib, json, sys
sys.base_prefix = sys.argv[1]
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from made_here.kernels import scaled_exp

triton.runtime.cache.__version__ = sys.argv[2]
events = []
triton.knobs.compilation.listener = lambda **event: events.append(event)
types = {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
source = ASTSource(scaled_exp, signature=types, constexprs={"BLOCK": 256})
kernel = triton.compile(source, target=GPUTarget("hip", "gfx1151", 32))
print(json.dumps({
    "key": triton.runtime.cache._base32(kernel.hash),
    "code": hashlib.sha256(kernel.asm["hsaco"]).hexdigest(),
    "compiled": not events[0]["cache_hit"],
    "files": {name: str(path) for name, path in kernel.metadata_group.items()},
}))
"""


class Bench:
    """An environment's prefix without packaged kernels, and a module with a kernel.

    Attributes:
        folder: The folder of both.
        prefix: The prefix.
        module: The file of the module.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = folder / "prefix"
        self.module = folder / "made_here" / "kernels.py"
        self.module.parent.mkdir(parents=True)
        self.module.write_text(MODULE)
        # the same files by another path, as a second environment has them
        (folder / "triton").symlink_to(Path(triton.__file__).parent)

    def compile(self, version: str = triton.__version__) -> dict:
        """Return what COMPILE prints in a new process. The process must not print an error.

        Args:
            version: The version that Triton takes itself for.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as cache:
            environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(self.folder)}
            command = [sys.executable, "-c", COMPILE, str(self.prefix), version]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            require(done.returncode == 0 and not done.stderr, f"a child said: {done.stderr}")
            result = json.loads(done.stdout)
            if result["compiled"]:
                compiled = self.folder / "compiled"
                shutil.rmtree(compiled, ignore_errors=True)
                file = next(iter(result["files"].values()))
                shutil.copytree(Path(file).parent, compiled)
        return result

    def package(self, key: str) -> Path:
        """Put the kernel that was compiled last into a package of the prefix.

        Args:
            key: Triton's key of the kernel.

        Returns:
            The folder of the package.
        """
        package = self.prefix / "share" / "triton-kernels" / "made-here"
        shutil.rmtree(package, ignore_errors=True)
        kernel = package / key
        kernel.mkdir(parents=True)
        files = {}
        for name in ("scaled_exp.json", "scaled_exp.hsaco"):
            content = (self.folder / "compiled" / name).read_bytes()
            (kernel / name).write_bytes(content)
            files[name] = hashlib.sha256(content).hexdigest()
        write_list(package, {key: {"files": files}})
        return package


def write_list(package: Path, kernels: dict) -> None:
    (package / "kernels.json").write_text(json.dumps({"kernels": kernels}))


# Each function damages the package in a folder, which has one kernel.


def flip_code(package: Path) -> None:
    flip(next(package.glob("*/scaled_exp.hsaco")))


def flip_metadata(package: Path) -> None:
    flip(next(package.glob("*/scaled_exp.json")))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove_code(package: Path) -> None:
    next(package.glob("*/scaled_exp.hsaco")).unlink()


def replace_code_by_folder(package: Path) -> None:
    code = next(package.glob("*/scaled_exp.hsaco"))
    code.unlink()
    code.mkdir()


def cut_list(package: Path) -> None:
    os.truncate(package / "kernels.json", 40)


def replace_list(package: Path) -> None:
    (package / "kernels.json").write_text("[]")


def replace_files(package: Path) -> None:
    (kernel,) = (path.name for path in package.iterdir() if path.is_dir())
    write_list(package, {kernel: {"files": ["scaled_exp.hsaco"]}})


DAMAGES = {
    "code with a flipped bit": flip_code,
    "metadata with a flipped bit": flip_metadata,
    "no code": remove_code,
    "a folder for code": replace_code_by_folder,
    "half a list": cut_list,
    "a list of another form": replace_list,
    "files of another form": replace_files,
}

with tempfile.TemporaryDirectory() as folder:
    bench = Bench(Path(folder, "first"))
    first = bench.compile()
    second = Bench(Path(folder, "second")).compile()
    require(first["compiled"] and second["compiled"], "an empty cache had the kernel")
    require(first["key"] == second["key"], "the key names a path of its environment")
    require(first["code"] == second["code"], "the kernel names a path of its environment")

    bench.package(first["key"])
    packaged = bench.compile()
    is_packaged = not packaged["compiled"] and packaged["code"] == first["code"]
    require(is_packaged, "the package was not read")
    is_in_prefix = all(str(bench.prefix) in path for path in packaged["files"].values())
    require(is_in_prefix, "the kernel is from elsewhere than the prefix")

    other_version = bench.compile(version="0.0.0")
    require(other_version["compiled"], "a kernel of another Triton was taken")
    bench.module.write_text(MODULE.replace("* 2.0", "* 3.0"))
    changed = bench.compile()
    is_compiled = changed["compiled"] and changed["code"] != first["code"]
    require(is_compiled, "a kernel of another source was taken")
    bench.module.write_text(MODULE)
    bench.compile(version="0.0.0")  # package() takes the kernel that was compiled last

    for name, damage in DAMAGES.items():
        damage(bench.package(first["key"]))
        result = bench.compile()
        is_compiled = result["compiled"] and result["code"] == first["code"]
        require(is_compiled, f"{name}: taken")
        print(f"{name}: compiled anew")
print("the same kernel from two environments, found in a package, and compiled when in doubt")
