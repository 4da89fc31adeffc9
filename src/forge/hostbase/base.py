# SPDX-License-Identifier: BSD-3-Clause
"""The host base: a conda channel made from the running CPython and PyPI's wheels.

The base is for machines that reach PyPI but not conda-forge. All its packages are host-bound and
never published, because its Python uses libraries of this machine, and its compilers are this
machine's.
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

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from forge.bases import Base
from forge.conda.local import LocalChannel
from forge.errors import ForgeError, NotAttempted
from forge.files import digest_tree, hold, move_whole, read_text, sha256_file, write_text
from forge.hostbase.lock import fetch_wheels, read_pins, require_pinned
from forge.hostbase.wheels import CODE, CONDA_NAMES, Conversion, Wheel, is_nvidia
from forge.project import Project, is_set
from forge.recipes.cost import Cost, parse_cost
from forge.recipes.recipe import list_packages, remove_extra
from forge.sources.cache import SourceCache

Say = Callable[[str], None]
# The type of a function that runs a job of the engine. It takes the job's arguments and its log.
RunJob = Callable[[dict[str, Any], Path], None]
VERSION = platform.python_version()
LOCK = "requirements.txt"
SUBDIR = "linux-64"
# This file is written when the base is complete. It lists the base's packages and wheels.
RECORD = "base.json"
# If this environment variable is set, the base has NVIDIA's libraries instead of stubs of them, for
# machines with an NVIDIA GPU.
NVIDIA_WHEELS = "FORGE_NVIDIA_WHEELS"


def require_compilers() -> None:
    """Raise NotAttempted if this machine has no gcc or no g++."""
    missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    if missing:
        advice = "triton needs gcc at run time as well. On Debian: apt-get install g++"
        raise NotAttempted(f"the host base needs {' and '.join(missing)}; {advice}")


class HostBaseMaker:
    """Makes the host base and keeps it current. It continues a run that was interrupted.

    Attributes:
        project: The checkout.
        base: The host base with its variants.
        folder: The folder of the channel.
        recipe: The folder with the recipe and the requirements of the base.
        output: The engine's output folder.
        log: The log of the engine's jobs.
        python: The executable of the CPython that is packaged.
        has_nvidia_wheels: Whether NVIDIA_WHEELS is set.
    """

    def __init__(self, project: Project, base: Base) -> None:
        self.project = project
        self.base = base
        self.folder = base.folder or project.build / "host-base"
        self.recipe = project.recipes / "bases" / "host"
        self.output = project.staging / "host-base"
        self.log = project.logs / "host-base.log"
        # This is the interpreter itself, not a link to it in a virtual environment.
        executable = getattr(sys, "_base_executable", "") or sys.executable
        self.python = os.path.realpath(executable)
        self.has_nvidia_wheels = is_set(NVIDIA_WHEELS)

    @property
    def cost(self) -> Cost:
        """The cost of making the base, as its recipe states it. Raise ForgeError if malformed."""
        path = self.recipe / "recipe.yaml"
        key = "cost_with_nvidia_wheels" if self.has_nvidia_wheels else "cost"
        try:
            stated = yaml.safe_load(read_text(path))["extra"][key]
        except (KeyError, TypeError):
            raise ForgeError(f"{path} has no extra.{key}: add it") from None
        return parse_cost(stated, path)

    @cached_property
    def key(self) -> str:
        """A digest of all inputs. The same key means the same packages."""
        recipe_file = self.recipe / "recipe.yaml"
        contents = {recipe_file: remove_extra(recipe_file.read_bytes())}
        inputs = [
            digest_tree(self.recipe, self.project.root, contents=contents),
            CODE,
            self.requirements,
            sys.version,
            version("py-rattler-build"),
            sha256_file(Path(self.python)),
            str(self._environment),
            f"{NVIDIA_WHEELS}: {self.has_nvidia_wheels}",
        ]
        return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]

    @cached_property
    def _environment(self) -> dict[str, str]:
        """The environment variables that the base's recipe reads, without the paths of wheels."""
        gcc = subprocess.getoutput("gcc -dumpfullversion 2>/dev/null")
        return {
            "FORGE_PYTHON": self.python,
            "FORGE_PYTHON_VERSION": VERSION,
            "FORGE_GCC_VERSION": gcc or "0",
            "FORGE_GLIBC_VERSION": platform.libc_ver()[1] or "0",
        }

    @property
    def requirements(self) -> str:
        """requirements.in with variants.yaml's pins: what recipes and stacks need from PyPI.

        Raise ForgeError if no variants file has a value for a pin.
        """
        path = self.recipe / "requirements.in"
        pins = {key: values[0] for key, values in self.base.variants.items() if values}
        try:
            return Template(read_text(path)).substitute(pins)
        except KeyError as error:
            reason = f"{path} uses ${error.args[0]}, for which no variants file has a value"
            raise ForgeError(f"{reason}: add it to variants.yaml") from None
        except ValueError as error:
            raise ForgeError(f"{path}: {error}; write $$ for a dollar sign") from None

    def names(self) -> frozenset[str]:
        """Return the names of the packages of the base that recipes may require.

        Packages that are only dependencies of these packages are not included.
        """
        names = list_packages(self.recipe / "recipe.yaml")
        for project in self._list_required():
            names.add(CONDA_NAMES.get(project, project))
        return frozenset(names)

    def _list_required(self) -> set[str]:
        """Return the canonical names of the projects in `requirements`.

        Raises:
            ForgeError: A line is not a requirement.
        """
        projects: set[str] = set()
        for line in self.requirements.splitlines():
            if not line or line.startswith("#"):
                continue
            try:
                projects.add(canonicalize_name(Requirement(line).name))
            except InvalidRequirement:
                path = self.recipe / "requirements.in"
                reason = f"{line!r:.80} is not a requirement such as a>=1"
                raise ForgeError(f"{path}: {reason}") from None
        return projects

    def _seal(self, data: dict[str, Any]) -> str:
        """Return a digest of data and `key`.

        If stored data have this digest, they are complete and were made from the present inputs.
        """
        return hashlib.sha256(f"{self.key} {json.dumps(data)}".encode()).hexdigest()

    def _read_sealed(self, name: str) -> dict[str, Any]:
        """Read a JSON file of an earlier run; empty if damaged or not from the present inputs."""
        try:
            data = json.loads((self.folder / name).read_bytes())
            return data if data.pop("key") == self._seal(data) else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _write_sealed(self, name: str, **data: Any) -> None:
        text = json.dumps({"key": self._seal(data), **data}, indent=1)
        write_text(self.folder / name, text)

    def is_current(self) -> bool:
        """Return whether the base was made from the present inputs, and lacks no file."""
        recorded = self._read_sealed(RECORD).get("packages")
        sizes = {file.name: file.stat().st_size for file in self.folder.glob(f"{SUBDIR}/*.conda")}
        return recorded == self._read_indexed_sizes() == sizes

    def _read_indexed_sizes(self) -> dict[str, int]:
        """Return the package sizes in the index by file name; empty if the index is damaged."""
        try:
            records = LocalChannel(self.folder).records()
        except ForgeError:
            return {}
        return {record.file_name: record.size for record in records}

    def make(self, say: Say, run: RunJob) -> None:
        """Make the base if it is not current.

        Two checkouts may share the folder through a link. Then the second one waits for the first.

        Args:
            say: Prints a line.
            run: Runs a job of the engine.

        Raises:
            NotAttempted: pip cannot fetch a wheel, or there is no compiler.
            Refused: The sha256 of a wheel is not in the lock.
            Failed: A part of the base cannot be made.
            ForgeError: The lock is malformed or does not satisfy `requirements`, or the folder is
                not writable.
        """
        if self.is_current():
            return
        require_compilers()
        with hold(self.folder, "making the host base in", say):
            if not self.is_current():
                self._make(say, run)

    def _make(self, say: Say, run: RunJob) -> None:
        """Make the base. The caller holds its lock."""
        subdir = self.folder / SUBDIR
        self._remove_damaged()
        wheels = {wheel.name: wheel for wheel in self._fetch_wheels(say)}
        built = self._build_recipe(say, run, wheels)
        conversions = {}
        for wheel in wheels.values():
            conversion = wheel.plan_conversion(wheels)
            conversions[conversion.file_name] = conversion
        self._convert(conversions, say, run)
        present = {file.name for file in subdir.glob("*.conda")}
        for name in present - built - conversions.keys():
            (subdir / name).unlink()
        self._write_repodata(conversions)
        LocalChannel(self.folder, self.project.recipes).index()
        record = [{"purl": wheel.purl, "sha256": wheel.sha256} for wheel in wheels.values()]
        self._write_sealed(RECORD, packages=self._read_indexed_sizes(), wheels=record)

    def _remove_damaged(self) -> None:
        """Remove packages whose size differs from that in the index.

        Otherwise a truncated package would count as made, because its file exists.
        """
        indexed = self._read_indexed_sizes()
        for package in self.folder.glob(f"{SUBDIR}/*.conda"):
            size = package.stat().st_size
            if indexed.get(package.name, size) != size:
                package.unlink()

    def _convert(self, conversions: dict[str, Conversion], say: Say, run: RunJob) -> None:
        """Convert the wheels whose packages are not in the base yet.

        Args:
            conversions: The conversions by the file names of the packages.
            say: Prints a line.
            run: Runs a job of the engine.
        """
        subdir = self.folder / SUBDIR
        missing = []
        for name, conversion in conversions.items():
            if not (subdir / name).exists():
                missing.append(asdict(conversion))
        if not missing:
            return
        say(f"host base: converting {len(missing)} wheels to packages")
        job = {
            "action": "convert",
            "wheels": missing,
            "subdir": str(subdir),
            "output_dir": str(self.output),
        }
        run(job, self.log)
        shutil.rmtree(self.output)

    def _write_repodata(self, conversions: dict[str, Conversion]) -> None:
        """Write an index of the converted packages. LocalChannel.index adds the other packages.

        An existing index is replaced, because it may be damaged or state other hashes. If no index
        were written here, rattler would spend half a minute on hashing all packages.

        Args:
            conversions: The conversions by the file names of the packages.
        """
        entries = {}
        for name, conversion in conversions.items():
            package = self.folder / SUBDIR / name
            entries[name] = asdict(conversion) | {
                "build_number": 0,
                "subdir": SUBDIR,
                "size": package.stat().st_size,
                "sha256": sha256_file(package),
            }
        for subdir, records in ((SUBDIR, entries), ("noarch", {})):
            text = json.dumps({"packages.conda": records})
            write_text(self.folder / subdir / "repodata.json", text)

    def _fetch_wheels(self, say: Say) -> Iterator[Wheel]:
        """Yield the wheels of the lock.

        A wheel of NVIDIA is left out, unless `requirements` names it or NVIDIA_WHEELS is set.
        """
        file = self.recipe / LOCK
        pins = read_pins(file)
        require_pinned(self.requirements, pins, file)
        if not self.has_nvidia_wheels:
            required = self._list_required()
            for name in list(pins):
                if is_nvidia(name) and name not in required:
                    del pins[name]
        cache = SourceCache(self.project)
        for path, source in fetch_wheels(pins.values(), file, cache, say):
            local_version = parse_wheel_filename(path.name)[1].local
            tag = f"{local_version.split('.')[0]}_" if local_version else ""
            yield Wheel.read(path, source, tag)

    def _build_recipe(self, say: Say, run: RunJob, wheels: dict[str, Wheel]) -> set[str]:
        """Build and test the packages of Python, the compilers and the stubs of CUDA's libraries.

        As for any recipe, rattler-build builds and tests them. The stubs are made from the wheel of
        torch. If NVIDIA_WHEELS is set, there are no stubs.

        Returns:
            The file names of the packages.
        """
        say(f"host base: CPython {VERSION} and the compilers")
        environment = dict(self._environment)
        if "torch" in wheels and not self.has_nvidia_wheels:
            environment["FORGE_TORCH"] = str(wheels["torch"].file)
            environment["FORGE_PYELFTOOLS"] = str(wheels["pyelftools"].file)
        shutil.rmtree(self.output, ignore_errors=True)
        build = {
            "action": "build",
            "recipes": [str(self.recipe / "recipe.yaml")],
            "channel": [],
            "output_dir": str(self.output),
            "package_format": "conda:1",
            "environment": environment,
        }
        run(build | self.base.arguments(f"host-{self.key}", None), self.log)
        packages = sorted(self.output.glob(f"{SUBDIR}/*.conda"))
        test = {
            "action": "test",
            "packages": [str(package) for package in packages],
            "channel": [self.output.as_uri()],
        }
        run(test, self.log)
        for package in packages:
            move_whole(package, self.folder / SUBDIR / package.name)
        shutil.rmtree(self.output)
        return {package.name for package in packages}
