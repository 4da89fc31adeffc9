# SPDX-License-Identifier: BSD-3-Clause
"""The aotriton recipe's own code on small kernels: compiled, killed, resumed, packed, checked."""

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
COUNT, JOBS = aotriton_tree.COUNT, 2


class Build:
    """A source tree, and the command that makes images of it."""

    def __init__(self, root: Path, python: Path) -> None:
        self.python, self.root, self.source = python, root, aotriton_tree.make(root / "source")
        self.cache, self.images, self.number = root / "cache", root / "images", 0

    def start(self, **environment: str) -> subprocess.Popen[str]:
        self.number += 1
        command = [self.python, RECIPE / "build_images.py", self.source, self.images]
        command += ["--build", self.root / f"build{self.number}", "--jobs", str(JOBS)]
        return subprocess.Popen(
            [*command, "--commit", "c" * 40, "--tree", "d" * 40],
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

    def finished(self) -> list[Path]:
        return list(self.cache.glob("*/*.hsaco"))

    def objects(self) -> dict[str, str]:
        files = (self.root / f"build{self.number}").rglob("*.hsaco")
        return {file.name: sha256_file(file) for file in files}


@pytest.fixture
def build(tmp_path: Path, attention_stack: Path) -> Build:
    return Build(tmp_path, attention_stack / PYTHON)


def test_images_and_upstreams_own_path(build: Build) -> None:
    """The images pass the check, and one process per kernel makes the same code objects.

    No kernel has a path of the build.
    """
    assert f"kernels: {COUNT} compiled" in build.run()
    found = check_images.check(build.images, COUNT)
    assert set(found) == {(n, t) for n in aotriton_tree.NAMES for t in aotriton_tree.TYPES}
    ours = build.objects()
    for file in (build.root / "build1").rglob("*.hsaco"):
        assert str(build.root).encode() not in file.read_bytes()
    rules = (build.root / "build1/Bare.compile").read_text().splitlines()
    environment = os.environ | build_images.COMPILE_ENVIRONMENT
    environment["TRITON_CACHE_DIR"] = str(build.root / "other")
    for rule in rules[::3]:
        arguments = build_images.compile_arguments(rule)
        out = build.root / "one" / Path(arguments[4]).name
        out.parent.mkdir(exist_ok=True)
        arguments[4] = str(out)
        compiler = build.source / "v3python/compile.py"
        subprocess.run([build.python, compiler, *arguments], env=environment, check=True)
        assert sha256_file(out) == ours[out.name]


def test_killed_build_goes_on(build: Build) -> None:
    """What a killed run had finished comes from the cache, into the same images."""
    child = build.start(TEST_STAYS=max(aotriton_tree.NAMES))  # those come last
    while len(list(build.root.glob("build1/*/*.stays"))) < JOBS and child.poll() is None:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    done = len(build.finished())
    assert child.returncode == -signal.SIGKILL
    assert done == COUNT - COUNT // len(aotriton_tree.NAMES)
    output = build.run()
    compiled, cached = map(int, re.search(r"(\d+) compiled.*, (\d+) from", output).groups())
    assert compiled + cached == COUNT and cached == done
    again = {file.name: sha256_file(file) for file in build.images.rglob("*.aks2")}
    whole = Build(build.root / "whole", build.python)
    whole.run()
    assert again == {file.name: sha256_file(file) for file in whole.images.rglob("*.aks2")}
    assert f"0 compiled, {COUNT} from the cache" in build.run()
    # the environment of the next build has another path
    other = build.root / "environment"
    other.mkdir()
    triton = next(build.python.parents[1].glob("lib/python*/site-packages/triton"))
    (other / "triton").symlink_to(triton)
    assert f"0 compiled, {COUNT} from the cache" in build.run(PYTHONPATH=str(other))


def test_kernel_that_does_not_compile(build: Build) -> None:
    source = build.source / "tritonsrc/flash.py"
    source.write_text(source.read_text().replace("value * 3", "value * nowhere"))
    output = build.run(code=1)
    assert re.search(r"bwd_kernel_dk_dv-[\w-]+\.hsaco does not compile", output)
    assert "Traceback" not in output.partition("does not compile")[0]
    assert not build.images.exists()


def test_triton_that_cannot_be_imported(tmp_path: Path) -> None:
    """Named as that: workers that cannot start look like those that ran out of memory."""
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: no such file')\n")
    output = Build(tmp_path, Path(sys.executable)).run(code=1, PYTHONPATH=str(tmp_path))
    assert output == "triton cannot be imported: ImportError: libtriton.so: no such file\n"


def sample() -> list[str]:
    """The patterns of kernels.sh."""
    script = '. "$1" && printf %s "$AOTRITON_IMAGES"'
    command = ["bash", "-c", script, "bash", RECIPE / "kernels.sh"]
    environment = os.environ | {"AOTRITON_KERNELS": "sample"}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()


def image(family: str, dtype: str, width: int, causal: int, padded: str, bias: int) -> str:
    """FAMILY/NAME as upstream writes it; dropout is off."""
    fields = (
        f"{padded}_F_{causal}_{bias}" if family == "attn_fwd" else f"{causal}_{padded}_F_{bias}"
    )
    fields = padded if family == "bwd_preprocess" else fields
    return f"{family}/FONLY__\uff0a{dtype}@16_{width}_{fields}___gfx115x"


def test_sample_is_what_the_package_tests_launch() -> None:
    """emulate_images.py and check_api.cc: fp16, 64; pytorch's test_with_gpu.py: all of these."""
    families = (check_images.FORWARD, *check_images.BACKWARD, "bwd_kernel_fuse")
    for case in itertools.product(families, ("fp16", "bf16"), (64, 128), (0, 3), "F", (0,)):
        assert sum(bool(re.match(pattern, image(*case))) for pattern in sample()) == 1, case
    for other in ("fp32", 64, 0, "F", 0), ("fp16", 256, 0, "F", 0), ("fp16", 64, 0, "T", 0):
        assert not any(re.match(p, image(f, *other)) for p in sample() for f in families)
    masked = image("attn_fwd", "fp16", 64, 0, "F", 1)
    assert not any(re.match(pattern, masked) for pattern in sample())


def test_only_chosen_images_are_compiled(tmp_path: Path) -> None:
    """And a pattern that fits none is an error: a set for another AOTriton."""
    images = {"attn_fwd/FONLY__x": ["a", "b"], "attn_fwd/FONLY__y": ["c"], "bwd/FONLY__x": ["d"]}
    lines = [";".join(["amd", "flash", *name.split("/"), *outs]) for name, outs in images.items()]
    (tmp_path / "Bare.cluster").write_text("\n".join(lines))
    (tmp_path / "Bare.compile").write_text("".join(f"d;p;{out};s\n" for out in "abcd"))
    build_images.choose(tmp_path, ["attn_fwd/.*x", "bwd/"])
    assert (tmp_path / "Bare.compile").read_text() == "d;p;a;s\nd;p;b;s\nd;p;d;s\n"
    with pytest.raises(SystemExit, match="name matches gone/x"):
        build_images.choose(tmp_path, ["bwd/", "gone/x"])


def test_process_that_dies(build: Build) -> None:
    output = build.run(code=1, TEST_CRASH="bwd_kernel_dq")
    assert "a process died" in output and str(build.cache) in output


# Lays out arguments of code objects whose values are their own names: stdin is a list of kernel,
# [(kind, size)], causal; of one that is refused it prints why.
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

_POINTER, _WORD, _WIDE = ("global_buffer", 8), ("by_value", 4), ("by_value", 8)
# attn_fwd as compiled without and with its optional groups, up to Triton's two scratch pointers
_BASE = [_POINTER] * 3 + [_WORD] + [_POINTER] * 2 + [_WIDE] * 12 + [_WORD] * 3 + [_POINTER] * 2
_BASE += [_WORD] * 2 + [_POINTER] * 2
_PADDED, _RANDOM = [_WORD] * 2, [_WORD, _POINTER, _POINTER, _WIDE, _POINTER, _POINTER]
_WINDOW, _PERSISTENT = [_WORD] * 2, [_POINTER, _WORD, _WORD]


# and the last argument of each
LAYOUTS = [
    (_BASE, False, "ss_k"),
    (_BASE + _PADDED, False, "Hdim_vo"),
    (_BASE + _WINDOW, True, "Window_right"),
    (_BASE + _PADDED + _RANDOM + _WINDOW + _PERSISTENT, True, "Batch"),
    (_BASE + _RANDOM + [_WORD] * 2, False, "Batch"),
]


def test_layouts(attention_stack: Path) -> None:
    """Optional groups are found, and what is no known layout is refused."""
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
    *given, unknown, other = json.loads(done.stdout)
    for (kinds, _, last), arguments in zip(LAYOUTS, given, strict=True):
        assert len(arguments) == len(kinds) and arguments[:4] == ["Q", "K", "V", "Sm_scale"]
        assert arguments[-1] == last
    assert "fit no known layout" in unknown and "not one of attn_fwd" in other
