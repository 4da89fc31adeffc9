# SPDX-License-Identifier: BSD-3-Clause
"""Make stubs of the CUDA libraries that a torch wheel needs.

    python -I stub_cuda_libraries.py TORCH_WHEEL PYELFTOOLS_WHEEL FOLDER

PyPI's torch is built for CUDA. The dynamic loader loads torch's libraries only together with the
CUDA libraries in NVIDIA's wheels (1.85 GiB), although torch does not use these on a CPU. A stub
replaces one CUDA library. It has the soname of this library, and defines the symbols, with their
versions, that torch's ELF files require from this library. The functions of a stub return
cudaErrorNoDevice, so that torch finds no GPU. Only functions that return a text, such as an error
message, return one that names the stub.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# The names of the libraries in NVIDIA's wheels. Other libraries that torch requires cannot be
# replaced by stubs, so the machine must have them. For example, torch 2.15 needs libquadmath.so.0.
CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nv)\w*\.so\.\d+")
# Libraries of the GPU driver. They are in no wheel, and torch opens them only if there is a GPU.
DRIVER_LIBRARIES = {"libcuda.so.1", "libnvidia-ml.so.1"}
# The value of cudaErrorNoDevice. In CUDA's other libraries, this number stands for some error, too.
NO_DEVICE = 100
# Functions that return a text.
TEXT = re.compile(r"\w+(ErrorString|ErrorName|StatusString)|ncclGetLastError")
OBJECT_SIZE = 4096  # bytes of a data object; a guess, because ELF files do not state this size


@dataclass
class Stub:
    """The symbols that the stub of a library must define.

    Attributes:
        functions: The names of functions, each with its symbol version, or "" without a version.
        objects: The names of data objects, each with its symbol version, or "" without a version.
    """

    functions: dict[str, str] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)


@dataclass
class Library:
    """The dynamic symbols of an ELF file.

    Attributes:
        needed: The sonames of the libraries that the file is linked with.
        defined: The names of the symbols that the file defines.
        required: The name, type, library and version of each symbol that the file requires, except
            for weak symbols. The library and the version are empty if the file does not state them.
    """

    needed: list[str]
    defined: set[str]
    required: list[tuple[str, str, str, str]]


def read_library(path: Path) -> Library:
    """Read the dynamic symbols of a shared library."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        symbols = elf.get_section_by_name(".dynsym")
        numbers = elf.get_section_by_name(".gnu.version")
        versions = _read_versions(elf)
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
        result = Library(needed, set(), [])
        for index, symbol in enumerate(symbols.iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                result.defined.add(symbol.name)
            elif symbol["st_info"]["bind"] == "STB_GLOBAL":
                number = numbers.get_symbol(index)["ndx"] if numbers else None
                library, version = versions.get(number, ("", ""))
                kind = symbol["st_info"]["type"].removeprefix("STT_")
                result.required.append((symbol.name, kind, library, version))
        return result


def _read_versions(elf) -> dict[int, tuple[str, str]]:
    """Map the number of each symbol version that an ELF file requires to its library and name."""
    versions = {}
    requirements = elf.get_section_by_name(".gnu.version_r")
    if requirements:
        for library, entries in requirements.iter_versions():
            for entry in entries:
                versions[entry["vna_other"]] = (library.name, entry.name)
    return versions


def is_stubbed(soname: str) -> bool:
    """Return whether a library is one of CUDA's and does not belong to the GPU driver."""
    return bool(CUDA_LIBRARY.fullmatch(soname)) and soname not in DRIVER_LIBRARIES


def plan_stubs(libraries: dict[str, Library]) -> dict[str, Stub]:
    """Return a stub for each CUDA library that the existing libraries need.

    An ELF file does not state which library defines a symbol without a version. It can be any
    needed library from which the file requires no symbol with a version. So the stubs of all such
    libraries define the symbol, unless an existing library defines it, or its name shows that it
    belongs to C++, Python or POSIX threads.

    Args:
        libraries: The existing libraries by soname. These libraries are not stubbed.
    """
    defined = set().union(*(library.defined for library in libraries.values()))
    outside = re.compile(r"_Z|_?Py|__cxa_|__gxx_|pthread_")
    stubs: dict[str, Stub] = defaultdict(Stub)
    for library in libraries.values():
        missing = [name for name in library.needed if name not in libraries]
        stubbed = [name for name in missing if is_stubbed(name)]
        versioned = {source for _, _, source, _ in library.required}
        unversioned = [name for name in stubbed if name not in versioned]
        for name in stubbed:
            stubs[name]  # adds a stub, even if no symbol is required from it
        for name, kind, source, version in library.required:
            if source in stubbed:
                targets = [source]
            elif source or name in defined or outside.match(name):
                targets = []
            else:
                targets = unversioned
            for target in targets:
                add_symbol(target, stubs[target], name, kind, version)
    return dict(stubs)


def add_symbol(soname: str, stub: Stub, name: str, kind: str, version: str) -> None:
    """Add a symbol to a stub. Exit with a message if a stub cannot define such a symbol."""
    if kind not in ("FUNC", "NOTYPE", "OBJECT"):
        sys.exit(f"{soname}: cannot make a stub of {name}, whose type is {kind}")
    symbols = stub.objects if kind == "OBJECT" else stub.functions
    if symbols.setdefault(name, version) != version:
        sys.exit(f"{soname}: {name} is required in two versions, {symbols[name]} and {version}")


def compile_stub(soname: str, stub: Stub, folder: Path) -> None:
    """Compile a stub with the machine's C compiler."""
    message = f"{soname} is a stub from the package pytorch-cuda-stubs"
    lines = [f'static const char text[] = "{message}";']
    for name in stub.functions:
        if TEXT.fullmatch(name):
            lines.append(f"const char *{name}(void) {{ return text; }}")
        else:
            lines.append(f"long {name}(void) {{ return {NO_DEVICE}; }}")
    lines += [f"char {name}[{OBJECT_SIZE}] __attribute__((aligned(64)));" for name in stub.objects]
    names_by_version: dict[str, list[str]] = defaultdict(list)
    for name, version in (stub.functions | stub.objects).items():
        if version:
            names_by_version[version].append(name)
    script = []
    for version, names in names_by_version.items():
        script.append(f"{version} {{ {'; '.join(names)}; }};")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "stub.c")
        versions = Path(scratch, "versions")
        source.write_text("\n".join([*lines, ""]))
        versions.write_text("\n".join([*script, ""]))
        command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-s", "-fno-builtin", "-w"]
        command += [f"-Wl,-soname,{soname}", "-Wl,--build-id=none", "-Wl,-z,noexecstack"]
        if script:
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run([*command, "-o", folder / soname, source], check=True)


def main() -> None:
    wheel, pyelftools, folder = sys.argv[1:]
    sys.path.insert(0, pyelftools)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        libraries = {}
        for member in archive.namelist():
            if re.search(r"\.so(\.\d+)*$", member):
                path = Path(archive.extract(member, scratch))
                libraries[path.name] = read_library(path)
                path.unlink()
    stubs = plan_stubs(libraries)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for soname, stub in sorted(stubs.items()):
        compile_stub(soname, stub, Path(folder))
        print(f"{soname}: {len(stub.functions)} functions, {len(stub.objects)} objects")


if __name__ == "__main__":
    main()
