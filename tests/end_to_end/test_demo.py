# SPDX-License-Identifier: BSD-3-Clause
"""README's first command: it shows kernels compiled, executed and compared, and builds nothing."""

import re
import shutil
from pathlib import Path

from support.project import CHECKOUT, drive, share_build

from forge.demo import ERRORS


def test_the_first_look(host_base: None, tmp_path: Path) -> None:
    """The wheels are those of the host base, so nothing is downloaded but flash-attn's source."""
    for name in ("variants.yaml", ".gitignore"):
        shutil.copy(CHECKOUT / name, tmp_path)
    for name in ("bases", "recipes", "patches", "packages"):
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    share_build(tmp_path)
    done = drive(CHECKOUT, "demo", FORGE_ROOT=str(tmp_path), FORGE_NO_PIXI="1")
    assert done.returncode == 0, done.stderr
    compiled, executed, compared = done.stdout.split("\n\n")[1:4]
    assert len(re.findall(r"^  \w+ +\d+ matrix instructions", compiled, re.M)) >= 4
    counts = re.findall(r"^  \w+ +([\d,]+) instructions of 32 lanes", executed, re.M)
    assert len(counts) >= 4 and all(int(count.replace(",", "")) > 1000 for count in counts)
    for meaning in ERRORS.values():
        (numbers,) = re.findall(rf"{meaning} +largest error (\S+), allowed (\S+)", compared)
        assert 0 < float(numbers[0]) < float(numbers[1])
    assert "pip downloads" not in done.stderr
    assert not (tmp_path / "channel").exists()
