# SPDX-License-Identifier: BSD-3-Clause
"""`forge patches check` on this repository's patches and the sources that PyPI serves."""

from __future__ import annotations

import re

from support.project import CHECKOUT, MiniProject


def test_ours_apply(project: MiniProject) -> None:
    """Those that PyPI serves must apply; the others are reported as not attempted."""
    done = project.forge("patches", "check", FORGE_ROOT=str(CHECKOUT))
    assert re.search(r"^flash-attn: \d+ patches: applies$", done.stdout, re.M)
    for line in done.stdout.splitlines():
        assert " patches: " not in line or re.search(r": (applies$|not attempted: )", line)


def test_exit_codes(project: MiniProject) -> None:
    patch = project.root / "patches" / "alpha" / "0001-word.patch"
    patch.parent.mkdir(parents=True)
    patch.write_text("nothing")
    source = "[{url: 'http://upstream.invalid/a.tar.gz', sha256: %s, patches: [%s]}]"
    project.recipe("alpha", source=source % ("0" * 64, "../../patches/alpha/0001-word.patch"))
    project.forge("patches", "check")
    project.forge("patches", "check", "--strict", code=3)
