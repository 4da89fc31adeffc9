# SPDX-License-Identifier: BSD-3-Clause
"""Convert a wheel to a conda package: lay out files, and turn requirements into match specs.

Only this module decides the contents of such packages. So if the module changes, the host base is
made again.
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

# conda-forge's names of projects that recipes and stacks require, if they differ from PyPI's names.
CONDA_NAMES = {
    # conda-forge's package `matplotlib` additionally requires a GUI toolkit.
    "matplotlib": "matplotlib-base",
    "torch": "pytorch",
    "msgpack": "msgpack-python",
    "typing-extensions": "typing_extensions",
}
# The package that replaces NVIDIA's wheels. recipes/bases/host/recipe.yaml builds it.
CUDA_STUBS = "pytorch-cuda-stubs"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Every package has this time stamp, so that the same inputs give the same bytes.
TIMESTAMP = datetime(2026, 1, 1, tzinfo=UTC)
CODE = sha256_file(Path(__file__))
# The installer writes the interpreter PLACEHOLDER into console scripts. SHEBANG replaces it: it
# runs the Python in the script's own folder, so that a prefix can be anywhere.
PLACEHOLDER = "/host-base/bin/python"
SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""


@dataclass(frozen=True)
class Conversion:
    """A conda package to make from a wheel. All values are plain JSON.

    Attributes:
        file: The wheel.
        name: The name of the package.
        version: Its version.
        build: Its build string.
        depends: The match specs of its run requirements.
        license: Its license, if the wheel states one.
        summary: Its summary, `about.summary`.
        left_out: Projects that the wheel's metadata requires but the package does not.
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
        """Make the package in `subdir`; return its file."""
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder, "tree")
            unpack_wheel(Path(self.file), tree, self.left_out)
            package = assemble_package(
                self.name,
                self.version,
                "linux-64",
                self.build,
                folder,
                files_dir=tree,
                depends=self.depends,
                license=self.license,
                summary=self.summary,
                compression_level=1,
                timestamp=TIMESTAMP,
            )
            target = subdir / self.file_name
            move_whole(package.path, target)
        return target


@dataclass(frozen=True)
class Wheel:
    """A wheel on this machine.

    Attributes:
        name: The canonical name of its project.
        file: The file.
        sha256: The sha256 of the file.
        purl: Its package URL.
        version: Its version.
        tag: The part of the package's build string that follows HOST_BOUND, such as `cpu_`.
        metadata: The parsed METADATA of the wheel.
    """

    name: str
    file: Path
    sha256: str
    purl: str
    version: Version
    tag: str
    metadata: Metadata

    @classmethod
    def read(cls, file: Path, source: Source, tag: str) -> "Wheel":
        """Read a wheel.

        Args:
            file: The file.
            source: The source of the file on PyPI.
            tag: The value of the attribute `tag`.

        Raises:
            ForgeError: The file is not a wheel.
        """
        try:
            with WheelFile.open(file) as archive:
                text = archive.read_dist_info("METADATA")
            metadata = Metadata.from_email(text, validate=False)
            name, version, *_ = parse_wheel_filename(source.file_name)
        except (*DAMAGED, KeyError) as error:
            raise ForgeError(f"{file} is not a wheel: {error!r:.300}") from None
        return cls(
            name=name,
            file=file,
            sha256=source.sha256,
            purl=str(source.purl),
            version=version,
            tag=tag,
            metadata=metadata,
        )

    def plan_conversion(self, wheels: dict[str, "Wheel"]) -> Conversion:
        """Describe the conda package to make from the wheel.

        Args:
            wheels: All wheels by name, including those that the wheel's extras require.
        """
        metadata = self.metadata
        depends = [f"python {PYTHON}.*", *list_depends(metadata, wheels)]
        left_out: list[str] = []
        for requirement in metadata.requires_dist or []:
            if is_stubbed(requirement, wheels):
                left_out.append(canonicalize_name(requirement.name))
        inputs = f"{self.sha256} {CODE} {depends} {left_out}"
        content_hash = hashlib.sha256(inputs.encode()).hexdigest()[:7]
        name = CONDA_NAMES.get(self.name, self.name)
        python = PYTHON.replace(".", "")
        return Conversion(
            file=str(self.file),
            name=name,
            version=self.version.public,
            build=f"{HOST_BOUND}{self.tag}py{python}h{content_hash}_0",
            depends=depends,
            license=metadata.license_expression or metadata.license or None,
            summary=f"{metadata.summary or name} (host-bound, from {self.purl})",
            left_out=left_out,
        )


def is_nvidia(name: str) -> bool:
    """Return whether the canonical name of a project on PyPI is that of an NVIDIA CUDA wheel."""
    return name.startswith(("nvidia-", "cuda-"))


def is_stubbed(requirement: Requirement, wheels: dict[str, Wheel]) -> bool:
    """Return whether a requirement is replaced by CUDA_STUBS.

    This is the case if it requires one of NVIDIA's projects and the base has no wheel of it.

    Args:
        requirement: A requirement of a wheel.
        wheels: All wheels by name.
    """
    name = canonicalize_name(requirement.name)
    return is_nvidia(name) and name not in wheels


def unpack_wheel(file: Path, prefix: Path, left_out: Sequence[str] = ()) -> None:
    """Unpack a wheel in the layout of conda packages: scripts in bin, modules in lib/pythonX.Y.

    Console scripts and `.data` trees go to the places that PEP 427 defines. Modules are compiled to
    byte code here, because otherwise every environment would do that at the first import. Tests are
    not compiled, since users do not import them.

    Args:
        file: The wheel.
        prefix: The folder to write to.
        left_out: Projects whose requirements are removed from the metadata.
    """
    modules = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    scripts = prefix / "bin"
    scheme = {
        "purelib": str(modules),
        "platlib": str(modules),
        "scripts": str(scripts),
        "data": str(prefix),
        "headers": str(prefix / "include" / f"python{PYTHON}"),
    }
    destination = SchemeDictionaryDestination(scheme, interpreter=PLACEHOLDER, script_kind="posix")
    with WheelFile.open(file) as source:
        install(source, destination, additional_metadata={"INSTALLER": b"conda"})
        dist_info = modules / source.dist_info_dir
    if left_out:
        drop_requirements(dist_info, left_out)
    for script in scripts.glob("*"):
        first_line, _, rest = script.read_bytes().partition(b"\n")
        if first_line.startswith(f"#!{PLACEHOLDER}".encode()):
            script.write_bytes(SHEBANG + rest)
            script.chmod(0o755)
    compileall.compile_dir(
        modules,
        quiet=2,
        stripdir=str(prefix),
        rx=re.compile("/site-packages/.*/tests?/"),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def drop_requirements(dist_info: Path, names: Sequence[str]) -> None:
    """Remove the lines of METADATA that require some projects, and update its line in RECORD.

    Package tests run `pip check`, which would otherwise report that these projects are missing.

    Args:
        dist_info: The folder of METADATA and RECORD.
        names: The canonical names of the projects that the wheel shall not require any more.
    """
    metadata = dist_info / "METADATA"
    head, blank, description = metadata.read_bytes().partition(b"\n\n")
    lines = []
    for line in head.splitlines(keepends=True):
        key, _, value = line.decode().partition(":")
        if key.lower() == "requires-dist":
            requirement = Requirement(value.strip())
            if canonicalize_name(requirement.name) in names:
                continue
        lines.append(line)
    content = b"".join(lines) + blank + description
    metadata.write_bytes(content)
    sha256 = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    entry = f"{dist_info.name}/METADATA,"
    record = dist_info / "RECORD"
    entries = []
    for text in record.read_text().splitlines():
        if text.startswith(entry):
            text = f"{entry}sha256={sha256.rstrip(b'=').decode()},{len(content)}"
        entries.append(f"{text}\n")
    record.write_text("".join(entries))


def list_depends(metadata: Metadata, wheels: dict[str, Wheel]) -> list[str]:
    """Turn Requires-Dist into conda match specs, with markers evaluated for this machine.

    conda has no extras, so `name[extra]` becomes `name` and the requirements of that extra. Each
    NVIDIA project without a wheel becomes CUDA_STUBS.

    Args:
        metadata: The metadata of a wheel.
        wheels: All wheels by name.
    """
    specs: set[str] = set()
    pending = [(requirement, "") for requirement in metadata.requires_dist or []]
    visited: set[tuple[str, str]] = set()
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if is_stubbed(requirement, wheels):
            specs.add(CUDA_STUBS)
            continue
        specs.add(match_spec(requirement))
        name = canonicalize_name(requirement.name)
        for required_extra in requirement.extras:
            if (name, required_extra) in visited or name not in wheels:
                continue
            visited.add((name, required_extra))
            for inner in wheels[name].metadata.requires_dist or []:
                if inner.marker and "extra" in str(inner.marker):
                    pending.append((inner, required_extra))
    return sorted(specs)


def match_spec(requirement: Requirement) -> str:
    """Turn a PEP 508 requirement (without its marker) into a conda match spec."""
    name = canonicalize_name(requirement.name)
    parts = sorted(str(part).replace("===", "==") for part in requirement.specifier)
    return " ".join([CONDA_NAMES.get(name, name), ",".join(parts)]).strip()
