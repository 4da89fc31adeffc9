# SPDX-License-Identifier: BSD-3-Clause
"""Fifty hostile packages (support/places.py) and a real pixi alone: what it lets out is named.

SECURITY.md says it of pixi. Once it is not so any more, this fails, and SECURITY.md says too much.
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
    folder, pixi = machine.app.folder, Pixi(tmp_path / "home", {})
    (folder / "pixi.toml").write_text(
        f'[workspace]\nname = "app"\nchannels = ["{machine.channel.as_uri()}"]\n'
        'platforms = ["linux-64"]\n[dependencies]\npython = "*"\nalpha = "*"\nbeta = "*"\n'
    )
    before = tree(machine.out)
    for _ in range(2):  # it repairs an environment as well
        pixi("install", cwd=folder, code=None)
    assert (folder / "pixi.lock").exists()
    if name not in BY_ORDER:
        assert (tree(machine.out) != before) is (name in LET_THROUGH | PIXIS)


def test_what_it_lets_through_is_named() -> None:
    text = (CHECKOUT / "SECURITY.md").read_text()
    bullet = text.split("**pixi's own install trusts packages more than ours does.**")[1]
    for words in ("console script", "conda-meta/*.json", "conda-meta/history", "CACHEDIR.TAG"):
        assert words in bullet
