# SPDX-License-Identifier: BSD-3-Clause
"""The page of a published channel: every figure is the index's, and it fits its screen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import CHECKOUT
from support.static_channel import Source, findings

from forge.channel import StaticChannel

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two revisions: three builds, one of them yanked."""
    folder = tmp_path_factory.mktemp("page")
    source, target = Source(folder / "source"), folder / "published"
    source.make("triton", "3.7.1")
    old = source.make("flash-attn", "2.8.3.post2")
    source.make("a-package-with-a-long-name-for-the-narrow-screen", "1.0")
    StaticChannel(target).publish(source)
    StaticChannel(target).publish(None, [old])
    write(target)
    return target


def write(target: Path) -> None:
    subprocess.run([sys.executable, CHECKOUT / "docs/channel_page.py", target], check=True)


def test_figures_are_the_indexs(target: Path) -> None:
    text = (target / "index.html").read_text()
    index = json.loads((target / "noarch/repodata_from_packages.json").read_text())
    records = index["packages.conda"].values()
    assert "2 packages, 1 yanked" in text and "revision 2." in text
    for record in records:
        assert f">{record['name']}</a>" in text and record["build"] in text
        assert f"{record['size'] / 1024:.1f} KiB" in text or f"{record['size']} B" in text
    for entry in json.loads((target / "revisions/log.json").read_text())["revisions"]:
        assert entry["time"] in text
    assert '<span class="yanked"><a href="noarch/flash-attn-' in text
    assert "executed under emulation" in text and "not run on gfx1151" in text
    assert re.search(r"<b>attention</b></td>.*triton 3\.7\.1</td>.*flash-attn", text)
    assert findings(target) == []


def test_nothing_is_from_elsewhere(target: Path) -> None:
    text = (target / "index.html").read_text()
    assert "<script" not in text and not re.search(r"(src|href)=.?https?:", text)
    assert "prefers" in text or "light-dark(" in text


def test_names_are_escaped(target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    for path in copy.glob("noarch/repodata*.json"):
        path.write_text(path.read_text().replace('"version":"1.0"', '"version":"<script>1"'))
    write(copy)
    text = (copy / "index.html").read_text()
    assert "<script" not in text and "&lt;script&gt;1" in text


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on PATH: the page is not looked at")
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits(target: Path, tmp_path: Path, width: int) -> None:
    """In Chromium: nothing is wider than the screen, and the picture is not one colour."""
    page = html.escape((target / "index.html").read_text(), quote=True)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id=f width={width} height=900 srcdoc="{page}"></iframe><p id=r></p><script>'
        "f.onload = () => { const d = f.contentDocument.documentElement;"
        "r.textContent = `${d.scrollWidth} ${d.clientWidth}` }</script>"
    )
    flags = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    dom = subprocess.run(
        [*flags, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    found = re.search(r'id="r">(\d+) (\d+)<', dom)
    assert found and int(found[1]) <= int(found[2]), found
    picture = tmp_path / "page.png"
    size = f"--window-size={width},1200"
    shot = [*flags, size, f"--screenshot={picture}", (target / "index.html").as_uri()]
    subprocess.run(shot, capture_output=True, check=True, timeout=120)
    assert picture.stat().st_size > 10_000
