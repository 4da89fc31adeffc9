# SPDX-License-Identifier: BSD-3-Clause
"""Compare random kernels that the emulator executes with the same kernels on the host.

usage: python fuzz.py [--seed N] [--count N]

clang compiles each kernel for gfx1151 at -O0 to -O3. The emulator executes the kernel in C if C is
installed, and otherwise with numpy. Every kernel is executed with checks, except at -O0, where
checks take most of the time. The first of every ten kernels is executed by both C and numpy, and
with checks at -O0, too. A kernel's number is its seed: `--seed N --count 1` executes kernel N by
both, and always with checks.

The exit status is 0 if all differences are known faults of LLVM, 1 if there are others, 2 for wrong
usage, and 3 without a compiler or disassembler.
"""

import argparse
import ctypes
import gc
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from strix_emulate import Buffer, Kernel, Options, launch
from strix_emulate.code import llvm, loader
from strix_emulate.errors import DisassemblerError, Trap
from strix_emulate.native import library as native

THREADS = 64
WORDS = 4
LEVELS = ("-O0", "-O1", "-O2", "-O3")
#: BATCH kernels are compiled together. Of every SHARE kernels, one is executed by every engine
#: (numpy, and C if it is installed), and with checks at -O0, too.
BATCH = 50
SHARE = 10
#: By level of optimisation, checks that are always off. At -O0, clang spills lanes that nothing
#: wrote.
_OFF = {"-O0": frozenset({"uninitialised"})}
_TYPES = ("u32", "i32", "u64", "i64", "u16", "u8", "f32", "f64")
#: These expressions have no undefined behaviour, because signed arithmetic wraps (-fwrapv), and
#: shift counts and divisors are bounded.
_INTEGER = (
    "({a} + {b})",
    "({a} - {b})",
    "({a} * {b})",
    "({a} & {b})",
    "({a} | {b})",
    "({a} ^ {b})",
    "({a} << ((unsigned)({b}) & 7))",
    "({a} >> ((unsigned)({b}) & 7))",
    "({a} < {b} ? {b} : {a})",
    "(DIVIDEND({a}) / ((({b}) & 63) + 1))",
    "(DIVIDEND({a}) % ((({b}) & 63) + 1))",
    "(({b}) & 1 ? {a} : ~{b})",
)
_FLOAT = (
    "({a} + {b})",
    "(MINUEND({a}) - {b})",
    "({a} * {b})",
    "({a} / {b})",
    "(LESSER({a}) < {b} ? {a} : {b})",
    "(-{a})",
    "__builtin_fabs({a})",
    "({a} != {b} ? {a} : {b} * 0.5)",
)
#: Faults of LLVM, each by the name of a macro. The macro hides an operand from LLVM, which avoids
#: the fault.
FAULTS = {
    # patches/llvm/fsub-zero-modifier.report.md describes this fault.
    "MINUEND": "SelectVOP3ModsImpl treats 0.0 - x as -x",
    # The next two faults are fixed after LLVM 22, by llvm-project#210077 and llvm-project#196418.
    "LESSER": "matchSelectPattern treats x < 0 ? x : 0 as a minimum, which is -0 for x = -0",
    "DIVIDEND": "LowerDIVREM24 treats unsigned numbers near 2**32 as small ones",
}
#: Functions are inlined at -O0, too. If a kernel called them, the whole file would be decoded for
#: each kernel.
_HEAD = """
typedef unsigned u32; typedef int i32; typedef unsigned long u64; typedef long i64;
typedef unsigned short u16; typedef unsigned char u8; typedef float f32; typedef double f64;
#ifdef __HIP__
#define FUNCTION static __attribute__((device, always_inline)) inline
#define KERNEL(n) extern "C" __attribute__((global)) void kernel##n(const u32 *in, u32 *out) { \\
    body##n(in, out, __builtin_amdgcn_workitem_id_x()); }
#else
#define FUNCTION static
#define KERNEL(n) void kernel##n(const u32 *in, u32 *out) { \\
    for (u32 i = 0; i < 64; i++) body##n(in, out, i); }
#endif
#define HIDE(x) ({ __typeof__((x) + 0) hidden = (x); __asm__("" : "+v"(hidden)); hidden; })
#ifndef MINUEND
#define MINUEND(x) (x)
#endif
#ifndef LESSER
#define LESSER(x) (x)
#endif
#ifndef DIVIDEND
#define DIVIDEND(x) (x)
#endif
FUNCTION i32 whole(f64 x) { return x > -1e9 && x < 1e9 ? (i32)x : 77; }
FUNCTION u32 bits(f64 y) {
    f32 x = (f32)y;
    u32 n;
    __builtin_memcpy(&n, &x, 4);
    return x != x ? 0x7fc00000 : n;
}
"""


class Writer:
    """Writes the source of one kernel, whose number is the seed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rng = random.Random(number)
        self.names: dict[str, str] = {}
        self.lines: list[str] = []

    def value(self, kind: str) -> str:
        """Return a variable or a constant, converted to the type `kind`."""
        if self.rng.random() < 0.2:
            if kind[0] == "f":
                return f"({kind}){self.rng.choice((0.0, -0.0, 1.5, -3.25, 1e-40, 3e38, 0.1))}"
            return f"({kind}){self.rng.choice((0, 1, 31, 255, 65535, 1 << 31, 0xDEADBEEF))}u"
        name, own_kind = self.rng.choice(list(self.names.items()))
        if own_kind[0] == "f" and kind[0] != "f":
            return f"({kind})whole({name})"
        return name if own_kind == kind else f"({kind}){name}"

    def expression(self, kind: str, depth: int = 2) -> str:
        """Return the text of a random tree of operations."""
        if depth == 0 or self.rng.random() < 0.2:
            return self.value(kind)
        a, b = (self.expression(kind, depth - 1) for _ in range(2))
        form = self.rng.choice(_FLOAT if kind[0] == "f" else _INTEGER)
        return f"({kind}){form.format(a=a, b=b)}"

    def declare(self) -> None:
        """Add the declaration of a new variable."""
        kind = self.rng.choice(_TYPES)
        name = f"v{len(self.names)}"
        self.lines.append(f"{kind} {name} = {self.expression(kind)};")
        self.names[name] = kind

    def change(self) -> str:
        """Return an assignment to a random variable."""
        name, kind = self.rng.choice(list(self.names.items()))
        return f"{name} = {self.expression(kind)};"

    def statement(self) -> None:
        """Add an assignment, a branch, a loop, or an array with a computed index."""
        kind = self.rng.random()
        if kind < 0.3:
            self.lines.append(self.change())
        elif kind < 0.55:
            test = f"{self.expression('i32')} < {self.expression('i32')}"
            self.lines.append(f"if ({test}) {{ {self.change()} }} else {{ {self.change()} }}")
        elif kind < 0.8:
            count = f"({self.value('u32')} & {self.rng.choice((1, 3, 7))})"
            self.lines.append(
                f"for (u32 k = 0, n = {count}; k < n; k++) {{ {self.change()} {self.change()} }}"
            )
        else:
            name = f"array{len(self.lines)}"
            size = self.rng.choice((4, 8))
            self.lines.append(f"u32 {name}[{size}];")
            self.lines.append(
                f"for (u32 k = 0; k < {size}; k++) {name}[k] = {self.expression('u32')} + k;"
            )
            self.lines.append(f"{name}[{self.value('u32')} & {size - 1}] = {self.value('u32')};")
            new = f"v{len(self.names)}"
            self.lines.append(f"u32 {new} = {name}[{self.value('u32')} & {size - 1}];")
            self.names[new] = "u32"

    def text(self) -> str:
        """Return the whole kernel."""
        self.lines.append("u32 v0 = in[i]; f32 v1 = (f32)(i32)in[i + 64] * 0.001f; i32 v2 = i;")
        self.names = {"v0": "u32", "v1": "f32", "v2": "i32"}
        for _ in range(3):
            self.declare()
        for _ in range(self.rng.randrange(3, 9)):
            self.statement()
        for word in range(WORDS):
            name, kind = self.rng.choice(list(self.names.items()))
            value = f"bits({name})" if kind[0] == "f" else f"(u32){name}"
            self.lines.append(f"out[{WORDS} * i + {word}] = {value};")
        body = "\n    ".join(self.lines)
        head = f"FUNCTION void body{self.number}(const u32 *in, u32 *out, u32 i)"
        return f"{head} {{\n    {body}\n}}\nKERNEL({self.number})\n"


@dataclass
class Difference:
    """A kernel that traps or differs from the host. `fault` is the cause if LLVM is at fault."""

    number: int
    level: str
    engine: str
    message: str
    fault: str

    def __str__(self) -> str:
        text = f"kernel {self.number} {self.level} by {self.engine}: {self.message}"
        return f"{text} (LLVM's {self.fault})" if self.fault else text


def source(numbers: range) -> str:
    """Return the source of a program with these kernels."""
    return _HEAD + "".join(Writer(number).text() for number in numbers)


def _compile(clang: str, text: str, output: Path, *options: str) -> bytes:
    command = [clang, *options, "-ffp-contract=off", "-fwrapv", "-w", "-", "-o", str(output)]
    subprocess.run(command, input=text, text=True, check=True)
    return output.read_bytes()


def device_kernels(
    clang: str, text: str, folder: Path, level: str, *more: str
) -> dict[str, Kernel]:
    """Compile kernels for gfx1151."""
    options = [
        *more,
        "-xhip",
        "-nogpuinc",
        "-nogpulib",
        "--offload-arch=gfx1151",
        level,
        "--cuda-device-only",
        "--no-gpu-bundle-output",
    ]
    image = _compile(clang, text, folder / f"device{level}", *options)
    return loader.parse_module(image, f"fuzz{level}").kernels


def inputs(number: int) -> np.ndarray:
    """Return the input of a kernel."""
    draw = np.random.default_rng(number)
    edges = np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    anything = draw.integers(1 << 32, size=2 * THREADS, dtype=np.uint32)
    return np.where(draw.random(2 * THREADS) < 0.25, draw.choice(edges, 2 * THREADS), anything)


def differences(
    clang: str, numbers: range, engines: tuple[str, ...], share: int = 1
) -> Iterator[Difference]:
    """Compile and execute kernels, and yield their differences from the host.

    The first of every `share` kernels is executed by all engines and with checks. The others are
    executed by the last engine only, and at -O0 without checks.
    """
    text = source(numbers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _compile(
            clang,
            text,
            folder / "host.so",
            "-xc",
            "-O1",
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-fuse-ld=lld",
        )
        host = ctypes.CDLL(str(folder / "host.so"))
        expected = {}
        for number in numbers:
            host_inputs = inputs(number)
            host_results = np.zeros(WORDS * THREADS, np.uint32)
            host[f"kernel{number}"](
                host_inputs.ctypes.data_as(ctypes.c_void_p),
                host_results.ctypes.data_as(ctypes.c_void_p),
            )
            expected[number] = host_results
        for level in LEVELS:
            kernels = device_kernels(clang, text, folder, level)
            for number in numbers:
                in_all_ways = number in numbers[::share]
                for engine in engines if in_all_ways else engines[-1:]:
                    options = Options(
                        native=engine == "C",
                        checks=in_all_ways or level != "-O0",
                        disabled_checks=_OFF.get(level, frozenset()),
                    )
                    message = execute(kernels[f"kernel{number}"], number, expected[number], options)
                    if message:
                        named = fault(clang, number, level, expected[number], options)
                        yield Difference(number, level, engine, message, named)


def fault(clang: str, number: int, level: str, expected: np.ndarray, options: Options) -> str:
    """Describe LLVM's faults that cause a kernel's difference, or return "".

    A fault is a cause if the kernel no longer differs once the fault's macro hides its operand. If
    no single fault is a cause, all are tried together.
    """
    text = source(range(number, number + 1))
    for faults in (*combinations(FAULTS, 1), tuple(FAULTS)):
        with tempfile.TemporaryDirectory() as scratch:
            hidden = [f"-D{operand}=HIDE" for operand in faults]
            kernels = device_kernels(clang, text, Path(scratch), level, *hidden)
        if not execute(kernels[f"kernel{number}"], number, expected, options):
            return " and ".join(FAULTS[operand] for operand in faults)
    return ""


def execute(kernel: Kernel, number: int, expected: np.ndarray, options: Options) -> str:
    """Execute one kernel; return how it differs, or ""."""
    out = np.zeros(WORDS * THREADS, np.uint32)
    try:
        launch(
            kernel,
            (1,),
            [Buffer(inputs(number), "in"), Buffer(out, "out")],
            threads=THREADS,
            options=options,
        )
    except Trap as trap:
        return str(trap)
    differing = np.flatnonzero(out != expected)
    if not len(differing):
        return ""
    index = int(differing[0])
    return (
        f"{len(differing)} of {len(out)} words, word {index % WORDS} of lane {index // WORDS} is "
        f"{out[index]:#x}, on the host {expected[index]:#x}"
    )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the first kernel")
    parser.add_argument("--count", type=int, default=100, help="how many kernels")
    options = parser.parse_args()
    clang = shutil.which("clang-22") or shutil.which("clang")
    try:
        llvm.find_disassembler()
    except DisassemblerError as error:
        print(error, file=sys.stderr)
        return 3
    if clang is None:
        print("fuzz.py: there is no clang; install clang-22 and lld-22", file=sys.stderr)
        return 3
    engines = ("numpy", "C") if native.load_library() is not None else ("numpy",)
    difference_count = faults = 0
    # Unoptimised code has so many instructions that garbage collection would take 40 % of the time.
    gc.disable()
    for first in range(options.seed, options.seed + options.count, BATCH):
        numbers = range(first, min(first + BATCH, options.seed + options.count))
        for difference in differences(clang, numbers, engines, SHARE):
            difference_count += 1
            faults += bool(difference.fault)
            print(difference, flush=True)
        gc.collect()
    print(
        f"{options.count} kernels at {', '.join(LEVELS)} by {engines[-1]}, every {SHARE}th by "
        f"{' and '.join(engines)} with checks: {difference_count} differences, {faults} of "
        "them caused by faults of LLVM"
    )
    return int(difference_count > faults)


if __name__ == "__main__":
    sys.exit(main())
