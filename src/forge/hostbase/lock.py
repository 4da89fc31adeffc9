# SPDX-License-Identifier: BSD-3-Clause
"""Read the lock of the host base, and fetch its wheels by pip with the sha256 that it pins.

The lock is recipes/bases/host/requirements.txt. It is compiled from requirements.in with a command
in pyproject.toml.
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

from forge.conda.scratch import scratch
from forge.errors import ForgeError, NotAttempted, Refused, redact
from forge.files import read_text, sha256_file
from forge.sources.cache import PYPI_URL, Source, SourceCache

HASH = re.compile(r"sha256:([0-9a-f]{64})")
MISMATCH = re.compile(r"^ +(\S+==\S+).*?^ +Got +([0-9a-f]{64})", re.M | re.S)
ADVICE = "compile it again with the command in pyproject.toml"


@dataclass(frozen=True)
class Pin:
    """A project, pinned to one version and to hashes of its files.

    Attributes:
        name: The canonical name.
        version: The version, as written in the lock.
        hashes: The sha256 of each file of that version that may be installed.
    """

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The pin as a line of a requirements file."""
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in self.hashes)
        return f"{self.name}=={self.version} {hashes}"


def read_pins(file: Path, environment: dict[str, str] | None = None) -> dict[str, Pin]:
    """Return the pins of a lock that apply to this machine and Python, by name.

    Args:
        file: The lock, a requirements file of pip.
        environment: Values of variables in markers that replace those of this machine; None to
            replace none.

    Raises:
        ForgeError: A line does not pin a project to one version with hashes.
    """
    pins: dict[str, Pin] = {}
    for line in read_text(file).replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        text, *hashes = line.split("--hash=")
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            reason = f"{file} has a line that is not a pin"
            raise ForgeError(f"{reason}: {text.strip()!r}") from None
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        pin = _make_pin(file, requirement, hashes)
        pins[pin.name] = pin
    return pins


def _make_pin(file: Path, requirement: Requirement, hashes: list[str]) -> Pin:
    """Return the pin of a line. Raise ForgeError if it lacks one exact version or valid hashes.

    Args:
        file: The path of the lock, for error messages.
        requirement: The requirement in the line.
        hashes: The values of the line's `--hash` options.
    """
    name = canonicalize_name(requirement.name)
    specifiers = list(requirement.specifier)
    is_pinned = len(specifiers) == 1 and specifiers[0].operator == "=="
    if not is_pinned or specifiers[0].version.endswith(".*"):
        raise ForgeError(f"{file} does not pin {name} to one version (NAME==VERSION): {ADVICE}")
    digests = []
    for text in hashes:
        match = HASH.fullmatch(text.strip())
        if match:
            digests.append(match[1])
    if not digests or len(digests) < len(hashes):
        raise ForgeError(f"{file} has no --hash of {name}, or one that is no sha256: {ADVICE}")
    return Pin(name, specifiers[0].version, tuple(digests))


def require_pinned(requirements: str, pins: dict[str, Pin], file: Path) -> None:
    """Require that the pins of a lock satisfy requirements.in.

    Args:
        requirements: The text of requirements.in, with the values of variants.yaml filled in.
        pins: The pins of the lock.
        file: The path of the lock, for error messages.

    Raises:
        ForgeError: A project is missing, or pinned to another version.
    """
    for line in requirements.splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None:
            raise ForgeError(f"{file} does not pin {requirement.name}: {ADVICE}")
        if not requirement.specifier.contains(pin.version, prereleases=True):
            difference = f"{pin.name} {pin.version}, but {requirement} is required"
            raise ForgeError(f"{file} pins {difference}: {ADVICE}")


def fetch_wheels(
    pins: Iterable[Pin],
    file: Path,
    cache: SourceCache,
    say: Callable[[str], None],
) -> Iterator[tuple[Path, Source]]:
    """Yield the path and the source of each pin's wheel, which pip downloads if it is not cached.

    Args:
        pins: The pins.
        file: The path of the lock, for error messages.
        cache: The cache of sources. Downloaded wheels are added to it.
        say: Called with lines to print: the number of downloads, and one line for each.

    Raises:
        Refused: The index has a wheel whose sha256 is not in the wheel's pin.
        NotAttempted: pip cannot fetch a wheel.
    """
    wheels = {pin: _find_cached_wheel(pin, cache) for pin in pins}
    missing = [pin for pin, source in wheels.items() if source is None]
    if missing:
        say(f"host base: pip downloads {len(missing)} wheels")
        with scratch(cache.folder) as name:
            folder = Path(name)
            _download(missing, file, folder, say)
            for wheel in folder.glob("*.whl"):
                cache.take(wheel, _make_source(wheel.name, sha256_file(wheel)))
        for pin in missing:
            wheels[pin] = _find_cached_wheel(pin, cache)
    for pin, source in wheels.items():
        if source is None:
            raise NotAttempted(f"pip downloaded no wheel of {pin.name} that {file} pins")
        yield cache.path(source), source


def _make_source(file_name: str, sha256: str) -> Source:
    name, version, *_ = parse_wheel_filename(file_name)
    purl = PackageURL("pypi", None, name, str(version), {"file_name": file_name})
    return Source(f"{PYPI_URL}/{file_name}", sha256, purl)


def _find_cached_wheel(pin: Pin, cache: SourceCache) -> Source | None:
    """Return the cached wheel of a pin that fits this Python best, or None if there is none."""
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    candidates = []
    for digest in pin.hashes:
        for wheel in (cache.folder / digest).glob("*.whl"):
            tags = parse_wheel_filename(wheel.name)[3]
            wheel_ranks = [ranks[tag] for tag in tags if tag in ranks]
            source = _make_source(wheel.name, digest)
            if wheel_ranks and cache.state(source) == "whole":
                candidates.append((min(wheel_ranks), wheel.name, source))
    return min(candidates)[2] if candidates else None


def _download(pins: list[Pin], file: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Download the wheels of pins by pip.

    Args:
        pins: The pins.
        file: The path of the lock, for error messages.
        folder: The folder for the wheels.
        say: Called with a line to print for each download.
    """
    requirements = folder / file.name
    requirements.write_text("".join(f"{pin.line}\n" for pin in pins))
    options = "--require-hashes --no-deps --only-binary :all: --progress-bar off"
    command = [
        sys.executable,
        *("-m", "pip", "download", *options.split()),
        *("--dest", str(folder), "-r", str(requirements)),
    ]
    lines = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if line.lstrip().startswith("Downloading "):
                url = line.split(maxsplit=1)[1].strip()
                say(f"host base: {redact(url.rpartition('/')[2])}")
    if not process.returncode:
        return
    output = redact("".join(lines))
    mismatch = MISMATCH.search(output)
    if mismatch:
        raise Refused(
            f"pip's index has a wheel of {mismatch[1]} with sha256 {mismatch[2]}, which {file} "
            "does not list. The wheel was damaged in transit or forged; it was deleted"
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    raise NotAttempted(f"pip cannot fetch what {file} pins: {' '.join(errors) or output}")
