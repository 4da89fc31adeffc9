# SPDX-License-Identifier: BSD-3-Clause
"""A small source tree with those interfaces of AOTriton that our recipe calls.

They are v3python.{database_compose, generate, compile, aks2, write_image_signature}. The tree also
has small kernels. They do not compute attention, but they have the names that the checks expect.
"""

import lzma
import struct
from pathlib import Path

NAMES = ("attn_fwd", "bwd_kernel_dk_dv", "bwd_kernel_dq", "bwd_preprocess")
TYPES = ("fp16", "bf16")
WAVES = (0, 2)
COUNT = len(NAMES) * len(TYPES) * len(WAVES)
FILES = {
    "v3python/__init__.py": "",
    "v3python/database_compose.py": "",
    "v3python/generate.py": """\
import argparse, itertools
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--target_gpus")
parser.add_argument("--build_dir", type=Path)
options = parser.parse_args()
source, build = Path.cwd(), options.build_dir
arch = options.target_gpus.removesuffix("_mod0")
compiles, clusters = [], []
for name, dtype in itertools.product({names}, {types}):
    folder = build / name
    folder.mkdir(parents=True, exist_ok=True)
    outs = []
    for per_eu in {waves}:
        outs.append(f"{folder}/{name}-{dtype}-{per_eu}.hsaco")
        compiles.append(f"default;python;{outs[-1]};{source}/tritonsrc/flash.py;{name};4;1;{per_eu};"
                        f"{arch};*{dtype}:16, *{dtype}:16, i32, 64")
    image = f"FONLY__\\uff0a{dtype}@16_64___gfx115x"
    clusters.append(";".join(["amd-gfx115x", "flash", name, image, *outs]))
(build / "Bare.compile").write_text("\\n".join(compiles) + "\\n")
(build / "Bare.cluster").write_text("\\n".join(clusters) + "\\n")
""",
    "v3python/compile.py": """\
import argparse, importlib, json, os, sys, time
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    for name in ("kernel_name", "out", "grid", "num_warps", "num_stages", "waves_per_eu", "target",
                 "signature", "timeout"):
        parser.add_argument(f"-{name[0]}" if name in ("out", "grid") else f"--{name}", dest=name)
    o = parser.parse_args()
    if o.kernel_name == os.environ.get("TEST_CRASH"):
        os._exit(9)
    if o.kernel_name == os.environ.get("TEST_STAYS"):
        Path(o.out).with_suffix(".stays").touch()
        time.sleep(600)
    sys.path.insert(0, str(o.path.parent))
    kernel = getattr(importlib.import_module(o.path.stem), o.kernel_name)
    x, y, n, block = (part.strip().split(":")[0] for part in o.signature.split(","))
    source = triton.compiler.ASTSource(
        fn=kernel, constexprs={"BLOCK": int(block)},
        signature={"x": x, "y": y, "n": n, "BLOCK": "constexpr"},
        attrs={(0,): [("tt.divisibility", 16)], (1,): [("tt.divisibility", 16)]})
    compiled = triton.compile(source, target=GPUTarget("hip", o.target, 32),
                              options={"num_warps": int(o.num_warps),
                                       "waves_per_eu": int(o.waves_per_eu)})
    Path(o.out).write_bytes(compiled.kernel)
    data = {"shared": compiled.metadata.shared, "num_warps": int(o.num_warps), "warp_size": 32}
    Path(o.out).with_suffix(".json").write_text(json.dumps(data))
if __name__ == "__main__":
    main()
""",
    "v3python/aks2.py": """\
import json, lzma, struct
from pathlib import Path
def do_create(args):
    directory, blobs = b"", b""
    for name in args.hsaco_files:
        file = Path(name)
        data, code = json.loads(file.with_suffix(".json").read_text()), file.read_bytes()
        label = file.stem.encode() + b"\\0"
        threads = data["num_warps"] * data["warp_size"]
        sizes = data["shared"], threads, len(blobs), len(code), len(label)
        directory += struct.pack("<5I", *sizes) + label
        blobs += code
    count, size = len(args.hsaco_files), len(directory) + len(blobs)
    head = b"AKS2" + struct.pack("<3I", size, count, len(directory))
    Path(args.o).write_bytes(head + lzma.compress(directory + blobs))
""",
    "v3python/write_image_signature.py": """\
import argparse, json
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("build_dir", "git_sha1", "git_treesha1", "target_arch", "output_file"):
    parser.add_argument(f"--{name}")
o = parser.parse_args()
Path(o.output_file).write_text(json.dumps({"AOTRITON_GIT_SHA1": o.git_sha1}))
""",
    "tritonsrc/flash.py": "import triton\nimport triton.language as tl\n",
}
KERNEL = """\
@triton.jit
def {name}(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, value * {factor}, mask=offsets < n)
"""


def make(root: Path) -> Path:
    """Write the tree and return its folder."""
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        for word, values in {"{names}": NAMES, "{types}": TYPES, "{waves}": WAVES}.items():
            text = text.replace(word, str(values))
        (root / name).write_text(text)
    with (root / "tritonsrc/flash.py").open("a") as source:
        for factor, name in enumerate(NAMES, start=2):
            source.write(KERNEL.format(name=name, factor=factor))
    return root


def image(*kernels: tuple[str, int, bytes]) -> bytes:
    """Return an AKS2 image of kernels.

    Args:
        kernels: For each kernel its name, its bytes of LDS and its code object.
    """
    directory = blobs = b""
    for name, lds, code in kernels:
        label = name.encode() + b"\0"
        directory += struct.pack("<5I", lds, 128, len(blobs), len(code), len(label)) + label
        blobs += code
    head = struct.pack("<3I", len(directory) + len(blobs), len(kernels), len(directory))
    return b"AKS2" + head + lzma.compress(directory + blobs)
