# SPDX-License-Identifier: BSD-3-Clause
"""Package test: a kernel from a package is found, and nothing else is ever taken for it.

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
    """An environment's prefix without kernels, and a module with one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, folder / "prefix"
        self.module = folder / "made_here" / "kernels.py"
        self.module.parent.mkdir(parents=True)
        self.module.write_text(MODULE)
        # the same files by another path: what a second environment is
        (folder / "triton").symlink_to(Path(triton.__file__).parent)

    def compile(self, version: str = triton.__version__) -> dict:
        """What a new process gets; it must end well and say nothing."""
        with tempfile.TemporaryDirectory(dir=self.folder) as cache:
            environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(self.folder)}
            command = [sys.executable, "-c", COMPILE, str(self.prefix), version]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            require(done.returncode == 0 and not done.stderr, f"a child said: {done.stderr}")
            found = json.loads(done.stdout)
            self.kept = {Path(path).name: Path(path) for path in found["files"].values()}
            if found["compiled"]:
                shutil.rmtree(self.folder / "compiled", ignore_errors=True)
                shutil.copytree(next(iter(self.kept.values())).parent, self.folder / "compiled")
        return found

    def package(self, key: str) -> Path:
        """Puts the kernel that was compiled last into a package of the prefix."""
        package = self.prefix / "share" / "triton-kernels" / "made-here"
        shutil.rmtree(package, ignore_errors=True)
        (package / key).mkdir(parents=True)
        files = {}
        for name in ("scaled_exp.json", "scaled_exp.hsaco"):
            content = (self.folder / "compiled" / name).read_bytes()
            (package / key / name).write_bytes(content)
            files[name] = hashlib.sha256(content).hexdigest()
        (package / "kernels.json").write_text(json.dumps({"kernels": {key: {"files": files}}}))
        return package


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


with tempfile.TemporaryDirectory() as folder:
    first, second = Bench(Path(folder, "first")), Bench(Path(folder, "second"))
    here, there = first.compile(), second.compile()
    require(here["compiled"] and there["compiled"], "an empty cache had the kernel")
    require(here["key"] == there["key"], "the key names a path of its environment")
    require(here["code"] == there["code"], "the kernel names a path of its environment")

    first.package(here["key"])
    found = first.compile()
    require(not found["compiled"] and found["code"] == here["code"], "the package was not read")
    require(all(str(first.prefix) in path for path in found["files"].values()), "from where?")

    require(first.compile(version="0.0.0")["compiled"], "a kernel of another Triton was taken")
    first.module.write_text(MODULE.replace("* 2.0", "* 3.0"))
    changed = first.compile()
    require(changed["compiled"] and changed["code"] != here["code"], "of another source")
    first.module.write_text(MODULE)
    first.compile(version="0.0.0")  # what package() takes

    damages = {
        "code with a flipped bit": lambda at: flip(at / here["key"] / "scaled_exp.hsaco"),
        "metadata with a flipped bit": lambda at: flip(at / here["key"] / "scaled_exp.json"),
        "no code": lambda at: (at / here["key"] / "scaled_exp.hsaco").unlink(),
        "a folder for code": lambda at: (
            (at / here["key"] / "scaled_exp.hsaco").unlink(),
            (at / here["key"] / "scaled_exp.hsaco").mkdir(),
        ),
        "half a list": lambda at: os.truncate(at / "kernels.json", 40),
        "a list of another form": lambda at: (at / "kernels.json").write_text("[]"),
        "files of another form": lambda at: (at / "kernels.json").write_text(
            json.dumps({"kernels": {here["key"]: {"files": ["scaled_exp.hsaco"]}}})
        ),
    }
    for name, damage in damages.items():
        damage(first.package(here["key"]))
        found = first.compile()
        require(found["compiled"] and found["code"] == here["code"], f"{name}: taken")
        print(f"{name}: compiled anew")
print("the same kernel from two environments, found in a package, and compiled when in doubt")
