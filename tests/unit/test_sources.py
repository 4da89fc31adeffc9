# SPDX-License-Identifier: BSD-3-Clause
"""What recipes may name as a source, and where its file is found: pip's configuration decides."""

import hashlib
import json
import os
import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from packageurl import PackageURL
from support.conda_packages import file, tarball
from support.project import MiniProject, commit
from support.servers import served
from unearth import Link

from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import sha256_file, write_text
from forge.project import Project
from forge.recipes.plan import load_all_sources
from forge.recipes.recipe import list_sources, prepare
from forge.sources import cache, download
from forge.sources.cache import PYPI_SOURCES, PYPI_URL, Source, SourceCache

WHEEL = "demo-1.0-cp39-cp39-win_amd64.whl"
PURL = PackageURL.from_string(f"pkg:pypi/demo@1.0?file_name={WHEEL}")
DOWN = "http://127.0.0.1:9/simple"


def test_cache_key() -> None:
    """A key that rattler-build 0.73 itself gave a source in its cache."""
    url = "http://127.0.0.1:18765/demo-1.0.tar.gz"
    sha256 = "682d061b5f5b48149308d1076f53ccbd62f7ca90d1509c88adfeea6581ecd71c"
    assert cache.cache_key(url, sha256) == "9f5c11690e33fdb6"


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("{url: 'http://upstream.invalid/a.tar.gz'}", "needs url and sha256"),
        ("{git: 'https://example.com/a.git', tag: v1}", "a full commit"),
        ("{git: 'https://example.com/a.git', branch: main}", "a full commit"),
        ("{git: 'https://example.com/a.git', rev: 0123abc}", "a full commit"),
        (f"{{url: '{PYPI_URL}/a.tar.gz', sha256: {'0' * 64}}}", "extra.purls"),
    ],
)
def test_source_without_what_pins_it(tmp_path: Path, source: str, wrong: str) -> None:
    project = MiniProject(tmp_path)
    project.recipe("alpha", source=f"[{source}]")
    with pytest.raises(ForgeError, match=rf"alpha.*{wrong}"):
        list_sources(load_all_sources(Project.at(project.root)).recipes["alpha"])


def test_settings_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own order: [global], then [install], which also resolves, then the environment."""
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = a\nproxy = b\ncert = c\nextra-index-url =\n    d\n    e\n"
        "[install]\nproxy = f\ncert = g\n[download]\nproxy = h\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_CERT", "i")
    found = download.pip_settings.__wrapped__()
    assert (found["index-url"], found["proxy"], found["cert"]) == ("a", "f", "i")
    assert found["extra-index-url"].split() == ["d", "e"]
    file.write_text("[global\n")
    with pytest.raises(ForgeError, match="pip cannot read its configuration"):
        download.pip_settings.__wrapped__()


class Index:
    """pip's configuration, and folders that it names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.settings = folder, {"index-url": DOWN}
        monkeypatch.setattr(download, "pip_settings", lambda: self.settings)
        monkeypatch.setenv(PYPI_SOURCES, PYPI_URL)
        monkeypatch.setenv("FORGE_TIMEOUT", "1")
        monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
        self.wheel = folder / "wheels" / WHEEL
        write_text(self.wheel, "a wheel of another system")
        self.sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        write_text(folder / "simple" / "demo" / "index.html",
                   f'<a href="../../wheels/{WHEEL}#sha256={self.sha256}">{WHEEL}</a>')  # fmt: skip

    def fetch(self, **source: str) -> str:
        """Fetch the wheel into a new cache; returns its text."""
        given = {"url": f"{PYPI_URL}/{WHEEL}", "sha256": self.sha256, "purl": PURL} | source
        project = Project(self.folder, self.folder / "channel", self.folder / "build")
        return SourceCache(project).fetch(Source(**given), lambda *_: None).read_text()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path, monkeypatch)


def test_index_and_further_index(index: Index) -> None:
    """A file is located by name, whatever system it is for; an index that is down hides nothing."""
    with pytest.raises(NotAttempted, match=r"pip's index offers no demo.*127\.0\.0\.1:9"):
        index.fetch()
    index.settings["extra-index-url"] = (index.folder / "simple").as_uri()
    assert index.fetch() == "a wheel of another system"
    index.settings["no-index"] = "true"
    with pytest.raises(NotAttempted, match="pip's index offers no demo"):
        index.fetch(sha256="0" * 64)


def test_file_that_the_index_does_not_have(index: Index) -> None:
    index.settings["index-url"] = (index.folder / "simple").as_uri()
    with pytest.raises(NotAttempted, match="pip's index does not offer it"):
        index.fetch(url=f"{PYPI_URL}/demo-2.0-cp39-cp39-win_amd64.whl")


def test_secrets_of_an_index_are_not_shown(index: Index) -> None:
    index.settings["index-url"] = DOWN.replace("//", "//user:secret@")
    with pytest.raises(NotAttempted) as failed:
        index.fetch()
    assert "secret" not in str(failed.value) and "127.0.0.1:9" in str(failed.value)


def test_certificates_that_cannot_be_read(index: Index) -> None:
    index.settings["cert"] = "/nowhere/ca.pem"
    with pytest.raises(ForgeError, match=r"pip's certificates /nowhere/ca\.pem"):
        index.fetch()


def test_a_server_proves_who_it_is(index: Index) -> None:
    """By a certificate among pip's or the system's, unless pip trusts its host."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, own = datetime.now(UTC), x509.IPAddress(ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([own]), critical=True)
        .sign(key, SHA256())
    )
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    ca, both = index.folder / "ca.pem", index.folder / "both.pem"
    ca.write_bytes(certificate.public_bytes(Encoding.PEM))
    both.write_bytes(ca.read_bytes() + key.private_bytes(*form))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(both)
    with served(index.folder, tls=tls) as url:
        index.settings["index-url"] = f"{url}/simple"
        with pytest.raises(NotAttempted, match="CERTIFICATE_VERIFY_FAILED"):
            index.fetch()
        for allowed in ({"cert": str(ca)}, {"trusted-host": "127.0.0.1"}):
            shutil.rmtree(index.folder / "build", ignore_errors=True)
            index.settings = {"index-url": f"{url}/simple", **allowed}
            assert index.fetch() == "a wheel of another system"


def test_a_folder_of_wheels_and_a_copy_that_is_cut(index: Index) -> None:
    """It is fetched anew, from where it came."""
    index.settings["find-links"] = f"{index.folder / 'absent'} {index.wheel.parent}"
    assert index.fetch() == "a wheel of another system"
    (cached,) = (index.folder / "build" / "sources").rglob(WHEEL)
    cached.write_bytes(cached.read_bytes()[:5])
    assert index.fetch() == "a wheel of another system"


def test_a_server_without_ranges_sends_all_of_it_again(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"whole")
    (partial := tmp_path / "partial").write_bytes(b"what")
    seen = []
    with served(tmp_path) as address:
        link = Link(f"{address}/a.bin")
        download.Downloader().download(link, partial, lambda *said: seen.append(said))
    assert (partial.read_bytes(), seen[-1]) == (b"whole", ("a.bin", 5, 5))


@pytest.mark.parametrize("how", ["clone -q --bare", "clone -q", "clone -q --depth 1"])
def test_any_repository_with_the_commit_will_do(tmp_path: Path, how: str) -> None:
    """Of which only that commit is kept."""
    (up := tmp_path / "up").mkdir()
    for text in ("first\n", "second\n"):
        (up / "text").write_text(text)
        made = commit(up)
    subprocess.run(f"git {how} {up.as_uri()} {tmp_path}/other", shell=True, check=True)
    source = Source("https://upstream.invalid/demo.git", "", commit=made)
    kept = SourceCache(Project(tmp_path, tmp_path / "channel", tmp_path / "build"))
    assert kept.add(tmp_path / "other", [source]) == source and kept.state(source) == "whole"
    count = ["git", "-C", str(kept.path(source)), "rev-list", "--all", "--count"]
    assert subprocess.check_output(count, text=True) == "1\n"
    tree = kept.prefill(source, tmp_path / "src_cache")
    assert (tree / "text").read_text() == "second\n"
    with pytest.raises(ForgeError, match="no recipe names"):
        kept.add(tmp_path / "other", [Source(source.url, "", commit="0" * 40)])


@pytest.mark.parametrize("packed", [True, False])
def test_an_archive_stays_packed_where_its_recipe_says_so(tmp_path: Path, packed: bool) -> None:
    """By `file_name`, as rattler-build has it: of a large one there are no two trees."""
    (tmp_path / "text").write_text("text")
    archive = shutil.make_archive(str(tmp_path / "demo"), "gztar", tmp_path, "text")
    source = Source("https://upstream.invalid/demo.tar.gz", sha256_file(Path(archive)))
    kept = SourceCache(Project(tmp_path, tmp_path / "channel", tmp_path / "build"))
    kept.add(Path(archive), [source])
    recipe = SimpleNamespace(path=tmp_path / "recipe.yaml", sources=[], extra={})
    data = {"url": source.url, "sha256": source.sha256} | ({"file_name": "a"} if packed else {})
    folder = tmp_path / "src_cache"
    assert prepare(recipe, data, kept, folder) == ""
    (entry,) = (folder / ".metadata").glob("*.json")
    described = json.loads(entry.read_text())
    assert (folder / described["cache_path"]).samefile(kept.path(source))
    assert ("extracted_path" in described) == any(folder.glob("*_extracted")) == (not packed)


def test_a_file_that_no_recipe_names(tmp_path: Path) -> None:
    """Of one with a name that a recipe has, that recipe's digest is said."""
    kept = SourceCache(Project(tmp_path, tmp_path / "channel", tmp_path / "build"))
    names = {"demo.tar.gz": "1" * 64, "other.tar.gz": "2" * 64}
    known = [Source(f"https://upstream.invalid/{name}", digest) for name, digest in names.items()]
    for name, hint in (
        ("demo.tar.gz", f"; a recipe names a demo.tar.gz with {'1' * 64}"),
        ("a", ""),
    ):
        (file := tmp_path / name).write_text("something else")
        with pytest.raises(ForgeError, match=f"which no recipe names{hint}$"):
            kept.add(file, known)


class Moved:
    """A recipe names the sha256 of another file; `index` is what pip's index has of this one."""

    def __init__(self, index: Index) -> None:
        self.index, self.name = index, "demo-2.0.tar.gz"
        self.file = index.folder / self.name
        self.file.write_bytes(tarball(file("demo/text", b"2.0")))
        self.found = hashlib.sha256(self.file.read_bytes()).hexdigest()
        index.settings["index-url"] = (index.folder / "simple").as_uri()
        self.lists(f"#sha256={self.found}")
        project = Project(index.folder, index.folder / "channel", index.folder / "build")
        self.cache = SourceCache(project)

    def lists(self, fragment: str) -> None:
        page = f'<a href="../../{self.name}{fragment}">{self.name}</a>'
        write_text(self.index.folder / "simple" / "demo" / "index.html", page)

    def refused(self, *parts: str) -> None:
        """The file is refused in words that have these parts, its own sha256 and the recipe's."""
        purl = PackageURL.from_string(f"pkg:pypi/demo@2.0?file_name={self.name}")
        with pytest.raises(Refused) as failed:
            source = Source(f"{PYPI_URL}/{self.name}", "0" * 64, purl)
            self.cache.fetch(source, lambda *_: None)
        found = hashlib.sha256(self.file.read_bytes()).hexdigest()
        wrong = f"demo@2.0?file_name={self.name} has sha256 {found}, the recipe says {'0' * 64}"
        for part in (wrong, *parts):
            assert part in str(failed.value)

    def kept(self) -> list[str]:
        """The sha256 of what is in the cache."""
        return [path.parent.name for path in self.cache.folder.rglob(f"{self.name}*")]


@pytest.fixture
def moved(index: Index) -> Moved:
    return Moved(index)


def test_nobody_states_the_sha256(moved: Moved) -> None:
    for fragment in ("", "#md5=0123"):
        moved.lists(fragment)
        moved.refused("; no index states it: ", "write that sha256 into it")


@pytest.mark.parametrize("cut", [0, 60])
def test_a_damaged_file_is_not_to_be_written(moved: Moved, cut: int) -> None:
    """Whole or not: pip's index states another sha256."""
    evil = tarball(file("demo/text", b"evil"))
    moved.file.write_bytes(evil[:cut] or evil)
    moved.refused(
        f"It was deleted: pip's index states {moved.found}: damaged in transit, or forged"
    )
    assert moved.kept() == []


@pytest.mark.parametrize(
    "content",
    [b"<html>please log in</html>", tarball(file("demo/text", b"2.0"))[:60], b""],
    ids=["a page", "cut", "empty"],
)
def test_what_is_no_archive_is_not_to_be_written(moved: Moved, content: bytes) -> None:
    """Nor where nobody states a sha256."""
    moved.lists("")
    moved.file.write_bytes(content)
    moved.refused("It was deleted: ", "cannot be unpacked")
    assert moved.kept() == []
