# SPDX-License-Identifier: BSD-3-Clause
"""LLVM's AMDGPU disassembler and assembler, through the C interface of libLLVM.

Older versions misread the code of newer compilers: LLVM 19 rejects the non-zero unused src2 of
some instructions and continues out of step. Hence the minimum version.
"""

import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path

from strix_emulate.code.target import DEFAULT, Target
from strix_emulate.errors import DisassemblerError, EmulatorError

MINIMUM_VERSION = 22
_TRIPLE = b"amdgcn-amd-amdhsa"
#: Environment variable: the libLLVM to use instead of the newest one found.
VARIABLE = "STRIX_EMULATE_LIBLLVM"
_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_ADVICE = (
    f"install libLLVM {MINIMUM_VERSION} or newer (package libllvm{MINIMUM_VERSION} of Debian and "
    f"conda-forge) or set {VARIABLE} to its path"
)
_OBJECT_FILE = 1
#: The opcodes of V_FMAMK_F16 and V_FMAAK_F16, with a literal that makes LLVM 22.1.8 crash.
_CRASHES = tuple(bytes([high, 0xFF, 0, 0, 0]) for high in (0x6E, 0x6F, 0x70, 0x71))
#: bytes of an instruction: at most, and of those that are remembered, of which none begins another
_LONGEST, _USUAL = 20, (4, 8, 12)
_MOST_TEXTS = 1 << 16


def _features(width: int) -> bytes:
    """Name features for waves of 32 or 64 lanes, whose masks are one scalar register or two."""
    return f"+real-true16,+wavefrontsize{width},-wavefrontsize{96 - width}".encode()


def disassemble(
    code: bytes, address: int = 0, width: int = 32, most: int = sys.maxsize,
    target: Target = DEFAULT,
) -> list[tuple[int, int, str]]:  # fmt: skip
    """Return address, size in bytes and text of each instruction; "" where LLVM gives up.

    most: of so many instructions at most.

    Raises:
        DisassemblerError: no suitable libLLVM.
    """
    lib = find_disassembler()
    context, texts = _context(lib, target.name, width)
    # LLVM 22.1.8 crashes where a literal is cut off
    room = len(code) + _LONGEST
    buffer = ctypes.create_string_buffer(code, room)
    text = ctypes.create_string_buffer(1024)
    lines: list[tuple[int, int, str]] = []
    at = 0
    while at < len(code) and len(lines) < most:
        for size in _USUAL:
            if (known := texts.get(code[at : at + size])) is not None:
                break
        if known is not None:
            lines.append((address + at, size, known))
            at += size
            continue
        if code[at + 3 : at + 8] in _CRASHES:
            # the literal becomes another one: nothing takes a number from the text
            buffer[at + 5] = b"\x01"
        size = lib.LLVMDisasmInstruction(
            context, ctypes.addressof(buffer) + at, room - at, address + at, text, 1024
        )
        size = size if at + size <= len(code) else 0
        lines.append((address + at, size or 4, text.value.decode().strip() if size else ""))
        if size in _USUAL:
            if len(texts) >= _MOST_TEXTS:
                texts.clear()
            texts[code[at : at + size]] = lines[-1][2]
        at += size or 4
    return lines


@cache
def _context(lib: ctypes.CDLL, name: str, width: int) -> tuple[int, dict[bytes, str]]:
    """Return LLVM's disassembler of one GPU, which stays, with the texts of what it read.

    Making it takes longer than a line, and most of a kernel's instructions stand there before.
    """
    context = lib.LLVMCreateDisasmCPUFeatures(
        _TRIPLE, name.encode(), _features(width), None, 0, None, None
    )
    if not context:
        raise DisassemblerError(f"{_found()[1]} cannot disassemble {name}; {_ADVICE}")
    return context, {}


def assemble(source: str, width: int = 32, target: Target = DEFAULT) -> bytes:
    """Assemble assembly by LLVM; return the relocatable ELF file.

    Raises:
        EmulatorError: the assembler's own message. DisassemblerError: no suitable libLLVM.
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
    message, buffer = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        failed = lib.LLVMTargetMachineEmitToMemoryBuffer(
            _machine(lib, target.name, width), module, _OBJECT_FILE, ctypes.byref(message),
            ctypes.byref(buffer),
        )  # fmt: skip
        if failed or errors:
            raise EmulatorError("; ".join(errors) or _take_string(lib, message.value))
        start, size = lib.LLVMGetBufferStart(buffer), lib.LLVMGetBufferSize(buffer)
        made = ctypes.string_at(start, size)
        lib.LLVMDisposeMemoryBuffer(buffer)
        return made
    finally:
        lib.LLVMDisposeModule(module)
        lib.LLVMContextDispose(context)


@cache
def _machine(lib: ctypes.CDLL, name: str, width: int) -> int:
    """Return LLVM's code generator for one GPU, which stays, too."""
    backend, message = ctypes.c_void_p(), ctypes.c_void_p()
    if lib.LLVMGetTargetFromTriple(_TRIPLE, ctypes.byref(backend), ctypes.byref(message)):
        raise DisassemblerError(_take_string(lib, message.value))
    return lib.LLVMCreateTargetMachine(backend, _TRIPLE, name.encode(), _features(width), 0, 2, 0)


def version() -> str:
    """Return version and file of the libLLVM in use, for reports."""
    (major, minor, patch), path = _found()[0], _found()[1]
    return f"LLVM {major}.{minor}.{patch} ({path})"


def find_disassembler() -> ctypes.CDLL:
    """Return the libLLVM in use, its AMDGPU parts initialised.

    Raises:
        DisassemblerError: none is new enough and supports AMDGPU; the message lists those found.
    """
    return _found()[2]


@cache
def _found() -> tuple[tuple[int, int, int], Path, ctypes.CDLL]:
    refused = []
    for path in _candidates():
        try:
            lib = ctypes.CDLL(str(path))
            numbers = [ctypes.c_uint() for _ in range(3)]
            lib.LLVMGetVersion(*map(ctypes.byref, numbers))
            for part in ("TargetInfo", "Target", "TargetMC", "AsmParser", "AsmPrinter"):
                getattr(lib, f"LLVMInitializeAMDGPU{part}")()
            lib.LLVMInitializeAMDGPUDisassembler()
        except (OSError, AttributeError) as error:
            refused.append(f"{path}: {str(error).splitlines()[0]}")
            continue
        if numbers[0].value < MINIMUM_VERSION:
            refused.append(f"{path} is LLVM {numbers[0].value}, which misreads the code of GFX11")
            continue
        _declare(lib)
        major, minor, patch = (number.value for number in numbers)
        return (major, minor, patch), path, lib
    raise DisassemblerError(
        f"no disassembler for GFX11; {_ADVICE}. Found: {'; '.join(refused) or 'no libLLVM'}"
    )


def _candidates() -> list[Path]:
    """List files to try: only VARIABLE's, or sys.prefix's, then those of _FOLDERS, newest first."""
    if named := os.environ.get(VARIABLE):
        return [Path(named)]
    by_version: dict[tuple[bool, int], Path] = {}
    for rank, folder in enumerate((f"{sys.prefix}/lib", *_FOLDERS)):
        for path in Path(folder).glob("libLLVM*.so*"):
            if match := re.fullmatch(r"libLLVM(?:-|\.so\.)(\d+)\b.*", path.name):
                by_version.setdefault((rank == 0, int(match[1])), path)
    return [path for _, path in sorted(by_version.items(), reverse=True)]


def _declare(lib: ctypes.CDLL) -> None:
    """Declare the types of results and arguments other than int."""
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    for name in (
        "CreateDisasmCPUFeatures", "ContextCreate", "ModuleCreateWithNameInContext",
        "CreateTargetMachine", "GetBufferStart", "GetDiagInfoDescription",
    ):  # fmt: skip
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
    lib.LLVMDisasmInstruction.restype = lib.LLVMGetBufferSize.restype = size


def _take_string(lib: ctypes.CDLL, address: int | None) -> str:
    if not address:
        return ""
    text = ctypes.string_at(address).decode()
    lib.LLVMDisposeMessage(address)
    return text
