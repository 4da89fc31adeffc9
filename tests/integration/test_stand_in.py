# SPDX-License-Identifier: BSD-3-Clause
"""What is built on the small conda-forge of the tests requires what it would on the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import stand_in

from forge.conda.local import Channel
from forge.conda.package import Package
from forge.recipes.render import build_recipes

RECIPE = """\
schema_version: 1
package: {name: made, version: "1.0"}
build: {number: 0, script: [mkdir -p $PREFIX/share, touch $PREFIX/share/made]}
requirements:
  build: [gxx_linux-64, sysroot_linux-64]
about: {license: MIT}
"""


def test_compilers_make_their_libraries_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "gxx_linux-64 14.3.0", "sysroot_linux-64 2.28", "libgcc 15.2.0", "libstdcxx 15.2.0"
    stubs = {stub: [] for stub in stand_in.STUBS if stub in names}
    assert len(stubs) == len(names)
    monkeypatch.setattr(stand_in, "STUBS", stubs)
    channel, recipe = tmp_path / "channel", tmp_path / "recipe.yaml"
    (channel / "linux-64").mkdir(parents=True)
    (channel / "noarch").mkdir()
    list(stand_in._stubs(tmp_path / "scratch", channel / "linux-64"))
    Channel(channel).index()
    recipe.write_text(RECIPE)
    where = {"channel": [channel.as_uri()], "output_dir": str(tmp_path / "out")}
    build_recipes([recipe], test="skip", package_format="conda:1", **where)
    (made,) = (tmp_path / "out").glob("linux-64/made-*.conda")
    needs = {"libgcc >=14", "libstdcxx >=14", "__glibc >=2.28,<3.0.a0"}
    assert set(Package(made).index["depends"]) == needs
