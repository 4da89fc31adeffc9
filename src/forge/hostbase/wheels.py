# SPDX-License-Identifier: BSD-3-Clause
"""From a wheel to a conda package: files laid out, requirements as match specs.

What such a package holds is decided here alone, so an edit here makes the host base again.
"""

import base64
import compileall
import hashlib
import py_compile
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from rattler_build import assemble_package

from forge.conda.local import HOST_BOUND
from forge.errors import ForgeError
from forge.files import move_whole, sha256_file
from forge.sources.archives import DAMAGED
from forge.sources.cache import Source

# PyPI names that conda-forge spells differently, as far as recipes and stacks meet them.
CONDA_NAMES = {
    # conda-forge's matplotlib adds a GUI toolkit
    "matplotlib": "matplotlib-base",
    "torch": "pytorch",
    "msgpack": "msgpack-python",
    "typing-extensions": "typing_extensions",
}
# What stands for NVIDIA's wheels where they are left out; recipes/bases/host/recipe.yaml makes it.
CUDA_STUBS = "pytorch-cuda-stubs"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# The same inputs give the same bytes: no clock in the packages.
TIMESTAMP = datetime(2026, 1, 1, tzinfo=UTC)
CODE = sha256_file(Path(__file__))
# Console scripts find their Python beside themselves, wherever the prefix is.
PLACEHOLDER = "/host-base/bin/python"
SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""


@dataclass(frozen=True)
class Conversion:
    """A conda package to make from the wheel `file`; what it consists of is plain JSON.

    `left_out` names projects that its metadata requires and the package does not.
    """

    file: str
    name: str
    version: str
    build: str
    depends: list[str]
    license: str | None
    summary: str
    left_out: list[str] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        """The name of the package file."""
        return f"{self.name}-{self.version}-{self.build}.conda"

    def size(self) -> int:
        """Return the size of the wheel, in bytes."""
        return Path(self.file).stat().st_size

    def make(self, subdir: Path) -> Path:
        """Make the package in `subdir`; returns its file."""
        with tempfile.TemporaryDirectory() as scratch:
            unpack_wheel(Path(self.file), Path(scratch, "tree"), self.left_out)
            made = assemble_package(
                self.name, self.version, "linux-64", self.build, scratch,
                files_dir=Path(scratch, "tree"),
                depends=self.depends,
                license=self.license,
                summary=self.summary,
                compression_level=1,
                timestamp=TIMESTAMP,
            )  # fmt: skip
            move_whole(made.path, subdir / self.file_name)
        return subdir / self.file_name


@dataclass(frozen=True)
class Wheel:
    """A wheel on this machine. `tag` comes first in the build string, such as `cpu_`."""

    name: str
    file: Path
    sha256: str
    purl: str
    version: Version
    tag: str
    metadata: Metadata

    @classmethod
    def read(cls, file: Path, source: Source, tag: str) -> "Wheel":
        """Read the wheel that was fetched from `source`, a file of PyPI."""
        try:
            with WheelFile.open(file) as archive:
                metadata = Metadata.from_email(archive.read_dist_info("METADATA"), validate=False)
            name, version, *_ = parse_wheel_filename(source.file_name)
        except (*DAMAGED, KeyError) as error:
            raise ForgeError(f"{file} is not a wheel: {error!r:.300}") from None
        return cls(name, file, source.sha256, str(source.purl), version, tag, metadata)

    def conversion(self, wheels: dict[str, "Wheel"]) -> Conversion:
        """Describe the conda package to make of it; `wheels` has its extras'."""
        needs = [f"python {PYTHON}.*", *depends(self.metadata, wheels)]
        left_out: list[str] = [
            canonicalize_name(requirement.name)
            for requirement in self.metadata.requires_dist or []
            if is_stubbed(requirement, wheels)
        ]
        inputs = f"{self.sha256} {CODE} {needs} {left_out}"
        content = hashlib.sha256(inputs.encode()).hexdigest()[:7]
        build = f"{HOST_BOUND}{self.tag}py{PYTHON.replace('.', '')}h{content}_0"
        data, name = self.metadata, CONDA_NAMES.get(self.name, self.name)
        terms = data.license_expression or data.license or None
        summary = f"{data.summary or name} (host-bound, from {self.purl})"
        public = self.version.public
        return Conversion(str(self.file), name, public, build, needs, terms, summary, left_out)


def is_nvidia(name: str) -> bool:
    """Return whether a project of PyPI is one of NVIDIA's for CUDA, by its canonical name."""
    return name.startswith(("nvidia-", "cuda-"))


def is_stubbed(requirement: Requirement, wheels: dict[str, Wheel]) -> bool:
    """Return whether CUDA_STUBS satisfies a requirement: the wheel is NVIDIA's and left out."""
    name = canonicalize_name(requirement.name)
    return is_nvidia(name) and name not in wheels


def unpack_wheel(file: Path, prefix: Path, left_out: Sequence[str] = ()) -> None:
    """Lay a wheel out as conda packages are: scripts in bin, modules in lib/pythonX.Y.

    Console scripts and `.data` trees go where PEP 427 says; byte code is made here once, because
    every environment would otherwise make it again at first import. Nobody imports a wheel's tests.
    Requirements on the projects `left_out` are removed from its metadata.
    """
    modules = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    scheme = {
        "purelib": str(modules), "platlib": str(modules),
        "scripts": str(prefix / "bin"), "data": str(prefix),
        "headers": str(prefix / "include" / f"python{PYTHON}"),
    }  # fmt: skip
    destination = SchemeDictionaryDestination(scheme, interpreter=PLACEHOLDER, script_kind="posix")
    with WheelFile.open(file) as source:
        install(source, destination, additional_metadata={"INSTALLER": b"conda"})
        dist_info = modules / source.dist_info_dir
    if left_out:
        drop_requirements(dist_info, left_out)
    for script in (prefix / "bin").glob("*"):
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(f"#!{PLACEHOLDER}".encode()):
            script.write_bytes(SHEBANG + rest)
            script.chmod(0o755)
    compileall.compile_dir(
        modules, quiet=2, stripdir=str(prefix), rx=re.compile("/site-packages/.*/tests?/"),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def drop_requirements(dist_info: Path, names: Sequence[str]) -> None:
    """Remove requirements on these projects from METADATA, and correct its line in RECORD.

    `pip check`, which package tests run, would otherwise miss them.
    """
    metadata, record = dist_info / "METADATA", dist_info / "RECORD"
    head, blank, description = metadata.read_bytes().partition(b"\n\n")
    kept = []
    for line in head.splitlines(keepends=True):
        key, _, value = line.decode().partition(":")
        is_requirement = key.lower() == "requires-dist"
        if not is_requirement or canonicalize_name(Requirement(value.strip()).name) not in names:
            kept.append(line)
    content = b"".join(kept) + blank + description
    metadata.write_bytes(content)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    place = f"{dist_info.name}/METADATA"
    lines = [
        f"{place},sha256={digest},{len(content)}" if line.startswith(f"{place},") else line
        for line in record.read_text().splitlines()
    ]
    record.write_text("\n".join([*lines, ""]))


def depends(metadata: Metadata, wheels: dict[str, Wheel]) -> list[str]:
    """Turn Requires-Dist into conda match specs: markers evaluated here, extras spelled out.

    conda knows no extras, so `name[extra]` becomes `name` plus what that extra asks for. What is
    left out of NVIDIA's becomes CUDA_STUBS.
    """
    specs: set[str] = set()
    todo = [(r, "") for r in metadata.requires_dist or []]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if is_stubbed(requirement, wheels):
            specs.add(CUDA_STUBS)
            continue
        specs.add(match_spec(requirement))
        name = canonicalize_name(requirement.name)
        for asked in requirement.extras:
            if (name, asked) not in seen and name in wheels:
                seen.add((name, asked))
                inner = wheels[name].metadata.requires_dist or []
                todo += [(r, asked) for r in inner if r.marker and "extra" in str(r.marker)]
    return sorted(specs)


def match_spec(requirement: Requirement) -> str:
    """Turn a PEP 508 requirement (without its marker) into a conda match spec."""
    name = canonicalize_name(requirement.name)
    parts = sorted(str(part).replace("===", "==") for part in requirement.specifier)
    return " ".join([CONDA_NAMES.get(name, name), ",".join(parts)]).strip()
