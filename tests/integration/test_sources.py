# SPDX-License-Identifier: BSD-3-Clause
"""Sources are fetched, verified and cached before a build, which then needs no network."""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packageurl import PackageURL
from support.conda_packages import file, tarball
from support.project import MiniProject, commit, forge
from support.servers import QuietHandler, served

from forge.errors import NotAttempted
from forge.project import Project
from forge.sources import download
from forge.sources.cache import PYPI_URL, Source, SourceCache

# A build script that installs the text of an archive.
INSTALL_TEXT = 'mkdir -p "$PREFIX/share/{name}"\ncp text "$PREFIX/share/{name}/text"\n'


def make_archive(folder: Path, text: str) -> tuple[Path, str]:
    """Make demo-1.0.tar.gz, which has the file `text`; return its path and its sha256."""
    path = folder / "demo-1.0.tar.gz"
    path.write_bytes(tarball(file("demo-1.0/text", text.encode())))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Upstream:
    """A server of sources.

    Attributes:
        folder: The folder that it serves.
        url: Its URL.
        requests: The path of each request, and the number of the first byte that it asks for.
        cut: The number of bytes after which the next download breaks off, or None.
    """

    folder: Path
    url: str = ""
    requests: list[tuple[str, int]] = field(default_factory=list)
    cut: int | None = None


class Handler(QuietHandler):
    """Serves a folder, supports `Range: bytes=N-`, and records the requests.

    /moved/X redirects to /X, and /secret/X requires a password.
    """

    upstream: Upstream

    def do_GET(self) -> None:
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.upstream.requests.append((self.path, start))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        credentials = "Basic dXNlcjpwYXNzd29yZA=="  # user:password
        if "/secret/" in self.path and self.headers["Authorization"] != credentials:
            self.send_error(401)
            return
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            path = path / "index.html"
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()[start:]
        if not data:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: self.upstream.cut])
        self.upstream.cut = None


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Upstream]:
    server = Upstream(tmp_path / "upstream")
    server.folder.mkdir()

    class OwnHandler(Handler):
        upstream = server

    with served(server.folder, OwnHandler) as server.url:
        yield server


@pytest.fixture
def private(project: MiniProject) -> MiniProject:
    """A project with a source cache of its own."""
    (project.root / "build" / "sources").unlink()
    return project


def write_source(url: str, sha256: str) -> str:
    """Return the text of a recipe's `source`."""
    return json.dumps([{"url": url, "sha256": sha256}])


def test_fetched_once_then_built_without_the_host(private: MiniProject, upstream: Upstream) -> None:
    """A build uses sources that were fetched earlier, and sends no request to the server."""
    path, sha256 = make_archive(upstream.folder, "from upstream\n")
    source = write_source(f"{upstream.url}/{path.name}", sha256)
    private.recipe("alpha", source=source, script=INSTALL_TEXT)
    private.forge("sources", "fetch", "alpha")
    upstream.requests.clear()
    path.unlink()
    private.forge("build-all", "--strict")
    assert upstream.requests == []
    assert len(private.packages()) == 1


def test_all_sources_come_before_the_first_build(private: MiniProject, upstream: Upstream) -> None:
    """The sources of all recipes are fetched before the first build.

    The first build of this test removes the second recipe's source from the server.
    """
    path, sha256 = make_archive(upstream.folder, "from upstream\n")
    script = f'rm {path}\nmkdir -p "$PREFIX/share"\ntouch "$PREFIX/share/a"\n'
    private.recipe("alpha", script=script)
    source = write_source(f"{upstream.url}/{path.name}", sha256)
    private.recipe("beta", run=["alpha"], source=source, script=INSTALL_TEXT)
    private.forge("build-all", "--strict")
    assert not path.exists() and len(private.packages()) == 2


def test_connection_that_breaks_off(private: MiniProject, upstream: Upstream) -> None:
    """After a download breaks off, the next run requests only the missing bytes."""
    path, sha256 = make_archive(upstream.folder, "x" * 5000)
    source = write_source(f"{upstream.url}/{path.name}", sha256)
    private.recipe("alpha", source=source, script=INSTALL_TEXT)
    upstream.cut = 30
    assert "not attempted: alpha" in private.forge("build", "alpha", code=3).stderr
    assert private.plan()["alpha"]["action"] == "skipped"
    private.forge("sources", "fetch", "alpha")
    private.forge("build", "alpha")
    assert private.plan()["alpha"]["action"] == "up-to-date"
    assert upstream.requests == [(f"/{path.name}", 0), (f"/{path.name}", 30)]


Fetch = Callable[[str, str], Path]


@pytest.fixture
def fetch(private: MiniProject) -> Fetch:
    """A function that fetches a source, given its URL and sha256, and returns its path."""
    cache = SourceCache(Project.at(private.root))
    return lambda url, sha256: cache.fetch(Source(url, sha256), lambda *_: None)


def test_download_that_was_complete(private: MiniProject, upstream: Upstream, fetch: Fetch) -> None:
    """A partial file that has all bytes is accepted when the server answers 416.

    A kill after the download and before the file is renamed leaves such a partial file.
    """
    path, sha256 = make_archive(upstream.folder, "from upstream\n")
    partial = private.root / "build" / "sources" / sha256 / f"{path.name}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(path.read_bytes())
    assert fetch(f"{upstream.url}/{path.name}", sha256).read_bytes() == path.read_bytes()
    assert upstream.requests == [(f"/{path.name}", path.stat().st_size)]


def test_redirect(upstream: Upstream, fetch: Fetch) -> None:
    path, sha256 = make_archive(upstream.folder, "from upstream\n")
    assert fetch(f"{upstream.url}/moved/{path.name}", sha256).exists()


def test_index_that_wants_a_password(
    upstream: Upstream, private: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password in the index's URL is sent with the requests for the page and for the file."""
    folder = upstream.folder / "secret"
    (folder / "demo").mkdir(parents=True)
    path, sha256 = make_archive(folder, "from upstream\n")
    (folder / "demo" / "index.html").write_text(f'<a href="../{path.name}">{path.name}</a>')
    purl = PackageURL.from_string(f"pkg:pypi/demo@1.0?file_name={path.name}")
    source = Source(f"{PYPI_URL}/{path.name}", sha256, purl)
    for user in ("", "user:password@"):
        settings = {"index-url": upstream.url.replace("//", f"//{user}") + "/secret"}
        monkeypatch.setattr(download, "pip_settings", lambda settings=settings: settings)
        cache = SourceCache(Project.at(private.root))
        if user:
            assert cache.fetch(source, lambda *_: None).exists()
        else:
            with pytest.raises(NotAttempted, match="401"):
                cache.fetch(source, lambda *_: None)


def test_unreachable_is_not_attempted(private: MiniProject, tmp_path: Path) -> None:
    """If a source cannot be fetched, its recipe and the recipe's dependents are not attempted.

    With `--strict`, the exit code is then 3. After `sources add`, all recipes are built.
    """
    path, sha256 = make_archive(tmp_path, "by hand\n")
    url = "http://upstream.invalid/demo-1.0.tar.gz"
    private.recipe("alpha", source=write_source(url, sha256), script=INSTALL_TEXT)
    private.recipe("beta", run=["alpha"])
    private.recipe("delta")
    done = private.forge("build-all")
    assert f"not attempted: alpha: {url} cannot be fetched" in done.stderr
    assert "forge sources add FILE" in done.stderr and sha256 in done.stderr
    assert "not attempted: beta: needs alpha" in done.stderr
    assert {p.split("-")[0] for p in private.packages()} == {"delta"}
    plan = private.plan()
    assert {step["action"] for step in (plan["alpha"], plan["beta"])} == {"skipped"}
    assert url in plan["alpha"]["reason"] and plan["beta"]["reason"] == "needs alpha"
    private.forge("build-all", "--strict", code=3)
    private.forge("build", "alpha", code=3)
    private.forge("sources", "fetch", code=3)

    private.forge("sources", "add", str(path))
    private.forge("build-all", "--strict")
    assert {p.split("-")[0] for p in private.packages()} == {"alpha", "beta", "delta"}


def test_changed_cache(private: MiniProject, tmp_path: Path) -> None:
    """A cached file with other bytes is not used, and `sources add` replaces it."""
    path, sha256 = make_archive(tmp_path, "good\n")
    url = "http://upstream.invalid/demo-1.0.tar.gz"
    private.recipe("alpha", source=write_source(url, sha256), script=INSTALL_TEXT)
    private.forge("sources", "add", str(path))
    cached = private.root / "build" / "sources" / sha256 / path.name
    cached.write_bytes(b"evil")
    done = private.forge("build", "alpha", code=3)
    assert "cannot be fetched" in done.stderr and private.packages() == set()
    assert cached.read_bytes() == b"evil", "a file that cannot be fetched again must stay"
    private.forge("sources", "add", str(path))
    private.forge("build", "alpha")


def test_mirrors_are_tried_in_turn(private: MiniProject, upstream: Upstream) -> None:
    path, sha256 = make_archive(upstream.folder, "from the mirror\n")
    urls = ["http://upstream.invalid/demo-1.0.tar.gz", f"{upstream.url}/{path.name}"]
    source = json.dumps([{"url": urls, "sha256": sha256}])
    private.recipe("alpha", source=source, script=INSTALL_TEXT)
    private.forge("build", "alpha")
    assert upstream.requests == [(f"/{path.name}", 0)]
    path.unlink()
    private.recipe("beta", source=source.replace(sha256, "1" * 64), script=INSTALL_TEXT)
    error = private.forge("build", "beta", code=3).stderr
    assert f"{urls[0]}: " in error and f"{urls[1]}: HTTP 404" in error


def test_git_source(private: MiniProject, tmp_path: Path) -> None:
    """A git source is fetched by its commit. Later builds do not need its server.

    A git source can be moved to another cache, like a file. A damaged copy is refused.
    """
    upstream = tmp_path / "upstream" / "demo.git"
    demo = tmp_path / "demo"
    demo.mkdir()
    for text in ("first\n", "second\n"):
        (demo / "text").write_text(text)
        revision = commit(demo)
    subprocess.run(["git", "clone", "-q", "--bare", demo, upstream], check=True)
    source = f'[{{git: "{upstream.as_uri()}", rev: {revision}, target_directory: got}}]'
    script = INSTALL_TEXT.replace("cp text", "cp got/text")
    private.recipe("alpha", source=source, script=script)
    private.forge("sources", "fetch")
    shutil.rmtree(upstream)
    folder = tmp_path / "exported"
    (private.root / "build" / "sources").rename(folder)
    assert "not attempted: alpha" in private.forge("build", "alpha", code=3).stderr
    private.forge("sources", "add", str(folder))
    assert f"commit {revision}" in private.forge("sources", "verify").stdout
    private.forge("build", "alpha")
    assert private.packages()

    exported = folder / revision / "demo.git"
    for path in (exported / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-3] + b"bad")
    shutil.rmtree(private.root / "build" / "sources")
    error = private.forge("sources", "add", str(folder), code=2).stderr
    assert f"refused: {exported} " in error and revision in error


@pytest.fixture
def exported(private: MiniProject, tmp_path: Path) -> Path:
    """A copy of a cache that has the source of alpha, and does not have the source of beta."""
    path, sha256 = make_archive(tmp_path, "moved\n")
    url = "http://upstream.invalid/demo-1.0.tar.gz"
    private.recipe("alpha", source=write_source(url, sha256), script=INSTALL_TEXT)
    private.recipe("beta", source=write_source("http://upstream.invalid/b.tar.gz", "2" * 64))
    private.forge("sources", "add", str(path))
    folder = tmp_path / "exported"
    shutil.copytree(private.root / "build" / "sources", folder)
    return folder


def test_verify(private: MiniProject, exported: Path) -> None:
    output = private.forge("sources", "verify", code=3).stdout
    assert "alpha: whole: http" in output and "beta: absent: http" in output
    private.forge("sources", "verify", "alpha")
    cached = next((private.root / "build" / "sources").glob("*/demo-1.0.tar.gz"))
    cached.write_bytes(b"evil")
    assert "alpha: changed: http" in private.forge("sources", "verify", code=1).stdout


def test_import_and_build_without_a_network(
    private: MiniProject, exported: Path, tmp_path: Path
) -> None:
    """Another checkout imports the sources, and then builds in a namespace without a network."""
    other = tmp_path / "other"
    other.mkdir()
    project = MiniProject(other)
    (other / "build" / "sources").unlink()
    for name in ("alpha", "beta"):
        shutil.copytree(private.root / "recipes" / name, other / "recipes" / name)
    project.forge("sources", "add", str(exported))
    offline = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*offline, "true"], capture_output=True, check=False).returncode:
        pytest.skip("not attempted: this machine allows no network namespaces")
    done = subprocess.run(
        [*offline, *project.command("build", "alpha")],
        env=project.environment,
        check=False,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name.split("-")[0] for name in project.packages()} == {"alpha"}


def test_import_refuses_other_bytes(private: MiniProject, exported: Path) -> None:
    """The message names a file with a wrong sha256, its sha256, and the expected sha256.

    Other files are imported.
    """
    good = next(exported.glob("*/demo-1.0.tar.gz"))
    bad = exported / "0bad" / good.name
    bad.parent.mkdir()
    bad.write_bytes(b"evil")
    actual = hashlib.sha256(b"evil").hexdigest()
    expected = good.parent.name
    shutil.rmtree(private.root / "build" / "sources")
    done = private.forge("sources", "add", str(exported), code=2)
    assert f"refused: {bad} has sha256 {actual}" in done.stderr and expected in done.stderr
    private.forge("sources", "verify", "alpha")
    empty = exported.parent / "empty"
    empty.mkdir()
    private.forge("sources", "add", str(empty), code=2)


def test_our_patches_apply() -> None:
    """Our patches apply to sources from PyPI. Other sources may be impossible to fetch here."""
    output = forge("patches", "check")
    assert re.search(r"^flash-attn: \d+ patches: applies$", output, re.M)
    for line in output.splitlines():
        assert " patches: " not in line or re.search(r": (applies$|not attempted: )", line)
