# SPDX-License-Identifier: BSD-3-Clause
"""The emulator reads damaged files, and quickly gives a result or an error of its own."""

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from mutants import Tally, texts, trees
from strix_emulate import cli
from strix_emulate.code import loader
from strix_emulate.errors import EmulatorError
from test_images import DEVICE, bundle, compress
from test_loader import elf, pack_aks2  # noqa: F401

Tally.refusal = EmulatorError


def zip_data(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/add.hsaco", data)
    return file.getvalue()


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "code object": bytes,
    "AKS2 pack": lambda data: pack_aks2([("a", 0, data), ("b", 512, data)]),
    "zip": zip_data,
    "offload bundle": lambda data: bundle((DEVICE, data)),
    "compressed bundle": lambda data: compress(bundle((DEVICE, data)), 2, 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_code_objects(form: str, elf: bytes, record_property) -> None:  # noqa: F811
    valid = FORMS[form](elf)
    tally = Tally(form, record_property)
    assert loader.parse(valid, "x")
    for mutant in texts(valid, list(FORMS).index(form), 400):
        tally.give(
            lambda m=mutant: loader.parse(m, "x"), lambda kernels: kernels is not None, mutant
        )


def test_modules(elf: bytes, record_property) -> None:  # noqa: F811
    tally = Tally("module", record_property)
    for mutant in texts(elf, 10, 400):
        tally.give(lambda m=mutant: loader.parse_module(m, "x"), bool, mutant)


def test_notes_of_triton(elf: bytes, tmp_path, record_property) -> None:  # noqa: F811
    tally = Tally("Triton's note", record_property)
    note = {"shared": 96, "name": "add"}
    (tmp_path / "add.hsaco").write_bytes(elf)
    file = tmp_path / "add.json"
    original = json.dumps(note).encode()
    for mutant in [
        *(json.dumps(t).encode() for t in trees(note, 11, 100)),
        *texts(original, 12, 100),
    ]:
        file.write_bytes(mutant)
        tally.give(lambda: loader.load(tmp_path), bool, mutant)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_arrays(kind: str, tmp_path, record_property) -> None:
    tally = Tally(f"array {kind}", record_property)
    file = tmp_path / f"a.{kind}"
    if kind == "npy":
        np.save(file, np.arange(24, dtype=np.float32))
    else:
        np.savez_compressed(file, a=np.arange(24))
    for mutant in texts(file.read_bytes(), 13, 300):
        file.write_bytes(mutant)
        tally.give(lambda: cli._parse_argument(f"in={file}", {}), bool, mutant)


@pytest.mark.parametrize(
    "text",
    ["out=x:f4:99999999x99999999", "out=x:f4:-1", "out=x:O:4", "out=x:f4:2x2x2x2x", "in=", "1.2.3"],
)
def test_arguments(text: str) -> None:
    with pytest.raises(EmulatorError, match="--arg"):
        cli._parse_argument(text, {})


def test_a_pipe_is_not_read_for_ever(elf: bytes, tmp_path) -> None:  # noqa: F811
    for name in ("pipe", "pipe.hsaco", "add.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(EmulatorError, match="not a regular file"):
        loader.load(tmp_path / "pipe")
    with pytest.raises(EmulatorError, match="no such regular file"):
        cli._parse_argument(f"in={tmp_path / 'pipe'}", {})
    (tmp_path / "add.hsaco").write_bytes(elf)
    assert loader.load(tmp_path)


def test_bombs_are_refused_before_they_are_unpacked(elf: bytes) -> None:  # noqa: F811
    """Each file has at most a few hundred kilobytes.

    The first file unpacks to more bytes than a code object may have. The second one only claims to
    do so. The last one has zip files in zip files.
    """
    zeros = zlib.compress(bytes(1 << 20), 9)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file, file.open("a", "w") as out:
        for _ in range((1 << 8) + 1):
            out.write(bytes(1 << 20))
    sizes = struct.pack("<2H3Q", 3, 1, 0, 1 << 45, 0)
    nested = elf
    for _ in range(60):
        nested = zip_data(nested)
    for bomb in (archive.getvalue(), b"CCOB" + sizes + zeros, nested):
        with pytest.raises(EmulatorError, match="bytes|zip file in another"):
            loader.parse(bomb, "bomb")
