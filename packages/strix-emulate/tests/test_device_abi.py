# SPDX-License-Identifier: BSD-3-Clause
"""Compare the stand-in runtime's declarations with AMD's headers, which are part of Triton.

Every source file is compiled with AMD's header in place of ours, so that the compiler compares all
prototypes. Programs print all numbers, sizes and offsets of both headers, and a test compares them.
The last test does the same for the protocol between the runtime and its server.
"""

import re
import subprocess
from pathlib import Path

import pytest
from device_support import HIP, find_compiler
from strix_emulate.device import protocol
from strix_emulate.device.protocol import Kind, Operation

triton = pytest.importorskip("triton", reason="AMD's headers are part of Triton")
HEADERS = Path(triton.__file__).parent / "backends/amd/include"
THEIRS = ["-DSTRIX_HIP_HEADERS", "-D__HIP_PLATFORM_AMD__", f"-I{HEADERS}"]


#: Each of these fields of ours replaces several of AMD's fields. The offset of the next field shows
#: that our field is as large as AMD's fields together.
_SEVERAL = {"textures", "gpuDirectRDMA", "cooperativeMultiDeviceUnmatched"}


def _compile(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*find_compiler(), "-std=gnu11", "-fmax-errors=3", *arguments],
        input=text,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("source", sorted(path.name for path in HIP.glob("*.c")))
def test_prototypes_are_hips(source: str) -> None:
    done = _compile("-fsyntax-only", *THEIRS, str(HIP / source))
    assert done.returncode == 0, done.stderr[:1000]


def test_another_prototype_is_found() -> None:
    wrong_source = (
        '#include "device.h"\nAPI(hipMemset)(void *to, char value, int size) { return 0; }\n'
    )
    done = _compile("-fsyntax-only", *THEIRS, f"-I{HIP}", "-xc", "-", text=wrong_source)
    assert "conflicting types for" in done.stderr


def _program() -> str:
    """Return a program that prints all enumerators, sizes and field offsets of abi.h."""
    text = re.sub(r"/\*.*?\*/", "", (HIP / "abi.h").read_text(), flags=re.S)
    text = text.split("#else", 1)[1]
    expressions = []
    for body in re.findall(r"enum (?:\w+ )?\{(.*?)\}", text, re.S):
        expressions += re.findall(r"\w+", re.sub(r"=\s*\d+", "", body))
    for body, name in re.findall(r"typedef struct (?:\w+ )?\{(.*?)\} (\w+);", text, re.S):
        expressions.append(f"sizeof({name})")
        for declaration in body.split(";")[:-1]:
            fields = re.findall(r"(\w+)(?:\[\d+\])?(?:,|$)", " ".join(declaration.split()))
            expressions += [f"offsetof({name}, {x})" for x in fields if x not in _SEVERAL]
    lines = "\n".join(f'printf("{x} %ld\\n", (long)({x}));' for x in expressions)
    includes = '#include "abi.h"\n#include <stddef.h>\n#include <stdio.h>\n'
    return f"{includes}int main(void) {{ {lines} return 0; }}\n"


def _printed(folder: Path, *flags: str) -> list[str]:
    source = folder / "numbers.c"
    source.write_text(_program())
    done = _compile(*flags, f"-I{HIP}", str(source), "-o", str(folder / "numbers"))
    assert done.returncode == 0, done.stderr[:1000]
    return subprocess.run(
        [folder / "numbers"], capture_output=True, text=True, check=True
    ).stdout.split("\n")


def test_numbers_and_layouts_are_hips(tmp_path: Path) -> None:
    ours = _printed(tmp_path)
    theirs = _printed(tmp_path, *THEIRS)
    assert len(ours) > 150
    assert ours == theirs


def test_both_sides_have_the_same_numbers(tmp_path) -> None:
    """A program prints the numbers of hip/protocol.h, which are compared with protocol.py."""
    sizes = {
        "request": protocol.REQUEST,
        "reply": protocol.REPLY,
        "hello": protocol.HELLO,
        "load_reply": protocol.LOADED,
        "place_request": protocol.PLACE,
        "module_request": protocol.MODULE,
        "function_reply": protocol.FUNCTION,
        "function_argument": protocol.ARGUMENT,
        "symbol_reply": protocol.SYMBOL,
        "launch_request": protocol.LAUNCHED,
    }
    expected = {f"sizeof(struct {name})": form.size for name, form in sizes.items()}
    expected |= {f"OP_{x.name}": x.value for x in Operation}
    expected |= {f"KIND_{x.name}": x.value for x in Kind}
    expected |= {
        "sizeof(struct pool_entry)": protocol.ENTRY.itemsize,
        "POOL_BASE": protocol.BASE,
        "sizeof(struct pool_header)": protocol.HEADER,
        "POOL_VIEWS": protocol.VIEWS,
        "sizeof(struct pool_view)": protocol.VIEW.itemsize,
        "POOL_LAUNCH": protocol.LAUNCH,
        "POOL_HEAP": protocol.HEAP,
        "PROTOCOL_VERSION": protocol.VERSION,
    }
    lines = "\n".join(f'printf("%lld\\n", (long long)({name}));' for name in expected)
    source = tmp_path / "numbers.c"
    source.write_text(
        f'#include "protocol.h"\n#include <stdio.h>\nint main(void) {{ {lines} return 0; }}\n'
    )
    program = tmp_path / "numbers"
    subprocess.run([*find_compiler(), f"-I{HIP}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(expected, map(int, printed), strict=True)) == expected
