# SPDX-License-Identifier: BSD-3-Clause
"""The lock of the host base: its pins, and pip's downloads from an index on this machine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject
from support.servers import served
from support.simple_index import SimpleIndex, add_wheel
from support.wheels import write_wheel

from forge import bases
from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import sha256_file
from forge.hostbase.base import LOCK, HostBaseMaker
from forge.hostbase.lock import Pin, fetch_wheels, read_pins, require_pinned
from forge.project import Project
from forge.sources.cache import SourceCache

OURS = CHECKOUT / "recipes/bases/host" / LOCK
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def python(version: str) -> dict[str, str]:
    return {"python_version": version, "python_full_version": f"{version}.0"}


@pytest.mark.parametrize("version", PYTHONS)
def test_the_lock_has_what_is_required(version: str) -> None:
    project = Project.at(CHECKOUT)
    host = HostBaseMaker(project, bases.load(project, "host"))
    pins = read_pins(OURS, python(version))
    require_pinned(host.requirements, pins, OURS)
    assert len(pins) > 100
    assert "colorama" not in pins, "the lock must leave out colorama, which only Windows requires"
    assert "://" not in OURS.read_text()


def test_another_version_than_the_locks_is_refused() -> None:
    """The lock must pin the required version, which `--variant pytorch=9.9.9` changes."""
    pins = {"torch": Pin("torch", "2.13.0", ("0" * 64,))}
    with pytest.raises(ForgeError, match=r"pins torch 2\.13\.0, but torch==9\.9\.9 is required"):
        require_pinned("# a comment\ntorch==9.9.9\n", pins, OURS)
    with pytest.raises(ForgeError, match="does not pin numpy: compile it again"):
        require_pinned("torch==2.13.0\nnumpy\n", pins, OURS)


DIGEST = "0" * 64
LINES = {
    "no hash": ("demo==1.0", "has no --hash of demo"),
    "another hash": (f"demo==1.0 --hash=md5:{DIGEST[:32]}", "one that is no sha256"),
    "a cut hash": (f"demo==1.0 --hash=sha256:{DIGEST[:63]}", "one that is no sha256"),
    "a cut hash of two": (
        f"demo==1.0 \\\n    --hash=sha256:{DIGEST} \\\n    --hash=sha256:{DIGEST[:63]}",
        "one that is no sha256",
    ),
    "no version": (f"demo --hash=sha256:{DIGEST}", "does not pin demo to one version"),
    "a range": (f"demo>=1.0 --hash=sha256:{DIGEST}", "does not pin demo to one version"),
    "a wildcard": (f"demo==1.* --hash=sha256:{DIGEST}", "does not pin demo to one version"),
    "an option": ("--extra-index-url x", "has a line that is not a pin: '--extra-index-url x'"),
    "a file": ("./demo-1.0-py3-none-any.whl", "has a line that is not a pin"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_pins_nothing_is_refused(tmp_path: Path, case: str) -> None:
    line, message = LINES[case]
    (tmp_path / LOCK).write_text(f"other==1.0 --hash=sha256:{DIGEST}\n{line}\n")
    with pytest.raises(ForgeError) as error:
        read_pins(tmp_path / LOCK)
    assert message in str(error.value) and str(tmp_path / LOCK) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_marker_decides(tmp_path: Path) -> None:
    hashes = f"\\\n    --hash=sha256:{DIGEST}\n"
    old, new = "python_version < '3.13'", "python_version >= '3.13'"
    (tmp_path / LOCK).write_text(f"demo==1.0 ; {old} {hashes}demo==2.0 ; {new} {hashes}")
    for version, expected in (("3.12", "1.0"), ("3.13", "2.0")):
        assert read_pins(tmp_path / LOCK, python(version))["demo"].version == expected


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the only index that pip uses."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with served(folder, SimpleIndex) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield folder


Fetch = Callable[[str], list[Path]]


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    """A function that fetches the wheels of a lock into a project's sources, and returns them."""
    project = Project.at(MiniProject(tmp_path / "project").root)
    (project.build / "sources").unlink()
    cache = SourceCache(project)

    def run(lock: str) -> list[Path]:
        (tmp_path / LOCK).write_text(lock)
        pins = read_pins(tmp_path / LOCK).values()
        return [path for path, _ in fetch_wheels(pins, tmp_path / LOCK, cache, print)]

    return run


def make_lock(*wheels: Path) -> str:
    """Return a lock of these wheels. Each has two hashes, the second of which is its own."""
    names = ["{}=={}".format(*wheel.name.split("-")) for wheel in wheels]
    digests = [sha256_file(wheel) for wheel in wheels]
    lines = zip(names, digests, strict=True)
    return "".join(f"{n} --hash=sha256:{DIGEST} --hash=sha256:{d}\n" for n, d in lines)


def test_wheels_are_fetched_once(index: Path, fetch: Fetch, capsys: pytest.CaptureFixture) -> None:
    """A wheel in the cache is not downloaded again, unless it is damaged.

    A requirement that the lock does not pin is not downloaded.
    """
    alpha = add_wheel(index, "alpha", "1.0", ("never-pinned",))
    beta = add_wheel(index, "beta", "2.0")
    add_wheel(index, "beta", "3.0")
    lock = make_lock(alpha, beta)
    content = beta.read_bytes()
    first = fetch(lock)
    assert [path.name for path in first] == [alpha.name, beta.name]
    assert "pip downloads 2 wheels" in capsys.readouterr().out
    alpha.unlink()
    first[1].write_bytes(b"damaged since")
    assert fetch(lock) == first and first[1].read_bytes() == content
    assert "pip downloads 1 wheels" in capsys.readouterr().out


def test_a_tampered_wheel_is_refused(tmp_path: Path, index: Path, fetch: Fetch) -> None:
    wheel = add_wheel(index, "alpha", "1.0")
    lock = make_lock(wheel)
    write_wheel(wheel.parent, "alpha", "1.0", {"alpha.py": "import evil\n"})
    with pytest.raises(Refused) as error:
        fetch(lock)
    tampered = sha256_file(wheel)
    assert f"a wheel of alpha==1.0 with sha256 {tampered}, which {tmp_path / LOCK} does not" in str(
        error.value
    )
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "project/build/sources").rglob("*.whl"))


def test_a_wheel_that_is_nowhere(index: Path, fetch: Fetch) -> None:
    with pytest.raises(NotAttempted, match=r"pip cannot fetch what .* pins: ERROR.*alpha==1\.0"):
        fetch(f"alpha==1.0 --hash=sha256:{DIGEST}\n")


def test_the_best_wheel_for_this_python(fetch: Fetch, tmp_path: Path) -> None:
    """Of the wheels in the cache, the most specific one that fits this machine is used."""
    sources = tmp_path / "project" / "build" / "sources"
    wheels = [
        write_wheel(tmp_path / tag, "alpha", "1.0", {"alpha.py": tag}, tag=tag)
        for tag in ("py3-none-win_amd64", "py3-none-any", "py3-none-manylinux_2_17_x86_64")
    ]
    for wheel in wheels:
        folder = sources / sha256_file(wheel)
        folder.mkdir(parents=True)
        wheel.rename(folder / wheel.name)
    hashes = " ".join(f"--hash=sha256:{folder.name}" for folder in sources.iterdir())
    (path,) = fetch(f"alpha==1.0 {hashes}\n")
    assert path.name == wheels[2].name
