# SPDX-License-Identifier: BSD-3-Clause
"""The host base: a conda channel made from the running CPython and PyPI's wheels.

For machines that reach PyPI but not conda-forge. Everything in it is host-bound (its Python links
this machine's libraries, its compilers are this machine's) and is never published.
"""

from __future__ import annotations

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
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from urllib.parse import unquote, urlsplit

from installer.sources import WheelFile
from packageurl import PackageURL
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rattler_build import assemble_package

from forge.bases import Base
from forge.channel.local import HOST_BOUND, Channel
from forge.errors import NotAttempted
from forge.files import digest_tree, place, sha256_file, write_text
from forge.hostbase.wheels import CONDA_NAMES, PYTHON, Wheel, depends, unpack_wheel
from forge.project import Project
from forge.sources.cache import PYPI_URL, Progress, Source, SourceCache, remote_size

# The same inputs give the same bytes: no clock in the packages.
TIMESTAMP = datetime(2026, 1, 1, tzinfo=UTC)
# Packages made by other code are other packages.
CODE = digest_tree(Path(__file__).parent)
Say = Callable[[str], None]


class HostBase:
    """Makes `build/host` and keeps it current. Interrupted, it goes on where it was."""

    def __init__(self, project: Project, base: Base) -> None:
        self.project, self.base, self.folder = project, base, base.folder
        self.recipe = project.root / "bases" / "host"
        os.environ["FORGE_PYTHON"] = str(_base_executable())
        os.environ["FORGE_PYTHON_VERSION"] = platform.python_version()
        os.environ["FORGE_GLIBC_VERSION"] = platform.libc_ver()[1] or "0"
        os.environ["FORGE_GCC_VERSION"] = _output("gcc", "-dumpfullversion") or "0"
        inputs = [
            digest_tree(self.recipe),
            CODE,
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

    def names(self) -> frozenset[str]:
        """The packages that its requirements name: what no recipe has to build on this base."""
        lines = [line for line in self.requirements.splitlines() if not line.startswith("#")]
        found = [canonicalize_name(Requirement(line).name) for line in lines if line.strip()]
        return frozenset(CONDA_NAMES.get(name, name) for name in found)

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
        lacking = [name for name in ("gcc", "g++") if shutil.which(name) is None]
        if lacking:
            raise NotAttempted(
                f"the host base needs {' and '.join(lacking)}, also for triton at run time; "
                "on Debian: apt-get install g++"
            )
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
        write_text(self.note, json.dumps(record, indent=1))

    def _resolve(self, say: Say) -> dict[str, Wheel]:
        """pip's resolution for this interpreter, kept so that a second run gets the same files."""
        kept = self.folder / "resolution.json"
        report = json.loads(kept.read_text()) if kept.exists() else {}
        if report.get("key") != self.key:
            say("host base: pip resolves the wheels")
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
            write_text(kept, json.dumps(report, indent=1))
        wheels = {}
        for file_name, version, name, sha256 in report["files"]:
            purl = PackageURL("pypi", None, name, version, {"file_name": file_name})
            parsed = Version(version)
            tag = f"{parsed.local.split('.')[0]}_" if parsed.local else ""
            wheel = Wheel(Source(f"{PYPI_URL}/{file_name}", sha256, purl), parsed, tag)
            wheels[wheel.name] = wheel
        cuda = [wheel for wheel in wheels.values() if wheel.name.startswith(("nvidia-", "cuda-"))]
        if cuda:
            big = [wheel for name, wheel in wheels.items() if wheel in cuda or name == "torch"]
            gib = sum(remote_size(wheel.source) or 0 for wheel in big) / 2**30
            say(
                "host base: pip offers only the CUDA build of torch here; with its "
                f"{len(cuda)} NVIDIA packages that is a download of {gib:.1f} GiB"
            )
            wheels["torch"].tag = "cuda_"
        return wheels

    def _convert(self, wheel: Wheel, wheels: dict[str, Wheel], cache: SourceCache, say: Say) -> str:
        """One wheel as a conda package; returns its file name. Skipped when it exists."""
        name = CONDA_NAMES.get(wheel.name, wheel.name)
        content = hashlib.sha256(f"{wheel.source.sha256} {CODE}".encode()).hexdigest()[:7]
        build = f"{HOST_BOUND}{wheel.tag}py{PYTHON.replace('.', '')}h{content}_0"
        version = wheel.version.public
        target = self.folder / "linux-64" / f"{name}-{version}-{build}.conda"
        if target.exists():
            return target.name
        say(f"host base: {wheel.source.file_name}")
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
        say(f"host base: CPython {platform.python_version()} and the compilers")
        output = self.project.staging / "host-base"
        shutil.rmtree(output, ignore_errors=True)
        log = self.project.logs / "host-base.log"
        job = {
            "action": "build",
            "recipes": [str(self.recipe / "recipe.yaml")],
            "channel": [],
            "output_dir": str(output),
            "package_format": "conda:1",
            **self.base.arguments(f"host-{self.key}", None),
        }
        run(job, log)
        packages = sorted(output.glob("linux-64/*.conda"))
        paths = [str(package) for package in packages]
        run({"action": "test", "packages": paths, "channel": [output.as_uri()]}, log)
        for package in packages:
            if not (self.folder / "linux-64" / package.name).exists():
                place(package, self.folder / "linux-64" / package.name)
        shutil.rmtree(output)
        names = [package.name for package in packages]
        write_text(done, json.dumps({"key": self.key, "files": names}))
        return set(names)


def _resolved(entry: dict) -> tuple[str, str, str, str]:
    """File name, version, name and sha256 of one entry of pip's report.

    pip before 23.1 states no hash for a file of a local wheel folder: that file is hashed here.
    """
    url = urlsplit(entry["download_info"]["url"])
    path = Path(unquote(url.path))
    sha256 = entry["download_info"]["archive_info"].get("hashes", {}).get("sha256")
    if sha256 is None and url.scheme == "file":
        sha256 = sha256_file(path)
    if sha256 is None:
        raise NotAttempted(f"pip's index states no sha256 for {path.name}")
    return path.name, entry["metadata"]["version"], entry["metadata"]["name"], sha256


def _base_executable() -> Path:
    return Path(os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
