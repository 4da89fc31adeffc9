# SPDX-License-Identifier: BSD-3-Clause
"""Tests of Linux kernel releases: their distribution, their order, and the table of faults."""

import pytest
from strix_validate.doctor import kernel_release
from strix_validate.doctor.kernel_release import (
    find_fault,
    find_faulty_nightly,
    find_first_fixed,
    find_misfit,
    is_fixed,
    parse,
)

#: Lists of releases of one distribution's kernel each, from the oldest to the newest.
ASCENDING = [
    [
        "7.1.0-rc5-arch1-1",
        "7.1.0-rc6-arch1-1",
        "7.1.0-rc10-arch1-1",
        "7.1.0-arch1-1",
        "7.1.1-arch1-1",
    ],
    ["7.1.0-070100rc6-generic", "7.1.0-070100-generic", "7.1.1-070101-generic"],
    ["7.1.0-0.rc6.1.fc45.x86_64", "7.1.0-200.fc45.x86_64", "7.1.1-200.fc45.x86_64"],
    ["6.18.9-arch1-1", "6.18.10-arch1-1", "6.19.0-arch1-1", "7.0.0-arch1-1", "10.0.0-arch1-1"],
    ["7.0.0-9-generic", "7.0.0-28-generic", "7.0.0-30-generic", "7.0.0-100-generic"],
    ["6.14.0-1018-oem", "6.14.0-1020-oem", "6.17.0-1009-oem"],
]


@pytest.mark.parametrize("releases", ASCENDING, ids=lambda releases: releases[0])
def test_order(releases):
    parsed = [parse(text) for text in releases]
    assert all(parsed)
    kernel = "upstream" if parsed[0].has_upstream_version else parsed[0].origin
    keys = [kernel_release.sort_key(release, kernel) for release in parsed]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize(
    ("text", "origin", "is_upstreams"),
    [
        ("7.0.0-28-generic", "ubuntu", False),
        ("6.17.0-20-lowlatency", "ubuntu", False),
        ("6.14.0-1020-oem", "ubuntu-oem", False),
        ("7.0.0-1004-azure", "ubuntu-other", False),
        ("7.0.12-070012-generic", "mainline", True),
        ("7.0.11-76070011-generic", "mainline", True),
        ("7.0.12-200.fc44.x86_64", "fedora", True),
        ("6.17.7-ba25.fc43.x86_64", "fedora", True),
        ("6.12.0-124.el10.x86_64", "rhel", False),
        ("7.0.12-2-cachyos", "arch", True),
        ("7.0.12-2-cachyos-lto", "arch", True),
        ("6.18.35-1-lts", "arch", True),
        ("7.0.14-4-pve", "proxmox", True),
        ("6.12.74+deb13+1-amd64", "debian", True),
        ("6.1.0-13-amd64", "debian", False),
        ("7.0.12-1-default", "opensuse", True),
        ("6.6.87.2-microsoft-standard-WSL2", "wsl", True),
        ("7.1.0", "", True),
    ],
)
def test_whose_kernel(text, origin, is_upstreams):
    release = parse(text)
    assert (release.origin, release.has_upstream_version) == (origin, is_upstreams)


@pytest.mark.parametrize("text", ["", "x", "6", "linux-6.18", "-1.2"])
def test_what_is_no_release(text):
    assert parse(text) is None


def test_rows_are_half_open():
    """A row contains its first build, but not the build after its last one. Each row has a link."""
    tails = {"ubuntu": "-generic", "ubuntu-oem": "-oem", "upstream": ""}
    for row in kernel_release.read_table().faulty:
        assert row.source.startswith("https://")
        tail = tails[row.kernel]
        assert find_fault(parse(row.from_ + tail)) == row, row
        assert find_fault(parse(row.to + tail)) is None, row
    for row in kernel_release.read_table().fixed:
        assert is_fixed(parse(row.from_ + tails[row.kernel])), row


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("6.17.0-18-generic", "6.17.0-19"),
        ("6.14.0-1017-oem", "6.14.0-1018"),
        ("6.18.3-arch1-1", "6.18.4"),
        ("6.18.4-rc1", "6.18.4"),
        ("6.17.0-061700-generic", "6.18.4"),
        ("6.17.0-1010-azure", "6.18.4"),
    ],
)
def test_kernels_without_the_fixes(text, bound):
    release = parse(text)
    assert not is_fixed(release)
    assert find_first_fixed(release) == bound


def test_another_vendors_numbers_are_not_upstreams():
    """Ubuntu's 7.1.0 may have the fix of 7.1.1, so only rows for Ubuntu's kernels apply to it."""
    assert find_fault(parse("7.1.0-5-generic")) is None
    assert find_fault(parse("7.1.0")) is not None


@pytest.mark.parametrize(
    ("runtime", "fits"),
    [
        ("6.4.4", False),
        ("7.1.25424", False),
        ("7.2", True),
        ("7.2.53150", True),
        ("7.9.0", False),
        ("7.10.0", False),
        ("7.11.0", True),
        ("10.0.0", True),
        ("20251218", False),
        ("20251219", True),
        ("7.11.0a20251218", False),
        ("7.11.0a20251219", True),
        ("", True),
        ("unknown", True),
    ],
)
def test_runtimes(runtime, fits):
    assert (find_misfit(runtime) is None) == fits


@pytest.mark.parametrize(
    ("runtime", "is_faulty"),
    [
        ("7.14.0a20260608", False),
        ("7.14.0a20260609", True),
        ("7.14.0a20260612", True),
        ("7.14.0a20260613", False),
        ("20260612", True),
        ("7.14.0", False),
        ("", False),
    ],
)
def test_nightlies(runtime, is_faulty):
    assert (find_faulty_nightly(runtime) is not None) == is_faulty
