# SPDX-License-Identifier: BSD-3-Clause
"""Package test: Triton uses a kernel from a package, but never a damaged or a wrong kernel.

Each compilation runs in a new process, with an empty user cache.
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


class Environment:
    """A prefix, at first without packaged kernels, and a module with a kernel.

    Attributes:
        folder: The folder that contains the prefix and the module.
        prefix: The prefix.
        module: The file of the module.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = folder / "prefix"
        self.module = folder / "made_here" / "kernels.py"
        self.module.parent.mkdir(parents=True)
        self.module.write_text(MODULE)
        # Triton's files have another path in each environment, so use another path here as well.
        (folder / "triton").symlink_to(Path(triton.__file__).parent)

    def compile(self, version: str = triton.__version__) -> dict:
        """Run COMPILE in a new process, which must not print an error, and return its output.

        Args:
            version: The version that Triton is told to have.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as cache:
            environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(self.folder)}
            command = [sys.executable, "-c", COMPILE, str(self.prefix), version]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            require(done.returncode == 0 and not done.stderr, f"a process printed: {done.stderr}")
            result = json.loads(done.stdout)
            if result["compiled"]:
                compiled = self.folder / "compiled"
                shutil.rmtree(compiled, ignore_errors=True)
                file = next(iter(result["files"].values()))
                shutil.copytree(Path(file).parent, compiled)
        return result

    def package(self, key: str) -> Path:
        """Put the kernel that was compiled last into a package in the prefix.

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


# Each of these functions, except `flip`, damages a package that has one kernel.


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
    environment = Environment(Path(folder, "first"))
    first = environment.compile()
    second = Environment(Path(folder, "second")).compile()
    require(first["compiled"] and second["compiled"], "an empty cache had the kernel")
    require(first["key"] == second["key"], "the key depends on a path of the environment")
    require(first["code"] == second["code"], "the kernel depends on a path of the environment")

    environment.package(first["key"])
    packaged = environment.compile()
    is_packaged = not packaged["compiled"] and packaged["code"] == first["code"]
    require(is_packaged, "the kernel in the package was not used")
    is_in_prefix = all(str(environment.prefix) in path for path in packaged["files"].values())
    require(is_in_prefix, "the kernel does not come from the prefix")

    other_version = environment.compile(version="0.0.0")
    require(other_version["compiled"], "a kernel of another Triton was used")
    environment.module.write_text(MODULE.replace("* 2.0", "* 3.0"))
    changed = environment.compile()
    is_compiled = changed["compiled"] and changed["code"] != first["code"]
    require(is_compiled, "a kernel with other source code was used")
    environment.module.write_text(MODULE)
    environment.compile(version="0.0.0")  # package() packs the kernel that was compiled last

    for name, damage in DAMAGES.items():
        damage(environment.package(first["key"]))
        result = environment.compile()
        is_compiled = result["compiled"] and result["code"] == first["code"]
        require(is_compiled, f"{name}: a damaged package was used")
        print(f"{name}: compiled again")
print(
    "the kernel is the same in two environments, is found in a package, and is compiled again if "
    "the package does not fit or is damaged"
)
