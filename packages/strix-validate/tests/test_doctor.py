# SPDX-License-Identifier: BSD-3-Clause
"""Run the doctor on machines made of files: healthy, with one or more faults, and empty."""

import json
import os
import resource
from types import SimpleNamespace

import hosts
import pytest
from program import run
from strix_validate import skips
from strix_validate.checks import Severity, State
from strix_validate.cli import app
from strix_validate.doctor import cluster_machine, environment
from strix_validate.doctor.tree import Node, Tree
from strix_validate.doctor.virtual_packages import detect
from strix_validate.reporting.record import Device
from strix_validate.tiers import doctor
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def enough_disk(monkeypatch):
    monkeypatch.setattr(environment, "disk_usage", lambda place: SimpleNamespace(free=10**12))


def examine(root, **options):
    options.setdefault("measure_copies", lambda library: {"read_only": 9e9, "writable": 2e9})
    tree = Tree(root, **options)
    results = doctor.examine(doctor.checks(), tree)
    judged = (skips.judge(result, Device(type="cpu", architecture="x86_64")) for result in results)
    return {result.check.id.removeprefix("doctor/"): result for result in judged}


def test_healthy_host_has_no_finding(tmp_path):
    results = examine(hosts.make(tmp_path, {}))
    assert len(results) >= 14
    for name, result in results.items():
        assert (result.state, result.severity) == (State.PASSED, None), (name, result)


@pytest.mark.parametrize("fault", hosts.FAULTS)
def test_each_fault_alone(fault, tmp_path):
    changes, expected = hosts.FAULTS[fault]
    hosts.make(tmp_path, changes)
    results = examine(tmp_path)
    for name, (state, severity, message, fix) in expected.items():
        result = results[name]
        assert (result.state.value, result.severity.value) == (state, severity), result
        assert message in result.reason and fix in result.fix, result
    for name, result in results.items():
        if name not in expected and result.state is not State.SKIPPED:
            assert (result.state, result.severity) == (State.PASSED, None), (name, result)


@pytest.fixture
def with_ray(tmp_path):
    file = f"{hosts.META}/ray-core-2.60.0-h1_0.json"
    return hosts.make(tmp_path, {file: hosts.record("ray-core", "2.60.0")})


@pytest.fixture
def cable(monkeypatch):
    """Mock a machine with one address, on a Thunderbolt link, and a high limit of open files."""
    limits = (cluster_machine.FILES, cluster_machine.FILES)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    link = cluster_machine.Link("10.77.0.1", "thunderbolt0")
    monkeypatch.setattr(cluster_machine, "list_links", lambda: [link])


def test_a_machine_of_two_prints_its_packages_and_addresses(with_ray, cable):
    result = examine(with_ray)["two-machines"]
    digest = cluster_machine.hash_packages(with_ray / "home/user/env")
    assert result.state is State.PASSED
    assert result.severity is Severity.INFO
    assert result.reason == f"hash of packages {digest}, addresses thunderbolt0 10.77.0.1"
    assert "the same hash of packages" in result.fix
    assert "ulimit" not in result.fix


def test_another_package_is_another_digest(with_ray):
    prefix = with_ray / "home/user/env"
    digest = cluster_machine.hash_packages(prefix)
    record = prefix / "conda-meta/ray-core-2.60.0-h1_0.json"
    record.write_text(record.read_text().replace("2.60.0", "2.61.0"))
    assert cluster_machine.hash_packages(prefix) != digest


def test_a_machine_without_a_network_joins_no_other(with_ray, cable, monkeypatch):
    monkeypatch.setattr(cluster_machine, "list_links", list)
    result = examine(with_ray)["two-machines"]
    assert result.state is State.FAILED
    assert result.reason == "this machine has no IPv4 address but loopback"
    assert "give the interface of the cable between the machines an address" in result.fix


@pytest.mark.parametrize("number", [0, 2])
def test_the_firmware_of_another_gpu_is_not_judged(number, tmp_path):
    file = f"sys/kernel/debug/dri/{number}/amdgpu_firmware_info"
    text = "MES feature version: 1, firmware version: 0x00000083\n"
    result = examine(hosts.make(tmp_path, {file: text}))["firmware"]
    assert result.severity is None
    assert result.measured["mes"] == "0x80"


def test_the_last_value_of_an_option_counts_and_all_are_removed(tmp_path):
    """modprobe reads the files of all folders, ordered by file name. The last value counts."""
    hosts.make(
        tmp_path,
        {
            "etc/modprobe.d/amdgpu.conf": "options amdgpu gttsize=8192\n",
            "usr/lib/modprobe.d/zz.conf": "options amdgpu gttsize=65536\n",
        },
    )
    result = examine(tmp_path)["gtt"]
    assert "amdgpu.gttsize=65536 caps GTT at 64 GiB" in result.reason
    assert "/etc/modprobe.d/amdgpu.conf" in result.fix
    assert "sudo cp /usr/lib/modprobe.d/zz.conf" in result.fix
    hosts.make(tmp_path, {"proc/cmdline": "amd_iommu=off amdgpu.gttsize=1024 amdgpu.gttsize=4096"})
    result = examine(tmp_path)["gtt"]
    assert "amdgpu.gttsize=4096 caps GTT at 4 GiB" in result.reason
    assert "amdgpu.gttsize=1024" in result.fix


def test_a_file_of_options_hides_a_package_file_of_its_name(tmp_path):
    """The fix copies a package's file to /etc and edits the copy, so the original has no effect."""
    package = {"usr/lib/modprobe.d/vendor.conf": "options amdgpu ppfeaturemask=0xffff7fff\n"}
    result = examine(hosts.make(tmp_path, package))["options"]
    assert "ppfeaturemask" in result.reason
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/modprobe.d").symlink_to(tmp_path / "usr/lib/modprobe.d")
    assert examine(tmp_path)["options"].fix == result.fix
    hosts.make(tmp_path, {"etc/modprobe.d/vendor.conf": "options amdgpu\n"})
    assert examine(tmp_path)["options"].severity is None


def test_a_line_whose_options_were_removed_does_not_take_the_next_line(tmp_path):
    lines = "options amdttm\noptions ttm pages_limit=31457280\n"
    result = examine(hosts.make(tmp_path, {"etc/modprobe.d/ttm.conf": lines}))["gtt"]
    assert result.severity is None, result


#: Loopback and two interfaces as `ip -json -4 address` prints them, and as `ip -brief -4 address`
#: does: eth0 has a metric, as systemd-networkd sets it for DHCP, and tun0 has a peer.
IP_JSON = (
    '[{},{"ifname":"lo","addr_info":[{"local":"127.0.0.1"}]},'
    '{"ifname":"eth0","addr_info":[{"local":"192.168.1.5","prefixlen":24,"metric":100}]},'
    '{"ifname":"tun0","addr_info":[{"local":"10.8.0.6","address":"10.8.0.5"}]}]'
)
IP_BRIEF = (
    "lo UNKNOWN 127.0.0.1/8\n"
    "eth0@if5 UP 192.168.1.5/24 metric 100\n"
    "tun0 UNKNOWN 10.8.0.6 peer 10.8.0.5/32"
)


def test_addresses_with_a_metric_or_a_peer_are_read(tmp_path, monkeypatch):
    program = tmp_path / "ip"
    program.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -json ]; then echo '{IP_JSON}'; else echo '{IP_BRIEF}'; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    links = cluster_machine.list_links()
    assert [(link.interface, link.address) for link in links] == [
        ("eth0", "192.168.1.5"),
        ("tun0", "10.8.0.6"),
    ]


def test_a_machine_without_the_program_ip_is_not_a_fault(with_ray, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    limits = (cluster_machine.FILES, cluster_machine.FILES)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    result = examine(with_ray)["two-machines"]
    assert result.state is State.SKIPPED
    assert "ip is not installed" in str(result.measured)


@pytest.mark.parametrize(
    ("limits", "state", "fix"),
    [
        ((1024, 4096), State.FAILED, "limits.conf"),
        ((1024, 8192), State.PASSED, "ulimit -n 8192"),
        ((1024, resource.RLIM_INFINITY), State.PASSED, "ulimit -n 8192"),
    ],
)
def test_a_cluster_needs_open_files(with_ray, cable, monkeypatch, limits, state, fix):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    result = examine(with_ray)["two-machines"]
    assert result.state is state
    assert fix in result.fix


def kernel_package(flash_attn="flash-attn-2.8.3.post2-pyh1_0"):
    """Return the files of an environment with packaged kernels for one build of flash-attn."""
    package = "flash-attn-kernels-gfx1151"
    record = {
        "depends": ["triton ==3.7.1 py312h1_0"],
        "constrains": ["__amdgpu_arch ==11.5.1", "flash-attn ==2.8.3.post2 pyh1_0"],
    }
    kernel = {"name": "k", "types": {}, "constants": {}, "options": {}, "files": {}}
    kernels = dict.fromkeys(("AAA", "BBB", "CCC"), kernel)
    return {
        f"home/user/env/share/triton-kernels/{package}/kernels.json": json.dumps(
            {"kernels": kernels}
        ),
        f"{hosts.META}/{package}-3.7.1-h1_0.json": json.dumps(record),
        f"{hosts.META}/triton-3.7.1-py312h1_0.json": "{}",
        f"{hosts.META}/{flash_attn}.json": "{}",
    }


def test_kernels_of_the_installed_versions_are_counted(tmp_path):
    result = examine(hosts.make(tmp_path, kernel_package()))["kernels"]
    assert result.severity is None
    assert result.measured == {"flash-attn-kernels-gfx1151": "3 kernels"}


@pytest.mark.parametrize("other", ["2.8.3.post2-pyh2_1", "2.8.4-pyh1_0"])
def test_kernels_of_another_build_are_a_warning(other, tmp_path):
    """Without the warning, users would not know that each kernel is compiled at its first call."""
    result = examine(hosts.make(tmp_path, kernel_package(f"flash-attn-{other}")))["kernels"]
    assert (result.state, result.severity) == (State.PASSED, Severity.WARNING)
    assert f"0 of 3 kernels are for the installed flash-attn-{other}" in result.reason
    assert result.fix == "pixi update flash-attn-kernels-gfx1151"


def test_variables_of_the_activation_are_printed(tmp_path):
    """Variables that the activation has set are not a finding."""
    values = {"ROCPROFILER_QUEUE_INTERPOSITION": "0", "MIOPEN_FIND_MODE": "FAST"}
    changes = hosts.environ(**values) | {f"{hosts.META}/rocm-sdk-core-10.0.0-h1_0.json": "{}"}
    result = examine(hosts.make(tmp_path, changes))["environment"]
    assert result.severity is None
    assert result.measured == values


@pytest.mark.parametrize("version", [110500, 110502, 120001])
def test_another_gpu_is_told_no_override(version, tmp_path):
    """If the doctor suggested an override, pixi would install kernels that this GPU cannot run."""
    results = examine(hosts.make(tmp_path, {f"{hosts.KFD}/1/properties": hosts.node(version, 32)}))
    assert results["gpu"].state is State.FAILED
    assert results["pixi"].state is State.SKIPPED
    assert "see doctor/gpu" in results["pixi"].reason
    assert not any("CONDA_OVERRIDE" in result.fix for result in results.values())


@pytest.mark.parametrize(
    "folder", ["lib64", "lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/x86_64-linux-gnu"]
)
def test_glibc_of_a_copy_is_in_the_folder_of_its_distribution(folder, tmp_path):
    text = "GNU C Library stable release version 2.27.\n"
    changes = {"lib64/libc.so.6": None, f"{folder}/libc.so.6": text}
    assert Tree(hosts.make(tmp_path, changes)).glibc == (2, 27)


def test_wsl_is_told_to_install_no_kernel(tmp_path):
    changes = {"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n"}
    results = examine(hosts.without_gpu(tmp_path, changes | hosts.UBUNTU))
    assert "WSL" in results["gpu"].reason
    assert "lspci" not in results["gpu"].fix
    assert results["gpu"].state is State.FAILED
    assert results["kernel"].state is results["pixi"].state is State.SKIPPED
    assert not any("linux-generic" in result.fix for result in results.values())


@pytest.mark.parametrize(
    "release", ["6.17.0-19-generic", "6.17.0-40-generic", "6.14.0-1018-oem", "6.14.0-1020-oem"]
)
def test_ubuntu_24_04_has_the_fixes_in_older_kernels(release, tmp_path):
    changes = {"proc/sys/kernel/osrelease": release, **hosts.UBUNTU}
    assert examine(hosts.make(tmp_path, changes))["kernel"].severity is None


@pytest.mark.parametrize("machine", hosts.MACHINES)
def test_what_pixi_detects(machine, tmp_path):
    """The doctor predicts the virtual packages that pixi detects.

    tests/integration/test_detection.py checks py-rattler's own detection on the same machines.
    """
    files, expected = hosts.MACHINES[machine]
    assert detect(Tree(hosts.make(tmp_path, files))) == expected


@pytest.mark.parametrize(
    ("changes", "variables", "expected"),
    [
        ({}, {"CONDA_OVERRIDE_AMDGPU": ""}, {}),
        ({}, {"CONDA_OVERRIDE_AMDGPU_ARCH": ""}, {"__amdgpu": "0"}),
        # Pixi ignores CONDA_OVERRIDE_AMDGPU_ARCH if there is no GPU.
        ({f"{hosts.KFD}/1/properties": None}, {"CONDA_OVERRIDE_AMDGPU_ARCH": "11.5.1"}, {}),
        (
            {},
            {"CONDA_OVERRIDE_AMDGPU": "0", "CONDA_OVERRIDE_AMDGPU_ARCH": "9.0.10"},
            {"__amdgpu": "0", "__amdgpu_arch": "9.0.10"},
        ),
    ],
)
def test_what_pixi_is_told(changes, variables, expected, tmp_path):
    tree = hosts.make(tmp_path, changes | hosts.environ(**variables))
    assert detect(Tree(tree)) == expected


@pytest.mark.parametrize(("variable", "value"), hosts.REFUSED)
def test_what_pixi_refuses(variable, value, tmp_path):
    result = examine(hosts.make(tmp_path, hosts.environ(**{variable: value})))["pixi"]
    assert result.severity is Severity.ERROR
    assert f"pixi does not accept {variable}={value}," in result.reason
    fix = hosts.OVERRIDE_ARCH if variable.endswith("ARCH") else hosts.OVERRIDE
    assert result.fix == f"export {fix}"


def test_no_permission(tmp_path):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    tree = hosts.make(tmp_path, hosts.MACHINES["without-rights"][0])
    results = examine(tree, open_device=refuse)
    assert results["groups"].severity is Severity.WARNING
    assert results["pixi"].severity is None
    for name in ("kfd", "render"):
        assert results[name].state is State.FAILED
        assert "permission denied" in results[name].reason
        assert "usermod -aG render,video" in results[name].fix


def test_device_that_is_none(tmp_path):
    hosts.make(tmp_path, {"dev/kfd": None})
    (tmp_path / "dev/kfd").mkdir()
    result = examine(tmp_path)["kfd"]
    assert result.state is State.FAILED
    assert "cannot be opened" in result.reason


def test_stale_caches(tmp_path):
    hosts.make(tmp_path, {"home/user/.triton/cache/entry": ""})
    old = (hosts.NOW - 30 * 86400,) * 2
    for name in (".cache/comgr/entry", ".triton/cache/entry"):
        os.utime(tmp_path / "home/user" / name, old)
    result = examine(tmp_path)["caches"]
    assert result.severity is Severity.WARNING
    assert result.fix == "rm -r ~/.cache/comgr ~/.triton/cache"


def test_little_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "disk_usage", lambda place: SimpleNamespace(free=3 * 10**9))
    result = examine(hosts.make(tmp_path, {}))["disk"]
    assert result.severity is Severity.WARNING
    assert "3.0 GB" in result.reason
    assert result.measured == {"free_gb": 3.0}


def test_empty_tree(tmp_path):
    results = examine(tmp_path)
    assert results["gpu"].state is State.FAILED
    assert "/sys/class/kfd lists no GPU" in results["gpu"].reason
    skipped = {name for name, result in results.items() if result.state is State.SKIPPED}
    assert {"kernel", "kfd", "gtt", "glibc", "caches"} <= skipped


def test_names_of_gpus():
    assert Node(110501, 0).name == "gfx1151"
    assert Node(90010, 0).name == "gfx90a"


def command(root, **variables):
    """Run `doctor --json` in a process that cannot import torch."""
    return run("doctor", "--root", root, "--json", without="torch", **variables)


def test_a_gpu_next_door(tmp_path):
    """gpu_arch names the expected GPU. That GPU passes, and any other GPU fails."""
    changes = {f"{hosts.KFD}/1/properties": hosts.node(110502, 16)}
    changes |= {f"{hosts.GPU}/device": "0x1114\n", f"{hosts.PCI}/device": "0x1114\n"}
    done = command(hosts.make(tmp_path / "krackan", changes), gpu_arch="gfx1152")
    assert done.returncode == 0, done.stdout
    findings = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    for name in ("gpu", "pixi", "kfd", "carve-out", "gtt", "vllm-memory"):
        assert findings[f"doctor/{name}"]["status"] == "ok", findings[f"doctor/{name}"]
    for name in ("kernel", "firmware"):
        measured = findings[f"doctor/{name}"]["measured"]
        assert measured["own_reason"] == "this check knows only gfx1151"
    done = command(hosts.make(tmp_path / "halo", {}), gpu_arch="gfx1152")
    (gpu,) = [f for f in json.loads(done.stdout)["findings"] if f["status"] == "error"]
    assert (done.returncode, gpu["id"]) == (1, "doctor/gpu")
    assert gpu["message"] == "the GPU is gfx1151, but these packages are compiled for gfx1152"
    done = command(tmp_path, gpu_arch="gfx1100")
    assert done.returncode == 2
    assert "doctor supports only gfx1151, gfx1150, gfx1152" in done.stderr


def test_command_on_a_host_without_amd_gpu(tmp_path):
    """The exit status is 1, with one error and no traceback, and torch is not imported."""
    done = command(hosts.without_gpu(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    findings = json.loads(done.stdout)["findings"]
    errors = [finding for finding in findings if finding["status"] == "error"]
    assert [finding["id"] for finding in errors] == ["doctor/gpu"]
    assert "lspci" in errors[0]["fix"]
    assert errors[0]["needs_reboot"] is False
    assert all(finding["message"] for finding in findings if finding["status"] == "skipped")


def sizes(carve_out=0.5, gtt=96, pages=96, memory=125, available=118, used=0):
    """Return the files of a machine, with sizes in GiB. HIP's pool has `used` GiB in use."""
    pool = "gtt" if carve_out < gtt else "vram"
    return {
        f"{hosts.GPU}/mem_info_vram_total": str(int(carve_out * hosts.GIB)),
        f"{hosts.GPU}/mem_info_gtt_total": str(gtt * hosts.GIB),
        f"{hosts.GPU}/mem_info_{pool}_used": str(used * hosts.GIB),
        "sys/module/ttm/parameters/pages_limit": str(pages * hosts.GIB // 4096),
        "proc/meminfo": f"MemTotal: {memory * 2**20} kB\nMemAvailable: {available * 2**20} kB\n",
    }


def group(version: int, limit: object, used=0, cache=0, folder="/job") -> dict[str, str]:
    """Return the files of a control group, with sizes in GiB. `used` includes `cache`."""
    names = ("memory.max", "memory.current", "inactive_file")
    root = "sys/fs/cgroup"
    line = "0::"
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        root = "sys/fs/cgroup/memory"
        line = "4:cpuset:/\n5:hugetlb,memory:"
    limit = limit * hosts.GIB if isinstance(limit, int) else limit
    return {
        "proc/self/cgroup": f"{line}{folder}\n",
        f"{root}{folder}/{names[0]}": f"{limit}\n",
        f"{root}{folder}/{names[1]}": f"{used * hosts.GIB}\n",
        f"{root}{folder}/memory.stat": f"anon 1\n{names[2]} {cache * hosts.GIB}\n",
    }


#: By name: the host's files, the weights in GiB, a part of the reason, and a part of the fix.
MEMORY = {
    "GTT": (sizes(), 40, "0.92 --kv-cache-memory-bytes 44G", ""),
    "no model": (sizes(), 0, "0.92 (doctor --model-gib adds", ""),
    "carve-out": (
        sizes(64, 31, 31, memory=62, available=55, used=1),
        30,
        "0.92 --kv-cache-memory-bytes 24G",
        "",
    ),
    "busy": (
        sizes(gtt=120, pages=120, available=40),
        20,
        "0.30 --kv-cache-memory-bytes 12G",
        "",
    ),
    "GPU busy": (sizes(used=48), 20, "0.50 --kv-cache-memory-bytes 24G", ""),
    "page limit": (sizes(gtt=128, pages=62), 40, "0.92 --kv-cache-memory-bytes 13G", ""),
    "below the model": (sizes(gtt=62, pages=62), 70, "70 GiB does not fit: 62", "pages_limit="),
    "the limit of a DKMS driver": (
        sizes() | {"sys/module/amdttm/parameters/pages_limit": f"{62 * hosts.GIB // 4096}\n"},
        70,
        "70 GiB does not fit: 62",
        "options amdttm pages_limit",
    ),
    "a group": (sizes() | group(2, 48), 20, "0.45 --kv-cache-memory-bytes 19G", ""),
    "a busy group": (sizes() | group(2, 48, 20, 8), 10, "0.33 --kv-cache-memory-bytes 17G", ""),
    "a group of version 1": (sizes() | group(1, 48), 20, "0.45 --kv-cache-memory-bytes 19G", ""),
    "the group above": (
        sizes() | group(2, 48, folder="/slice") | {"proc/self/cgroup": "0::/slice/a/b\n"},
        20,
        "0.45 --kv-cache-memory-bytes 19G",
        "",
    ),
    "a namespace's root": (
        sizes() | group(2, 48, folder="") | {"proc/self/cgroup": "0::/../other\n"},
        20,
        "0.45 --kv-cache-memory-bytes 19G",
        "",
    ),
    "a group without a limit": (sizes() | group(2, "max"), 0, "0.92 (doctor --model-gib adds", ""),
    "version 1 without a limit": (
        sizes() | group(1, 9223372036854771712 // 2**30, 0),
        0,
        "0.92 (doctor --model-gib adds",
        "",
    ),
    "a group with no room": (sizes() | group(2, 16, 16), 10, "10 GiB does not fit: 0", "free"),
    "a group below the model": (sizes() | group(2, 48), 60, "60 GiB does not fit: 44", "smaller"),
    "nothing free": (sizes(available=6), 0, "does not fit: 2 GiB", "free memory"),
    "larger than all": (sizes(), 120, "120 GiB does not fit: 96", "smaller"),
    "larger than the carve-out": (sizes(96, 15, 15, 31, 28), 100, "does not fit: 96", "smaller"),
}


@pytest.mark.parametrize("case", MEMORY)
def test_flags_for_vllm(case, tmp_path):
    changes, gib, reason, fix = MEMORY[case]
    tree = Tree(hosts.make(tmp_path, changes))
    check = [check for check in doctor.checks() if check.id == "doctor/vllm-memory"]
    (result,) = doctor.examine(check, tree, gib * hosts.GIB)
    assert result.state is State.PASSED and reason in result.reason and fix in result.fix, result
    assert result.severity is (Severity.WARNING if fix else None)
    assert fix or result.reason.startswith("vllm serve MODEL --gpu-memory-utilization ")


def test_flags_for_vllm_on_the_command_line(tmp_path):
    hosts.make(tmp_path, sizes())
    command = ["doctor", "--root", str(tmp_path), "--only", "doctor/vllm-memory"]
    done = CliRunner().invoke(app, [*command, "--model-gib", "40"], env={"COLUMNS": "400"})
    assert done.exit_code == 0
    assert "--gpu-memory-utilization 0.92 --kv-cache-memory-bytes 44G" in done.output
