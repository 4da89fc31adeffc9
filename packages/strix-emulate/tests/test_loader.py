# SPDX-License-Identifier: BSD-3-Clause
"""Files that are not kernels for a supported GPU give one clear message, and an exit status."""

import io
import lzma
import math
import os
import struct
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path

import fixtures
import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from strix_emulate import cli
from strix_emulate.code import llvm, loader
from strix_emulate.errors import LoadError
from strix_emulate.native import library as native


@pytest.fixture(scope="module")
def elf() -> bytes:
    return fixtures.code_object()


def command(*arguments, code: int) -> str:
    """Run the command line, check its exit status, and return its output."""
    output = io.StringIO()
    with (
        redirect_stdout(output),
        redirect_stderr(output),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "argv", ["strix-emulate", *map(str, arguments)])
        cli.main()
    assert end.value.code == code, output.getvalue()
    return output.getvalue()


def pack_aks2(entries: list[tuple[str, int, bytes]]) -> bytes:
    """Return an AOTriton pack, in the format that AOTriton's v3src reads."""
    directory = b""
    blobs = b""
    for name, lds, blob in entries:
        text = name.encode() + b"\0"
        directory += struct.pack("<5I", lds, 128, len(blobs), len(blob), len(text)) + text
        blobs += blob
    raw = directory + blobs
    return struct.pack("<4s3I", b"AKS2", len(raw), len(entries), len(directory)) + lzma.compress(
        raw
    )


def test_descriptor(elf):
    (kernel,) = loader.parse(elf, "add")
    assert (kernel.name, kernel.user_sgprs, kernel.ieee) == ("add", (("kernarg", 2),), True)
    assert [a.kind for a in kernel.arguments][:4] == ["global_buffer"] * 3 + ["by_value"]
    assert kernel.max_threads == 128
    assert kernel.vgprs % 8 == 0
    assert kernel.denormals_32


def test_a_kernel_of_no_declared_size_goes_on_to_the_next_symbol(elf):
    symbols = ELFFile(io.BytesIO(elf)).get_section_by_name(".dynsym")
    names = [symbol.name for symbol in symbols.iter_symbols()]
    offset = symbols["sh_offset"] + names.index("add") * symbols["sh_entsize"] + 16
    (kernel,) = loader.parse(elf[:offset] + bytes(8) + elf[offset + 8 :], "add")
    assert kernel.code.startswith(loader.parse(elf, "add")[0].code)


def test_packs(elf, tmp_path):
    pack = pack_aks2([("a", 0, elf), ("failed to compile", 0, b""), ("b", 512, elf)])
    assert [k.launch_lds for k in loader.parse(pack, "pack")] == [0, 512]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("amd-gfx115x/flash/x.aks2", pack)
    assert len(loader.parse(archive.getvalue(), "zip")) == 2
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "add.hsaco").write_bytes(elf)
    (tmp_path / "k" / "add.json").write_text('{"shared": 96}')
    assert loader.load(tmp_path)[0].launch_lds == 96


def test_damaged_packs(elf):
    pack = pack_aks2([("a", 0, elf)])
    for bad in (pack[:40], pack[:4] + b"\1" + pack[5:], pack[:12]):
        with pytest.raises(LoadError, match="AKS2"):
            loader.parse(bad, "pack")
    # The directory is shorter than its number of entries requires.
    raw = lzma.decompress(pack[16:])[:20]
    for size in (19, 12, 0):
        cut = struct.pack("<4s3I", b"AKS2", size, 2, size) + lzma.compress(raw[:size])
        with pytest.raises(LoadError, match="pack: AKS2 directory ends early"):
            loader.parse(cut, "pack")


def test_another_gpu():
    code_object, _ = fixtures.compile_kernel(
        fixtures.softmax, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}, "gfx1201"
    )
    with pytest.raises(LoadError, match=r"not supported.*is 0x4e; gfx1151 is 0x4a"):
        loader.parse(code_object, "other")


def test_not_an_amdgpu_file(elf):
    for bad, words in (
        (Path(sys.executable).read_bytes(), "machine is"),
        (b"no ELF file", "not a complete AMDGPU code object"),
        (elf[:8] + b"\x09" + elf[9:], "unknown code object version"),
        (elf[:7] + b"\x00" + elf[8:], "OS ABI"),
    ):
        with pytest.raises(LoadError, match=words):
            loader.parse(bad, "file")


def test_every_truncation_is_one_message(elf):
    for size in range(0, len(elf) - 1, 97):
        try:
            kernels = loader.parse(elf[:size], "cut")
        except LoadError:
            continue
        # Only bytes that the loader does not read were cut off.
        assert kernels == loader.parse(elf, "whole")


def test_metadata_for_another_wave_is_refused(elf):
    key = b".wavefront_size"
    offset = elf.index(key) + len(key)
    assert elf[offset] == 32
    with pytest.raises(LoadError, match="its descriptor is for waves of 32 lanes"):
        loader.parse(elf[:offset] + b"\x40" + elf[offset + 1 :], "file")


@pytest.mark.parametrize("shift", [16, 18])
def test_flushing_of_only_inputs_or_only_results_is_refused(elf, shift):
    # The descriptor is the only content of .rodata. Its word COMPUTE_PGM_RSRC1 is at byte 48.
    place = ELFFile(io.BytesIO(elf)).get_section_by_name(".rodata")["sh_offset"] + 48
    word = int.from_bytes(elf[place : place + 4], "little")
    for mode in range(4):
        changed = word & ~(3 << shift) | mode << shift
        image = elf[:place] + changed.to_bytes(4, "little") + elf[place + 4 :]
        if mode in (0, 3):
            loader.parse(image, "file")
            continue
        with pytest.raises(LoadError, match="only in inputs or only in results"):
            loader.parse(image, "file")


def test_command_line(elf, tmp_path):
    kernel = tmp_path / "add.hsaco"
    kernel.write_bytes(elf)
    x = np.arange(300, dtype=np.float32)
    y = np.ones(300, np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    arguments = [
        f"in={tmp_path}/x.npy",
        f"in={tmp_path}/y.npy",
        f"out={tmp_path}/o.npy:float32:300",
        "300",
    ]
    arguments_of_run = [word for a in arguments for word in ("--arg", a)]
    output = command("run", kernel, "--grid", "2", *arguments_of_run, code=0)
    assert '"executed"' in output
    assert "not_checked" not in output
    assert (np.load(tmp_path / "o.npy") == x + y).all()
    assert '"wmma_share"' in command("stats", kernel, code=0)
    listing = command("disassemble", kernel, code=0).splitlines()
    assert listing[0].split()[0] == "0x0"
    assert listing[-1].endswith("s_endpgm")
    # Each of these errors gives one message: out of bounds, damaged file, missing file, bad
    # arguments.
    assert "bounds" in command("run", kernel, "--grid", "4", *arguments_of_run[:-1], "3000", code=1)
    kernel.write_bytes(elf[: len(elf) // 2])
    assert "not a complete AMDGPU code object" in command(
        "run", kernel, "--grid", "2", *arguments_of_run, code=2
    )
    assert "No such file" in command("run", tmp_path / "none", "--grid", "2", code=2)
    kernel.write_bytes(elf)
    assert "--grid" in command("run", kernel, "--grid", "x", code=2)
    assert "--arg" in command("run", kernel, "--grid", "2", "--arg", "in=none.npy", code=2)
    for grid in ("1,1,1,2", 2**32, 2**31):
        message = command("run", kernel, "--grid", grid, *arguments_of_run, code=2)
        assert "cannot be launched" in message
    assert "LDS" in command("run", kernel, "--grid", 1, "--lds", "-1", *arguments_of_run, code=2)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-3", 1e-3), ("-2E5", -2e5), ("1.", 1.0), ("-inf", -math.inf), ("0x1e3", 0x1E3)],
)
def test_numbers(text, number):
    parsed = cli._parse_argument(text, {})
    assert parsed == number
    assert type(parsed) is type(number)


def test_a_number_that_does_not_fit_is_refused(elf, tmp_path):
    kernel = tmp_path / "add.hsaco"
    kernel.write_bytes(elf)
    arguments = ["--arg", "null"] * 3 + ["--arg", "1e300"]
    assert "argument 3" in command("run", kernel, "--grid", "1", *arguments, code=2)


def test_outputs_have_the_given_name(elf, tmp_path):
    kernel = tmp_path / "add.hsaco"
    kernel.write_bytes(elf)
    np.save(tmp_path / "x.npy", np.ones(100, np.float32))
    inputs = ["--arg", f"in={tmp_path / 'x.npy'}"] * 2
    start = ["run", kernel, "--grid", "1", *inputs]
    command(*start, "--arg", f"out={tmp_path / 'sum'}:float32:100", "--arg", "100", code=0)
    assert (np.load(tmp_path / "sum") == 2).all()
    output = f"out={tmp_path / 'no' / 'sum.npy'}:float32:100"
    message = command(*start, "--arg", output, "--arg", "100", code=2)
    assert "no such folder" in message


def process(*arguments, code: int, **environment) -> str:
    """Run the command line in a process of its own, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", "from strix_emulate.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_version():
    first, second = process("--version", code=0).splitlines()
    assert first == f"strix-emulate {version('strix-emulate')}"
    assert second == f"executes with {native.describe()}"


def test_llvm_that_cannot_decode_is_refused(elf, tmp_path):
    kernel = tmp_path / "add.hsaco"
    kernel.write_bytes(elf)
    output = process("stats", kernel, code=3, **{llvm.VARIABLE: "/no/libLLVM.so"})
    assert "libllvm22" in output
    assert "/no/libLLVM.so" in output


def test_old_llvm_is_refused(monkeypatch):
    monkeypatch.setattr(llvm, "MINIMUM_VERSION", 1000)
    llvm._find.cache_clear()
    try:
        with pytest.raises(llvm.DisassemblerError, match="which misreads the code of GFX11"):
            llvm.find_disassembler()
    finally:
        monkeypatch.undo()
        llvm._find.cache_clear()
