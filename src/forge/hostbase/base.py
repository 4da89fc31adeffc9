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
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import unquote, urlsplit

from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from forge.bases import Base
from forge.channel.local import Channel
from forge.errors import NotAttempted
from forge.files import digest_tree, move_whole, sha256_file, write_text
from forge.hostbase.wheels import CODE, CONDA_NAMES, Wheel
from forge.locks import hold
from forge.project import Project
from forge.sources.cache import PYPI_URL, Source, SourceCache, remote_size
from forge.sources.download import Progress

Say = Callable[[str], None]
RunJob = Callable[[dict[str, Any], Path], None]


class HostBase:
    """Makes `build/host-base` and keeps it current. Interrupted, it goes on where it was."""

    def __init__(self, project: Project, base: Base) -> None:
        self.project, self.base = project, base
        self.folder = base.folder or project.build / "host-base"
        self.recipe = project.root / "bases" / "host"
        python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
        os.environ["FORGE_PYTHON"] = python
        os.environ["FORGE_PYTHON_VERSION"] = platform.python_version()
        os.environ["FORGE_GLIBC_VERSION"] = platform.libc_ver()[1] or "0"
        os.environ["FORGE_GCC_VERSION"] = _gcc_version()
        inputs = [
            digest_tree(self.recipe), CODE, self.requirements,
            importlib.metadata.version("py-rattler-build"), sys.version, sha256_file(Path(python)),
            os.environ["FORGE_GCC_VERSION"], os.environ["FORGE_GLIBC_VERSION"],
        ]  # fmt: skip
        self.key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]

    @property
    def requirements(self) -> str:
        """What pip resolves, with the pins of variants.yaml filled in."""
        values = {key: values[0] for key, values in self.base.variants.items() if values}
        return Template((self.recipe / "requirements.in").read_text()).substitute(values)

    def names(self) -> frozenset[str]:
        """The packages that its requirements name: what no recipe has to build on this base."""
        lines = [line for line in self.requirements.splitlines() if not line.startswith("#")]
        names = [canonicalize_name(Requirement(line).name) for line in lines if line.strip()]
        return frozenset(CONDA_NAMES.get(name, name) for name in names)

    def _read(self, name: str) -> dict[str, Any]:
        """A JSON file of an earlier run, if that had these very inputs; else nothing."""
        file = self.folder / name
        data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return data if data.get("key") == self.key else {}

    def _write(self, name: str, **data: Any) -> None:
        write_text(self.folder / name, json.dumps({"key": self.key, **data}, indent=1))

    def is_current(self) -> bool:
        """Whether the base was finished from exactly these inputs."""
        return bool(self._read("base.json"))

    def make(self, say: Say, progress: Progress, run: RunJob) -> None:
        """Make the base if it is not current. `run(job, log)` runs an engine job.

        Two checkouts may share the folder by a link: the second waits for the first. Raises
        NotAttempted when pip cannot resolve or fetch, BuildFailed when a part fails.
        """
        if self.is_current():
            return
        missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
        if missing:
            raise NotAttempted(
                f"the host base needs {' and '.join(missing)}, also for triton at run time; "
                "on Debian: apt-get install g++"
            )
        with hold(self.folder, "making the host base in", say):
            if not self.is_current():
                self._make(say, progress, run)

    def _make(self, say: Say, progress: Progress, run: RunJob) -> None:
        subdir, cache, wheels = self.folder / "linux-64", SourceCache(self.project), {}
        for source, tag in self._resolve(say):
            wheel = Wheel.read(cache.fetch(source, progress), source, tag)
            wheels[wheel.name] = wheel
        packages = self._build_recipe(say, run)
        for wheel in wheels.values():
            with tempfile.TemporaryDirectory(dir=self.project.staging) as scratch:
                packages.add(wheel.convert(wheels, subdir, Path(scratch), say).name)
        for stale in subdir.glob("*.conda"):
            if stale.name not in packages:
                stale.unlink()
        Channel(self.folder).index()
        record = [{"purl": wheel.purl, "sha256": wheel.sha256} for wheel in wheels.values()]
        self._write("base.json", python=sys.version, wheels=record)

    def _resolve(self, say: Say) -> list[tuple[Source, str]]:
        """Each wheel's file and tag, as pip resolved them when first asked."""
        files = self._read("resolution.json").get("files")
        if files is None:
            say("host base: pip resolves the wheels")
            files = [_resolved(entry) for entry in self._pip_report()]
            self._write("resolution.json", files=files)
        cuda = sum(name.startswith(("nvidia-", "cuda-")) for _, _, name, _ in files)
        wheels, gib = [], 0.0
        for file_name, version, name, sha256 in files:
            purl = PackageURL("pypi", None, name, version, {"file_name": file_name})
            source = Source(f"{PYPI_URL}/{file_name}", sha256, purl)
            local = Version(version).local
            tag = f"{local.split('.')[0]}_" if local else ""
            if cuda and name.startswith(("nvidia-", "cuda-", "torch")):
                gib += (remote_size(source) or 0) / 2**30
                tag = "cuda_" if name == "torch" else tag
            wheels.append((source, tag))
        if cuda:
            size = f"with its {cuda} NVIDIA packages that is a download of {gib:.1f} GiB"
            say(f"host base: pip offers only the CUDA build of torch here; {size}")
        return wheels

    def _pip_report(self) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            listed, out = Path(folder, "requirements.txt"), Path(folder, "report.json")
            listed.write_text(self.requirements)
            command = [
                sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed",
                "--only-binary", ":all:", "--quiet", "--report", str(out), "-r", str(listed),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
                why = " ".join(errors) or done.stderr.strip()
                raise NotAttempted(f"pip cannot resolve {self.recipe}/requirements.in: {why}")
            entries: list[dict[str, Any]] = json.loads(out.read_text())["install"]
            return entries

    def _build_recipe(self, say: Say, run: RunJob) -> set[str]:
        """Python and the compilers, by rattler-build like any recipe, tests included."""
        subdir, names = self.folder / "linux-64", self._read("recipe.json").get("files", [])
        if names and all((subdir / name).exists() for name in names):
            return set(names)
        say(f"host base: CPython {platform.python_version()} and the compilers")
        output, log = self.project.staging / "host-base", self.project.logs / "host-base.log"
        shutil.rmtree(output, ignore_errors=True)
        job = self.base.arguments(f"host-{self.key}", None) | {
            "action": "build", "recipes": [str(self.recipe / "recipe.yaml")], "channel": [],
            "output_dir": str(output), "package_format": "conda:1",
        }  # fmt: skip
        run(job, log)
        packages = sorted(output.glob("linux-64/*.conda"))
        paths = [str(package) for package in packages]
        run({"action": "test", "packages": paths, "channel": [output.as_uri()]}, log)
        for package in packages:
            if not (subdir / package.name).exists():
                move_whole(package, subdir / package.name)
        shutil.rmtree(output)
        names = [package.name for package in packages]
        self._write("recipe.json", files=names)
        return set(names)


def _resolved(entry: dict[str, Any]) -> tuple[str, str, str, str]:
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


def _gcc_version() -> str:
    if shutil.which("gcc") is None:
        return "0"
    command = ["gcc", "-dumpfullversion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"
