# SPDX-License-Identifier: BSD-3-Clause
"""Features that HIP programs need, tested by small programs of hip/ on the emulated device."""

import re
from pathlib import Path

import pytest
from device_support import (
    HIP_PROGRAMS,
    assemble,
    build_hip_program,
    build_host_program,
    compile_device_code,
    find_library,
    link,
    run_emulated,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder for the library and programs."""
    path = tmp_path_factory.mktemp("features")
    find_library(path / "lib")
    return path


#: For each program, the lines that it prints. A line that begins with "!" is instead a part of the
#: emulator's messages.
PROGRAMS = {
    # This program captures streams and launches graphs.
    "graph": [
        "circle: hipErrorInvalidValue",
        "destroyed: hipSuccess",
        "synchronised: hipErrorStreamCaptureUnsupported",
        "then: hipErrorStreamCaptureInvalidated",
        "other stream: hipErrorStreamCaptureUnmatched",
        "not joined: hipErrorStreamCaptureUnjoined",
        "no capture: hipErrorIllegalState",
    ],
    # This program uses 2D and 3D regions, libraries, memory pools and a reset.
    "served": [
        "pitch: hipErrorInvalidPitchValue, hipErrorInvalidPitchValue",
        "library: add, again; not there: hipErrorNotFound",
        "reset: hipErrorInvalidHandle, hipErrorInvalidValue",
    ],
    # This program has graphs that are updated, and graphs that allocate memory.
    "graph_memory": [
        "more nodes: hipErrorGraphExecUpdateFailure 2",
        "another kind: hipErrorGraphExecUpdateFailure 3",
        "before the launch: hipErrorInvalidValue",
        "not freed: hipErrorInvalidValue",
        "behind its free: hipErrorIllegalAddress",
        "!do not lie in an allocation",
    ],
    # This program uses pinned host memory and virtual memory.
    "memory": [
        "again: hipErrorHostMemoryAlreadyRegistered",
        "no more: hipErrorHostMemoryNotRegistered",
        "twice: hipErrorInvalidValue",
        "in use: hipErrorInvalidValue",
        "gone: hipErrorInvalidValue",
        "not mapped: hipErrorIllegalAddress",
        "!do not lie in an allocation (lane 0 of wave 0 of workgroup 0)",
    ],
    # A child that is forked before the first use of the device has a device of its own.
    "fork": [
        "168",
        "268",
        "line 18: hipMalloc((void **)&data, sizeof host): initialization error",
        "468",
    ],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(folder: Path, name: str) -> None:
    done = run_emulated(folder, build_hip_program(name, folder), folder / f"{name}.hsaco")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line for line in PROGRAMS[name] if line[0] != "!"]
    messages = [line[1:] for line in PROGRAMS[name] if line[0] == "!"]
    assert done.stdout.splitlines() == printed
    assert all(message in done.stderr for message in messages)


def test_what_is_refused_fails_later_calls(folder: Path) -> None:
    """A caller who ignores the error must not compute with missing results."""
    program = link(folder, HIP_PROGRAMS / "refused.c", name="refused")
    done = run_emulated(folder, program)
    assert done.stdout == (
        "refused by HIP: hipSuccess\nafter: hipErrorNotSupported, hipErrorNotSupported\n"
    )
    assert done.stderr == (
        "strix-emulate: hipCreateTextureObject is not supported; all later calls fail\n"
    )
    rounds = ".amdhsa_float_round_mode_32 1"
    code_object = assemble(folder, "rounds", ("rounds", "s_endpgm", 32), directive=rounds)
    done = run_emulated(folder, program, code_object, "rounds")
    assert done.stdout == (
        "of no kernel: hipSuccess\nafter: hipErrorNotSupported, hipErrorNotSupported\n"
    )
    assert re.search(
        r"strix-emulate: .*rounds: does not round to nearest even.*; all later calls fail\n",
        done.stderr,
    )


def test_checks_of_libraries_that_are_not_ours_only_note(folder: Path) -> None:
    """A race in a kernel of a user's library ends the launch.

    In libraries of ROCm, torch and vLLM, a race ends the launch only with --strict.
    """
    image = compile_device_code(HIP_PROGRAMS / "race.hip", folder / "race.hsaco")
    caller = folder / "caller.c"
    caller.write_text("int race(void);\nint main(void) { return race(); }\n")
    results = {}
    (folder / "vllm").mkdir()
    theirs = ("librocsolver.so.0", "libtorch_hip.so", "vllm/_C_stable_libtorch.abi3.so")
    for name in (*theirs, "libours.so"):
        build_host_program(HIP_PROGRAMS / "race.hip", image, folder, name, "-shared", "-fPIC")
        program = link(folder, caller, folder / name, f"-Wl,-rpath,{folder}", name="caller")
        without_race = run_emulated(folder, program, options=["--no-checks", "race"])
        results[name] = run_emulated(folder, program), without_race
        if name == "librocsolver.so.0":
            strict = run_emulated(folder, program, options=["--strict"])
    for name in theirs:
        noted, off = results[name]
        assert noted.stdout == "hipSuccess\n"
        assert noted.stderr.count("noted in _Z8exchangePi at 0x") == 1
        assert "strix-emulate: 2 launches; race noted 2 times in 1 places" in noted.stderr
        assert off.stderr == "strix-emulate: 2 launches; not checked: race\n"
    ended, off = results["libours.so"]
    assert (strict.stdout, ended.stdout) == ("hipErrorIllegalAddress\n",) * 2
    assert "race: LDS cell" in ended.stderr
    assert "race: LDS cell" in strict.stderr
    assert (off.stdout, off.stderr.count("not checked: race")) == ("hipSuccess\n", 1)


def test_checks_of_kernels_that_headers_bring_only_note(folder: Path) -> None:
    """A race in a kernel of rocPRIM's headers ends the launch only with --strict.

    This holds even though the kernel is part of a user's program.
    """
    source = folder / "headers.hip"
    text = (HIP_PROGRAMS / "race.hip").read_text()
    text = text.replace('"hip.h"', f'"{HIP_PROGRAMS / "hip.h"}"')
    text = text.replace("__global__", "namespace rocprim {\n__global__")
    text = text.replace("t ^ 32];\n}", "t ^ 32];\n}\n}\nusing rocprim::exchange;")
    source.write_text(text + "int main() { return race(); }\n")
    image = compile_device_code(source, folder / "headers.hsaco")
    program = build_host_program(source, image, folder, "headers")
    noted = run_emulated(folder, program)
    strict = run_emulated(folder, program, options=["--strict"])
    assert (noted.stdout, strict.stdout) == ("hipSuccess\n", "hipErrorIllegalAddress\n")
    assert noted.stderr.count("noted in _ZN7rocprim8exchangeEPi at 0x") == 1


def test_processes_share_memory_and_events(folder: Path) -> None:
    done = run_emulated(folder, build_hip_program("share", folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "one process: hipErrorInvalidContext",
        "child 1063",
        "closed: hipErrorIllegalAddress",
        "parent 2126",
    ]
    two = run_emulated(folder, folder / "share", "forked", options=["--devices", "2"])
    assert (two.returncode, two.stdout) == (0, "forked 2126\n"), two.stdout + two.stderr


def test_several_devices_and_peers(folder: Path) -> None:
    program = build_hip_program("peers", folder)
    done = run_emulated(folder, program, options=["--devices", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "2 devices, thread 0, memory 1, stream 1, 0000:c6:00.0",
        "hipDeviceDisablePeerAccess(0): hipErrorPeerAccessNotEnabled",
        "hipDeviceEnablePeerAccess(0, 0): hipSuccess",
        "hipDeviceEnablePeerAccess(0, 0): hipErrorPeerAccessAlreadyEnabled",
        "hipDeviceEnablePeerAccess(1, 0): hipErrorInvalidDevice",
        "hipMemcpyPeer(second, 2, first, 0, 128): hipErrorInvalidDevice",
    ]
    assert run_emulated(folder, program).stdout.splitlines() == [
        "hipSetDevice(1): hipErrorInvalidDevice",
        "hipDeviceEnablePeerAccess(0, 0): hipErrorInvalidDevice",
    ]


def test_what_kernels_ask_of_a_device(folder: Path) -> None:
    program = build_hip_program("kernel", folder)
    messages = {}
    for feature, expected in (
        ("stack", "stack 1024\ntoo small: hipErrorIllegalAddress\n"),
        ("clocks", ""),
        ("managed", ""),
        ("padding", ""),
        ("grid", "not cooperative: hipErrorIllegalAddress\n"),
        ("freed", "freed: hipErrorIllegalAddress\n"),
        ("abort", "aborted: hipErrorLaunchFailure\n"),
        ("heap", "heap: hipErrorIllegalAddress\n"),
    ):
        done = run_emulated(folder, program, feature)
        assert (done.returncode, done.stdout) == (0, expected), done.stdout + done.stderr
        messages[feature] = done.stderr
    assert "scratch offset" in messages["stack"]
    assert "noted in _Z7paddingPi at 0x" in messages["padding"]
    strict = run_emulated(folder, program, "padding", options=["--strict"])
    assert (strict.stdout, "uninitialised: LDS" in strict.stderr) == (
        "padding: hipErrorIllegalAddress\n",
        True,
    )
    assert "do not lie in an allocation" in messages["freed"]
    assert "grid.sync() in a launch that is not cooperative" in messages["grid"]
    assert "abort: the kernel called abort(), or an assertion in it failed" in messages["abort"]
    assert "the kernel has hidden arguments that may be null, for: malloc" in messages["heap"]


def test_kernels_print_assert_and_wait_for_the_grid(folder: Path) -> None:
    triton = pytest.importorskip("triton", reason="ROCm's device libraries are part of Triton")
    library_ = Path(triton.__file__).parent / "backends/amd/lib/ockl.bc"
    linked = ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(library_)]
    image = compile_device_code(HIP_PROGRAMS / "ockl.hip", folder / "ockl.hsaco", *linked)
    program = build_host_program(HIP_PROGRAMS / "ockl.hip", image, folder, "ockl")
    done = run_emulated(folder, program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stale: wave 0 of workgroup" in done.stderr
    # Workgroups may print in any order.
    assert sorted(done.stdout.splitlines()[1:4]) == [
        "0 of kernel:   0.00, a,     0, 100%",
        "100 of kernel:  50.00, c,   640, 100%",
        "50 of kernel:  25.00, b,   320, 100%",
    ]
    assert done.stdout.splitlines()[4:] == [
        "after",
        "heap: some are null",
        "hipErrorLaunchFailure",
    ]
    assert "ockl.hip: Assertion `x != 5' failed.\n" in done.stderr
    assert "abort: the kernel called abort(), or an assertion in it failed" in done.stderr
