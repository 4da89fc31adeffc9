# SPDX-License-Identifier: BSD-3-Clause
"""The checks that run inside packages accept good data and refuse bad data."""

import itertools
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support import aotriton_tree
from support.elf_files import (
    GFX1100,
    GFX1151,
    GOOD,
    TARGET,
    bundle,
    code_object,
    compressed,
)
from support.recipe_checks import RECIPES, load, run

pytest.importorskip("elftools", reason="the package checks read ELF files with pyelftools")
from checks import elf, gpu, offload
from checks.gpu import find_skip_reason
from checks.loaded_from import foreign, libraries
from checks.verdict import CheckFailed, require

check_images = load("aotriton", "check_images")
sys.modules["check_images"] = check_images
select_images = load("aotriton", "select_images")

# --- the verdict


def test_require() -> None:
    require([0], "unused")
    with pytest.raises(CheckFailed, match="the list is empty"):
        require([], "the list is empty")


@pytest.mark.parametrize("optimize", ["", "1", "2"])
def test_a_failed_check_ends_the_program(optimize: str) -> None:
    """A failed check prints only its message and exits with 1.

    This holds even if Python ignores assert statements.
    """
    code = "from checks.verdict import require; require(1 == 2, 'one is not two'); print('passed')"
    done = run("-c", code, PYTHONOPTIMIZE=optimize)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "one is not two\n")


# --- code objects and offload bundles


def test_a_code_object_for_gfx1151() -> None:
    assert elf.fault(code_object()) == ""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (code_object(GFX1100), "is for processor 0x41, not gfx1151 (0x4a)"),
        (code_object(machine=62), "is for EM_X86_64, not AMDGPU"),
        (code_object(osabi=0), "is not a 64-bit HSA code object"),
        (code_object()[:4] + b"\1" + code_object()[5:], "is not a 64-bit HSA code object"),
        (b"text" * 20, "is not an ELF file"),
        (b"", "is not an ELF file"),
    ],
)
def test_another_code_object(code: bytes, message: str) -> None:
    assert message in elf.fault(code)


@pytest.mark.parametrize(
    ("fatbin", "count"),
    [
        (b"", 0),
        (GOOD, 1),
        # The linker concatenates the sections of object files, and aligns them to pages.
        (GOOD.ljust(4096, b"\0") + compressed(GOOD) + b"\0" * 77 + compressed(GOOD, 2), 3),
    ],
)
def test_right_images(fatbin: bytes, count: int) -> None:
    assert offload.count_images(fatbin) == count


@pytest.mark.parametrize(
    ("fatbin", "message"),
    [
        (bundle({"hipv4-amdgcn-amd-amdhsa--gfx1100": code_object()}), "image for hipv4"),
        (compressed(bundle({"hip-amdgcn-amd-amdhsa--gfx1150": code_object()})), "gfx1150"),
        (GOOD + bundle({TARGET: code_object(GFX1100)}), "is for processor 0x41"),
        (bundle({TARGET: code_object(machine=62)}), "is for EM_X86_64"),
        (bundle({TARGET: b""}), "(0 bytes) is not an ELF file"),
        (GOOD + b"HIPK", "no offload bundle"),
        (compressed(GOOD)[:-9], "does not decompress"),
        (compressed(b"no bundle"), "does not contain a bundle"),
        (b"CCOB" + struct.pack("<HH", 9, 1) + bytes(24), "version 9"),
    ],
)
def test_wrong_images(fatbin: bytes, message: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        offload.count_images(fatbin)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "processor", "expected"),
    [
        ("gfx1150", 0x43, "'' 110500"),
        ("gfx1153", 0x58, "'' 110503"),
        ("gfx1150", GFX1151, "is for processor 0x4a, not gfx1150 (0x43)"),
        ("gfx942", 0x4C, "gpu_arch is gfx942; the checks know gfx1150, gfx1151"),
    ],
)
def test_the_gpu_is_that_of_the_variant(
    tmp_path: Path, arch: str, processor: int, expected: str
) -> None:
    """The checks are for the GPU that the variant gpu_arch names.

    rattler-build sets the variants as environment variables of package tests.
    """
    (tmp_path / "code").write_bytes(code_object(processor))
    code = "import sys; from checks import elf, gpu; "
    code += "print(repr(elf.fault(open(sys.argv[1], 'rb').read())), gpu.KFD_VERSION)"
    done = run("-c", code, str(tmp_path / "code"), gpu_arch=arch)
    assert expected in done.stdout + done.stderr


# --- where libraries are loaded from


def test_foreign_libraries() -> None:
    """Libraries outside the environment are foreign, except those of glibc."""
    prefix = Path("/env")
    inside = "/env/lib/libhip.so.7"
    glibc = [f"/lib/x86_64-linux-gnu/lib{name}" for name in ("c.so.6", "m-2.36.so", "mvec.so.1")]
    outside = ["/opt/rocm/lib/libhip.so.7", "/usr/lib/libcrypt.so.1"]
    files = [inside, *glibc, *outside, "/dev/kfd"]
    lines = [f"7f00-7f01 r-xp 00000000 00:01 1 {file}\n" for file in files]
    lines.append("7f02-7f03 rw-p 0 0:0 0 [heap]\n")
    loaded = libraries("".join(lines))
    assert [str(file) for file in foreign(loaded, prefix)] == outside


# --- AOTriton's images

COUNT = len(aotriton_tree.NAMES) * len(aotriton_tree.TYPES)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A small aotriton.images: an image of one kernel per family and type."""
    folder = tmp_path / "aotriton.images/amd-gfx115x"
    for name in aotriton_tree.NAMES:
        for dtype in aotriton_tree.TYPES:
            path = folder / f"flash/{name}/FONLY__\uff0a{dtype}@16_64___gfx115x.aks2"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(aotriton_tree.image((name, 0, code_object(GFX1151))))
    (folder / "__signature__").write_text("{}")
    return folder.parent


def make_image(lds: int = 0, code: bytes = b"") -> bytes:
    """Return an image of one kernel.

    Args:
        lds: The bytes of LDS that the kernel uses.
        code: The code object of the kernel.
    """
    return aotriton_tree.image(("bwd_kernel_dq", lds, code))


def test_right_images_of_aotriton(images: Path) -> None:
    kernels = check_images.check(images, COUNT)
    assert set(kernels) == set(itertools.product(aotriton_tree.NAMES, aotriton_tree.TYPES))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_image(), "is empty"),
        (make_image(0, code_object(GFX1100)), "is for processor 0x41"),
        (make_image(65537, code_object()), "65537 bytes of LDS"),
        (make_image(0, b"text" * 20), "is not an ELF file"),
        (make_image(0, code_object(machine=62)), "is for EM_X86_64"),
        (make_image(0, code_object())[:-9], "damaged"),
        (b"AKS3" + make_image(0, code_object())[4:], "not an AKS2 image"),
        (b"", "not an AKS2 image"),
        (b"AKS2" + struct.pack("<I", 1) + make_image(0, code_object())[8:], "header: 1 bytes"),
    ],
)
def test_a_wrong_image_of_aotriton(images: Path, data: bytes, message: str) -> None:
    path = sorted(images.rglob("bwd_kernel_dq/*.aks2"))[0]
    path.write_bytes(data)
    with pytest.raises(CheckFailed) as caught:
        check_images.check(images, COUNT)
    assert path.name in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "messages"),
    [
        ("bwd_kernel_dq/*fp16*.aks2", [f"{COUNT - 1} kernels", "no bwd_kernel_dq kernel for fp16"]),
        ("attn_fwd/*.aks2", ["no attn_fwd kernel"]),
        ("__signature__", ["no __signature__"]),
    ],
)
def test_incomplete_images_of_aotriton(images: Path, missing: str, messages: list[str]) -> None:
    for path in images.rglob(missing):
        path.unlink()
    with pytest.raises(CheckFailed) as caught:
        check_images.check(images, COUNT)
    assert all(message in str(caught.value) for message in messages)


def test_amds_images_are_reduced_to_gfx1151(images: Path, tmp_path: Path) -> None:
    """The images for gfx1151 are selected from AMD's archive, and pass check_images.

    An archive of another commit is refused.
    """
    expected = {path.name: path.read_bytes() for path in images.rglob("*.aks2")}
    for path in images.rglob("*.aks2"):
        name = path.parent.name
        other_kernel = (name, 0, code_object(GFX1100))
        path.write_bytes(
            aotriton_tree.image(other_kernel, (name, 0, code_object(GFX1151)), other_kernel)
        )
    (signature,) = images.rglob("__signature__")
    signature.write_text('{"AOTRITON_GIT_SHA1": "c0ffee"}')
    with pytest.raises(CheckFailed, match=r"is not of AOTriton decaf: .*c0ffee"):
        select_images.select(images, tmp_path / "out", "decaf")
    assert select_images.select(images, tmp_path / "out", "c0ffee") == COUNT
    check_images.check(tmp_path / "out", COUNT)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out/**/*.aks2")} == expected


def test_kernels_variant_is_one_of_four() -> None:
    """Both build scripts read kernels.sh, which refuses unknown values of aotriton_kernels."""
    recipe = RECIPES / "aotriton"
    for script in ("build_images.sh", "build_library.sh"):
        assert '. "$RECIPE_DIR/kernels.sh"' in (recipe / script).read_text()
    command = ["bash", "-c", f". {recipe}/kernels.sh"]
    environment = {"AOTRITON_KERNELS": "most"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "most, not core, full, sample or upstream" in done.stderr


# --- the GPU: only a gfx1151 that KFD lists

CPU = "simd_count 1\ngfx_target_version 0\n"
OURS = "simd_count 1\ngfx_target_version 110501\n"
OTHER = "simd_count 1\ngfx_target_version 110000\n"


@pytest.mark.parametrize(
    ("nodes", "device", "reason"),
    [
        ([CPU, OURS], True, ""),
        ([CPU, OTHER, OURS], True, ""),
        ([CPU, OTHER], True, "(others: 110000)"),
        ([CPU], True, "(others: none)"),
        ([], True, "(others: none)"),
        ([CPU, OURS], False, "cannot be opened"),
    ],
)
def test_gfx1151_alone(tmp_path: Path, nodes: list[str], device: bool, reason: str) -> None:
    for number, text in enumerate(nodes):
        file = tmp_path / "nodes" / str(number) / "properties"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    if device:
        (tmp_path / "kfd").touch()
    skip_reason = find_skip_reason(tmp_path / "nodes", tmp_path / "kfd")
    assert reason in skip_reason
    assert bool(reason) == bool(skip_reason)


def test_an_emulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated device is used without KFD. It is the GPU of `strix-emulate device --target`."""
    nowhere = tmp_path / "none"
    monkeypatch.setenv("STRIX_EMULATE_TARGET", "gfx1151")
    assert not find_skip_reason(nowhere, nowhere)
    monkeypatch.setattr(gpu, "ARCH", "gfx1150")
    assert "is a gfx1151, not a gfx1150" in find_skip_reason(nowhere, nowhere)
    monkeypatch.setenv("STRIX_EMULATE_TARGET", "gfx1150")
    assert not find_skip_reason(nowhere, nowhere)


@pytest.mark.parametrize(
    "program",
    [
        "pytorch/test_with_gpu",
        "amdsmi/check_library",
        "torchvision/check_ops",
        "torchaudio/check_ops",
        "bitsandbytes/check_numbers",
    ],
)
def test_package_tests_ask_kfd(program: str) -> None:
    text = (RECIPES / f"{program}.py").read_text()
    assert "reason = find_skip_reason()" in text
    assert "conv2d" not in text, (
        "the test must not use conv2d: an open bug of MIOpen would fail it after hours of building"
    )


@pytest.mark.parametrize("recipe", ["bitsandbytes", "pytorch", "torchaudio", "torchvision", "vllm"])
def test_what_cannot_be_built_here_proves_itself_under_emulation(recipe: str) -> None:
    """A package test installs the emulated device and its C code, and runs on that device.

    These packages cannot be built by the tests of this repository.
    """
    text = (RECIPES / recipe / "recipe.yaml").read_text()
    device = re.escape("- strix-emulate device --target ${{ gpu_arch }} --no-checks -- ")
    emulated = re.findall(rf"{device}(\S+) (\S+)", text)
    assert emulated
    for program, argument in emulated:
        assert program == "strix-validate" or f"- python {argument}\n" in text
    requirements = set(re.findall(r"- (strix-emulate-\w+)\n", text))
    assert {"strix-emulate-hip", "strix-emulate-native"} <= requirements
