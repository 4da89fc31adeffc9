# SPDX-License-Identifier: BSD-3-Clause
"""Data that a soak reads from the machine: sensors, kernel messages, and doctor's findings."""

import os
import struct

import hosts
import pytest
from strix_validate.doctor.tree import Tree
from strix_validate.soak import kernel_log, telemetry
from strix_validate.soak.advice import advise


def metrics(*counters, size=264, version=3):
    data = bytearray(struct.pack("<HBB", size, version, 0)).ljust(264, b"\0")
    struct.pack_into(f"<{len(counters)}I", data, 228, *counters)
    return bytes(data)


def test_sensors_of_amdgpu_are_read(tmp_path):
    device = tmp_path / "sys/class/drm/card1/device"
    hwmon = device / "hwmon/hwmon3"
    hwmon.mkdir(parents=True)
    for name, text in {
        "mem_info_vram_total": "536870912",
        "mem_info_vram_used": str(100 * 2**20),
        "mem_info_gtt_used": str(2000 * 2**20),
        "gpu_busy_percent": "97",
        "pp_dpm_mclk": "0: 400Mhz\n1: 1000Mhz *\n",
        "pp_dpm_sclk": "0: 600Mhz \n1: 1100Mhz *\n2: 2900Mhz\n",
        "hwmon/hwmon3/temp1_input": "71500",
        "hwmon/hwmon3/power1_average": "118000000",
        "hwmon/hwmon3/freq1_input": "2788000000",
    }.items():
        (device / name).write_text(f"{text}\n")
    expected = {
        "temperature_c": 71.5,
        "clock_mhz": 2788.0,
        "memory_clock_mhz": 1000.0,
        "power_w": 118.0,
        "busy_percent": 97.0,
        "gpu_memory_mib": 2100.0,
    }
    assert telemetry.read_amd(Tree(tmp_path)) == expected
    (hwmon / "freq1_input").unlink()
    (hwmon / "power1_average").rename(hwmon / "power1_input")
    (hwmon / "temp1_input").write_text("not a number")
    del expected["temperature_c"]
    assert telemetry.read_amd(Tree(tmp_path)) == expected | {"clock_mhz": 1100.0}


def test_counters_of_throttling_are_read_from_the_version_that_is_known():
    before = telemetry.read_throttle_counters(metrics(1, 2, 3, 4, 5, 6, 7))
    assert before == (1, 2, 3, 4, 5, 6, 7)
    limits = telemetry.name_limits(before, (1, 2, 9, 4, 5, 8, 7))
    assert limits == "fast power limit, GPU temperature"
    assert telemetry.name_limits((), before) == telemetry.name_limits(before, before) == ""
    for strange in (b"", metrics(1)[:100], metrics(1, version=2), metrics(1, size=120)):
        assert telemetry.read_throttle_counters(strange) == ()


def test_lines_of_nvidia_smi_are_read():
    reading = telemetry.parse_nvidia("61, 1755, 2619, 688.23, 100, 5120\n")
    assert reading == dict(zip(telemetry.COLUMNS, (61, 1755, 2619, 688.23, 100, 5120), strict=True))
    assert telemetry.parse_nvidia("61, [N/A], 2619, [Not Supported], 100, 9") == {
        "temperature_c": 61,
        "memory_clock_mhz": 2619,
        "busy_percent": 100,
        "gpu_memory_mib": 9,
    }


def test_a_machine_without_sensors_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (reading,) = telemetry.readings(Tree(tmp_path))
    assert "no amdgpu" in reading["absent"]


FAULTS = [
    "4,8123,99812,-;amdgpu 0000:c4:00.0: amdgpu: ring comp_1.1.0 timeout, signaled seq=11801",
    "3,8124,99813,-;amdgpu 0000:c6:00.0: [gfxhub] page fault (src_id:0 ring:24 vmid:8)",
    "6,8125,99814,-;amdgpu 0000:c6:00.0: amdgpu: GPU reset begin!. Source:  1",
    "3,8126,99815,-;amdgpu: MES failed to respond to msg=REMOVE_QUEUE",
    "3,8127,99816,-;amdgpu: SMU: No response msg_reg: 32 resp_reg: 0",
    "4,8128,99817,-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
    "3,8129,99818,-;Out of memory: Killed process 4242 (python) total-vm:93817284kB",
    "2,8130,99819,-;mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 21",
    "3,8131,99820,-;AMD-Vi: Event logged [IO_PAGE_FAULT device=c6:00.0 domain=0x001a]",
    "3,8132,99821,-;INFO: task python:523991 blocked for more than 122 seconds.",
]
HARMLESS = [
    "6,1,1,-;amdgpu 0000:c4:00.0: amdgpu: SMU is initialized successfully!",
    "6,2,2,-;usb 1-4: reset high-speed USB device number 3 using xhci_hcd",
    "5,3,3,-;audit: type=1400 apparmor=DENIED",
    "6,4,4,-;[drm] Initialized amdgpu 3.64.0 for 0000:c4:00.0 on minor 1",
    " SUBSYSTEM=pci",
]


def test_faults_are_told_from_other_messages():
    messages = kernel_log.select_faults([*FAULTS, *HARMLESS])
    expected = [line.partition(";")[2] for line in FAULTS]
    expected[6] = "Out of memory: Killed process … total-vm:93817284kB"
    expected[9] = "INFO: task … blocked for more than 122 seconds."
    assert messages == expected
    assert kernel_log.select_faults(["amdgpu: GPU reset of process chrome pid 12, user"]) == [
        "amdgpu: GPU reset of process …, user"
    ]


def test_the_kernels_log_is_read_from_its_end(tmp_path, monkeypatch):
    file = tmp_path / "kmsg"
    file.write_text(f"{FAULTS[0]}\n")
    monkeypatch.setattr(kernel_log, "KMSG", file)
    log = kernel_log.KernelLog()
    assert log.faults() == []
    assert not log.absent
    with file.open("a") as stream:
        stream.write(f"{HARMLESS[0]}\n{FAULTS[1]}\n{FAULTS[2][:20]}")
        stream.flush()
        assert [message[:6] for message in log.faults()] == ["amdgpu"]
        stream.write(f"{FAULTS[2][20:]}\n")
    assert log.faults() == [FAULTS[2].partition(";")[2]]
    log.close()


@pytest.mark.parametrize("shows", [True, False])
def test_the_journal_is_read_where_the_kernels_log_may_not_be(shows, tmp_path, monkeypatch):
    """journalctl is a mock. It prints nothing if the user may not read the kernel's messages."""
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\n{'echo amdgpu: GPU reset begin' if shows else ':'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path / "missing")
    log = kernel_log.KernelLog()
    if shows:
        log._journal.wait()
        assert log.faults() == ["amdgpu: GPU reset begin"]
    else:
        assert "run as root" in log.absent
        assert log.faults() == []
    log.close()


AMD = "sys/class/drm/card1/device/power_dpm_force_performance_level"
PROFILE = "sys/firmware/acpi/platform_profile"


def test_advice_is_what_doctor_finds_and_names_what_is_in_order(tmp_path):
    changes = {AMD: "low", PROFILE: "performance", **hosts.mes(0x83)}
    text = advise(Tree(hosts.make(tmp_path, changes)))
    assert text.startswith("read the kernel's log: sudo dmesg")
    for words in (
        "doctor/power: ",
        "echo auto | sudo tee",
        "issues/5750",
        "doctor/firmware: ",
        "0x83",
        "powerprofilesctl set balanced",
    ):
        assert words in text, words
    (in_order,) = [part for part in text.split(". ") if part.startswith("no findings of")]
    assert "doctor/options" in in_order
    assert "doctor/power" not in in_order


def test_advice_of_the_iommu_and_of_lockup_timeout(tmp_path):
    line = "quiet amdgpu.lockup_timeout=1000"
    changes = {"proc/cmdline": line, "sys/class/iommu/ivhd0/x": "", PROFILE: "balanced"}
    text = advise(Tree(hosts.make(tmp_path, changes)))
    findings = {part.partition(":")[0]: part for part in text.split(". ")}
    assert "issues/6598" in text
    assert "doctor/iommu" in findings
    assert "lockup_timeout=1000" in findings["doctor/options"]
    assert "balanced" not in text


def test_without_a_gpu_of_amd_advice_is_to_read_the_kernels_log(tmp_path):
    text = advise(Tree(hosts.without_gpu(tmp_path, {PROFILE: "performance"})))
    assert text.startswith("read the kernel's log")
    assert "doctor/" not in text
    assert "powerprofilesctl" not in text
