# SPDX-License-Identifier: BSD-3-Clause
"""The wheels of the host base: pinned by sha256 in a lock, and fetched by pip with those hashes.

The lock, recipes/bases/host/requirements.txt, is compiled from requirements.in; pyproject.toml has
the command.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from forge.conda.package import scratch
from forge.errors import ForgeError, NotAttempted, Refused, redacted
from forge.files import read_text, sha256_file
from forge.sources.cache import PYPI_URL, Source, SourceCache

HASH = re.compile(r"sha256:([0-9a-f]{64})")
MISMATCH = re.compile(r"^ +(\S+==\S+).*?^ +Got +([0-9a-f]{64})", re.M | re.S)
ANEW = "compile it anew with the command in pyproject.toml"


@dataclass(frozen=True)
class Pin:
    """A project in one version.

    Attributes:
        name: The canonical name.
        version: The version, as the lock has it.
        hashes: The sha256 of each file of that version that may be installed.
    """

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The pin as pip reads it."""
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in self.hashes)
        return f"{self.name}=={self.version} {hashes}"


def read_pins(file: Path, environment: dict[str, str] | None = None) -> dict[str, Pin]:
    """Return the pins of a lock by name, as far as they are for this machine and Python.

    Args:
        file: A requirements file in pip's form.
        environment: Values of markers that replace those of this machine.

    Raises:
        ForgeError: A line is not one version of a project with its hashes.
    """
    pins: dict[str, Pin] = {}
    for line in read_text(file).replace("\\\n", " ").splitlines():
        words, *hashes = line.split("--hash=")
        if not line.strip() or line.startswith("#"):
            continue
        try:
            requirement = Requirement(words)
        except InvalidRequirement:
            raise ForgeError(f"{file} has a line that pins nothing: {words.strip()!r}") from None
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        name, versions = canonicalize_name(requirement.name), list(requirement.specifier)
        pinned = [version.operator for version in versions] == ["=="]
        if not pinned or versions[0].version.endswith(".*"):
            raise ForgeError(f"{file} does not pin {name} to one version (NAME==VERSION): {ANEW}")
        digests = [HASH.fullmatch(text.strip()) for text in hashes]
        if not digests or None in digests:
            raise ForgeError(f"{file} has no --hash=sha256:... for each file of {name}: {ANEW}")
        pins[name] = Pin(name, versions[0].version, tuple(d[1] for d in digests if d))
    return pins


def require_pinned(requirements: str, pins: dict[str, Pin], file: Path) -> None:
    """Require that a lock has what requirements.in asks for, with the pins of variants.yaml.

    Raises:
        ForgeError: A project is missing, or pinned to another version.
    """
    for line in requirements.splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None:
            raise ForgeError(f"{file} does not pin {requirement.name}: {ANEW}")
        if not requirement.specifier.contains(pin.version, prereleases=True):
            have = f"{pin.name} {pin.version}, and {requirement} is required"
            raise ForgeError(f"{file} pins {have}: {ANEW}")


def fetch_wheels(
    pins: Iterable[Pin], file: Path, cache: SourceCache, say: Callable[[str], None]
) -> Iterator[tuple[Path, Source]]:
    """Yield the wheel of each pin: from the cache of sources, or by pip from its index.

    Raises:
        Refused: The index has a wheel with another sha256.
        NotAttempted: pip cannot fetch one.
    """
    wheels = {pin: _cached_wheel(pin, cache) for pin in pins}
    missing = [pin for pin, source in wheels.items() if source is None]
    if missing:
        say(f"host base: pip downloads {len(missing)} wheels")
        with scratch(cache.folder) as folder:
            _download(missing, file, Path(folder), say)
            for wheel in Path(folder).glob("*.whl"):
                cache.take(wheel, _source(wheel.name, sha256_file(wheel)))
        wheels |= {pin: _cached_wheel(pin, cache) for pin in missing}
    for pin, source in wheels.items():
        if source is None:
            raise NotAttempted(f"pip downloaded no wheel of {pin.name} that {file} pins")
        yield cache.path(source), source


def _source(file_name: str, sha256: str) -> Source:
    name, version, *_ = parse_wheel_filename(file_name)
    purl = PackageURL("pypi", None, name, str(version), {"file_name": file_name})
    return Source(f"{PYPI_URL}/{file_name}", sha256, purl)


def _cached_wheel(pin: Pin, cache: SourceCache) -> Source | None:
    """Return the wheel of a pin that fits this Python best, if the cache has one whole."""
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    fitting = []
    for digest in pin.hashes:
        for wheel in (cache.folder / digest).glob("*.whl"):
            tags = parse_wheel_filename(wheel.name)[3]
            rank = min((ranks[tag] for tag in tags if tag in ranks), default=None)
            source = _source(wheel.name, digest)
            if rank is not None and cache.state(source) == "whole":
                fitting.append((rank, wheel.name, source))
    return min(fitting)[2] if fitting else None


def _download(pins: list[Pin], file: Path, folder: Path, say: Callable[[str], None]) -> None:
    words = "-m pip download --require-hashes --no-deps --only-binary :all: --progress-bar off"
    missing = folder / file.name
    missing.write_text("".join(f"{pin.line}\n" for pin in pins))
    command = [sys.executable, *words.split(), "--dest", str(folder), "-r", str(missing)]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if line.lstrip().startswith("Downloading "):
                say(f"host base: {redacted(line.split(maxsplit=1)[1].strip().rpartition('/')[2])}")
    output = redacted("".join(lines))
    if process.returncode:
        mismatch = MISMATCH.search(output)
        if mismatch:
            raise Refused(
                f"pip's index has a wheel of {mismatch[1]} with sha256 {mismatch[2]}, which {file} "
                "does not list: damaged in transit, or forged. Nothing was kept"
            )
        errors = [line for line in output.splitlines() if line.startswith("ERROR")]
        raise NotAttempted(f"pip cannot fetch what {file} pins: {' '.join(errors) or output}")
