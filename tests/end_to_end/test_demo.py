# SPDX-License-Identifier: BSD-3-Clause
"""`./forge demo`, README's first command: it compiles, executes and compares kernels."""

import re
from pathlib import Path

import pytest
from support.project import CHECKOUT, copy_checkout, drive

from forge.demo import ERRORS


def test_the_first_look(host_base: None, tmp_path: Path) -> None:
    """The demo uses the wheels of the host base, and builds no package.

    The demo downloads only the source of flash-attn.
    """
    root = tmp_path / "checkout"
    copy_checkout(root, packages=False)
    done = drive(CHECKOUT, "demo", FORGE_ROOT=str(root))
    if done.returncode == 3 and "needs a libLLVM" in done.stderr:
        pytest.skip("no libLLVM: the kernels were compiled, and not executed")
    assert done.returncode == 0, done.stderr
    compiled, executed, compared = done.stdout.split("\n\n")[1:4]
    assert len(re.findall(r"^  \w+ +\d+ matrix instructions", compiled, re.M)) >= 4
    counts = re.findall(r"^  \w+ +([\d,]+) instructions of 32 lanes", executed, re.M)
    assert len(counts) >= 4 and all(int(count.replace(",", "")) > 1000 for count in counts)
    for meaning in ERRORS.values():
        (numbers,) = re.findall(rf"{meaning} +largest error (\S+), allowed (\S+)", compared)
        assert 0 < float(numbers[0]) < float(numbers[1])
    assert "pip downloads" not in done.stderr
    assert not list((root / "channel").glob("*/*.conda"))
