# SPDX-License-Identifier: BSD-3-Clause
"""A small conda-forge for tests, on loopback: it solves, builds, installs and runs for real.

Its packages are this machine's: the host base's (Python, the compilers and the wheels that recipes
and stacks need, without the 2 GB that its pytorch alone needs), packages of one text file for what
PyPI lacks, and where there is a pixi, which locks the root workspace, the wheels of
requirements*.txt. None carries the mark of the host base, as none of conda-forge's does; inside
they are the same. Clients find it as people behind a mirror find theirs: through `[mirrors]` in the
configuration of a home folder.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import zstandard
from filelock import FileLock
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from rattler_build import assemble_package
from support.project import CHECKOUT

from forge.conda.local import HOST_BOUND, LocalChannel
from forge.files import sha256_file
from forge.hostbase import wheels
from forge.sources.cache import PYPI_URL, Source

LISTS = [CHECKOUT / name for name in ("requirements.txt", "requirements-dev.txt")]
GROUPS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["dependency-groups"]
LINTERS = {Requirement(line).name for line in GROUPS["lint"]}
HOST_BASE = CHECKOUT / "build" / "host-base" / "linux-64"
PACKAGES = CHECKOUT / "build" / "conda-forge" / "linux-64"
RECORDS = CHECKOUT / "tests" / "data" / "conda-forge"
PYTHON = wheels.PYTHON
# the service that pixi asks for PyPI's names of conda packages: it knows conda-forge's, not ours
MAPPING = "https://conda-mapping.prefix.dev"

# Packages of one text file, NAME VERSION [BUILD]: what they need. What PyPI lacks, what is hundreds
# of megabytes, what has a recipe that no test can build, or lints: enough to solve and install. And
# conda-forge's names for what has another on the host base or on PyPI.
STUBS = {
    "actionlint 1.7.12": [],
    "amd-aiter 0.1.20": [],
    "bitsandbytes 0.50.1": [],
    "clang-format 22.1.0": [],
    "codespell 2.4.1": [],
    "conda-smithy 3.62.0": [],
    "flash-attn-kernels-gfx1151 3.7.1": [],
    "git 2.55.0": [],
    "mypy 1.20.0": [],
    "pixi-pack 0.7.10": [],
    "pixi-unpack 0.7.10": [],
    "pre-commit 4.6.0": [],
    "pytorch 2.13.0 rocm_stub_0": [],
    "rattler-build 0.73.0": [],
    "ray-default 2.55.1": [],
    "ruff 0.15.0": [],
    "shellcheck 0.11.0": [],
    "strix-emulate-native 0.1.0": [],
    "triton 3.7.1": [],
    "triton-packages-kernels-gfx1151 3.7.1": [],
    "types-pyyaml 6.0.12": [],
    "zizmor 1.30.0": [],
    "gcc 14.3.0": ["hostgcc_linux-64"],
    "gcc_linux-64 14.3.0": ["hostgcc_linux-64"],
    "gxx_linux-64 14.3.0": ["hostgxx_linux-64"],
    "libgcc 15.2.0": [],
    "libllvm22 22.1.8": ["hostllvm"],
    "libstdcxx 15.2.0": ["libgcc"],
    "python-installer 1.1.0": ["installer"],
    "sysroot_linux-64 2.28": ["hostsysroot_linux-64"],
}

# What conda-forge's packages of these names make those require that are built with them. Without it
# a wrong list of requirements passes.
RUN_EXPORTS: dict[str, dict[str, list[str]]] = {
    "gcc_linux-64": {"strong": ["libgcc >=14"]},
    "gxx_linux-64": {"strong": ["libstdcxx >=14", "libgcc >=14"]},
    "numpy": {"weak": ["numpy >=1.25,<3"]},
    "sysroot_linux-64": {"strong": ["__glibc >=2.28,<3.0.a0"]},
}


def make(folder: Path) -> Path:
    """Write the channel to `folder`: an index, and links to packages. The host base must exist."""
    with FileLock(CHECKOUT / "build" / ".conda-forge"):
        packages = _packages()
    (folder / "linux-64").mkdir(parents=True)
    for name, record in packages.items():
        record.pop("indexed_timestamp", None)  # conda-forge's have none
        (folder / "linux-64" / name).symlink_to(PACKAGES / name)
    write_repodata(folder, "linux-64", packages)
    write_repodata(folder, "noarch", {})
    return folder


def write_repodata(folder: Path, subdir: str, packages: dict[str, dict[str, Any]]) -> None:
    """The index of a subdir in the two forms that clients ask for first."""
    text = json.dumps(
        {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages,
         "repodata_version": 1},
    ).encode()  # fmt: skip
    (folder / subdir).mkdir(exist_ok=True)
    (folder / subdir / "repodata.json").write_bytes(text)
    (folder / subdir / "repodata.json.zst").write_bytes(zstandard.compress(text))


def _packages() -> dict[str, dict[str, Any]]:
    """The index of all packages in build/conda-forge; made once."""
    made_of, lists = PACKAGES.parent / "made-of.json", LISTS if shutil.which("pixi") else []
    base = json.loads((HOST_BASE / "repodata.json").read_bytes())["packages.conda"]
    made_by = [sha256_file(path) for path in (Path(__file__), *lists)]
    inputs = [wheels.CODE, *made_by, sys.version, [*base]]
    if not made_of.exists() or json.loads(made_of.read_text()) != inputs:
        PACKAGES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PACKAGES.parent) as scratch:
            stubs = {stub.split()[0] for stub in STUBS}
            names = (*map(re.escape, stubs), wheels.CUDA_STUBS, "(nvidia|cuda)-.*")
            unused = re.compile("|".join(names))
            kept = {n: r for n, r in base.items() if not unused.fullmatch(r["name"])}
            renamed = {_unmarked(HOST_BASE / name): record for name, record in kept.items()}
            made = {
                *renamed,
                *map(_unmarked, _convert(Path(scratch), lists) if lists else ()),
                *_stubs(Path(scratch), PACKAGES),
            }
        for file in {*PACKAGES.glob("*.conda")} - made:
            file.unlink()
        # the rest is read by rattler, which takes 20 s for these; a changed stub
        # keeps its name, so nothing else is kept
        known = {file.name: _renamed(record, file) for file, record in renamed.items()}
        write_repodata(PACKAGES.parent, "linux-64", known)
        LocalChannel(PACKAGES.parent).index()
        made_of.write_text(json.dumps(inputs))
    return json.loads((PACKAGES / "repodata.json").read_bytes())["packages.conda"]


def _unmarked(file: Path) -> Path:
    """A package of the host base in PACKAGES, whose build string does not say so; made once."""
    name, version, build = file.stem.rsplit("-", 2)
    build = build.removeprefix(HOST_BOUND)
    target = PACKAGES / f"{name}-{version}-{build}.conda"
    if target.exists():
        return target
    return _repacked(file, target, build)


def _repacked(file: Path, target: Path, build: str) -> Path:
    """Write a package to `target`, with this build string and its name's run_exports."""
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(partial, "w") as new:
        for part in old.namelist():
            member = zipfile.ZipInfo(part.replace(file.stem, target.stem))
            with old.open(part) as source, new.open(member, "w", force_zip64=True) as copy:
                if part.startswith("info-"):
                    exports = RUN_EXPORTS.get(file.stem.rsplit("-", 2)[0])
                    copy.write(_info_with(source.read(), build, exports))
                else:
                    shutil.copyfileobj(source, copy, 1 << 20)
    return partial.replace(target)


def _renamed(record: dict[str, Any], file: Path) -> dict[str, Any]:
    """The record of what `_unmarked` made from the package of `record`."""
    own = {"build": file.stem.rsplit("-", 1)[1], "size": file.stat().st_size}
    kept = {key: value for key, value in record.items() if key != "md5"}
    return kept | own | {"sha256": sha256_file(file)}


def _info_with(packed: bytes, build: str, exports: dict[str, list[str]] | None) -> bytes:
    """The info section of a package with another build string, and perhaps with run_exports."""
    unpacked = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    section = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(unpacked)) as old,
        tarfile.open(fileobj=section, mode="w") as new,
    ):
        for member in old:
            content = old.extractfile(member).read() if member.isfile() else b""
            if member.name == "info/index.json":
                content = json.dumps(json.loads(content) | {"build": build}).encode()
                member.size = len(content)
            if not (exports and member.name == "info/run_exports.json"):
                new.addfile(member, io.BytesIO(content))
        if exports:
            content, member = json.dumps(exports).encode(), tarfile.TarInfo("info/run_exports.json")
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return zstandard.compress(section.getvalue())


def _convert(scratch: Path, lists: list[Path]) -> Iterator[Path]:
    """The wheels of some requirements, but for linters, by the host base's own code."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--require-hashes", "--only-binary", ":all:", "-d", scratch / "wheels",
         *chain(*(("-r", path) for path in lists))],
        check=True,
    )  # fmt: skip
    found: dict[str, wheels.Wheel] = {}
    for file in sorted((scratch / "wheels").glob("*.whl")):
        name, version, *_ = parse_wheel_filename(file.name)
        purl = PackageURL("pypi", None, name, str(version), {"file_name": file.name})
        source = Source(f"{PYPI_URL}/{file.name}", sha256_file(file), purl)
        found[name] = wheels.Wheel.read(file, source, "")
    for wheel in (wheel for name, wheel in found.items() if name not in LINTERS):
        yield wheel.plan_conversion(found).make(scratch)


def _stubs(scratch: Path, folder: Path) -> Iterator[Path]:
    """The packages of STUBS, in `folder`."""
    for stub, needs in STUBS.items():
        name, version, build = [*stub.split(), "stub_0"][:3]
        files = scratch / f"{name}-stub"
        (files / "share").mkdir(parents=True)
        (files / "share" / f"{name}.txt").write_text("stands for the real one in tests\n")
        made = assemble_package(
            name, version, "linux-64", build, scratch, files_dir=files, depends=needs
        )
        yield _repacked(made.path, folder / made.path.name, build)


# a machine without the GPU is told that it has it; docs/stacks.md
GPU = {"CONDA_OVERRIDE_AMDGPU": "0", "CONDA_OVERRIDE_AMDGPU_ARCH": "11.5.1"}


def write_mirrors(home: Path, mirrors: dict[str, str]) -> None:
    """The configuration in a home folder that gives each URL another address."""
    lines = [f'"{url}" = ["{mirror}"]' for url, mirror in mirrors.items()]
    (home / ".pixi").mkdir(parents=True, exist_ok=True)
    (home / ".pixi" / "config.toml").write_text("\n".join(["[mirrors]", *lines, ""]))


def write_mapping(folder: Path, **names: str) -> None:
    """What the service MAPPING says, in a folder to serve."""
    file = folder / "compressed-v0" / "compressed_mapping.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(names))


def clean_environment(home: Path) -> dict[str, str]:
    """The environment of a user whose home is `home`, with nothing configured but what is there."""
    foreign = re.compile(r"(XDG|PIXI|RATTLER|CONDA|FORGE|PYTHON)_?|VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if not foreign.match(key)}
    return kept | {"HOME": str(home)}
