# SPDX-License-Identifier: BSD-3-Clause
"""Sources are fetched, checked and kept before a build, which then needs no network."""

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

READ = 'mkdir -p "$PREFIX/share/{name}"\ncp text "$PREFIX/share/{name}/text"\n'


def archive(folder: Path, name: str, text: str) -> tuple[Path, str]:
    """demo-1.0/text as NAME; returns the path and its sha256."""
    path = folder / name
    path.write_bytes(tarball(file("demo-1.0/text", text.encode())))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Upstream:
    """What a server has, and what it was asked for; after `cut` bytes it hangs up, once."""

    folder: Path
    url: str = ""
    asked: list[tuple[str, int]] = field(default_factory=list)
    cut: int | None = None


class Handler(QuietHandler):
    """Serves a folder, honours `Range: bytes=N-`, and records the requests.

    /moved/X redirects to /X, /secret/X wants the password.
    """

    upstream: Upstream

    def do_GET(self) -> None:
        start = self.headers.get("Range", "bytes=0-")[6:-1]
        self.upstream.asked.append((self.path, int(start)))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        # user:password
        if (
            "/secret/" in self.path
            and self.headers["Authorization"] != "Basic dXNlcjpwYXNzd29yZA=="
        ):
            self.send_error(401)
            return
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()[int(start) :]
        if not data:
            self.send_error(416)
            return
        self.send_response(206 if int(start) else 200)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: self.upstream.cut])
        self.upstream.cut = None


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Upstream]:
    made = Upstream(tmp_path / "upstream")
    made.folder.mkdir()

    class Own(Handler):
        upstream = made

    with served(made.folder, Own) as made.url:
        yield made


@pytest.fixture
def private(project: MiniProject) -> MiniProject:
    """A project with a source cache of its own."""
    (project.root / "build" / "sources").unlink()
    return project


def source(url: str, sha256: str) -> str:
    return json.dumps([{"url": url, "sha256": sha256}])


def test_fetched_once_then_built_without_the_host(private: MiniProject, upstream: Upstream) -> None:
    """The build itself must not reach the host: it is gone when the build starts."""
    _, sha256 = archive(upstream.folder, "demo-1.0.tar.gz", "from upstream\n")
    url = f"{upstream.url}/demo-1.0.tar.gz"
    private.recipe("alpha", source=source(url, sha256), script=READ)
    private.forge("sources", "fetch", "alpha")
    upstream.asked.clear()
    (upstream.folder / "demo-1.0.tar.gz").unlink()
    private.forge("build-all", "--strict")
    assert upstream.asked == []
    assert len(private.packages()) == 1


def test_all_sources_come_before_the_first_build(private: MiniProject, upstream: Upstream) -> None:
    """The first build takes the second one's source away; that is fetched already."""
    path, sha256 = archive(upstream.folder, "demo-1.0.tar.gz", "from upstream\n")
    script = f'rm {path}\nmkdir -p "$PREFIX/share"\ntouch "$PREFIX/share/a"\n'
    private.recipe("alpha", script=script)
    url = f"{upstream.url}/demo-1.0.tar.gz"
    private.recipe("beta", run=["alpha"], source=source(url, sha256), script=READ)
    private.forge("build-all", "--strict")
    assert not path.exists() and len(private.packages()) == 2


def test_connection_that_breaks_off(private: MiniProject, upstream: Upstream) -> None:
    """What came is kept; the next run asks for the rest."""
    path, sha256 = archive(upstream.folder, "demo-1.0.tar.gz", "x" * 5000)
    private.recipe("alpha", source=source(f"{upstream.url}/{path.name}", sha256), script=READ)
    upstream.cut = 30
    assert "not attempted: alpha" in private.forge("build", "alpha", code=3).stderr
    assert private.plan()["alpha"]["action"] == "skipped"
    private.forge("sources", "fetch", "alpha")
    private.forge("build", "alpha")
    assert private.plan()["alpha"]["action"] == "up-to-date"
    assert upstream.asked == [(f"/{path.name}", 0), (f"/{path.name}", 30)]


@pytest.fixture
def fetch(private: MiniProject) -> Callable[[str, str], Path]:
    cached = SourceCache(Project.at(private.root))
    return lambda url, sha256: cached.fetch(Source(url, sha256), lambda *_: None)


def test_download_that_was_complete(
    private: MiniProject,
    upstream: Upstream,
    fetch: Callable[[str, str], Path],
) -> None:
    """Killed before it got its name: the server has nothing to add (416)."""
    path, sha256 = archive(upstream.folder, "demo-1.0.tar.gz", "from upstream\n")
    partial = private.root / "build" / "sources" / sha256 / f"{path.name}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(path.read_bytes())
    assert fetch(f"{upstream.url}/{path.name}", sha256).read_bytes() == path.read_bytes()
    assert upstream.asked == [(f"/{path.name}", path.stat().st_size)]


def test_redirect(upstream: Upstream, fetch: Callable[[str, str], Path]) -> None:
    path, sha256 = archive(upstream.folder, "demo-1.0.tar.gz", "from upstream\n")
    assert fetch(f"{upstream.url}/moved/{path.name}", sha256).exists()


def test_index_that_wants_a_password(
    upstream: Upstream, private: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, too, is asked for with the password of the index."""
    (upstream.folder / "secret" / "demo").mkdir(parents=True)
    path, sha256 = archive(upstream.folder / "secret", "demo-1.0.tar.gz", "from upstream\n")
    page = upstream.folder / "secret" / "demo" / "index.html"
    page.write_text(f'<a href="../{path.name}">{path.name}</a>')
    purl = PackageURL.from_string(f"pkg:pypi/demo@1.0?file_name={path.name}")
    wanted = Source(f"{PYPI_URL}/{path.name}", sha256, purl)
    for user in ("", "user:password@"):
        settings = {"index-url": upstream.url.replace("//", f"//{user}") + "/secret"}
        monkeypatch.setattr(download, "pip_settings", lambda settings=settings: settings)
        cached = SourceCache(Project.at(private.root))
        if user:
            assert cached.fetch(wanted, lambda *_: None).exists()
        else:
            with pytest.raises(NotAttempted, match="401"):
                cached.fetch(wanted, lambda *_: None)


def test_unreachable_is_not_attempted(private: MiniProject, tmp_path: Path) -> None:
    path, sha256 = archive(tmp_path, "demo-1.0.tar.gz", "by hand\n")
    url = "http://upstream.invalid/demo-1.0.tar.gz"
    private.recipe("alpha", source=source(url, sha256), script=READ)
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
    path, sha256 = archive(tmp_path, "demo-1.0.tar.gz", "good\n")
    url = "http://upstream.invalid/demo-1.0.tar.gz"
    private.recipe("alpha", source=source(url, sha256), script=READ)
    private.forge("sources", "add", str(path))
    cached = private.root / "build" / "sources" / sha256 / path.name
    cached.write_bytes(b"evil")
    done = private.forge("build", "alpha", code=3)
    assert "cannot be fetched" in done.stderr and private.packages() == set()
    assert cached.read_bytes() == b"evil", "what cannot be fetched anew is not thrown away"
    private.forge("sources", "add", str(path))  # which also mends it
    private.forge("build", "alpha")


def test_mirrors_are_tried_in_turn(private: MiniProject, upstream: Upstream) -> None:
    path, sha256 = archive(upstream.folder, "demo-1.0.tar.gz", "from the mirror\n")
    urls = ["http://upstream.invalid/demo-1.0.tar.gz", f"{upstream.url}/{path.name}"]
    named = json.dumps([{"url": urls, "sha256": sha256}])
    private.recipe("alpha", source=named, script=READ)
    private.forge("build", "alpha")
    assert upstream.asked == [(f"/{path.name}", 0)]
    path.unlink()
    private.recipe("beta", source=named.replace(sha256, "1" * 64), script=READ)
    error = private.forge("build", "beta", code=3).stderr
    assert f"{urls[0]}: " in error and f"{urls[1]}: HTTP 404" in error


def test_git_source(private: MiniProject, tmp_path: Path) -> None:
    """Fetched by commit, moved like a file, checked, and built when its host is gone."""
    upstream = tmp_path / "upstream" / "demo.git"
    (demo := tmp_path / "demo").mkdir()
    for text in ("first\n", "second\n"):
        (demo / "text").write_text(text)
        made = commit(demo)
    subprocess.run(["git", "clone", "-q", "--bare", demo, upstream], check=True)
    named = f'[{{git: "{upstream.as_uri()}", rev: {made}, target_directory: got}}]'
    script = READ.replace("cp text", "cp got/text")
    private.recipe("alpha", source=named, script=script)
    private.forge("sources", "fetch")
    shutil.rmtree(upstream)
    folder = tmp_path / "exported"
    (private.root / "build" / "sources").rename(folder)
    assert "not attempted: alpha" in private.forge("build", "alpha", code=3).stderr
    private.forge("sources", "add", str(folder))
    assert f"commit {made}" in private.forge("sources", "verify").stdout
    private.forge("build", "alpha")
    assert private.packages()

    moved = folder / made / "demo.git"
    for item in (moved / "objects").rglob("*"):
        if item.is_file():
            item.chmod(0o644)
            item.write_bytes(item.read_bytes()[:-3] + b"bad")
    shutil.rmtree(private.root / "build" / "sources")
    refused = private.forge("sources", "add", str(folder), code=2).stderr
    assert f"refused: {moved} " in refused and made in refused


@pytest.fixture
def exported(private: MiniProject, tmp_path: Path) -> Path:
    """A copy of the cache with the source of alpha; beta's source was never fetched."""
    path, sha256 = archive(tmp_path, "demo-1.0.tar.gz", "moved\n")
    url = "http://upstream.invalid/demo-1.0.tar.gz"
    private.recipe("alpha", source=source(url, sha256), script=READ)
    private.recipe("beta", source=source("http://upstream.invalid/b.tar.gz", "2" * 64))
    private.forge("sources", "add", str(path))
    folder = tmp_path / "exported"
    shutil.copytree(private.root / "build" / "sources", folder)
    return folder


def test_verify(private: MiniProject, exported: Path) -> None:
    listed = private.forge("sources", "verify", code=3).stdout
    assert "alpha: whole: http" in listed and "beta: absent: http" in listed
    private.forge("sources", "verify", "alpha")
    cached = next((private.root / "build" / "sources").glob("*/demo-1.0.tar.gz"))
    cached.write_bytes(b"evil")
    assert "alpha: changed: http" in private.forge("sources", "verify", code=1).stdout


def test_import_and_build_without_a_network(
    private: MiniProject, exported: Path, tmp_path: Path
) -> None:
    """On another checkout, in a network namespace that has no interface up."""
    other = tmp_path / "other"
    other.mkdir()
    project = MiniProject(other)
    (other / "build" / "sources").unlink()
    for name in ("alpha", "beta"):
        shutil.copytree(private.root / "recipes" / name, other / "recipes" / name)
    project.forge("sources", "add", str(exported))
    cut = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*cut, "true"], capture_output=True, check=False).returncode:
        pytest.skip("not attempted: this machine lets nobody make a network namespace")
    done = subprocess.run(
        [*cut, *project.command("build", "alpha")],
        env=project.environment,
        check=False,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name.split("-")[0] for name in project.packages()} == {"alpha"}


def test_import_refuses_other_bytes(private: MiniProject, exported: Path) -> None:
    """It says which file, what was expected and what was found, and takes the good ones."""
    good = next(exported.glob("*/demo-1.0.tar.gz"))
    bad = exported / "0bad" / good.name
    bad.parent.mkdir()
    bad.write_bytes(b"evil")
    found, wanted = hashlib.sha256(b"evil").hexdigest(), good.parent.name
    shutil.rmtree(private.root / "build" / "sources")
    done = private.forge("sources", "add", str(exported), code=2)
    assert f"refused: {bad} has sha256 {found}" in done.stderr and wanted in done.stderr
    private.forge("sources", "verify", "alpha")
    (exported.parent / "empty").mkdir()
    private.forge("sources", "add", str(exported.parent / "empty"), code=2)


def test_our_patches_apply() -> None:
    """Those that PyPI serves must apply; the others are reported as not attempted."""
    said = forge("patches", "check")
    assert re.search(r"^flash-attn: \d+ patches: applies$", said, re.M)
    for line in said.splitlines():
        assert " patches: " not in line or re.search(r": (applies$|not attempted: )", line)
