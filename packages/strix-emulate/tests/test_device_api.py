# SPDX-License-Identifier: BSD-3-Clause
"""Entry points of the stand-in runtime, their errors, and the end of the runtime's processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import triton
import triton.language as tl
from device_support import HIP, find_library, load_builder, run_emulated, run_on_device
from fixtures import code_object, compile_kernel
from strix_emulate.device import launcher

SCENARIOS = Path(__file__).with_name("device_scenarios.py")
INVALID = "hipErrorInvalidValue"


@triton.jit
def forever(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the library, add.hsaco and forever.hsaco."""
    path = tmp_path_factory.mktemp("device")
    find_library(path / "lib")
    (path / "add.hsaco").write_bytes(code_object())
    code, _ = compile_kernel(forever, {"flag": "*i32"}, {}, num_warps=1)
    (path / "forever.hsaco").write_bytes(code)
    return path


def scenario(folder: Path, name: str, *arguments, options=()) -> tuple[dict, str]:
    done = run_emulated(folder, sys.executable, SCENARIOS, name, *arguments, options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_memory(folder: Path) -> None:
    results, _ = scenario(folder, "memory", options=["--memory", "0.0625"])
    assert results == {
        "readable on the host": 0x7FB57FB5,
        "copy": "hipSuccess",
        "copied": "xxx",
        "copy past the end": INVALID,
        "copy between allocations": INVALID,
        "copy to the host as if to the device": INVALID,
        "fill past the end": INVALID,
        "fill the host": INVALID,
        "rows wider than their pitch": INVALID,
        "fill nodes": ["hipSuccess", INVALID, INVALID],
        "absurd width": "hipErrorOutOfMemory",
        "free the middle": INVALID,
        "free the host's": INVALID,
        "free as pinned": INVALID,
        "free": "hipSuccess",
        "free again": INVALID,
        "free nothing": "hipSuccess",
        "use after free": INVALID,
        "another place": True,
        "all free": True,
        "too much": "hipErrorOutOfMemory",
        "absurd": "hipErrorOutOfMemory",
        "remembered": "hipErrorOutOfMemory",
        "last": ["hipErrorOutOfMemory", "hipSuccess"],
        "distinct": 1000,
        "first again": True,
    }


def test_flags_of_host_memory(folder: Path) -> None:
    results, _ = scenario(folder, "host_memory")
    assert results == {
        "hipHostMalloc": ["hipSuccess", 6, 6],
        "hipHostAlloc": ["hipSuccess", 0x4000_0002, 0x4000_0002],
        "hipMallocHost": ["hipSuccess", 0, 0],
        "no pointer": INVALID,
        "register 0x3": ["hipSuccess", "hipSuccess", 3, 3],
        "register 0x80000000": ["hipSuccess", "hipSuccess", 0x8000_0000, 0x8000_0000],
        "register 0x10": [INVALID, INVALID, 77, 0],
        "device": [INVALID, 77, 0],
    }


def test_copies_in_a_batch(folder: Path) -> None:
    results, _ = scenario(folder, "batch")
    assert results == {
        "copy": "hipSuccess",
        "copied": [1, 2, 1, 2],
        "past the end": [INVALID, 1],
        "with attributes": "hipErrorNotSupported",
        "nothing": INVALID,
        "still usable": "hipSuccess",
    }


def test_handles(folder: Path) -> None:
    results, _ = scenario(folder, "handles")
    invalid = "hipErrorInvalidHandle"
    assert results == {
        "create": "hipSuccess",
        "device": ["hipSuccess", 0],
        "device of none": "hipSuccess",
        "device of destroyed": INVALID,
        "not recorded": invalid,
        "record": "hipSuccess",
        "wait": "hipSuccess",
        "elapsed": "hipSuccess",
        "destroy": "hipSuccess",
        "destroyed": invalid,
        "no event": invalid,
        "attributes": [2**31 - 1, 1, 100_000],
        "address": "hipSuccess",
        "no address": "hipErrorNotFound",
    }


def test_streams_of_two_threads(folder: Path) -> None:
    assert scenario(folder, "threads")[0] == {"devices": [0]}


def test_capture_of_many_forks(folder: Path) -> None:
    assert scenario(folder, "capture")[0] == {"end": "hipSuccess"}


def test_launches(folder: Path) -> None:
    results, text = scenario(folder, "add", folder / "add.hsaco")
    assert results == {
        "launch": "hipSuccess",
        "sum": 3750,
        "no kernel": "hipErrorInvalidHandle",
        "too large a grid": "hipErrorInvalidConfiguration",
        "too many cooperative waves": "hipErrorCooperativeLaunchTooLarge",
        "too many threads": "hipErrorInvalidConfiguration",
        "still usable": "hipSuccess",
        "too far": "hipErrorIllegalAddress",
        "after": ["hipErrorIllegalAddress"] * 2,
    }
    assert re.search(
        r"trap in add at 0x[\da-f]+ `global_load\w+ .*`: bounds: \d+ bytes at 0x[\da-f]+ do not "
        r"lie in an allocation \(lane \d+ of wave \d+ of workgroup [34]\)",
        text,
    ), text


def test_a_kernel_that_never_ends_is_stopped(folder: Path) -> None:
    results, text = scenario(
        folder, "long", folder / "forever.hsaco", options=["--budget", "20000"]
    )
    assert results["launch"] == "hipErrorIllegalAddress"
    assert "budget: more than 20000 wave-instructions" in text


def _find_servers(mark: str) -> list[int]:
    """Return the emulator's processes that were started for the client with this mark."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark.encode() in (folder / "environ").read_bytes()
                and b"device.server" in (folder / "cmdline").read_bytes()
            ):
                processes.append(int(folder.name))
        except OSError:
            continue
    return processes


def _list_shared_files(process: int) -> set[Path]:
    """Return the files of /dev/shm that a process has mapped."""
    maps = Path(f"/proc/{process}/maps").read_text()
    return {Path(file) for file in re.findall(r"/dev/shm/\S+", maps)}


def _begin(folder: Path, mark: str, *arguments) -> subprocess.Popen:
    """Start a scenario, and return once the scenario has printed its first line."""
    library = str(find_library(folder / "lib"))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "strix_emulate",
            "device",
            "--",
            sys.executable,
            str(SCENARIOS),
            *map(str, arguments),
        ],
        env=os.environ | {"STRIX_EMULATE_HIP": library, "STRIX_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline()
    return process


def _wait_until(condition) -> bool:
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_the_server_ends_with_its_client(folder: Path) -> None:
    """The server ends even in the middle of a kernel, and leaves no files."""
    mark = f"client-{os.getpid()}"
    client = _begin(folder, mark, "long", folder / "forever.hsaco")
    (server,) = _find_servers(mark)
    # Only the files of these two processes count. Other processes have files in /dev/shm, too.
    shared = {file for process in (client.pid, server) for file in _list_shared_files(process)}
    client.kill()
    client.communicate()
    assert _wait_until(lambda: not _find_servers(mark))
    assert not [file for file in shared if file.exists()]


def test_a_client_outlives_its_server(folder: Path) -> None:
    mark = f"server-{os.getpid()}"
    client = _begin(folder, mark, "wait", folder / "add.hsaco")
    (server,) = _find_servers(mark)
    os.kill(server, signal.SIGKILL)
    assert _wait_until(lambda: not _find_servers(mark))
    client.send_signal(signal.SIGUSR1)
    output, errors = client.communicate(timeout=600)
    assert json.loads(output) == {"launch": ["hipErrorUnknown"] * 2, "free": "hipErrorUnknown"}
    assert errors == "strix-emulate: the emulator's process has ended\n"


def test_without_a_library_the_command_says_so(tmp_path: Path) -> None:
    done = run_on_device(["true"], STRIX_EMULATE_HIP=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "install strix-emulate-hip" in done.stderr


def test_limits_of_an_outer_device_do_not_count(folder: Path) -> None:
    library_folder = folder / "lib"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "folder", lambda: library_folder)
        options = launcher.DeviceOptions(memory=1 << 30, budget=5, seconds=2.5)
        outer = launcher.environment({}, options)
        inner = launcher.environment(outer, launcher.DeviceOptions(budget=7))
    assert outer[launcher.MEMORY_VARIABLE] == str(1 << 30)
    assert inner[launcher.BUDGET_VARIABLE] == "7"
    assert not {launcher.MEMORY_VARIABLE, launcher.SECONDS_VARIABLE} & set(inner)


@pytest.mark.parametrize("size", ["0.001", "5000", "nan", "-1"])
def test_impossible_sizes_of_memory_are_refused(folder: Path, size: str) -> None:
    done = run_emulated(folder, "true", options=["--memory", size])
    assert done.returncode == 2
    assert done.stderr.startswith(f"strix-emulate: --memory {float(size)}: expected")


def test_the_program_decides_the_exit_status(folder: Path) -> None:
    assert run_emulated(folder, "sh", "-c", "exit 7").returncode == 7
    missing = run_emulated(folder, "no-such-program")
    assert missing.returncode == 2
    assert missing.stderr == "strix-emulate: no-such-program: No such file or directory\n"


def test_a_python_that_cannot_serve_is_named(folder: Path) -> None:
    command = ["env", "STRIX_EMULATE_PYTHON=/bin/false", sys.executable, SCENARIOS]
    done = run_emulated(folder, *command, "add", folder / "add.hsaco")
    assert done.returncode == 1
    assert "cannot start the emulator: /bin/false -m strix_emulate.device.server" in done.stderr


def _exports(path: Path) -> dict[str, str]:
    """Return the symbol version of each name that a library exports."""
    done = subprocess.run(
        ["readelf", "-Ws", "--dyn-syms", path], capture_output=True, text=True, check=True
    )
    return dict(re.findall(r" (?:DEFAULT) +\d+ (\w+)@@(hip_[\d.]+)", done.stdout))


def test_exports_are_those_of_amds_library(folder: Path) -> None:
    """The test needs AMD's library of HIP 7.2, installed or named by STRIX_AMD_HIP."""
    folders = ("/opt/rocm/lib", "/usr/lib/x86_64-linux-gnu", f"{sys.prefix}/lib")
    places = [os.environ.get("STRIX_AMD_HIP") or "", *(f"{x}/libamdhip64.so.7" for x in folders)]
    paths = [Path(place).resolve() for place in places]
    real = [path for path in paths if path.match("*.so.7.2.*")]
    if not real:
        pytest.skip("AMD's libamdhip64.so.7.2 is not installed; set STRIX_AMD_HIP to its path")
    assert _exports(find_library(folder / "lib") / "libamdhip64.so.7") == _exports(real[0])


def test_every_name_is_exported_with_its_version(folder: Path) -> None:
    exported = _exports(find_library(folder / "lib") / "libamdhip64.so.7")
    if not HIP.is_dir():
        pytest.skip("this test needs the stand-in runtime's sources, which only a checkout has")
    assert exported.keys() == load_builder().states().keys()
    expected = {
        "hipMalloc": "hip_4.2",
        "hipMallocAsync": "hip_5.1",
        "hipGetProcAddress": "hip_6.1",
        "hipGetDevicePropertiesR0600": "hip_6.0",
        "hipDrvLaunchKernelEx": "hip_6.5",
    }
    assert {name: exported[name] for name in expected} == expected


def test_the_table_of_entry_points_is_true() -> None:
    build = load_builder()
    assert (HIP / "ENTRY_POINTS.md").read_text() == build.table(), "python hip/build.py --table"
    states = build.states()
    assert {"served", "hint", "absent", "refused"} == set(states.values())
    # Triton's driver and AOTriton's library import these functions.
    for name in (
        "GetDevicePropertiesR0600",
        "ModuleLoadDataEx",
        "ModuleGetFunction",
        "FuncGetAttribute",
        "DrvLaunchKernelEx",
        "ModuleLaunchKernel",
        "ModuleLaunchCooperativeKernel",
        "PointerGetAttribute",
        "GetProcAddress",
        "DriverGetVersion",
        "GetLastError",
        "GetErrorString",
        "ModuleUnload",
        "PeekAtLastError",
        "StreamGetDevice",
        "GetDevice",
    ):
        assert states[f"hip{name}"] == "served", name
