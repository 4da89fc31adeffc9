# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi installs the hostile packages of support/places.py, without our own checks.

SECURITY.md names the cases in which pixi writes outside of the prefix. If pixi no longer does so,
these tests fail, and SECURITY.md has to be changed.
"""

from pathlib import Path

import pytest
from support.pixi import Pixi
from support.places import BY_ORDER, CASES, LET_THROUGH, PIXIS, Machine
from support.project import CHECKOUT
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
    # The second run repairs the environment that the first has installed.
    for _ in range(2):
        pixi("install", cwd=folder, code=None)
    assert (folder / "pixi.lock").exists()
    if name not in BY_ORDER:
        has_written_outside = tree(machine.out) != before
        assert has_written_outside is (name in LET_THROUGH | PIXIS)


def test_what_it_lets_through_is_named() -> None:
    text = (CHECKOUT / "SECURITY.md").read_text()
    bullet = text.split("**pixi's own install trusts packages more than ours does.**")[1]
    for words in ("console script", "conda-meta/*.json", "conda-meta/history", "CACHEDIR.TAG"):
        assert words in bullet
