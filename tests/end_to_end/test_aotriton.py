# SPDX-License-Identifier: BSD-3-Clause
"""The programs of the aotriton recipe compile, pack and check small kernels, even after a kill."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import aotriton_tree
from support.recipe_checks import RECIPES, load

from forge.files import sha256_file

pytest.importorskip("elftools", reason="the package checks read ELF files with pyelftools")
RECIPE = RECIPES / "aotriton"
check_images = load("aotriton", "check_images")
build_images = load("aotriton", "build_images")

PYTHON = "build/stacks/attention/.pixi/envs/default/bin/python"
COUNT = aotriton_tree.COUNT
JOBS = 2


class Build:
    """A source tree of small kernels, and the command that compiles it into images.

    Attributes:
        root: The folder with the source tree, the cache, the images and the build folders.
        python: The interpreter, which has Triton.
        source: The source tree.
        cache: Triton's cache. All builds share it.
        images: The folder that a build writes the images to.
        number: The number of builds that were started. Each has its own build folder.
    """

    def __init__(self, root: Path, python: Path) -> None:
        self.root = root
        self.python = python
        self.source = aotriton_tree.make(root / "source")
        self.cache = root / "cache"
        self.images = root / "images"
        self.number = 0

    def start(self, **environment: str) -> subprocess.Popen[str]:
        self.number += 1
        command = [self.python, RECIPE / "build_images.py", self.source, self.images]
        command += ["--build", self.root / f"build{self.number}", "--jobs", str(JOBS)]
        command += ["--commit", "c" * 40, "--tree", "d" * 40]
        return subprocess.Popen(
            command,
            env=os.environ | {"TRITON_CACHE_DIR": str(self.cache)} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, code: int = 0, **environment: str) -> str:
        child = self.start(**environment)
        output = child.communicate()[0]
        assert child.returncode == code, output
        return output

    def count_cached_kernels(self) -> int:
        return len(list(self.cache.glob("*/*.hsaco")))

    def hash_objects(self) -> dict[str, str]:
        """Return the SHA-256 of each code object of the last build, by file name."""
        files = (self.root / f"build{self.number}").rglob("*.hsaco")
        return {file.name: sha256_file(file) for file in files}

    def hash_images(self) -> dict[str, str]:
        """Return the SHA-256 of each image, by file name."""
        return {file.name: sha256_file(file) for file in self.images.rglob("*.aks2")}


@pytest.fixture
def build(tmp_path: Path, attention_stack: Path) -> Build:
    return Build(tmp_path, attention_stack / PYTHON)


def test_images_and_upstreams_own_path(build: Build) -> None:
    """The images pass the check, and upstream's compile.py makes the same code objects.

    compile.py runs in one process per kernel, as upstream's build does. No code object contains a
    path of the build folder.
    """
    assert f"kernels: {COUNT} compiled" in build.run()
    kernels = check_images.check(build.images, COUNT)
    assert set(kernels) == set(itertools.product(aotriton_tree.NAMES, aotriton_tree.TYPES))
    hashes = build.hash_objects()
    for file in (build.root / "build1").rglob("*.hsaco"):
        assert str(build.root).encode() not in file.read_bytes()
    rules = (build.root / "build1/Bare.compile").read_text().splitlines()
    environment = os.environ | build_images.COMPILE_ENVIRONMENT
    environment["TRITON_CACHE_DIR"] = str(build.root / "other")
    for rule in rules[::3]:
        arguments = build_images.compile_arguments(rule)
        code_object = build.root / "one" / Path(arguments[4]).name
        code_object.parent.mkdir(exist_ok=True)
        arguments[4] = str(code_object)
        compiler = build.source / "v3python/compile.py"
        subprocess.run([build.python, compiler, *arguments], env=environment, check=True)
        assert sha256_file(code_object) == hashes[code_object.name]


def test_killed_build_goes_on(build: Build) -> None:
    """After a kill, the next run takes the finished kernels from the cache.

    The next run makes the same images as a run that was not killed.
    """
    # The kernels with the last name are compiled last. Each of them writes a file and then hangs.
    child = build.start(TEST_STAYS=max(aotriton_tree.NAMES))
    while len(list(build.root.glob("build1/*/*.stays"))) < JOBS and child.poll() is None:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    num_finished = build.count_cached_kernels()
    assert num_finished == COUNT - COUNT // len(aotriton_tree.NAMES)
    output = build.run()
    compiled, cached = map(int, re.search(r"(\d+) compiled.*, (\d+) from", output).groups())
    assert compiled + cached == COUNT and cached == num_finished
    uninterrupted = Build(build.root / "whole", build.python)
    uninterrupted.run()
    assert build.hash_images() == uninterrupted.hash_images()
    assert f"0 compiled, {COUNT} from the cache" in build.run()
    # The cache stays valid in another environment, where Triton has another path.
    environment = build.root / "environment"
    environment.mkdir()
    triton = next(build.python.parents[1].glob("lib/python*/site-packages/triton"))
    (environment / "triton").symlink_to(triton)
    assert f"0 compiled, {COUNT} from the cache" in build.run(PYTHONPATH=str(environment))


def test_kernel_that_does_not_compile(build: Build) -> None:
    source = build.source / "tritonsrc/flash.py"
    source.write_text(source.read_text().replace("value * 3", "value * nowhere"))
    output = build.run(code=1)
    assert re.search(r"bwd_kernel_dk_dv-[\w-]+\.hsaco does not compile", output)
    assert "Traceback" not in output.partition("does not compile")[0]
    assert not build.images.exists()


def test_triton_that_cannot_be_imported(tmp_path: Path) -> None:
    """The message names the import error.

    If the program did not import Triton before it starts its workers, a failed import would look
    like a lack of memory: in both cases workers end without an answer.
    """
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: no such file')\n")
    output = Build(tmp_path, Path(sys.executable)).run(code=1, PYTHONPATH=str(tmp_path))
    assert output == "triton cannot be imported: ImportError: libtriton.so: no such file\n"


def read_sample_patterns() -> list[str]:
    """Return the patterns by which kernels.sh chooses the images of the variant `sample`."""
    script = '. "$1" && printf %s "$AOTRITON_IMAGES"'
    command = ["bash", "-c", script, "bash", RECIPE / "kernels.sh"]
    environment = os.environ | {"AOTRITON_KERNELS": "sample"}
    output = subprocess.check_output(command, env=environment, text=True)
    return output.split()


def name_image(family: str, dtype: str, head_dim: int, causal: int, padded: str, bias: int) -> str:
    """Return upstream's name FAMILY/NAME of an image without dropout."""
    if family == "bwd_preprocess":
        fields = padded
    elif family == "attn_fwd":
        fields = f"{padded}_F_{causal}_{bias}"
    else:
        fields = f"{causal}_{padded}_F_{bias}"
    return f"{family}/FONLY__\uff0a{dtype}@16_{head_dim}_{fields}___gfx115x"


def count_matches(image: str, patterns: list[str]) -> int:
    return sum(re.match(pattern, image) is not None for pattern in patterns)


def test_sample_is_what_the_package_tests_launch() -> None:
    """The variant `sample` has the images that package tests launch.

    emulate_images.py and check_api.cc launch fp16 kernels with a head dimension of 64. pytorch's
    test_with_gpu.py launches causal kernels of the dtypes and head dimensions in the first loop
    below.
    """
    patterns = read_sample_patterns()
    families = (check_images.FORWARD, *check_images.BACKWARD, "bwd_kernel_fuse")
    for case in itertools.product(families, ("fp16", "bf16"), (64, 128), (0, 3), "F", (0,)):
        assert count_matches(name_image(*case), patterns) == 1, case
    not_launched = [("fp32", 64, 0, "F", 0), ("fp16", 256, 0, "F", 0), ("fp16", 64, 0, "T", 0)]
    for family, case in itertools.product(families, not_launched):
        assert count_matches(name_image(family, *case), patterns) == 0
    with_bias = name_image("attn_fwd", "fp16", 64, 0, "F", 1)
    assert count_matches(with_bias, patterns) == 0


def test_only_chosen_images_are_compiled(tmp_path: Path) -> None:
    """Only images that match a pattern are compiled. A pattern that matches no image is an error.

    Such a pattern was written for another AOTriton version.
    """
    images = {"attn_fwd/FONLY__x": ["a", "b"], "attn_fwd/FONLY__y": ["c"], "bwd/FONLY__x": ["d"]}
    lines = []
    for name, objects in images.items():
        lines.append(";".join(["amd", "flash", *name.split("/"), *objects]))
    (tmp_path / "Bare.cluster").write_text("\n".join(lines))
    (tmp_path / "Bare.compile").write_text("".join(f"d;p;{out};s\n" for out in "abcd"))
    build_images.choose(tmp_path, ["attn_fwd/.*x", "bwd/"])
    assert (tmp_path / "Bare.compile").read_text() == "d;p;a;s\nd;p;b;s\nd;p;d;s\n"
    with pytest.raises(SystemExit, match="name matches gone/x"):
        build_images.choose(tmp_path, ["bwd/", "gone/x"])


def test_process_that_dies(build: Build) -> None:
    output = build.run(code=1, TEST_CRASH="bwd_kernel_dq")
    assert "a process died" in output and str(build.cache) in output
    assert "MAX_JOBS=" in output


# This program prints the arguments that emulated_kernels.arguments() lays out for each case. The
# value of an argument is its name, so that the output shows the order of the arguments. For a
# refused case, the program prints the message of the error. Stdin is a list of cases:
# [kernel, [[kind, size], ...], causal].
SCRIPT = """
import json, sys
from types import SimpleNamespace
from strix_emulate import Argument, EmulatorError
import emulated_kernels

words = " ".join(emulated_kernels.LAYOUTS.values()).replace("[", "").replace("]", "").split()
values = {word[:-2]: word[:-2] for word in words}

def lay_out(name, kinds, causal):
    kinds += [("global_buffer", 8), ("global_buffer", 8), ("hidden_none", 8)]
    declared = tuple(Argument("", 8 * i, size, kind) for i, (kind, size) in enumerate(kinds))
    try:
        kernel = SimpleNamespace(name=name, arguments=declared)
        return emulated_kernels.arguments(kernel, values, causal)
    except EmulatorError as error:
        return str(error)

print(json.dumps([lay_out(*case) for case in json.load(sys.stdin)]))
"""

# Arguments of a kernel. Each has a kind and a size in bytes.
_POINTER = ("global_buffer", 8)
_INT32 = ("by_value", 4)
_INT64 = ("by_value", 8)
# _BASE has the arguments that attn_fwd always takes, without Triton's two scratch pointers. The
# other lists are optional groups of arguments.
_BASE = [_POINTER] * 3 + [_INT32] + [_POINTER] * 2 + [_INT64] * 12 + [_INT32] * 3 + [_POINTER] * 2
_BASE += [_INT32] * 2 + [_POINTER] * 2
_PADDED = [_INT32] * 2
_RANDOM = [_INT32, _POINTER, _POINTER, _INT64, _POINTER, _POINTER]
_WINDOW = [_INT32] * 2
_PERSISTENT = [_POINTER, _INT32, _INT32]

# Cases for attn_fwd: the arguments, whether attention is causal, and the last argument's name.
LAYOUTS = [
    (_BASE, False, "ss_k"),
    (_BASE + _PADDED, False, "Hdim_vo"),
    (_BASE + _WINDOW, True, "Window_right"),
    (_BASE + _PADDED + _RANDOM + _WINDOW + _PERSISTENT, True, "Batch"),
    (_BASE + _RANDOM + [_INT32] * 2, False, "Batch"),
]


def test_layouts(attention_stack: Path) -> None:
    """Optional groups of arguments are recognized, and an unknown layout is refused."""
    cases = [("attn_fwd", kinds, causal) for kinds, causal, _ in LAYOUTS]
    cases += [("attn_fwd", [_POINTER, *_BASE], False), ("bwd_kernel_fuse", _BASE, False)]
    done = subprocess.run(
        [attention_stack / PYTHON, "-c", SCRIPT],
        cwd=RECIPE,
        input=json.dumps(cases),
        text=True,
        capture_output=True,
        check=True,
    )
    *laid_out, unknown_layout, unknown_kernel = json.loads(done.stdout)
    for (kinds, _, last), arguments in zip(LAYOUTS, laid_out, strict=True):
        assert len(arguments) == len(kinds) and arguments[:4] == ["Q", "K", "V", "Sm_scale"]
        assert arguments[-1] == last
    assert "fit no known layout" in unknown_layout
    assert "not one of attn_fwd" in unknown_kernel
