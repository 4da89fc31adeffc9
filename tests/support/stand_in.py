# SPDX-License-Identifier: BSD-3-Clause
"""A small stand-in for conda-forge. Tests serve it on loopback, and solve and install from it.

Its packages come from three places:

- the host base: Python, the compilers, and the wheels that recipes and stacks need, except
  CUDA's libraries and packages of which there is a stub;
- stubs with one text file (STUBS), for example for packages that PyPI lacks;
- the wheels of requirements*.txt, if pixi is on PATH, because pixi locks the root workspace.

The build strings of the host base's packages have a mark that no package of conda-forge has. The
copies of these packages lack the mark. Clients find the channel as they find a mirror: by
`[mirrors]` in the configuration of a home folder.
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
# The service from which pixi gets the PyPI names of conda packages. It knows the packages of
# conda-forge, not ours.
MAPPING = "https://conda-mapping.prefix.dev"

# The stubs, `NAME VERSION [BUILD]`, and their requirements. Each stub has one text file, which
# suffices to solve and install. The first part of the list, up to zizmor, replaces packages that
# PyPI lacks, that are very large, that no test can build, or that are linters. The second part
# gives conda-forge's names to packages that have other names on the host base or on PyPI.
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

# The run_exports of conda-forge's packages of these names. Without them a wrong list of
# requirements would pass.
RUN_EXPORTS: dict[str, dict[str, list[str]]] = {
    "gcc_linux-64": {"strong": ["libgcc >=14"]},
    "gxx_linux-64": {"strong": ["libstdcxx >=14", "libgcc >=14"]},
    "numpy": {"weak": ["numpy >=1.25,<3"]},
    "sysroot_linux-64": {"strong": ["__glibc >=2.28,<3.0.a0"]},
}


def make(folder: Path) -> Path:
    """Write the channel to `folder` and return it: an index, and links to packages.

    The host base must exist.
    """
    with FileLock(CHECKOUT / "build" / ".conda-forge"):
        packages = _packages()
    (folder / "linux-64").mkdir(parents=True)
    for name, record in packages.items():
        record.pop("indexed_timestamp", None)  # Records of conda-forge do not have this field.
        (folder / "linux-64" / name).symlink_to(PACKAGES / name)
    write_repodata(folder, "linux-64", packages)
    write_repodata(folder, "noarch", {})
    return folder


def write_repodata(folder: Path, subdir: str, packages: dict[str, dict[str, Any]]) -> None:
    """Write the index of a subdir in two forms, plain and compressed."""
    repodata = {
        "info": {"subdir": subdir},
        "packages": {},
        "packages.conda": packages,
        "repodata_version": 1,
    }
    text = json.dumps(repodata).encode()
    (folder / subdir).mkdir(exist_ok=True)
    (folder / subdir / "repodata.json").write_bytes(text)
    (folder / subdir / "repodata.json.zst").write_bytes(zstandard.compress(text))


def _packages() -> dict[str, dict[str, Any]]:
    """Return the records of all packages in build/conda-forge. Make the packages if necessary."""
    lists = LISTS if shutil.which("pixi") else []
    base = json.loads((HOST_BASE / "repodata.json").read_bytes())["packages.conda"]
    sources = [sha256_file(path) for path in (Path(__file__), *lists)]
    inputs = [wheels.CODE, *sources, sys.version, [*base]]
    inputs_file = PACKAGES.parent / "made-of.json"
    if not inputs_file.exists() or json.loads(inputs_file.read_text()) != inputs:
        _make_packages(base, lists)
        inputs_file.write_text(json.dumps(inputs))
    return json.loads((PACKAGES / "repodata.json").read_bytes())["packages.conda"]


def _make_packages(base: dict[str, dict[str, Any]], lists: list[Path]) -> None:
    """Make and index the packages in build/conda-forge, and remove others.

    Args:
        base: The records of the host base by file name.
        lists: The lists of requirements whose wheels become packages.
    """
    PACKAGES.mkdir(parents=True, exist_ok=True)
    stubs = {stub.split()[0] for stub in STUBS}
    unused = re.compile("|".join([*map(re.escape, stubs), wheels.CUDA_STUBS, "(nvidia|cuda)-.*"]))
    records = {}
    for name, record in base.items():
        if not unused.fullmatch(record["name"]):
            records[_unmarked(HOST_BASE / name)] = record
    packages = {*records}
    with tempfile.TemporaryDirectory(dir=PACKAGES.parent) as scratch:
        if lists:
            packages |= {_unmarked(package) for package in _convert(Path(scratch), lists)}
        packages |= {*_stubs(Path(scratch), PACKAGES)}
    for file in {*PACKAGES.glob("*.conda")} - packages:
        file.unlink()
    # rattler takes 20 s to read these packages, so their records are copied. It reads all other
    # packages again, because a changed stub keeps its file name, and its old record would be wrong.
    copied = {file.name: _renamed(record, file) for file, record in records.items()}
    write_repodata(PACKAGES.parent, "linux-64", copied)
    LocalChannel(PACKAGES.parent).index()


def _unmarked(file: Path) -> Path:
    """Copy a package of the host base to PACKAGES, unless the copy exists.

    The copy's build string does not begin with HOST_BOUND.
    """
    name, version, build = file.stem.rsplit("-", 2)
    build = build.removeprefix(HOST_BOUND)
    target = PACKAGES / f"{name}-{version}-{build}.conda"
    if target.exists():
        return target
    return _repacked(file, target, build)


def _repacked(file: Path, target: Path, build: str) -> Path:
    """Write a package to `target`, with this build string and the run_exports for its name."""
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
    """Return the record of `file`, the copy that `_unmarked` made of a package.

    `record` is the record of the package.
    """
    changes = {
        "build": file.stem.rsplit("-", 1)[1],
        "size": file.stat().st_size,
        "sha256": sha256_file(file),
    }
    result = record | changes
    result.pop("md5", None)
    return result


def _info_with(packed: bytes, build: str, exports: dict[str, list[str]] | None) -> bytes:
    """Return the info section of a package with another build string and run_exports."""
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
            content = json.dumps(exports).encode()
            member = tarfile.TarInfo("info/run_exports.json")
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return zstandard.compress(section.getvalue())


def _convert(scratch: Path, lists: list[Path]) -> Iterator[Path]:
    """Convert the wheels that `lists` require, except linters, as the host base converts wheels."""
    requirements: list[str | Path] = []
    for path in lists:
        requirements += ["-r", path]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command = [*pip, *options, "-d", scratch / "wheels", *requirements]
    subprocess.run(command, check=True)
    by_name: dict[str, wheels.Wheel] = {}
    for file in sorted((scratch / "wheels").glob("*.whl")):
        name, version, *_ = parse_wheel_filename(file.name)
        purl = PackageURL("pypi", None, name, str(version), {"file_name": file.name})
        source = Source(f"{PYPI_URL}/{file.name}", sha256_file(file), purl)
        by_name[name] = wheels.Wheel.read(file, source, "")
    for name, wheel in by_name.items():
        if name not in LINTERS:
            yield wheel.plan_conversion(by_name).make(scratch)


def _stubs(scratch: Path, folder: Path) -> Iterator[Path]:
    """Make the packages of STUBS in `folder`."""
    for stub, needs in STUBS.items():
        name, version, build = [*stub.split(), "stub_0"][:3]
        files = scratch / f"{name}-stub"
        (files / "share").mkdir(parents=True)
        (files / "share" / f"{name}.txt").write_text("stands for the real one in tests\n")
        package = assemble_package(
            name, version, "linux-64", build, scratch, files_dir=files, depends=needs
        )
        yield _repacked(package.path, folder / package.path.name, build)


# With these variables, a machine without the GPU solves like one that has it. See docs/stacks.md.
GPU = {"CONDA_OVERRIDE_AMDGPU": "0", "CONDA_OVERRIDE_AMDGPU_ARCH": "11.5.1"}


def write_mirrors(home: Path, mirrors: dict[str, str]) -> None:
    """Write the configuration in a home folder that redirects each URL to its mirror."""
    lines = [f'"{url}" = ["{mirror}"]' for url, mirror in mirrors.items()]
    (home / ".pixi").mkdir(parents=True, exist_ok=True)
    (home / ".pixi" / "config.toml").write_text("\n".join(["[mirrors]", *lines, ""]))


def write_mapping(folder: Path, **names: str) -> None:
    """Write the answer of the service MAPPING into a folder that will be served."""
    file = folder / "compressed-v0" / "compressed_mapping.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(names))


def clean_environment(home: Path) -> dict[str, str]:
    """Return the environment of a user whose only configuration is in `home`."""
    foreign = re.compile(r"(XDG|PIXI|RATTLER|CONDA|FORGE|PYTHON)_?|VIRTUAL_ENV")
    variables = {key: value for key, value in os.environ.items() if not foreign.match(key)}
    return variables | {"HOME": str(home)}
