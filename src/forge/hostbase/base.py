# SPDX-License-Identifier: BSD-3-Clause
"""The host base: a conda channel made from the running CPython and PyPI's wheels.

For machines that reach PyPI but not conda-forge. Everything in it is host-bound (its Python links
this machine's libraries, its compilers are this machine's) and is never published.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import unquote, urlsplit

from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from forge.bases import Base
from forge.conda.index import SHA256
from forge.conda.local import Channel
from forge.errors import ForgeError, NotAttempted
from forge.files import digest_tree, hold, move_whole, read_text, sha256_file, write_text
from forge.hostbase.wheels import CODE, CONDA_NAMES, Wheel
from forge.project import Project
from forge.recipes.recipe import packages_in
from forge.sources.cache import PYPI_URL, Progress, Source, SourceCache

Say = Callable[[str], None]
RunJob = Callable[[dict[str, Any], Path], None]
VERSION = platform.python_version()


class HostBase:
    """Makes `build/host-base` and keeps it current. Interrupted, it goes on where it was."""

    def __init__(self, project: Project, base: Base) -> None:
        self.project, self.base = project, base
        self.folder = base.folder or project.build / "host-base"
        self.recipe = project.root / "bases" / "host"
        self.output, self.log = project.staging / "host-base", project.logs / "host-base.log"
        self.python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)

    @cached_property
    def key(self) -> str:
        """A digest of what the base is made from: equal keys, equal packages."""
        inputs = [
            digest_tree(self.recipe, self.project.root), CODE, self.requirements, sys.version,
            version("py-rattler-build"), sha256_file(Path(self.python)), str(self._environment),
        ]  # fmt: skip
        return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]

    @cached_property
    def _environment(self) -> dict[str, str]:
        """What its recipe reads."""
        return {
            "FORGE_PYTHON": self.python, "FORGE_PYTHON_VERSION": VERSION,
            "FORGE_GCC_VERSION": subprocess.getoutput("gcc -dumpfullversion 2>/dev/null") or "0",
            "FORGE_GLIBC_VERSION": platform.libc_ver()[1] or "0",
        }  # fmt: skip

    @property
    def requirements(self) -> str:
        """What pip resolves, with the pins of variants.yaml filled in."""
        values = {key: values[0] for key, values in self.base.variants.items() if values}
        return Template(read_text(self.recipe / "requirements.in")).substitute(values)

    def names(self) -> frozenset[str]:
        """List the packages that recipes may need of it: what its requirements and recipe name."""
        lines = [line for line in self.requirements.splitlines() if line and line[0] != "#"]
        names = [canonicalize_name(Requirement(line).name) for line in lines]
        own = packages_in(self.recipe / "recipe.yaml")
        return frozenset(own.union(CONDA_NAMES.get(name, name) for name in names))

    def _seal(self, data: dict[str, Any]) -> str:
        return hashlib.sha256(f"{self.key} {json.dumps(data)}".encode()).hexdigest()

    def _read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of an earlier run, if whole and of these very inputs; else nothing."""
        try:
            data = json.loads((self.folder / name).read_bytes())
            return data if data.pop("key") == self._seal(data) else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _write(self, name: str, **data: Any) -> None:
        write_text(self.folder / name, json.dumps({"key": self._seal(data), **data}, indent=1))

    def is_current(self) -> bool:
        """Return whether it was finished from exactly these inputs, and nothing was lost since."""
        there = {f.name: f.stat().st_size for f in self.folder.glob("linux-64/*.conda")}
        return self._read("base.json").get("packages") == self._indexed() == there

    def _indexed(self) -> dict[str, int]:
        """Return the sizes of its packages; nothing where the index is damaged."""
        try:
            return {r.file_name: r.size for r in Channel(self.folder).records()}
        except ForgeError:
            return {}

    def make(self, say: Say, progress: Progress, run: RunJob) -> None:
        """Make the base if it is not current. `run(job, log)` runs an engine job.

        Two checkouts may share the folder by a link: the second waits for the first. Raises
        NotAttempted when pip cannot resolve or fetch, Failed when a part fails.
        """
        if self.is_current():
            return
        if missing := [name for name in ("gcc", "g++") if shutil.which(name) is None]:
            advice = "also for triton at run time; on Debian: apt-get install g++"
            raise NotAttempted(f"the host base needs {' and '.join(missing)}, {advice}")
        with hold(self.folder, "making the host base in", say):
            if not self.is_current():
                self._make(say, progress, run)

    def _make(self, say: Say, progress: Progress, run: RunJob) -> None:
        subdir, cache = self.folder / "linux-64", SourceCache(self.project)
        indexed = self._indexed()
        for package in subdir.glob("*.conda"):  # a cut one would be kept for its name
            if indexed.get(package.name, size := package.stat().st_size) != size:
                package.unlink()
        read = [Wheel.read(cache.fetch(s, progress), s, tag) for s, tag in self._resolve(say)]
        wheels = {wheel.name: wheel for wheel in read}
        packages = self._build_recipe(say, run)
        wanted = {c.file_name: c for c in (w.conversion(wheels) for w in wheels.values())}
        if todo := [asdict(c) for name, c in wanted.items() if not (subdir / name).exists()]:
            say(f"host base: {len(todo)} wheels become packages")
            job = {"action": "convert", "wheels": todo, "subdir": str(subdir)}
            run(job | {"output_dir": str(self.output)}, self.log)
            shutil.rmtree(self.output)
        for name in {file.name for file in subdir.glob("*.conda")} - packages - wanted.keys():
            (subdir / name).unlink()
        known = {
            name: asdict(wheel) | {"build_number": 0, "subdir": subdir.name}
            | {"size": (subdir / name).stat().st_size, "sha256": sha256_file(subdir / name)}
            for name, wheel in wanted.items()
        }  # fmt: skip
        # anew: it may be damaged, or name other bytes; rattler would hash them for half a minute
        for folder, entries in ((subdir, known), (self.folder / "noarch", {})):
            write_text(folder / "repodata.json", json.dumps({"packages.conda": entries}))
        Channel(self.folder, self.project.names).index()
        record = [{"purl": wheel.purl, "sha256": wheel.sha256} for wheel in wheels.values()]
        self._write("base.json", packages=self._indexed(), wheels=record)

    def _resolve(self, say: Say) -> Iterator[tuple[Source, str]]:
        """Yield each wheel's file and tag, as pip resolved them when first asked."""
        files = self._read("resolution.json").get("files")
        if files is None:
            say("host base: pip resolves the wheels")
            files = [_resolved(entry) for entry in self._pip_report()]
            self._write("resolution.json", files=files)
        for file_name, sha256 in files:
            name, release, *_ = parse_wheel_filename(file_name)
            purl = PackageURL("pypi", None, name, str(release), {"file_name": file_name})
            source = Source(f"{PYPI_URL}/{file_name}", sha256, purl)
            yield source, f"{release.local.split('.')[0]}_" if release.local else ""

    def _pip_report(self) -> list[dict[str, Any]]:
        words = "-m pip install --dry-run --ignore-installed --quiet --only-binary :all: --report -"
        command = [sys.executable, *words.split(), "-r", "/dev/stdin"]
        done = subprocess.run(command, input=self.requirements, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            why = " ".join(errors) or done.stderr.strip()
            raise NotAttempted(f"pip cannot resolve {self.recipe}/requirements.in: {why}")
        return json.loads(done.stdout)["install"]

    def _build_recipe(self, say: Say, run: RunJob) -> set[str]:
        """Build Python and the compilers, by rattler-build like any recipe, tests included."""
        say(f"host base: CPython {VERSION} and the compilers")
        output = self.output
        shutil.rmtree(output, ignore_errors=True)
        job = {
            "action": "build", "recipes": [str(self.recipe / "recipe.yaml")], "channel": [],
            "output_dir": str(output), "package_format": "conda:1",
            "environment": self._environment,
        }  # fmt: skip
        run(job | self.base.arguments(f"host-{self.key}", None), self.log)
        made = sorted(output.glob("linux-64/*.conda"))
        job = {"action": "test", "packages": [*map(str, made)], "channel": [output.as_uri()]}
        run(job, self.log)
        for package in made:
            move_whole(package, self.folder / "linux-64" / package.name)
        shutil.rmtree(output)
        return {package.name for package in made}


def _resolved(entry: dict[str, Any]) -> tuple[str, str]:
    """Return the file name and sha256 of one entry of pip's report.

    pip before 23.1 states no hash for a file of a local wheel folder: that file is hashed here.
    """
    url = urlsplit(entry["download_info"]["url"])
    path = Path(unquote(url.path))
    sha256 = entry["download_info"]["archive_info"].get("hashes", {}).get("sha256")
    if sha256 is None:
        if url.scheme != "file":
            raise NotAttempted(f"pip's index states no sha256 for {path.name}")
        sha256 = sha256_file(path)
    if not SHA256.fullmatch(sha256):  # it becomes the name of a folder
        raise NotAttempted(f"pip's index states {sha256!a:.80} as sha256 of {path.name!a:.200}")
    return path.name, sha256
