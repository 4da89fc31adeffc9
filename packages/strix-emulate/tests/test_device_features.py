# SPDX-License-Identifier: BSD-3-Clause
"""What HIP programs count on, one small program of tests/hip for each, on the emulated device."""

from pathlib import Path

import pytest
from device_support import hip_program, library, on_device


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
