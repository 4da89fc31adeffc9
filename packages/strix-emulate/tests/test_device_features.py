# SPDX-License-Identifier: BSD-3-Clause
"""What HIP programs count on, one small program of tests/hip for each, on the emulated device."""

from pathlib import Path

import pytest
from device_support import HIP_PROGRAMS, assembled, hip_program, library, link, on_device


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """For the library and programs."""
    path = tmp_path_factory.mktemp("features")
    library(path / "lib")
    return path


def on(folder: Path, *command, options=(), **variables):
    return on_device(
        list(command), *options, STRIX_EMULATE_HIP=str(library(folder / "lib")), **variables
    )


def test_waves_end_before_barriers_and_lds_addresses_wrap(folder: Path) -> None:
    done = on(folder, hip_program("waves", folder))
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout + done.stderr


def test_what_is_refused_fails_later_calls(folder: Path) -> None:
    """A caller who ignores the error must not compute with what was not done."""
    program = link(folder, HIP_PROGRAMS / "refused.c", name="refused")
    done = on(folder, program)
    assert done.stdout == (
        "refused by HIP: hipSuccess\nafter: hipErrorNotSupported, hipErrorNotSupported\n"
    )
    assert done.stderr == (
        "strix-emulate: hipCreateTextureObject is not supported; all later calls fail\n"
    )
    made = assembled(folder, "rounds", ("rounds", "s_endpgm", ".amdhsa_float_round_mode_32 1"))
    done = on(folder, program, made, "rounds")
    assert done.stdout == (
        "of no kernel: hipSuccess\nafter: hipErrorNotSupported, hipErrorNotSupported\n"
    )
    assert "rounds: rounds other than to nearest even" in done.stderr
