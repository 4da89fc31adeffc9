# SPDX-License-Identifier: BSD-3-Clause
"""Make a channel that replaces conda-forge, from Debian's files and PyPI's wheels.

Its packages have conda-forge's names. This module writes a recipe for Debian's files, and
rattler-build builds it, because only packages that rattler-build makes have run_exports.
Without run_exports, a recipe with a wrong list of requirements would not fail.
"""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from packageurl import PackageURL
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from rattler_build import assemble_package
from rehearsal import compilers, debian, trees

from forge.conda.local import write_index
from forge.files import move_whole, sha256_file
from forge.hostbase import wheels
from forge.recipes.recipe import list_packages, parse_package_name
from forge.recipes.render import build_recipes
from forge.sources.cache import PYPI_URL, Source

MARK = "rehearsal"
LIB = trees.MULTIARCH
# The paths of Debian's files in a conda prefix.
MOVES: trees.Moves = [
    (r"usr/share/(doc|man|bug|lintian|locale|bash-completion|emacs|vim)/.*", None),
    (rf"{LIB}/openblas-openmp/libopenblas(.*)", r"lib/libopenblas\1"),
    (rf"{LIB}/openblas-openmp/.*", None),
    (r"usr/include/x86_64-linux-gnu/(?:openblas-openmp/)?(.*)", r"include/\1"),
    (r"usr/lib/llvm-21/lib/clang/21/include/(omp.*\.h)", r"include/\1"),
    (r"usr/lib/llvm-21/include/.*", None),
    (r"usr/lib/llvm-21/lib/(libi?omp5?\.so.*)", r"lib/\1"),
    (rf"{LIB}/(.*)", r"lib/\1"),
    (r"usr/(bin|include|lib|share)/(.*)", r"\1/\2"),
]
BLAS_LINKS = {
    "lib/libblas.so": "libopenblas.so.0",
    "lib/libblas.so.3": "libopenblas.so.0",
    "lib/libcblas.so": "libopenblas.so.0",
    "lib/libcblas.so.3": "libopenblas.so.0",
    "lib/liblapack.so": "libopenblas.so.0",
    "lib/liblapack.so.3": "libopenblas.so.0",
}


@dataclass(frozen=True)
class Part:
    """A package of the channel that is made of Debian's files.

    Attributes:
        debs: The Debian packages whose files it has.
        needs: Its run requirements.
        exports: Its run_exports, as in a recipe.
        version: Its version. If empty, the package has the version of the first Debian package.
        build: Its build string.
        only: A pattern. Only files whose paths in the prefix match it are in the package.
        links: Targets of additional links, by path.
    """

    debs: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    exports: Any = None
    version: str = ""
    build: str = "{mark}_0"
    only: str = ".*"
    links: dict[str, str] = field(default_factory=dict)


def weak_exports(*specs: str) -> dict[str, list[str]]:
    """Return the run_exports of a library."""
    return {"weak": [*specs]}


# Static libraries are left out, as in conda-forge's packages. Otherwise a linker that does not find
# libz.so would link libz.a.
NO_ARCHIVE = r".*(?<!\.a)"
PARTS: dict[str, Part] = {
    "libgcc": Part(("libgcc-s1", "libgomp1", "libatomic1"), only=r"lib/lib.*\.so.*"),
    "libstdcxx": Part(("libstdc++6",), ("libgcc",), only=r"lib/lib.*\.so.*"),
    "libgfortran5": Part(("libgfortran5",), ("libgcc",), only=r"lib/lib.*\.so.*"),
    "libopenblas": Part(
        ("libopenblas0-openmp",),
        ("libgfortran5", "llvm-openmp"),
        build="openmp_{mark}_0",
        only=r"lib/lib.*\.so.*",
    ),
    "llvm-openmp": Part(("libomp-21-dev", "libomp5"), exports={"strong": ["llvm-openmp >=21"]}),
    "libzlib": Part(("zlib1g",), only=r"lib/lib.*\.so.*"),
    "zlib": Part(
        ("zlib1g-dev",),
        ("libzlib",),
        weak_exports("libzlib >=1.3,<2"),
        only=NO_ARCHIVE,
        links={"lib/libz.so": "libz.so.1"},
    ),
    "libpng": Part(
        ("libpng16-16t64", "libpng-dev"), ("libzlib",), weak_exports("libpng >=1.6,<1.7")
    ),
    "libjpeg-turbo": Part(
        ("libjpeg62-turbo", "libjpeg62-turbo-dev"), (), weak_exports("libjpeg-turbo")
    ),
    "libwebp-base": Part(
        ("libwebp7", "libwebp-dev", "libsharpyuv0"), (), weak_exports("libwebp-base")
    ),
    "liblzma": Part(("liblzma5",), only=r"lib/lib.*\.so.*"),
    "liblzma-devel": Part(
        ("liblzma-dev",),
        ("liblzma",),
        weak_exports("liblzma >=5,<6.0a0"),
        only=NO_ARCHIVE,
        links={"lib/liblzma.so": "liblzma.so.5"},
    ),
    "bzip2": Part(("libbz2-1.0",)),
    "libexpat": Part(("libexpat1",)),
    "libffi": Part(("libffi8",)),
    "libuuid": Part(("libuuid1",)),
    "openssl": Part(("libssl3t64",), ("libzlib", "zstd"), only=r"lib/lib.*\.so.*"),
    "zstd": Part(("libzstd1",)),
    "eigen": Part(("libeigen3-dev",)),
    "jemalloc": Part(("libjemalloc2", "libjemalloc-dev")),
    "cmake": Part(("cmake",)),
    "ninja": Part(("ninja-build",), only="bin/.*"),
    "make": Part(("make",), only="bin/.*"),
    "patch": Part(("patch",), only="bin/.*"),
    "pkg-config": Part(("pkgconf", "pkgconf-bin"), links={"bin/pkg-config": "pkgconf"}),
    "ccache": Part(("ccache",), only="bin/.*"),
    "git": Part(("git",), only="(bin|lib/git-core)/.*"),
    "libllvm22": Part(("libllvm22",), only=r"lib/lib.*\.so.*"),
    "nomkl": Part(version="1.0"),
    "pybind11-abi": Part(version="11"),
}
BLAS_NAMES = ("libblas", "libcblas", "liblapack")
for blas_name in BLAS_NAMES:
    PARTS[blas_name] = Part(
        needs=("libopenblas * openmp_*",),
        version="3.9.0",
        links=BLAS_LINKS if blas_name == "libblas" else {},
        exports=weak_exports(f"{blas_name} >=3.9.0,<4.0a0"),
    )
# The packages of the libraries that Python's own modules load. Without them, the modules would load
# this machine's libraries.
PYTHON_NEEDS = (
    "bzip2",
    "libexpat",
    "libffi",
    "liblzma",
    "libuuid",
    "libzlib",
    "openssl",
    "zstd",
)
# Keys of a recipe's requirements whose values are not installed.
NOT_INSTALLED = {"if", "run_constraints", "run_exports", "ignore_run_exports"}
# Names of packages on PyPI, by their names on conda-forge. On conda-forge, ray-default is ray with
# the requirements of its dashboard. Here the wheel of ray replaces it.
PYPI_NAMES = {"ray-default": "ray"} | {conda: pypi for pypi, conda in wheels.CONDA_NAMES.items()}

# Requirements that a package of conda-forge has and the wheel does not have. On conda-forge,
# fastapi is `fastapi[standard]`, and pybind11 has its headers where extensions of torch look for
# them.
FURTHER_NEEDS = {
    "fastapi": (
        "email-validator",
        "fastapi-cli",
        "httpx",
        "jinja2",
        "python-multipart",
        "uvicorn",
        "uvloop",
    ),
    "pybind11": ("pybind11-global",),
}


def list_specs(section: Any) -> Iterator[str]:
    """Yield the specs in a section of a recipe's requirements, whatever their conditions."""
    match section:
        case str():
            yield section
        case list():
            for item in section:
                yield from list_specs(item)
        case dict():
            for key, value in section.items():
                if key not in NOT_INSTALLED:
                    yield from list_specs(value)


def list_wheel_specs(root: Path) -> list[str]:
    """Return the specs that wheels have to satisfy, in the form that pip reads.

    These are the requirements of recipes, of their tests and of stacks. The packages of recipes and
    of this module are left out, and so are specs that pip cannot read.

    Args:
        root: The checkout.
    """
    own_names = {*PARTS, "python", "gcc"}
    specs: set[str] = set()
    for recipe in root.glob("recipes/*/recipe.yaml"):
        for name in list_packages(recipe):
            # A name may contain an expression, such as the GPU's name.
            own_names.add(re.sub(r"\$\{\{.*?\}\}", "*", name))
        data = yaml.safe_load(recipe.read_text())
        for part in [data, *data.get("outputs", [])]:
            tests = [test.get("requirements") for test in part.get("tests", [])]
            specs.update(list_specs([part.get("requirements"), tests]))
    for stack in root.glob("stacks/*/pixi.toml"):
        data = tomllib.loads(stack.read_text())
        for part in [data, *data.get("feature", {}).values()]:
            for name, versions in part.get("dependencies", {}).items():
                specs.add(name if versions == "*" else f"{name} {versions}")
    result = []
    for spec in specs:
        match = re.fullmatch(r"([\w.-]+)(?: ([<>=!~]\S+))?", spec)
        if not match:
            continue
        name, versions = match.groups(default="")
        is_own = any(fnmatch(name, pattern) for pattern in own_names)
        if not is_own and not name.startswith("__"):
            result.append(f"{name}{versions}")
    return sorted(result)


def make_outputs(tree: Path, host: compilers.Host, subdir: Path) -> list[dict[str, Any]]:
    """Lay out the files of the packages that do not exist yet, and return their recipe's outputs.

    Args:
        tree: The folder for the files.
        host: The host compiler.
        subdir: The folder of the packages.
    """
    outputs = []
    for name, part in PARTS.items():
        builds = [part.build.format(mark=MARK)]
        if name in BLAS_NAMES:
            builds = [f"{MARK}_0_netlib", f"{MARK}_1_openblas"]
        version = part.version or debian.read_version(part.debs[0])
        for build_string in builds:
            if (subdir / f"{name}-{version}-{build_string}.conda").exists():
                continue
            files = tree / name
            if not files.exists():
                lay_out_part(files, part)
            output = make_output(name, version, build_string, part.needs, part.exports, files)
            outputs.append(output)
    for package in compilers.list_packages(host):
        name, version, build_string = package.name, package.version, package.build
        if not (subdir / f"{name}-{version}-{build_string}.conda").exists():
            files = package.write(tree / name)
            output = make_output(name, version, build_string, package.needs, package.exports, files)
            outputs.append(output)
    return outputs


def lay_out_part(folder: Path, part: Part) -> None:
    """Lay out the files of a package in a new folder."""
    folder.mkdir(parents=True)
    names = []
    for package in part.debs:
        for name in debian.list_files(package):
            target = trees.find_target(name, MOVES)
            if target and re.fullmatch(part.only, target):
                names.append(name)
    trees.lay_out(names, MOVES, folder)
    for link, target in part.links.items():
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(target)


def make_output(
    name: str, version: str, build: str, needs: Iterable[str], exports: Any, files: Path
) -> dict[str, Any]:
    """Return one output of the recipe that `build` writes.

    The script of the output copies the contents of the folder `files` into the prefix.
    """
    requirements: dict[str, Any] = {"run": [*needs]}
    if exports:
        requirements["run_exports"] = exports
    return {
        "package": {"name": name, "version": version},
        "build": {
            "string": build,
            "script": [f'cp -a "{files}/." "$PREFIX/"'],
            "dynamic_linking": {
                # With relative RPATHs, as in conda-forge's packages, a library loads the prefix's
                # libraries, and not those of this machine.
                "binary_relocation": ["lib/*.so*", "bin/python*"],
                "overlinking_behavior": "ignore",
            },
            "prefix_detection": {"ignore": True},
            "python": {"skip_pyc_compilation": ["**"]},
        },
        "requirements": requirements,
        "about": {"license": "LicenseRef-Debian", "summary": f"{name} of Debian, for a rehearsal"},
    }


def make_python_outputs(tree: Path, copier: Path) -> list[dict[str, Any]]:
    """Return the outputs of Python, which is copied from this machine, and of its ABI.

    Args:
        tree: The folder for the files.
        copier: The path of copy_interpreter.py, which the host base uses, too.
    """
    python_version = wheels.PYTHON
    tag = f"cp{python_version.replace('.', '')}"
    version = ".".join(map(str, sys.version_info[:3]))
    interpreter = Path(sys.base_prefix) / "bin" / f"python{python_version}"
    subprocess.run([interpreter, "-I", copier, tree / "python"], check=True)
    (tree / "python_abi").mkdir()
    abi_spec = f"python_abi {python_version}.* *_{tag}"
    exports = {"noarch": ["python"], "weak": [abi_spec]}
    build_string = f"{MARK}_0_{tag}"
    python = make_output("python", version, build_string, PYTHON_NEEDS, exports, tree / "python")
    python["requirements"]["run_constraints"] = [abi_spec]
    abi = make_output("python_abi", python_version, build_string, [], None, tree / "python_abi")
    abi["requirements"]["run_constraints"] = [f"python {python_version}.* *_{tag}"]
    return [python, abi]


def make(folder: Path, work: Path, host: compilers.Host, copier: Path, specs: list[str]) -> None:
    """Make the channel. Packages that exist are kept.

    Args:
        folder: The folder of the channel.
        work: A folder for intermediate files.
        host: The host compiler.
        copier: The path of copy_interpreter.py.
        specs: The specs that wheels have to satisfy.
    """
    subdir = folder / "linux-64"
    for name in ("linux-64", "noarch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "trees", ignore_errors=True)
    outputs = make_outputs(work / "trees", host, subdir)
    if not list(subdir.glob(f"python_abi-{wheels.PYTHON}-*.conda")):
        outputs += make_python_outputs(work / "trees", copier)
    if outputs:
        build(outputs, work, subdir)
    for package in convert_wheels(specs, work / "wheels", subdir):
        print(package.name, flush=True)
    write_index(folder, write_shards=False)


def build(outputs: list[dict[str, Any]], work: Path, subdir: Path) -> None:
    """Build the packages of these outputs with rattler-build, and move them to `subdir`."""
    recipe = work / "conda-forge" / "recipe.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "schema_version": 1,
        "recipe": {"name": "conda-forge", "version": "1"},
        "outputs": outputs,
    }
    # The recipe is written as JSON, because YAML would have anchors, which rattler-build does not
    # read.
    recipe.write_text(json.dumps(data))
    options = {"channel": [], "test": "skip", "package_format": "conda:1"}
    build_recipes([recipe], output_dir=work / "built", **options)
    for package in (work / "built" / "linux-64").glob("*.conda"):
        shutil.move(package, subdir / package.name)
    shutil.rmtree(work / "trees")
    shutil.rmtree(work / "built")


def convert_wheels(specs: Iterable[str], cache: Path, subdir: Path) -> Iterable[Path]:
    """Make packages from the wheels that satisfy `specs`, and yield the new packages.

    Args:
        specs: Specs with conda-forge's names, in the form that pip reads.
        cache: A folder for the wheels.
        subdir: The folder of the packages.
    """
    specs = [*specs, *itertools.chain(*FURTHER_NEEDS.values())]
    names = {spec: parse_package_name(spec) for spec in specs}
    pypi_specs = [spec.replace(name, PYPI_NAMES.get(name, name), 1) for spec, name in names.items()]
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    versions = resolve(pip, pypi_specs)
    download = [*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", cache]
    pins = [f"{name}=={version}" for name, version in versions.items()]
    subprocess.run([*download, *pins], check=True)
    wheels_by_name = read_wheels(versions, cache)
    for wheel in wheels_by_name.values():
        conversion = wheel.plan_conversion(wheels_by_name)
        conversion = dataclasses.replace(
            conversion,
            build=f"{MARK}_{conversion.build.rsplit('_', 2)[-2]}_0",
            depends=[*conversion.depends, *FURTHER_NEEDS.get(conversion.name, ())],
        )
        if not (subdir / conversion.file_name).exists():
            yield conversion.make(subdir)
        for name in find_other_names(conversion.name, names.values()):
            yield from make_alias(name, conversion, subdir)


def resolve(pip: list[str], specs: list[str]) -> dict[str, Version]:
    """Return the versions that pip chooses, by name.

    Packages whose names begin with torch, triton, nvidia or cuda are left out.

    Args:
        pip: The command line of pip.
        specs: The specs.
    """
    command = [*pip, "install", "-q", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--report", "-", *specs], stdout=subprocess.PIPE, check=True)
    versions = {}
    for entry in json.loads(done.stdout)["install"]:
        name = entry["metadata"]["name"]
        if not re.match(r"(torch|triton|nvidia|cuda)", name):
            versions[canonicalize_name(name)] = Version(entry["metadata"]["version"])
    return versions


def read_wheels(versions: Mapping[str, Version], cache: Path) -> dict[str, wheels.Wheel]:
    """Return the wheels of these versions by name. The cache may have other versions, too."""
    wheels_by_name: dict[str, wheels.Wheel] = {}
    for file in sorted(cache.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(file.name)
        if versions.get(name) == version:
            purl = PackageURL("pypi", None, name, str(version), {"file_name": file.name})
            source = Source(f"{PYPI_URL}/{file.name}", sha256_file(file), purl)
            wheels_by_name[name] = wheels.Wheel.read(file, source, "")
    return wheels_by_name


def find_other_names(wheel: str, names: Iterable[str]) -> set[str]:
    """Return the names in `names` that conda-forge uses for a wheel and PyPI does not use."""
    same = {name for name in names if canonicalize_name(PYPI_NAMES.get(name, name)) == wheel}
    return same - {wheel}


def make_alias(name: str, wheel: wheels.Conversion, subdir: Path) -> Iterable[Path]:
    """Make a package with conda-forge's name that requires the package of a wheel.

    The package of the wheel has PyPI's name. If the package with conda-forge's name exists, nothing
    is yielded.
    """
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch) / "none"
        empty.mkdir()
        package = assemble_package(
            name,
            wheel.version,
            "linux-64",
            f"{MARK}_0",
            scratch,
            files_dir=empty,
            depends=[f"{wheel.name} =={wheel.version}"],
        )
        if not (subdir / package.path.name).exists():
            move_whole(package.path, subdir / package.path.name)
            yield subdir / package.path.name
