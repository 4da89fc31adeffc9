# SPDX-License-Identifier: BSD-3-Clause
"""The embedded base: a conda channel made from the running CPython and PyPI's wheels.

For machines that reach PyPI but not conda-forge. Everything in it is host-bound (its Python links
this machine's libraries, its compilers are this machine's) and is never published.
"""

from __future__ import annotations

import compileall
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from string import Template


from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from packageurl import PackageURL
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rattler_build import assemble_package

from strix_forge.bases import Base
from strix_forge.channel import HOST_BOUND, Channel
from strix_forge.project import NotAttempted, Project, digest_tree, place, sha256_file
from strix_forge.sources import PYPI_URL, Progress, Source, SourceCache, remote_size

# PyPI names that conda-forge spells differently, as far as recipes and stacks meet them.
CONDA_NAMES = {"torch": "pytorch", "msgpack": "msgpack-python", "typing-extensions": "typing_extensions"}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PY = f"py{PYTHON.replace('.', '')}"
# The same inputs give the same bytes: no clock in the packages.
TIMESTAMP = datetime(2026, 1, 1, tzinfo=timezone.utc)
# Console scripts find their Python beside themselves, wherever the prefix is.
PLACEHOLDER = "/embedded-base/bin/python"
SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""
MANY_FILES = 300
Say = Callable[[str], None]


@dataclass
class Wheel:
    """One resolved wheel: its file, and the metadata inside it once it is here."""

    source: Source
    version: Version
    metadata: Metadata | None = None

    @property
    def name(self) -> str:
        return canonicalize_name(self.source.purl.name)


class EmbeddedBase:
    """Makes `build/embedded` and keeps it current. Interrupted, it goes on where it was."""

    def __init__(self, project: Project, base: Base) -> None:
        self.project, self.base, self.folder = project, base, base.folder
        self.recipe = project.root / "bases" / "embedded"
        os.environ["FORGE_PYTHON"] = str(_base_executable())
        os.environ["FORGE_PYTHON_VERSION"] = platform.python_version()
        os.environ["FORGE_GLIBC_VERSION"] = platform.libc_ver()[1] or "0"
        os.environ["FORGE_GCC_VERSION"] = _output("gcc", "-dumpfullversion") or "0"
        inputs = [
            digest_tree(self.recipe),
            sha256_file(Path(__file__)),
            self.requirements,
            importlib.metadata.version("py-rattler-build"),
            sys.version,
            sha256_file(_base_executable()),
            os.environ["FORGE_GCC_VERSION"],
            os.environ["FORGE_GLIBC_VERSION"],
        ]
        self.key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]

    @property
    def requirements(self) -> str:
        """What pip resolves, with the pins of variants.yaml filled in."""
        values = {key: values[0] for key, values in self.base.variants.items() if values}
        return Template((self.recipe / "requirements.in").read_text()).substitute(values)

    @property
    def note(self) -> Path:
        return self.folder / "base.json"

    def is_current(self) -> bool:
        """Whether the base was finished from exactly these inputs."""
        return self.note.exists() and json.loads(self.note.read_text())["key"] == self.key

    def make(self, say: Say, progress: Progress, run: Callable[[dict, Path], None]) -> None:
        """Make the base if it is not current. `run(job, log)` runs an engine job.

        Raises NotAttempted when pip cannot resolve or fetch, BuildFailed when a part fails.
        """
        if self.is_current():
            return
        wheels = self._resolve(say)
        cache = SourceCache(self.project)
        for wheel in wheels.values():
            path = cache.fetch(wheel.source, progress)
            with WheelFile.open(path) as archive:
                wheel.metadata = Metadata.from_email(
                    archive.read_dist_info("METADATA"), validate=False
                )
        kept = {self._convert(wheel, wheels, cache, say) for wheel in wheels.values()}
        kept |= self._build_recipe(say, run)
        for stale in self.folder.glob("linux-64/*.conda"):
            if stale.name not in kept:
                stale.unlink()
        Channel(self.folder).index()
        record = {
            "key": self.key,
            "python": sys.version,
            "wheels": [
                {"purl": str(w.source.purl), "sha256": w.source.sha256} for w in wheels.values()
            ],
        }
        self.note.write_text(json.dumps(record, indent=1))

    def _resolve(self, say: Say) -> dict[str, Wheel]:
        """pip's resolution for this interpreter, kept so that a second run gets the same files."""
        kept = self.folder / "resolution.json"
        report = json.loads(kept.read_text()) if kept.exists() else {}
        if report.get("key") != self.key:
            say("embedded base: pip resolves the wheels")
            with tempfile.TemporaryDirectory() as folder:
                listed, out = Path(folder, "requirements.txt"), Path(folder, "report.json")
                listed.write_text(self.requirements)
                command = [
                    sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed",
                    "--only-binary", ":all:", "--quiet", "--report", out, "-r", listed,
                ]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    lines = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
                    raise NotAttempted(
                        f"pip cannot resolve {self.recipe / 'requirements.in'}: "
                        f"{' '.join(lines) or done.stderr.strip()}"
                    )
                installs = json.loads(out.read_text())["install"]
            report = {"key": self.key, "files": [_resolved(entry) for entry in installs]}
            self.folder.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(report, indent=1))
        wheels = {}
        for file_name, version, name, sha256 in report["files"]:
            purl = PackageURL("pypi", None, name, version, {"file_name": file_name})
            wheel = Wheel(Source(f"{PYPI_URL}/{file_name}", sha256, purl), Version(version))
            wheels[wheel.name] = wheel
        cuda = [wheel for wheel in wheels.values() if wheel.name.startswith(("nvidia-", "cuda-"))]
        if cuda:
            big = [wheel for name, wheel in wheels.items() if wheel in cuda or name == "torch"]
            sizes = [remote_size(wheel.source) for wheel in big]
            say(
                f"embedded base: pip offers only the CUDA build of torch here; it and its "
                f"{len(cuda)} NVIDIA packages are {sum(filter(None, sizes)) / 2**30:.1f} GiB to "
                "download"
            )
        return wheels

    def _convert(
        self, wheel: Wheel, wheels: dict[str, Wheel], cache: SourceCache, say: Say
    ) -> str:
        """One wheel as a conda package; returns its file name. Skipped when it exists."""
        name = CONDA_NAMES.get(wheel.name, wheel.name)
        local = f"{wheel.version.local.split('.')[0]}_" if wheel.version.local else ""
        content = hashlib.sha256(
            f"{wheel.source.sha256} {sha256_file(Path(__file__))}".encode()
        ).hexdigest()[:7]
        build = f"{HOST_BOUND}{local}{PY}h{content}_0"
        version = wheel.version.public
        target = self.folder / "linux-64" / f"{name}-{version}-{build}.conda"
        if target.exists():
            return target.name
        say(f"embedded base: {wheel.source.file_name}")
        self.project.staging.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.project.staging) as folder:
            tree = Path(folder, "tree")
            unpack_wheel(cache.path(wheel.source), tree)
            made = assemble_package(
                name,
                version,
                "linux-64",
                build,
                folder,
                files_dir=tree,
                depends=[f"python {PYTHON}.*", *depends(wheel.metadata, wheels)],
                license=wheel.metadata.license_expression or wheel.metadata.license or None,
                summary=f"{wheel.metadata.summary or name} (host-bound, from {wheel.source.purl})",
                compression_level=1,
                timestamp=TIMESTAMP,
            )
            place(made.path, target)
        return target.name

    def _build_recipe(self, say: Say, run: Callable[[dict, Path], None]) -> set[str]:
        """Python and the compilers, by rattler-build like any recipe, tests included."""
        done = self.folder / "recipe.json"
        if done.exists():
            record = json.loads(done.read_text())
            if record["key"] == self.key and all(
                (self.folder / "linux-64" / name).exists() for name in record["files"]
            ):
                return set(record["files"])
        say(f"embedded base: CPython {platform.python_version()} and the compilers")
        output = self.project.staging / "embedded-base"
        shutil.rmtree(output, ignore_errors=True)
        log = self.project.logs / "embedded-base.log"
        job = {
            "action": "build",
            "recipe": str(self.recipe / "recipe.yaml"),
            "channels": [],
            "variant_files": self.base.variant_files,
            "overrides": self.base.overrides | {"content_digest": [f"embedded-{self.key}"]},
            "output": str(output),
            "number": None,
            "prefix": HOST_BOUND,
            "package_format": "conda:1",
        }
        run(job, log)
        packages = sorted(output.glob("linux-64/*.conda"))
        channels = [output.as_uri()]
        run({"action": "test", "packages": [str(p) for p in packages], "channels": channels}, log)
        for package in packages:
            place(package, self.folder / "linux-64" / package.name)
        shutil.rmtree(output)
        names = [package.name for package in packages]
        done.write_text(json.dumps({"key": self.key, "files": names}))
        return set(names)


def unpack_wheel(file: Path, prefix: Path) -> None:
    """Lay a wheel out as conda packages are: scripts in bin, modules in lib/pythonX.Y.

    Console scripts and `.data` trees go where PEP 427 says; byte code is made here once, because
    every environment would otherwise make it again at first import.
    """
    modules = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    scheme = {
        "purelib": str(modules),
        "platlib": str(modules),
        "scripts": str(prefix / "bin"),
        "data": str(prefix),
        "headers": str(prefix / "include" / f"python{PYTHON}"),
    }
    destination = SchemeDictionaryDestination(scheme, interpreter=PLACEHOLDER, script_kind="posix")
    with WheelFile.open(file) as source:
        install(source, destination, additional_metadata={"INSTALLER": b"conda"})
    for script in (prefix / "bin").glob("*"):
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(f"#!{PLACEHOLDER}".encode()):
            script.write_bytes(SHEBANG + rest)
            script.chmod(0o755)
    # more than one process pays only for large wheels
    many = sum(1 for _ in modules.rglob("*.py")) > MANY_FILES
    compileall.compile_dir(
        modules, quiet=2, workers=0 if many else 1, stripdir=str(prefix),
        invalidation_mode=compileall.py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def depends(metadata: Metadata, wheels: dict[str, Wheel]) -> list[str]:
    """Requires-Dist as conda match specs: markers evaluated here, extras spelled out.

    conda knows no extras, so `name[extra]` becomes `name` plus what that extra asks for.
    """
    specs: set[str] = set()
    todo = [(r, "") for r in metadata.requires_dist or []]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        specs.add(match_spec(requirement))
        name = canonicalize_name(requirement.name)
        for wanted in requirement.extras:
            if (name, wanted) not in seen and name in wheels:
                seen.add((name, wanted))
                inner = wheels[name].metadata.requires_dist or []
                todo += [(r, wanted) for r in inner if r.marker and "extra" in str(r.marker)]
    return sorted(specs)


def match_spec(requirement: Requirement) -> str:
    """A PEP 508 requirement (without its marker) as a conda match spec."""
    name = canonicalize_name(requirement.name)
    parts = sorted(str(part).replace("===", "==") for part in requirement.specifier)
    return " ".join([CONDA_NAMES.get(name, name), ",".join(parts)]).strip()


def _resolved(entry: dict) -> tuple[str, str, str, str]:
    """File name, version, name and sha256 of one entry of pip's report."""
    info = entry["download_info"]
    file_name = info["url"].rsplit("/", 1)[1].replace("%2B", "+")
    sha256 = info["archive_info"]["hashes"]["sha256"]
    return file_name, entry["metadata"]["version"], entry["metadata"]["name"], sha256


def _base_executable() -> Path:
    return Path(os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
