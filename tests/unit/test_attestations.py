# SPDX-License-Identifier: BSD-3-Clause
"""Attestations from build to installation, signed by a Sigstore of the tests' own.

The public Sigstore is not reached: what differs there is the trusted root.
"""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import rattler
from support.servers import served
from support.small_channel import workspace
from support.static_channel import Source, findings

from forge.bases import PUBLISHED
from forge.channel import publish as static
from forge.channel import revisions
from forge.channel.publish import StaticChannel
from forge.conda.attestations import Publisher
from forge.conda.index import SHARDS, load
from forge.conda.location import Location
from forge.envs.workspace import Workspace
from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import sha256_file

pytest.importorskip("cryptography", reason="the tests' Sigstore signs with it")
from support.sigstore import Sigstore

pytestmark = pytest.mark.skipif(
    not hasattr(rattler, "verify_attestation"), reason="py-rattler 0.25 checks no attestations"
)

WORKFLOW = "https://github.com/us/forge/.github/workflows/release.yml@refs/heads/main"
SIGSTORE = Sigstore()


def bundle(package: Path, **other: str) -> dict[str, Any]:
    words = {"sha256": sha256_file(package), "channel": PUBLISHED, "identity": WORKFLOW}
    return SIGSTORE.attest(package.name, **words | other)


@dataclass
class User:
    """A locked workspace, and who has to attest the packages of its channel."""

    app: Workspace
    publishers: dict[str, Publisher]
    cache: Path

    def install(self) -> int:
        """As `forge install` does."""
        self.app.require_attested("default", self.publishers)
        return self.app.install("default", self.cache)


class Release:
    """A channel of alpha and beta, published with whatever attestations lie beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.public = folder, folder / "public"
        self.source = Source(folder / "channel")
        for name in ("alpha", "beta"):
            self.source.make(name)
        self.alpha, self.beta = sorted(self.source.folder.glob("noarch/*.conda"))

    def publish(self, alpha: dict[str, Any] | None) -> None:
        """Publish both; beta is attested as it should be, alpha by that bundle or not at all."""
        for package, attestation in ((self.alpha, alpha), (self.beta, bundle(self.beta))):
            if attestation:
                file = package.with_name(f"{package.name}.sigstore.json")
                file.write_text(json.dumps(attestation))
        StaticChannel(self.public).publish(self.source)

    def user(self, url: str) -> User:
        """Somebody who takes the channel from `url`, and whose stack says who publishes it."""
        (self.folder / "root.json").write_text(SIGSTORE.trusted_root)
        table = f'{OURS}identity = "{WORKFLOW}"\ntrusted-root = "../root.json"\n'
        declared = workspace(self.folder / "stack", PUBLISHED, table).manifest.publishers
        app = workspace(self.folder / "app", url)
        app.lock()
        return User(app, {url: declared[PUBLISHED]}, self.folder / "cache")


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


def advertised(public: Path, name: str) -> dict[str, Any]:
    """File -> the hash of its attestations, by one form of the index."""
    data = load(Location(public), f"noarch/{name}") or {}
    return {file: r.get("attestations_sha256") for file, r in data["packages.conda"].items()}


def test_published_and_installed(release: Release) -> None:
    """Every form of the index names the bundles, and a client believes them; twice the same."""
    release.publish(bundle(release.alpha))
    forms = [advertised(release.public, f"repodata.json{end}") for end in ("", ".zst")]
    assert forms[0] == forms[1] and len({*forms[0].values(), None}) == 3
    before = sorted(release.public.rglob("*.sigs.*"))
    assert StaticChannel(release.public).publish(release.source) is None
    release.source.make("gamma")
    StaticChannel(release.public).publish(release.source)  # which nobody has attested
    assert sorted(release.public.rglob("*.sigs.*")) == before and not findings(release.public)
    with served(release.public) as url:
        assert release.user(url).install() == 2


OTHERS = "https://github.com/them/forge/.github/workflows/release.yml@refs/heads/main"
FAULTS = {
    "missing": (None, "no attestations are advertised"),
    "another identity": ({"identity": OTHERS}, "does not match the trusted publisher"),
    "another package's": ({"sha256": "0" * 64}, "artifact hash does not match"),
    "another channel's": ({"channel": "https://elsewhere.test/c"}, "attested for https://elsewh"),
}


@pytest.mark.parametrize(("other", "says"), FAULTS.values(), ids=FAULTS)
def test_refused(release: Release, other: dict[str, str] | None, says: str) -> None:
    """Nothing is installed, and the message says what is wrong with which package."""
    release.publish(other and bundle(release.alpha, **other))
    with served(release.public) as url:
        user = release.user(url)
        with pytest.raises(Refused) as error:
            user.install()
        assert says in str(error.value) and release.alpha.name in str(error.value)
        assert "\n" not in str(error.value) and not user.app.prefix("default").exists()
        user.publishers.clear()  # one who trusts whoever serves the channel
        assert user.install() == 2


def test_the_locked_bytes_are_what_must_be_attested(release: Release) -> None:
    """A server that lies at `lock`, and shows the attested record and lying bytes at `install`."""
    release.publish(bundle(release.alpha))
    other = Source(release.folder / "other")
    other.make("alpha", text="what nobody attested")
    other.make("beta")
    honest, lying = release.public / "noarch", release.folder / "lying"
    StaticChannel(lying).publish(other)
    with served(lying) as url:
        user = release.user(url)
    with served(release.public) as real:
        user.publishers = {real: user.publishers[url]}
        user.app = workspace(release.folder / "app", real)
        user.app.lock_file.write_text(user.app.lock_file.read_text().replace(url, real))
        shutil.copy(lying / "noarch" / release.alpha.name, honest)
        with pytest.raises(Refused, match=r"alpha.*artifact hash does not match"):
            user.install()
        assert not user.app.prefix("default").exists()


def test_altered(release: Release) -> None:
    """A statement that was edited after it was signed."""
    edited = bundle(release.alpha)
    payload = json.loads(base64.b64decode(edited["dsseEnvelope"]["payload"]))
    payload["predicate"]["more"] = 1
    text = base64.b64encode(json.dumps(payload).encode()).decode()
    edited["dsseEnvelope"]["payload"] = text
    release.publish(edited)
    with served(release.public) as url, pytest.raises(Refused, match="alpha.*verification failed"):
        release.user(url).install()


def test_bundles_that_the_index_does_not_mean(release: Release) -> None:
    """A bundle that was exchanged, and one that is gone: for clients and for channel verify."""
    release.publish(bundle(release.alpha))
    (sidecar,) = release.public.glob("noarch/alpha-*.sigs.*")
    with served(release.public) as url:
        sidecar.write_text("[]")
        with pytest.raises(Refused, match="alpha"):
            release.user(url).install()
        assert any("attestations are damaged" in line for line in findings(release.public))
        sidecar.unlink()
        with pytest.raises(Refused, match="alpha"):
            release.user(url).install()
        assert any("attestations are missing" in line for line in findings(release.public))


def test_no_bundle(release: Release) -> None:
    with pytest.raises(ForgeError, match=r"alpha.*is not a Sigstore bundle"):
        release.publish({"mediaType": "text"})


def test_another_sigstore(release: Release) -> None:
    """The same claims, vouched for by a Sigstore that the manifest does not trust."""
    package = release.alpha
    foreign = Sigstore().attest(package.name, sha256_file(package), PUBLISHED, WORKFLOW)
    release.publish(foreign)
    with served(release.public) as url, pytest.raises(Refused, match="alpha.*verification failed"):
        release.user(url).install()


OURS = f'[tool.strix-forge.publishers."{PUBLISHED}"]\n'
DECLARATIONS = [
    ("[tool.strix-forge]\npublisher = 1\n", "publisher is not supported"),
    (f'[tool.strix-forge.publishers]\n"{PUBLISHED}" = "me"\n', "is missing or no table"),
    (f'{OURS}issuer = "x"\n', "needs an identity"),
    ('[tool.strix-forge.publishers."https://x"]\nidentity = "x"\n', "none of the channels"),
]
DECLARATIONS += [
    (f'{OURS}identity = "x"\nlog-days = {days}\n', "log-days is a number")
    for days in ("-1", '"7"', "true", "1.5")
]


@pytest.mark.parametrize(("text", "says"), DECLARATIONS)
def test_wrong_declarations(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ForgeError, match=says):
        _ = workspace(tmp_path / "app", PUBLISHED, text).manifest


def test_a_pipe_as_trusted_root_is_not_read_for_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "root.json")
    publisher = Publisher(WORKFLOW, "x", trusted_root=str(tmp_path / "root.json"))
    with pytest.raises(ForgeError, match="a pipe"):
        publisher.require([])


@pytest.mark.parametrize("issuer", ["", "x", "http://[::1"])
def test_an_issuer_that_is_none(issuer: str) -> None:
    with pytest.raises(ForgeError, match="issuer.*URL"):
        Publisher(WORKFLOW, "x", issuer).require([])


def test_an_index_that_is_gone_when_attestations_are_asked_for(release: Release) -> None:
    release.publish(bundle(release.alpha))
    with served(release.public) as url:
        user = release.user(url)
        for index in release.public.glob("*/repodata*"):
            index.unlink()
        with pytest.raises(ForgeError, match=f"no attestations were asked for.*{url}"):
            user.install()


def test_bindings_without_attestations(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    release.publish(bundle(release.alpha))
    monkeypatch.delattr(rattler, "verify_attestation")
    with served(release.public) as url, pytest.raises(NotAttempted, match=r"need py-rattler 0\.28"):
        release.user(url).install()


class TestLog:
    """A publisher who attests the log as well: what is the newest is his word, not the server's."""

    @pytest.fixture(autouse=True)
    def _trusted_root(self, release: Release) -> None:
        (release.folder / "root.json").write_text(SIGSTORE.trusted_root)

    @staticmethod
    def current(public: Path, days: int = 36500) -> set[str] | None:
        """What somebody who never saw the channel takes for the present one."""
        root = str(public.parent / "root.json")
        who = Publisher(WORKFLOW, PUBLISHED, trusted_root=root, log_days=days)
        seen = public.parent / "never.json"
        try:
            return revisions.require_current(Location(public), seen, publisher=who)
        finally:
            seen.unlink(missing_ok=True)

    @staticmethod
    def attest(public: Path, by: Sigstore = SIGSTORE, **other: str) -> None:
        """As in docs/provenance.md."""
        log = public / revisions.LOG
        words = {"sha256": sha256_file(log), "channel": PUBLISHED, "identity": WORKFLOW} | other
        bundle = by.attest(words.pop("name", "log-1-0.conda"), **words)
        log.with_name(f"{log.name}.sigstore.json").write_text(json.dumps(bundle))

    def test_attested(self, release: Release) -> None:
        """Taken, and no more after a publish, until that is attested."""
        release.publish(None)
        self.attest(release.public)
        both = {sha256_file(release.alpha), sha256_file(release.beta)}
        assert self.current(release.public) == both and not findings(release.public)
        StaticChannel(release.public).publish(None, [release.alpha.stem])
        with pytest.raises(Refused, match="log.json is not attested by"):
            self.current(release.public)
        self.attest(release.public)
        assert self.current(release.public) == {sha256_file(release.beta)}

    OTHERS: ClassVar = {name: other for name, (other, _) in FAULTS.items() if other} | {
        "another Sigstore's": {"by": Sigstore()},
        "a package's": {"name": "alpha-1.0-h1234567_0.conda"},
    }

    @pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
    def test_refused(self, other: dict[str, Any], release: Release) -> None:
        release.publish(None)
        self.attest(release.public, **other)
        with pytest.raises(Refused, match="log.json is not attested by"):
            self.current(release.public)

    def test_edited_after_it_was_attested(self, release: Release) -> None:
        """A yank undone, another index, another serial, not even a space; and no bundle, no log."""
        release.publish(None)
        StaticChannel(release.public).publish(None, [release.alpha.stem])
        self.attest(release.public)
        log = release.public / revisions.LOG
        whole = json.loads(text := log.read_text())
        undone = [entry | {"yanked": []} for entry in whole["revisions"]]
        other = dict.fromkeys(whole["index"], "0" * 64)
        edits = [{"revisions": undone}, {"index": other}, {"before": other}, {"serial": 99}]
        for edited in [f"{text} ", *(json.dumps(whole | edit, indent=1) for edit in edits)]:
            log.write_text(edited)
            with pytest.raises(Refused, match="artifact hash does not match"):
                self.current(release.public)
        log.write_text(text)
        bundle = log.with_name(f"{log.name}.sigstore.json")
        for damaged in ("", "[", "{}", "[[]]", '{"dsseEnvelope": 1}', None):
            bundle.write_text(damaged) if damaged is not None else bundle.unlink()
            with pytest.raises(Refused, match="log.json is not attested by"):
                self.current(release.public)
        log.unlink()
        with pytest.raises(Refused, match="log.json is not attested by"):
            self.current(release.public)

    def test_expired(self, release: Release) -> None:
        """An old copy of everything, all of it attested: whoever never saw the channel notices."""
        release.publish(None)
        self.attest(release.public)  # the tests' Sigstore did it on the second day of 2026
        with pytest.raises(Refused, match=r"on 2026-01-02, more than 30 days ago"):
            self.current(release.public, days=30)


class TestRollback:
    """The newest log that was seen of a channel is remembered."""

    @pytest.fixture
    def older(self, release: Release) -> Iterator[tuple[Location, Path, Path]]:
        """A channel of two revisions whose log was seen, then put back to the first."""
        release.publish(None)
        log, seen = release.public / "revisions/log.json", release.folder / "state/seen.json"
        first = log.read_text()
        with served(release.public) as url:
            revisions.require_current(Location(url), seen)
            release.source.make("gamma")
            StaticChannel(release.public).publish(release.source)
            revisions.require_current(Location(url), seen)  # newer is right
            log.write_text(first)
            yield Location(url), seen, log

    def test_refused_until_accepted(self, older: tuple[Location, Path, Path]) -> None:
        location, seen, _ = older
        for _ in range(2):
            with pytest.raises(Refused, match="has 1 revisions .serial 2., and not the 2"):
                revisions.require_current(location, seen)
        revisions.require_current(location, seen, accept=True)
        with pytest.raises(Refused, match="is not that of revision 1"):  # the index is the second's
            revisions.require_current(location, seen)
        revisions.require_current(location, seen, accept=True)

    @pytest.mark.parametrize("form", ["repodata.json", "repodata.json.zst", SHARDS])
    def test_an_older_index_beside_the_newest_log(
        self, form: str, release: Release, tmp_path: Path
    ) -> None:
        """It would give a yanked build to a fresh lock; whichever form a client asks for."""
        release.publish(None)
        older = (release.public / "noarch" / form).read_bytes()
        StaticChannel(release.public).publish(None, [release.alpha.stem])
        seen = tmp_path / "seen.json"
        with served(release.public) as url:
            revisions.require_current(Location(url), seen)
            (release.public / "noarch" / form).write_bytes(older)
            with pytest.raises(Refused, match=rf"noarch/{form} is not that of revision 2"):
                revisions.require_current(Location(url), seen)
        assert any("is not that of revision 2" in line for line in findings(release.public))
        StaticChannel(release.public).publish(None, [release.alpha.stem])  # completes it
        assert not findings(release.public)
        with served(release.public) as url:
            revisions.require_current(Location(url), tmp_path / "other.json")

    def test_removed(self, older: tuple[Location, Path, Path]) -> None:
        location, seen, log = older
        log.unlink()
        with pytest.raises(Refused, match="has 0 revisions"):
            revisions.require_current(location, seen)

    def test_rewritten(self, older: tuple[Location, Path, Path]) -> None:
        """As long as before, and another history."""
        location, seen, log = older
        whole = json.loads(log.read_text())
        for minute in range(8):  # whichever digest is greater
            first = whole["revisions"][0]
            second = first | {"revision": 2, "time": f"2026-01-01T00:0{minute}:00+00:00"}
            log.write_text(json.dumps(whole | {"serial": 99, "revisions": [first, second]}))
            with pytest.raises(Refused, match="has 2 revisions .serial 99., and not the 2"):
                revisions.require_current(location, seen)

    def test_the_state_between(self, release: Release, tmp_path: Path) -> None:
        """What a publish shows while it switches the index is refused to who saw the end of it.

        Both indexes are that log's, so it would bring a yanked build back.
        """
        release.publish(None)
        shutil.copytree(release.public, tmp_path / "between")
        real = static._move

        def stop_at_the_index(source: Path, target: Path) -> None:
            if target.parent.name == "noarch":
                raise KeyboardInterrupt
            real(source, target)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(static, "_move", stop_at_the_index)
            StaticChannel(tmp_path / "between").publish(None, [release.alpha.stem])
        with served(tmp_path / "between") as url:
            files = revisions.require_current(Location(url), tmp_path / "new.json")
            assert files is not None and sha256_file(release.alpha) in files
            StaticChannel(release.public).publish(None, [release.alpha.stem])
            seen = tmp_path / "seen.json"
            revisions.require_current(Location(release.public), seen)
            seen.write_text(seen.read_text().replace(release.public.as_uri(), url))
            with pytest.raises(Refused, match="had before"):
                revisions.require_current(Location(url), seen)

    def test_channels_are_remembered_apart(
        self, older: tuple[Location, Path, Path], release: Release, tmp_path: Path
    ) -> None:
        location, seen, _ = older
        StaticChannel(tmp_path / "other").publish(release.source)
        with served(tmp_path / "other") as url:
            revisions.require_current(Location(url), seen)
        assert {location.url, url} == json.loads(seen.read_text()).keys()

    def test_damaged_memory(self, older: tuple[Location, Path, Path]) -> None:
        location, seen, _ = older
        entries = (1, ["a", "b"], [1])
        for text in ("", "[1]", *(json.dumps({location.url: entry}) for entry in entries)):
            seen.write_text(text)
            with pytest.raises(ForgeError, match="is damaged; delete it"):
                revisions.require_current(location, seen)
