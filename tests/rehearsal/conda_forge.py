# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for conda-forge: Debian's files and PyPI's wheels under conda-forge's names.

rattler-build makes what Debian has, by a recipe that is written here, because a package made any
other way has no run_exports: without them a wrong list of dependencies passes.
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
# The layout of a conda prefix.
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
BLAS = {
    f"lib/lib{name}.so{end}": "libopenblas.so.0"
    for name in ("blas", "cblas", "lapack")
    for end in ("", ".3")
}


@dataclass(frozen=True)
class Part:
    """A package: the Debian packages whose files it has, what it needs and makes others need.

    `only` is a pattern of the names in the prefix that it keeps. Of `version`, the first Debian
    package says it where none is given. `exports` is run_exports as recipes have it.
    """

    debs: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    exports: Any = None
    version: str = ""
    build: str = "{mark}_0"
    only: str = ".*"
    links: dict[str, str] = field(default_factory=dict)


def weak(*specs: str) -> dict[str, list[str]]:
    """The run_exports of a library."""
    return {"weak": [*specs]}


# conda-forge has no static libraries there: a linker that misses libz.so would take libz.a
NO_ARCHIVE = r".*(?<!\.a)"
BLAS_NEEDS = ("libopenblas * openmp_*",)
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
        weak("libzlib >=1.3,<2"),
        only=NO_ARCHIVE,
        links={"lib/libz.so": "libz.so.1"},
    ),
    "libpng": Part(("libpng16-16t64", "libpng-dev"), ("libzlib",), weak("libpng >=1.6,<1.7")),
    "libjpeg-turbo": Part(("libjpeg62-turbo", "libjpeg62-turbo-dev"), (), weak("libjpeg-turbo")),
    "libwebp-base": Part(("libwebp7", "libwebp-dev", "libsharpyuv0"), (), weak("libwebp-base")),
    "liblzma": Part(("liblzma5",), only=r"lib/lib.*\.so.*"),
    "liblzma-devel": Part(
        ("liblzma-dev",),
        ("liblzma",),
        weak("liblzma >=5,<6.0a0"),
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
    **{
        name: Part(
            needs=BLAS_NEEDS,
            version="3.9.0",
            links=BLAS if name == "libblas" else {},
            exports=weak(f"{name} >=3.9.0,<4.0a0"),
        )
        for name in ("libblas", "libcblas", "liblapack")
    },
}
# What Python's own modules load, which would be this machine's.
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
BLAS_NAMES = ("libblas", "libcblas", "liblapack")
# of a recipe's requirements
NOT_INSTALLED = {"if", "run_constraints", "run_exports", "ignore_run_exports"}
# conda-forge's ray-default is ray with what its dashboard needs; the wheel alone stands for it
PYPI_NAMES = {"ray-default": "ray"} | {conda: pypi for pypi, conda in wheels.CONDA_NAMES.items()}

# What conda-forge's package requires and the wheel does not: `fastapi[standard]`, and pybind11's
# headers where extensions of torch look for them.
NEEDS_MORE = {
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


def required(section: Any) -> Iterator[str]:
    """The specs in a section of a recipe's requirements, whatever its conditions."""
    match section:
        case str():
            yield section
        case list():
            yield from itertools.chain(*map(required, section))
        case dict():
            kept = (part for key, part in section.items() if key not in NOT_INSTALLED)
            yield from itertools.chain(*map(required, kept))


def asked(root: Path) -> list[str]:
    """What the recipes and stacks below `root` require that a wheel can be: specs without a blank.

    That is a name of neither this channel's other makers nor a recipe, with versions or without.
    """
    own, specs = {*PARTS, "python", "gcc"}, set[str]()
    for recipe in root.glob("recipes/*/recipe.yaml"):
        # a name may have the GPU in it
        own |= {re.sub(r"\$\{\{.*?\}\}", "*", name) for name in list_packages(recipe)}
        data = yaml.safe_load(recipe.read_text())
        for part in [data, *data.get("outputs", [])]:
            tests = [test.get("requirements") for test in part.get("tests", [])]
            specs |= {*required([part.get("requirements"), tests])}
    for stack in root.glob("stacks/*/pixi.toml"):
        data = tomllib.loads(stack.read_text())
        for part in [data, *data.get("feature", {}).values()]:
            needs = part.get("dependencies", {}).items()
            specs |= {f"{name} {'' if said == '*' else said}".strip() for name, said in needs}
    plain = [found for spec in specs if (found := re.fullmatch(r"([\w.-]+)( [<>=!~]\S+)?", spec))]
    return sorted(
        f"{name}{(bounds or '').strip()}"
        for name, bounds in (found.groups() for found in plain)
        if not name.startswith("__") and not any(fnmatch(name, one) for one in own)
    )


def outputs(tree: Path, host: compilers.Host, subdir: Path) -> list[dict[str, Any]]:
    """The outputs of the recipe that `subdir` lacks; lays out each one's files below `tree`."""
    made = []
    for name, part in PARTS.items():
        builds = [part.build.format(mark=MARK)]
        if name in BLAS_NAMES:
            builds = [f"{MARK}_0_netlib", f"{MARK}_1_openblas"]
        version = part.version or debian.version(part.debs[0])
        lacking = [b for b in builds if not (subdir / f"{name}-{version}-{b}.conda").exists()]
        if lacking:
            fill(tree / name, part)
        made += [output(name, version, b, part.needs, part.exports, tree / name) for b in lacking]
    for one in compilers.packages(host):
        if not (subdir / f"{one.name}-{one.version}-{one.build}.conda").exists():
            files = one.write(tree / one.name)
            made.append(output(one.name, one.version, one.build, one.needs, one.exports, files))
    return made


def fill(folder: Path, part: Part) -> None:
    """Lay out the files of a package in a folder that is not there yet."""
    folder.mkdir(parents=True)
    names = [name for package in part.debs for name in debian.files(package)]
    chosen = [n for n in names if re.fullmatch(part.only, trees.moved(n, MOVES) or "-")]
    trees.lay_out(chosen, MOVES, folder)
    for link, target in part.links.items():
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(target)


def output(
    name: str, version: str, build: str, needs: Iterable[str], exports: Any, files: Path
) -> dict[str, Any]:
    """One output of a recipe that copies `files`."""
    requirements = {"run": [*needs]} | ({"run_exports": exports} if exports else {})
    copy = f'cp -a "{files}/." "$PREFIX/"'
    # as conda-forge's: a library finds others in the prefix, and not those of this machine
    moved = ["lib/*.so*", "bin/python*"]
    linking = {"binary_relocation": moved, "overlinking_behavior": "ignore"}
    return {
        "package": {"name": name, "version": version},
        "build": {
            "string": build,
            "script": [copy],
            "dynamic_linking": linking,
            "prefix_detection": {"ignore": True},
            "python": {"skip_pyc_compilation": ["**"]},
        },
        "requirements": requirements,
        "about": {"license": "LicenseRef-Debian", "summary": f"{name} of Debian, for a rehearsal"},
    }


def python_outputs(tree: Path, copier: Path) -> list[dict[str, Any]]:
    """CPython of this machine, copied as the host base copies it, and its ABI."""
    xy, tag = wheels.PYTHON, f"cp{wheels.PYTHON.replace('.', '')}"
    version = ".".join(map(str, sys.version_info[:3]))
    base = Path(sys.base_prefix) / "bin" / f"python{xy}"
    subprocess.run([base, "-I", copier, tree / "python"], check=True)
    (tree / "python_abi").mkdir()
    abi = f"python_abi {xy}.* *_{tag}"
    exports = {"noarch": ["python"], "weak": [abi]}
    own = [
        output("python", version, f"{MARK}_0_{tag}", PYTHON_NEEDS, exports, tree / "python"),
        output("python_abi", xy, f"{MARK}_0_{tag}", [], None, tree / "python_abi"),
    ]
    own[0]["requirements"]["run_constraints"] = [abi]
    own[1]["requirements"]["run_constraints"] = [f"python {xy}.* *_{tag}"]
    return own


def make(folder: Path, work: Path, host: compilers.Host, python: Path, specs: list[str]) -> None:
    """Makes the channel in `folder`; what is there stays. `python` is copy_interpreter.py."""
    subdir = folder / "linux-64"
    for name in ("linux-64", "noarch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "trees", ignore_errors=True)
    parts = outputs(work / "trees", host, subdir)
    if not list(subdir.glob(f"python_abi-{wheels.PYTHON}-*.conda")):
        parts += python_outputs(work / "trees", python)
    if parts:
        build(parts, work, subdir)
    for package in from_pypi(specs, work / "wheels", subdir):
        print(package.name, flush=True)
    write_index(folder, write_shards=False)


def build(parts: list[dict[str, Any]], work: Path, subdir: Path) -> None:
    """Has rattler-build make the packages in `subdir`."""
    recipe = work / "conda-forge" / "recipe.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    whole = {"schema_version": 1, "recipe": {"name": "conda-forge", "version": "1"}}
    recipe.write_text(json.dumps(whole | {"outputs": parts}))  # rattler-build takes no anchors
    options = {"channel": [], "test": "skip", "package_format": "conda:1"}
    build_recipes([recipe], output_dir=work / "built", **options)
    for package in (work / "built" / "linux-64").glob("*.conda"):
        shutil.move(package, subdir / package.name)
    shutil.rmtree(work / "trees")
    shutil.rmtree(work / "built")


def from_pypi(specs: Iterable[str], cache: Path, subdir: Path) -> Iterable[Path]:
    """Wheels as packages: what pip resolves `specs` to, but what is built here from source."""
    specs = [*specs, *itertools.chain(*NEEDS_MORE.values())]
    names = {spec: parse_package_name(spec) for spec in specs}
    wanted = [spec.replace(name, PYPI_NAMES.get(name, name), 1) for spec, name in names.items()]
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "-q", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--report", "-", *wanted], stdout=subprocess.PIPE, check=True)
    chosen = {
        canonicalize_name(entry["metadata"]["name"]): Version(entry["metadata"]["version"])
        for entry in json.loads(done.stdout)["install"]
        if not re.match(r"(torch|triton|nvidia|cuda)", entry["metadata"]["name"])
    }
    download = [*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", cache]
    subprocess.run([*download, *(f"{name}=={v}" for name, v in chosen.items())], check=True)
    found = wheels_of(chosen, cache)
    for wheel in found.values():
        made = wheel.plan_conversion(found)
        depends = [*made.depends, *NEEDS_MORE.get(made.name, ())]
        build = f"{MARK}_{made.build.rsplit('_', 2)[-2]}_0"
        made = dataclasses.replace(made, build=build, depends=depends)
        if not (subdir / made.file_name).exists():
            yield made.make(subdir)
        for name in other_names(made.name, names.values()):
            yield from renamed(name, made, subdir)


def wheels_of(chosen: Mapping[str, Version], cache: Path) -> dict[str, wheels.Wheel]:
    """The wheels of these versions; a folder of several runs has others of the same names."""
    found: dict[str, wheels.Wheel] = {}
    for file in sorted(cache.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(file.name)
        if chosen.get(name) == version:
            purl = PackageURL("pypi", None, name, str(version), {"file_name": file.name})
            source = Source(f"{PYPI_URL}/{file.name}", sha256_file(file), purl)
            found[name] = wheels.Wheel.read(file, source, "")
    return found


def other_names(wheel: str, names: Iterable[str]) -> set[str]:
    """The names among `names` that conda-forge gives what PyPI's package `wheel` has."""
    theirs = {name for name in names if canonicalize_name(PYPI_NAMES.get(name, name)) == wheel}
    return theirs - {wheel}


def renamed(name: str, wheel: wheels.Conversion, subdir: Path) -> Iterable[Path]:
    """A package of conda-forge's name that needs the wheel's, whose name is PyPI's."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "none").mkdir()
        made = assemble_package(
            name,
            wheel.version,
            "linux-64",
            f"{MARK}_0",
            scratch,
            files_dir=Path(scratch) / "none",
            depends=[f"{wheel.name} =={wheel.version}"],
        )
        if not (subdir / made.path.name).exists():
            move_whole(made.path, subdir / made.path.name)
            yield subdir / made.path.name
