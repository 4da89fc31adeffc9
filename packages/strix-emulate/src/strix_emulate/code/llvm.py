# SPDX-License-Identifier: BSD-3-Clause
"""LLVM's AMDGPU disassembler and assembler, through the C interface of libLLVM.

Versions older than MINIMUM_VERSION misread the code of newer compilers. For example, some
instructions of GFX11 have a non-zero value in an unused src2 field. LLVM 19 rejects them and
continues at a wrong offset.
"""

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from strix_emulate.code.target import DEFAULT, Target
from strix_emulate.errors import DisassemblerError, EmulatorError

MINIMUM_VERSION = 22
_TRIPLE = b"amdgcn-amd-amdhsa"
#: Environment variable with the path of the libLLVM to use.
VARIABLE = "STRIX_EMULATE_LIBLLVM"
_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_ADVICE = (
    f"install libLLVM {MINIMUM_VERSION} or newer (package libllvm{MINIMUM_VERSION} of Debian and "
    f"conda-forge) or set {VARIABLE} to its path"
)
_OBJECT_FILE = 1
#: Bytes 3 to 7, counted from 0, of V_FMAMK_F16 and V_FMAAK_F16 with the literal 0xff, which crashes
#: LLVM 22.1.8.
_CRASHES = tuple(bytes([high, 0xFF, 0, 0, 0]) for high in (0x6E, 0x6F, 0x70, 0x71))
#: Size of the longest instruction in bytes.
_MAX_SIZE = 20
#: Sizes in bytes of the instructions whose texts are cached. The bytes of one instruction are never
#: the start of a longer one, so the cache can be searched by each size in turn.
_CACHED_SIZES = (4, 8, 12)
#: Maximum number of cached texts.
_MAX_CACHED_TEXTS = 1 << 16
#: Maximum size of an instruction's text in bytes.
_MAX_TEXT_SIZE = 1024


def _features(width: int) -> bytes:
    """Return LLVM's subtarget features for waves of 32 or 64 lanes."""
    return f"+real-true16,+wavefrontsize{width},-wavefrontsize{96 - width}".encode()


def disassemble(
    code: bytes,
    width: int = 32,
    max_instructions: int = sys.maxsize,
    target: Target = DEFAULT,
) -> list[tuple[int, int, str]]:
    """Return (offset, size in bytes, text) of each instruction.

    The text is "" for 4 bytes that LLVM cannot decode.

    Args:
        code: The bytes.
        width: Lanes of a wave.
        max_instructions: Maximum number of instructions.
        target: The GPU.

    Raises:
        DisassemblerError: There is no suitable libLLVM.
    """
    lib = find_disassembler()
    context, texts = _context(lib, target.name, width)
    # LLVM 22.1.8 crashes if a literal is cut off, so the buffer is longer than the code.
    buffer = ctypes.create_string_buffer(code, len(code) + _MAX_SIZE)
    line = ctypes.create_string_buffer(_MAX_TEXT_SIZE)
    lines: list[tuple[int, int, str]] = []
    at = 0
    while at < len(code) and len(lines) < max_instructions:
        for size in _CACHED_SIZES:
            text = texts.get(code[at : at + size])
            if text is not None:
                break
        else:
            if code[at + 3 : at + 8] in _CRASHES:
                # Change the literal, so that LLVM does not crash. Its text then has a wrong
                # literal, but the decoder reads literals from `code`.
                buffer[at + 5] = b"\x01"
            place = ctypes.addressof(buffer) + at
            size = lib.LLVMDisasmInstruction(
                context, place, len(buffer) - at, at, line, _MAX_TEXT_SIZE
            )
            text = line.value.decode().strip()
            if not size or at + size > len(code):
                size = 4
                text = ""
            if text and size in _CACHED_SIZES:
                if len(texts) >= _MAX_CACHED_TEXTS:
                    texts.clear()
                texts[code[at : at + size]] = text
        lines.append((at, size, text))
        at += size
    return lines


@cache
def _context(lib: ctypes.CDLL, name: str, width: int) -> tuple[int, dict[bytes, str]]:
    """Return LLVM's disassembler for a GPU, and a cache of instruction texts by their bytes.

    Keeping both saves time. Creating a disassembler takes longer than decoding an instruction. Most
    instructions of a kernel have the same bytes as an earlier one.
    """
    context = lib.LLVMCreateDisasmCPUFeatures(
        _TRIPLE, name.encode(), _features(width), None, 0, None, None
    )
    if not context:
        raise DisassemblerError(f"{_find().path} cannot disassemble {name}; {_ADVICE}")
    return context, {}


def assemble(source: str, width: int = 32, target: Target = DEFAULT) -> bytes:
    """Assemble with LLVM; return the relocatable ELF file.

    Raises:
        EmulatorError: The assembler rejects the source. The message is the assembler's.
        DisassemblerError: There is no suitable libLLVM.
    """
    lib = find_disassembler()
    errors: list[str] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    def on_diagnostic(info, _):
        errors.append(_take_string(lib, lib.LLVMGetDiagInfoDescription(info)))

    context = lib.LLVMContextCreate()
    lib.LLVMContextSetDiagnosticHandler(context, on_diagnostic, None)
    module = lib.LLVMModuleCreateWithNameInContext(b"assembly", context)
    lib.LLVMSetTarget(module, _TRIPLE)
    text = source.encode()
    lib.LLVMSetModuleInlineAsm2(module, text, len(text))
    message = ctypes.c_void_p()
    buffer = ctypes.c_void_p()
    try:
        failed = lib.LLVMTargetMachineEmitToMemoryBuffer(
            _machine(lib, target.name, width),
            module,
            _OBJECT_FILE,
            ctypes.byref(message),
            ctypes.byref(buffer),
        )
        if failed or errors:
            raise EmulatorError("; ".join(errors) or _take_string(lib, message.value))
        start = lib.LLVMGetBufferStart(buffer)
        elf = ctypes.string_at(start, lib.LLVMGetBufferSize(buffer))
        lib.LLVMDisposeMemoryBuffer(buffer)
        return elf
    finally:
        lib.LLVMDisposeModule(module)
        lib.LLVMContextDispose(context)


@cache
def _machine(lib: ctypes.CDLL, name: str, width: int) -> int:
    """Return LLVM's code generator for a GPU."""
    backend = ctypes.c_void_p()
    message = ctypes.c_void_p()
    if lib.LLVMGetTargetFromTriple(_TRIPLE, ctypes.byref(backend), ctypes.byref(message)):
        raise DisassemblerError(_take_string(lib, message.value))
    return lib.LLVMCreateTargetMachine(backend, _TRIPLE, name.encode(), _features(width), 0, 2, 0)


def version() -> str:
    """Return the version and the path of the libLLVM in use, for reports."""
    library = _find()
    major, minor, patch = library.version
    return f"LLVM {major}.{minor}.{patch} ({library.path})"


def find_disassembler() -> ctypes.CDLL:
    """Return the libLLVM in use, with its AMDGPU parts initialised.

    Raises:
        DisassemblerError: No libLLVM is new enough and supports AMDGPU. The message lists the
            rejected ones.
    """
    return _find().lib


@dataclass(frozen=True)
class _Library:
    """A libLLVM.

    Attributes:
        version: Major, minor and patch version.
        path: The file.
        lib: The loaded library.
    """

    version: tuple[int, int, int]
    path: Path
    lib: ctypes.CDLL


@cache
def _find() -> _Library:
    """Return the first suitable libLLVM. Raise DisassemblerError if there is none."""
    rejected = []
    for path in _candidates():
        try:
            library = _open(path)
        except (OSError, AttributeError) as error:
            rejected.append(f"{path}: {str(error).splitlines()[0]}")
            continue
        if library.version[0] >= MINIMUM_VERSION:
            _declare(library.lib)
            return library
        rejected.append(f"{path} is LLVM {library.version[0]}, which misreads the code of GFX11")
    raise DisassemblerError(
        f"no disassembler for GFX11; {_ADVICE}. Found: {'; '.join(rejected) or 'no libLLVM'}"
    )


def _open(path: Path) -> _Library:
    """Load a libLLVM and initialise its AMDGPU parts.

    Raises:
        OSError: The file cannot be loaded.
        AttributeError: The library lacks a function, such as those for AMDGPU.
    """
    lib = ctypes.CDLL(str(path))
    major = ctypes.c_uint()
    minor = ctypes.c_uint()
    patch = ctypes.c_uint()
    lib.LLVMGetVersion(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(patch))
    for part in ("TargetInfo", "Target", "TargetMC", "AsmParser", "AsmPrinter"):
        getattr(lib, f"LLVMInitializeAMDGPU{part}")()
    lib.LLVMInitializeAMDGPUDisassembler()
    return _Library((major.value, minor.value, patch.value), path, lib)


def _candidates() -> list[Path]:
    """Return the libLLVM files to try.

    If the environment variable VARIABLE is set, the result is only the file that it names.
    Otherwise, files in the lib folder of sys.prefix come before those in _FOLDERS. In each of these
    two groups, newer versions come before older ones, and each major version has one file.
    """
    configured_path = os.environ.get(VARIABLE)
    if configured_path:
        return [Path(configured_path)]
    by_version: dict[tuple[bool, int], Path] = {}
    own_folder = f"{sys.prefix}/lib"
    for folder in (own_folder, *_FOLDERS):
        for path in Path(folder).glob("libLLVM*.so*"):
            match = re.fullmatch(r"libLLVM(?:-|\.so\.)(\d+)\b.*", path.name)
            if match:
                by_version.setdefault((folder == own_folder, int(match[1])), path)
    return [path for _, path in sorted(by_version.items(), reverse=True)]


def _declare(lib: ctypes.CDLL) -> None:
    """Declare the types of arguments and results to ctypes, whose default is int."""
    pointer = ctypes.c_void_p
    size = ctypes.c_size_t
    text = ctypes.c_char_p
    for name in (
        "CreateDisasmCPUFeatures",
        "ContextCreate",
        "ModuleCreateWithNameInContext",
        "CreateTargetMachine",
        "GetBufferStart",
        "GetDiagInfoDescription",
    ):
        getattr(lib, f"LLVM{name}").restype = pointer
    signatures = {
        "DisasmInstruction": [pointer, pointer, ctypes.c_uint64, ctypes.c_uint64, text, size],
        "ContextSetDiagnosticHandler": [pointer, pointer, pointer],
        "ModuleCreateWithNameInContext": [text, pointer],
        "SetTarget": [pointer, text],
        "SetModuleInlineAsm2": [pointer, text, size],
        "CreateTargetMachine": [pointer, text, text, text] + [ctypes.c_int] * 3,
        "TargetMachineEmitToMemoryBuffer": [pointer, pointer, ctypes.c_int, pointer, pointer],
        "DisposeModule": [pointer],
        "ContextDispose": [pointer],
        "GetBufferStart": [pointer],
        "GetBufferSize": [pointer],
        "DisposeMemoryBuffer": [pointer],
        "GetDiagInfoDescription": [pointer],
        "DisposeMessage": [pointer],
    }
    for name, types in signatures.items():
        getattr(lib, f"LLVM{name}").argtypes = types
    lib.LLVMDisasmInstruction.restype = size
    lib.LLVMGetBufferSize.restype = size


def _take_string(lib: ctypes.CDLL, address: int | None) -> str:
    if not address:
        return ""
    text = ctypes.string_at(address).decode()
    lib.LLVMDisposeMessage(address)
    return text
