# SPDX-License-Identifier: BSD-3-Clause
"""The hostile packages of support/places.py, installed by a real pixi without the driver.

support/places.py lists the packages through which pixi writes outside the prefix. SECURITY.md
describes them. If a newer pixi refuses one of these packages, the test fails, and both files must
be corrected.
"""

from pathlib import Path

import pytest
from support.pixi import Pixi
from support.places import BY_ORDER, CASES, LET_THROUGH, PIXIS, Machine
from support.static_channel import tree

pytestmark = pytest.mark.pixi


@pytest.mark.parametrize("name", CASES)
def test_installed_by_pixi_alone(name: str, tmp_path: Path) -> None:
    machine = Machine(CASES[name], tmp_path)
    folder = machine.app.folder
    pixi = Pixi(tmp_path / "home", {})
    (folder / "pixi.toml").write_text(
        f'[workspace]\nname = "app"\nchannels = ["{machine.channel.as_uri()}"]\n'
        'platforms = ["linux-64"]\n[dependencies]\npython = "*"\nalpha = "*"\nbeta = "*"\n'
    )
    before = tree(machine.out)
    # The second run repairs the environment that the first run has installed.
    for _ in range(2):
        pixi("install", cwd=folder, code=None)
    assert (folder / "pixi.lock").exists()
    if name not in BY_ORDER:
        assert (tree(machine.out) != before) is (name in LET_THROUGH | PIXIS)
