# SPDX-License-Identifier: BSD-3-Clause
"""The HTML page of a published channel agrees with the channel's index, and fits any screen."""

import html
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from support.project import CHECKOUT, module
from support.static_channel import BUILD, Source, require_whole

from forge.channel import PublishedChannel
from forge.channel.publish import GENERATOR

page = module(CHECKOUT / "tools/channel_page.py")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published channel of three builds, one of them withdrawn, and its page."""
    folder = tmp_path_factory.mktemp("page")
    source = Source(folder / "source")
    target = folder / "published"
    source.make("triton", "3.7.1")
    old = source.make("flash-attn", "2.8.3.post2")
    long = "rocm1000_gfx1151_py312h1234567_0"
    source.make("a-package-with-a-long-name-for-the-narrow-screen", "1.0", build=long)
    PublishedChannel(target).publish(source)
    PublishedChannel(target).withdraw([old], "gives <wrong> numbers")
    write(target)
    return target


@pytest.fixture
def copy(target: Path, tmp_path: Path) -> Path:
    return shutil.copytree(target, tmp_path / "copy")


def write(target: Path) -> None:
    """Write the page of a channel."""
    subprocess.run([sys.executable, CHECKOUT / "tools/channel_page.py", target], check=True)


def brightness(picture: Path) -> int:
    """Return the red value, 0 to 255, of the first pixel of a PNG with 8 bits per channel.

    PNG's filters never change this byte, so they need not be undone.
    """
    data = picture.read_bytes()
    packed = b""
    # The signature of a PNG file has 8 bytes.
    offset = 8
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4])
        if data[offset + 4 : offset + 8] == b"IDAT":
            packed += data[offset + 8 : offset + 8 + length]
        offset += length + 12
    return zlib.decompress(packed)[1]


def test_figures_are_the_indexs(target: Path) -> None:
    text = (target / "index.html").read_text()
    index = json.loads((target / "noarch/repodata.json").read_text())
    records = index["packages.conda"].values()
    total = sum(record["size"] for record in records) / 1024
    assert f"2 packages, {total:.1f} KiB." in text
    assert "\npixi add triton</pre>" in text, "the example has to be a package of the channel"
    for record in records:
        assert f">{record['name']}</a>" in text
        assert record["build"] in text
        assert f"{record['size'] / 1024:.1f} KiB" in text or f"{record['size']} B" in text
    (entry,) = json.loads((target / "withdrawn.json").read_text())["withdrawn"]
    assert f"noarch/flash-attn-2.8.3.post2-{BUILD}.conda</td>" in text
    assert entry["date"] in text
    assert "gives &lt;wrong&gt; numbers" in text
    assert text.count("other builds: executed under emulation") == 1, (
        "the page must say this only of the package that has evidence of another build"
    )
    assert "not run on gfx1151" in text
    assert "by hand" not in text
    assert text.count("built by its recipe, tests passed") == 2
    assert re.search(r"<b>attention</b></td>.*triton 3\.7\.1</td>.*flash-attn", text)
    require_whole(target)


def test_a_channel_that_no_gpu_has_run_says_so(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = "Untested: no package of this channel has run on a gfx1151 GPU."
    assert warning in (copy / "index.html").read_text()
    records = json.loads((copy / "noarch/repodata.json").read_text())["packages.conda"].values()
    checkout = tmp_path / "checkout"
    for name in ("docs/evidence", "recipes", "stacks"):
        shutil.copytree(CHECKOUT / name, checkout / name)
    package = {"sha256": next(iter(records))["sha256"]}
    summary = {"passed": 279, "failed": 0}
    run = {"subject": "packages", "packages": [package], "summary": summary}
    (checkout / "docs/evidence/2027-01-01-gfx1151.json").write_text(json.dumps(run))
    monkeypatch.setattr(page, "ROOT", checkout)
    assert warning not in page.make_page(copy)
    assert page.make_page(copy).count("checked on gfx1151: 279 passed, 0 failed") == 1


def test_a_channel_without_withdrawals_does_not_speak_of_them(copy: Path) -> None:
    (copy / "withdrawn.json").write_text('{"withdrawn": []}')
    write(copy)
    assert "ithdrawn" not in (copy / "index.html").read_text()


def test_publish_knows_the_page(target: Path) -> None:
    """The page has the mark by which `publish` recognises it. Other pages are never replaced."""
    assert GENERATOR in (target / "index.html").read_text()


def test_nothing_is_from_elsewhere(target: Path) -> None:
    text = (target / "index.html").read_text()
    assert "<script" not in text
    assert not re.search(r"(src|href)=.?https?:", text)
    assert "color-scheme: light dark" in text


def test_names_are_escaped(copy: Path) -> None:
    for path in copy.glob("noarch/repodata*.json"):
        path.write_text(path.read_text().replace('"build":"', '"build":"<script>1'))
    write(copy)
    text = (copy / "index.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;1" in text


def test_a_page_that_cannot_be_made_is_one_line(copy: Path) -> None:
    (copy / "withdrawn.json").write_text('{"withdrawn": [{}]}')
    before = (copy / "index.html").read_bytes()
    done = subprocess.run(
        [sys.executable, CHECKOUT / "tools/channel_page.py", copy],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"tools/channel_page.py: no page of {copy}: KeyError: 'file'\n"
    assert (copy / "index.html").read_bytes() == before


def test_newest_is_by_version_and_not_by_date() -> None:
    """1.10 is the newest version even if 1.9, a fix of the older series, was built later."""
    builds = [("1.9", 0, 9), ("1.10", 0, 1), ("1.10", 1, 2)]
    records = [
        {"version": version, "build_number": number, "timestamp": time}
        for version, number, time in builds
    ]
    records.sort(key=page.sort_key)
    order = [(record["version"], record["build_number"]) for record in records]
    assert order == [("1.10", 1), ("1.10", 0), ("1.9", 0)]


@pytest.mark.parametrize(
    ("build", "constrains", "gpu"),
    [
        ("rocm1000_gfx1151_py312h0_0", [], "gfx1151"),
        ("rocm_gfx90a_h0_0", [], "gfx90a"),
        ("py312h0_0", ["__amdgpu_arch ==11.5.1"], "gfx1151"),
        ("py312h0_0", ["numpy <3"], "not bound"),
    ],
)
def test_gpu(build: str, constrains: list[str], gpu: str) -> None:
    assert page.find_gpu({"name": "a", "build": build, "constrains": constrains}) == gpu


def test_a_run_on_the_gpu_proves_the_file_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's record counts only for a file with the sha256 that the record states."""
    record = {
        "subject": "packages",
        "packages": [{"name": "triton", "sha256": "a" * 64}],
        "summary": {"passed": 7, "failed": 1},
    }
    (tmp_path / "docs/evidence").mkdir(parents=True)
    (tmp_path / "docs/evidence/2026-12-01-gfx1151-packages.json").write_text(json.dumps(record))
    monkeypatch.setattr(page, "ROOT", tmp_path)
    description = page.describe_gpu_runs("a" * 64)
    assert description.startswith(
        "checked on gfx1151: 7 passed, 1 failed <small>2026-12-01-gfx1151"
    )
    assert page.describe_gpu_runs("b" * 64) == "not run on gfx1151"


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on PATH to render the page")
@pytest.mark.parametrize(
    ("width", "scheme"),
    [(360, "light"), (360, "dark"), (800, "light"), (1280, "light"), (1280, "dark")],
)
def test_it_fits(target: Path, tmp_path: Path, width: int, scheme: str) -> None:
    """Chromium shows the page and its tables without overflow, in the light and the dark scheme."""
    text = html.escape((target / "index.html").read_text(), quote=True)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id=f width={width} height=900 srcdoc="{text}"></iframe><p id=r></p><script>'
        "f.onload = () => { const d = f.contentDocument;"
        "const all = [d.documentElement, ...d.querySelectorAll('.wide')];"
        "r.textContent = all.map(e => e.scrollWidth - e.clientWidth).join(' ') }</script>"
    )
    flags = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        f"--blink-settings=preferredColorScheme={('dark', 'light').index(scheme)}",
    ]
    done = subprocess.run(
        [*flags, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    dom = done.stdout
    assert '<p id="r">0 0 0 0</p>' in dom, re.findall('<p id="r">.*</p>', dom)
    picture = tmp_path / "page.png"
    size = f"--window-size={width},1200"
    command = [*flags, size, f"--screenshot={picture}", (target / "index.html").as_uri()]
    subprocess.run(command, capture_output=True, check=True, timeout=600)
    is_dark = brightness(picture) < 64
    assert is_dark == (scheme == "dark"), brightness(picture)
