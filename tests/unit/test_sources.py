# SPDX-License-Identifier: BSD-3-Clause
"""The sources that recipes may name, and fetching their files as pip's configuration states."""

import hashlib
import json
import os
import re
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
    """The key of a source is the one that rattler-build 0.73 used in its own cache."""
    url = "http://127.0.0.1:18765/demo-1.0.tar.gz"
    sha256 = "682d061b5f5b48149308d1076f53ccbd62f7ca90d1509c88adfeea6581ecd71c"
    assert cache.cache_key(url, sha256) == "9f5c11690e33fdb6"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{url: 'http://upstream.invalid/a.tar.gz'}", "needs url and sha256"),
        ("{git: 'https://example.com/a.git', tag: v1}", "a full commit"),
        ("{git: 'https://example.com/a.git', branch: main}", "a full commit"),
        ("{git: 'https://example.com/a.git', rev: 0123abc}", "a full commit"),
        (f"{{url: '{PYPI_URL}/a.tar.gz', sha256: {'0' * 64}}}", "extra.purls"),
    ],
)
def test_source_without_what_pins_it(tmp_path: Path, source: str, message: str) -> None:
    project = MiniProject(tmp_path)
    project.recipe("alpha", source=f"[{source}]")
    with pytest.raises(ForgeError, match=rf"alpha.*{message}"):
        list_sources(load_all_sources(Project.at(project.root)).recipes["alpha"])


def test_settings_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from [global], [install] and the environment, and the last one wins.

    This is the order of `pip install`, whose options the driver uses. pip ignores empty values.
    """
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = a\nproxy = b\ncert = c\nextra-index-url =\n    d\n    e\n"
        "[install]\nproxy = f\ncert = g\n[download]\nproxy = h\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_CERT", "i")
    monkeypatch.setenv("PIP_PROXY", "")
    settings = download.pip_settings.__wrapped__()
    assert (settings["index-url"], settings["proxy"], settings["cert"]) == ("a", "f", "i")
    assert settings["extra-index-url"].split() == ["d", "e"]
    file.write_text("[global\n")
    with pytest.raises(ForgeError, match="pip cannot read its configuration"):
        download.pip_settings.__wrapped__()


class Index:
    """A configuration of pip, and an index with one wheel.

    Attributes:
        folder: The folder of the index.
        settings: The settings of pip.
        wheel: The file of the wheel.
        sha256: The sha256 of the wheel.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.settings = {"index-url": DOWN}
        monkeypatch.setattr(download, "pip_settings", lambda: self.settings)
        monkeypatch.setenv(PYPI_SOURCES, PYPI_URL)
        monkeypatch.setenv("FORGE_TIMEOUT", "1")
        monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
        self.wheel = folder / "wheels" / WHEEL
        write_text(self.wheel, "a wheel of another system")
        self.sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        write_text(
            folder / "simple" / "demo" / "index.html",
            f'<a href="../../wheels/{WHEEL}#sha256={self.sha256}">{WHEEL}</a>',
        )

    def fetch(self, **source: str) -> str:
        """Fetch the wheel into a new cache and return its text. `source` has fields of Source."""
        fields = {"url": f"{PYPI_URL}/{WHEEL}", "sha256": self.sha256, "purl": PURL} | source
        project = Project(self.folder, self.folder / "channel", self.folder / "build")
        return SourceCache(project).fetch(Source(**fields), lambda *_: None).read_text()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path, monkeypatch)


def test_index_and_further_index(index: Index) -> None:
    """A file is found by its exact name, even a wheel that is for another system.

    If one index does not answer, the other indexes are searched.
    """
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
    assert "secret" not in str(failed.value)
    assert "127.0.0.1:9" in str(failed.value)


def test_certificates_that_cannot_be_read(index: Index) -> None:
    index.settings["cert"] = "/nowhere/ca.pem"
    with pytest.raises(ForgeError, match=r"pip's certificates /nowhere/ca\.pem"):
        index.fetch()


def test_proxy(index: Index) -> None:
    """As in pip, a proxy may have no scheme. A proxy that cannot be used is named."""
    index.settings["proxy"] = "127.0.0.1:9"
    with pytest.raises(NotAttempted, match="pip's index offers no demo"):
        index.fetch()
    for proxy in ("socks4://127.0.0.1:9", "http://127.0.0.1:port"):
        index.settings["proxy"] = proxy
        with pytest.raises(ForgeError, match="the proxy of pip or of the environment cannot be"):
            index.fetch()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trusted-host", "a.invalid b.invalid:port", "has trusted-host b.invalid:port, which is"),
        ("trusted-host", "a.invalid:70000", "has trusted-host a.invalid:70000, .* out of range"),
        ("trusted-host", "a..ä", "has trusted-host a..ä, which is invalid"),
        ("index-url", "http://[::1/simple", r"has the index http://\[::1/simple, which is invalid"),
        ("extra-index-url", "http://u:word@h:x/simple", "has the index http://h:x/simple, which"),
        ("find-links", "http://[::1/wheels", r"offers no demo .*; http://\[::1/wheels: Val.*IPv6"),
        ("client-cert", "/nowhere/me.pem", "cannot read the certificate /nowhere/me.pem: .*No"),
        ("client-cert", "~nobody.invalid/me.pem", "cannot read the certificate ~nobody.inv"),
        ("cert", "~nobody.invalid/ca.pem", "cannot read pip's certificates ~nobody.inv"),
        ("client-cert", "/dev/null", r"cannot read the certificate /dev/null: \[SSL\]"),
    ],
)
def test_a_wrong_setting_of_pip_is_named(index: Index, key: str, value: str, message: str) -> None:
    """The message names the setting, and not the proxy."""
    index.settings[key] = value
    with pytest.raises(ForgeError, match=message) as failed:
        index.fetch()
    assert "proxy" not in str(failed.value)
    assert "word" not in str(failed.value)


@pytest.mark.parametrize(
    "url", ["http://a.invalid:port/a.bin", "http://[::1/a.bin", "file://a.invalid/a.bin"]
)
def test_a_wrong_url_of_a_source_is_named(index: Index, url: str) -> None:
    with pytest.raises(NotAttempted, match=f"{re.escape(url)} is not a valid URL"):
        index.fetch(url=url, purl=None)


def test_a_server_proves_who_it_is(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip or the system has to know a server's certificate, unless pip trusts the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    now = datetime.now(UTC)
    address = x509.IPAddress(ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=True)
        .sign(key, SHA256())
    )
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    ca = index.folder / "ca.pem"
    certificate_and_key = index.folder / "both.pem"
    ca.write_bytes(certificate.public_bytes(Encoding.PEM))
    certificate_and_key.write_bytes(ca.read_bytes() + key.private_bytes(*form))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate_and_key)
    with served(index.folder, tls=tls) as url:
        index.settings["index-url"] = f"{url}/simple"
        with pytest.raises(NotAttempted, match="CERTIFICATE_VERIFY_FAILED"):
            index.fetch()
        monkeypatch.setenv("HOME", str(index.folder))
        for allowed in ({"cert": str(ca)}, {"cert": "~/ca.pem"}, {"trusted-host": "127.0.0.1"}):
            shutil.rmtree(index.folder / "build", ignore_errors=True)
            index.settings = {"index-url": f"{url}/simple", **allowed}
            assert index.fetch() == "a wheel of another system"


def test_a_folder_of_wheels_and_a_copy_that_is_cut(index: Index) -> None:
    """A wheel is found in a folder of `find-links`. A damaged copy of it is fetched again."""
    index.settings["find-links"] = f"{index.folder / 'absent'} {index.wheel.parent}"
    assert index.fetch() == "a wheel of another system"
    (cached,) = (index.folder / "build" / "sources").rglob(WHEEL)
    cached.write_bytes(cached.read_bytes()[:5])
    assert index.fetch() == "a wheel of another system"


@pytest.mark.parametrize(
    ("path", "reason"), [("/proc/self/mem", "Input/output error"), ("/proc/self", "Is a directory")]
)
def test_a_local_source_that_cannot_be_read(index: Index, path: str, reason: str) -> None:
    """The message blames the source, and not the file of the cache.

    Nothing is mapped at address 0, so a read of /proc/self/mem fails as that of a failing disk.
    """
    with pytest.raises(NotAttempted, match=rf"file://{path} cannot be fetched \(.*{reason}\)"):
        index.fetch(url=f"file://{path}", purl=None)


def test_a_server_without_ranges_sends_all_of_it_again(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"whole")
    partial = tmp_path / "partial"
    partial.write_bytes(b"what")
    reports: list[tuple[object, ...]] = []
    with served(tmp_path) as address:
        link = Link(f"{address}/a.bin")
        download.Downloader().download(link, partial, lambda *report: reports.append(report))
    assert partial.read_bytes() == b"whole"
    assert reports[-1] == ("a.bin", 5, 5)


@pytest.mark.parametrize("command", ["clone -q --bare", "clone -q", "clone -q --depth 1"])
def test_any_repository_with_the_commit_will_do(tmp_path: Path, command: str) -> None:
    """A commit is added from any kind of repository. The cache has only that commit."""
    upstream = tmp_path / "up"
    upstream.mkdir()
    for text in ("first\n", "second\n"):
        (upstream / "text").write_text(text)
        newest = commit(upstream)
    subprocess.run(f"git {command} {upstream.as_uri()} {tmp_path}/other", shell=True, check=True)
    source = Source("https://upstream.invalid/demo.git", "", commit=newest)
    source_cache = SourceCache(Project(tmp_path, tmp_path / "channel", tmp_path / "build"))
    assert source_cache.add(tmp_path / "other", [source]) == source
    assert source_cache.state(source) == "whole"
    count = ["git", "-C", str(source_cache.path(source)), "rev-list", "--all", "--count"]
    assert subprocess.check_output(count, text=True) == "1\n"
    tree = source_cache.prefill(source, tmp_path / "src_cache")
    assert (tree / "text").read_text() == "second\n"
    with pytest.raises(ForgeError, match="has no commit that a recipe names"):
        source_cache.add(tmp_path / "other", [Source(source.url, "", commit="0" * 40)])


@pytest.mark.parametrize("packed", [True, False])
def test_an_archive_stays_packed_where_its_recipe_says_so(tmp_path: Path, packed: bool) -> None:
    """An archive is not unpacked if its recipe has rattler-build's key `file_name`.

    The build script then unpacks it, so that a large archive is not unpacked twice.
    """
    (tmp_path / "text").write_text("text")
    archive = shutil.make_archive(str(tmp_path / "demo"), "gztar", tmp_path, "text")
    source = Source("https://upstream.invalid/demo.tar.gz", sha256_file(Path(archive)))
    source_cache = SourceCache(Project(tmp_path, tmp_path / "channel", tmp_path / "build"))
    source_cache.add(Path(archive), [source])
    recipe = SimpleNamespace(path=tmp_path / "recipe.yaml", sources=[], extra={})
    data = {"url": source.url, "sha256": source.sha256}
    if packed:
        data["file_name"] = "a"
    folder = tmp_path / "src_cache"
    assert prepare(recipe, data, source_cache, folder) == ""
    (entry,) = (folder / ".metadata").glob("*.json")
    metadata = json.loads(entry.read_text())
    assert (folder / metadata["cache_path"]).samefile(source_cache.path(source))
    assert ("extracted_path" in metadata) == (not packed)
    assert any(folder.glob("*_extracted")) == (not packed)


def test_what_cannot_be_read_is_not_added(tmp_path: Path) -> None:
    """A pipe would block the command, and other errors would keep it from adding later files."""
    store = SourceCache(Project.at(MiniProject(tmp_path / "project").root))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForgeError, match="pipe is not a file, but a pipe"):
        store.add(tmp_path / "pipe", [])
    with pytest.raises(ForgeError, match="absent cannot be read: No such file"):
        store.add(tmp_path / "absent", [])


def test_a_file_that_no_recipe_names(tmp_path: Path) -> None:
    """If a recipe names another file of the same name, the message has that file's sha256."""
    source_cache = SourceCache(Project(tmp_path, tmp_path / "channel", tmp_path / "build"))
    names = {"demo.tar.gz": "1" * 64, "other.tar.gz": "2" * 64}
    sources = [Source(f"https://upstream.invalid/{name}", digest) for name, digest in names.items()]
    hint_of_demo = f"; a recipe names a demo.tar.gz with {'1' * 64}"
    for name, hint in (("demo.tar.gz", hint_of_demo), ("a", "")):
        path = tmp_path / name
        path.write_text("something else")
        with pytest.raises(ForgeError, match=f"which no recipe names{hint}$"):
            source_cache.add(path, sources)


class Moved:
    """An index whose file has another sha256 than the recipe states.

    Attributes:
        index: The index.
        name: The name of the file.
        file: The file on the index.
        sha256: The sha256 that the index states at first.
        cache: The cache of sources.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.name = "demo-2.0.tar.gz"
        self.file = index.folder / self.name
        self.file.write_bytes(tarball(file("demo/text", b"2.0")))
        self.sha256 = hashlib.sha256(self.file.read_bytes()).hexdigest()
        index.settings["index-url"] = (index.folder / "simple").as_uri()
        self.write_page(f"#sha256={self.sha256}")
        project = Project(index.folder, index.folder / "channel", index.folder / "build")
        self.cache = SourceCache(project)

    def write_page(self, fragment: str) -> None:
        """Write the page of the index. Its link to the file ends with this fragment."""
        page = f'<a href="../../{self.name}{fragment}">{self.name}</a>'
        write_text(self.index.folder / "simple" / "demo" / "index.html", page)

    def require_refused(self, *parts: str) -> None:
        """Require that the file is refused with a message that has both hashes and these parts."""
        purl = PackageURL.from_string(f"pkg:pypi/demo@2.0?file_name={self.name}")
        with pytest.raises(Refused) as failed:
            source = Source(f"{PYPI_URL}/{self.name}", "0" * 64, purl)
            self.cache.fetch(source, lambda *_: None)
        actual = hashlib.sha256(self.file.read_bytes()).hexdigest()
        expected = f"demo@2.0?file_name={self.name} has sha256 {actual}, the recipe says {'0' * 64}"
        for part in (expected, *parts):
            assert part in str(failed.value)

    def list_cached(self) -> list[str]:
        """Return the sha256 of each copy in the cache."""
        return [path.parent.name for path in self.cache.folder.rglob(f"{self.name}*")]


@pytest.fixture
def moved(index: Index) -> Moved:
    return Moved(index)


def test_nobody_states_the_sha256(moved: Moved) -> None:
    for fragment in ("", "#md5=0123"):
        moved.write_page(fragment)
        moved.require_refused("; no index states it: ", "write the file's sha256 into the recipe")


@pytest.mark.parametrize("cut", [0, 60])
def test_a_damaged_file_is_not_to_be_written(moved: Moved, cut: int) -> None:
    """A file with another sha256 than pip's index states is deleted: it is damaged or forged.

    The message does not advise the user to write its sha256 into the recipe.
    """
    evil = tarball(file("demo/text", b"evil"))
    moved.file.write_bytes(evil[:cut] or evil)
    moved.require_refused(
        f"It was deleted: pip's index states {moved.sha256}: damaged in transit, or forged"
    )
    assert moved.list_cached() == []


@pytest.mark.parametrize(
    "content",
    [b"<html>please log in</html>", tarball(file("demo/text", b"2.0"))[:60], b""],
    ids=["a page", "cut", "empty"],
)
def test_what_is_no_archive_is_not_to_be_written(moved: Moved, content: bytes) -> None:
    """A file that is no archive is deleted, even if no index states a sha256."""
    moved.write_page("")
    moved.file.write_bytes(content)
    moved.require_refused("It was deleted: ", "cannot be unpacked")
    assert moved.list_cached() == []
