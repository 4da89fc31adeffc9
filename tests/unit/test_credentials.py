# SPDX-License-Identifier: BSD-3-Clause
"""No message and no file that the driver writes has the credential of a URL."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import expect_error
from support.project import CHECKOUT
from support.servers import QuietHandler, served
from support.small_channel import read, workspace
from support.stand_in import write_mirrors
from typer.testing import CliRunner

from forge import network
from forge.cli.main import app
from forge.conda.location import Location
from forge.envs.manifest import Manifest, match_spec
from forge.errors import ForgeError, NotAttempted, one_line, redact, remove_secrets
from forge.project import Project
from forge.sources.cache import Source, SourceCache

SECRET = "s3cr3t"
URLS = [
    f"http://user:p@{SECRET}@127.0.0.1:9/channel",
    f"http://user:{SECRET}@127.0.0.1:9/channel",
    f"http://{SECRET}@127.0.0.1:9/channel",
    f"http://127.0.0.1:9/t/{SECRET}/channel",
    f"http://127.0.0.1:9/channel;token={SECRET}",
    f"http://127.0.0.1:9/channel?api_key={SECRET}",
    f"http://127.0.0.1:9/%74/{SECRET}/channel",
    f"http://127.0.0.1:9/channel#token={SECRET}",
    f"http://127.0.0.1:9/channel?a=(b){SECRET}",
    f"http:/user:{SECRET}@127.0.0.1:9/channel",
    f"http://user%3A{SECRET}%40127.0.0.1:9/channel",
]


def get_message(run: Callable[[], object]) -> str:
    """Return the text that a user would read: the error of `run`, or else its result."""
    try:
        result = run()
    except ForgeError as error:
        return str(error)
    if isinstance(result, list | tuple):
        return "\n".join(map(str, result))
    return str(result)


def command(words: str) -> str:
    """Run a command that fails, and return its output and message."""
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code and done.exception
    return f"{done.output} {done.exception}"


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
@pytest.mark.parametrize(
    "words",
    ["lock attention --base conda-forge --channel URL", "publish --base host --to URL"],
)
def test_commands(words: str, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORGE_ROOT", str(CHECKOUT))
    output = command(words.replace("URL", url))
    assert SECRET not in output
    assert "Traceback" not in output


def publish(to: str) -> None:
    """Run `publish` with a destination that it refuses, and raise its error."""
    raise expect_error("publish", "--to", to)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"https://user:{SECRET}@prefix.dev/demo", "carries a credential"),
        (f"https://{SECRET}@anaconda.org/demo", "carries a credential"),
        (f"https://anaconda.org/t/{SECRET}/demo", "carries a credential"),
        (f"https://prefix.dev/demo?token={SECRET}", "carries a credential"),
        (f"s3://key:{SECRET}@bucket/prefix", "carries a credential"),
        ("http://[::1/x", "malformed channel URL"),
        ("https://h:99999/x", "malformed channel URL"),
        # There is no host after the credential, so the password is parsed as a port.
        (f"https://me:{SECRET}/x", "malformed channel URL"),
    ],
    ids=range(8),  # Otherwise the tests' names would have the secret.
)
def test_what_is_no_address_of_a_channel(url: str, message: str) -> None:
    """`publish` and Location refuse such a URL, with a message that does not have the secret."""
    for reader in (publish, Location):
        with pytest.raises(ForgeError, match=message) as error:
            reader(url)
        assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("", "is empty"),
        ("https://prefix.dev/channel", "is not a directory: publish to one"),
        ("ftp://example.org/channel", "is neither a folder nor"),
        ("s3://bucket/channel", "is neither a folder nor"),
    ],
)
def test_where_nothing_is_published(to: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        publish(to)


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_manifests(url: str, tmp_path: Path) -> None:
    file = tmp_path / "pixi.toml"
    file.write_text(f'[workspace]\nname = "a"\nchannels = ["{url}"]\nplatforms = ["linux-64"]\n')
    message = get_message(lambda: Manifest.load(file))
    assert SECRET not in message
    assert "pixi.toml" in message


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_locks(url: str, channel: Path, tmp_path: Path) -> None:
    """Reading a lock whose URLs have a credential does not show it."""
    home = workspace(tmp_path / "local", channel.as_uri())
    home.lock()
    text = home.lock_file.read_text()
    home.lock_file.write_text(text.replace(channel.as_uri(), url))
    for run in (lambda: home.locked("default"), lambda: home.install("default")):
        message = get_message(run)
        assert message
        assert SECRET not in message, message


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_sources_that_do_not_answer(url: str, tmp_path: Path) -> None:
    cache = SourceCache(Project(tmp_path, tmp_path / "channel", tmp_path / "build"))
    archive = Source(f"{url}/a.tar.gz", "0" * 64)
    message = get_message(lambda: cache.fetch(archive, lambda *_: None))
    assert SECRET not in message
    assert "127.0.0.1" in message
    repository = Source(url, "", commit="0" * 40)
    message = get_message(lambda: cache.fetch(repository, lambda *_: None))
    assert SECRET not in message
    assert message


@pytest.mark.parametrize(
    ("mirror", "expected"),
    [(URLS[0], ""), (f"user:{SECRET}@127.0.0.1:9/c", "is not an http(s) or oci URL")],
    ids=["does not answer", "no scheme"],
)
def test_mirrors(
    mirror: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    write_mirrors(tmp_path, {"https://conda.invalid": mirror})
    message = get_message(lambda: read(Location("https://conda.invalid/x", retries=0), "a"))
    assert SECRET not in message
    assert message
    assert expected in message
    if not expected:
        assert SECRET not in redact(network.find_outage("https://conda.invalid/x", 1))


def test_token_of_the_store_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of rattler's credential store is not in messages.

    rattler's client sends such a token in the URL, and its errors contain that URL.
    """

    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            assert f"/t/{SECRET}/" in self.path
            self.send_error(403)

    (tmp_path / "auth.json").write_text(json.dumps({"127.0.0.1": {"CondaToken": SECRET}}))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(tmp_path / "auth.json"))
    with served(tmp_path, Refusing) as url, pytest.raises(NotAttempted, match="403") as error:
        read(Location(url, retries=0), "noarch/repodata.json")
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_the_rule_itself(url: str) -> None:
    for text in (url, f"see {url}/noarch/a.conda (404)", f"'{url}', and {url}", f"403 ({url})"):
        for shown in (str(ForgeError(text)), one_line(text), redact(text)):
            assert SECRET not in shown
            assert "127.0.0.1:9" in shown
    assert SECRET in url, "the URL must have the secret, or the test shows nothing"


def test_what_is_no_credential_stays() -> None:
    for text in ("https://a.invalid/b/noarch/x-1-0.conda", "a@b.c wrote /t/x", "1/t/ 2; token"):
        assert redact(text).startswith(text[:10])
    assert redact("https://a.invalid/b/noarch/x-1-0.conda: 404").endswith("x-1-0.conda: 404")
    shown = redact(f"403 for url (https://h.invalid/t/{SECRET}/c/x.conda)")
    assert shown == "403 for url (https://h.invalid/t/***/c/x.conda)"
    assert Location("file:///srv/t/channel").folder == Path("/srv/t/channel")


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_a_requirement_that_is_a_url(url: str) -> None:
    """The message does not have the secret, even if it cuts the URL off before the @."""
    for value in (url, url.replace(SECRET, SECRET * 20)):
        assert SECRET not in get_message(lambda value=value: match_spec("a", value))


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        "s3c\nr3t",  # The secret, wrapped at the width of a terminal.
        "two words",
        "p%20w",
        "sesame",
        "token-as-user",
        f"GET http://user:{SECRET}@h/x",
        "password=hunter2",
        "password: 'hunter 2'",
        '{"token": "hunter2"}',
        "machine h login joe password hunter2",
        "X-Api-Key: hunter2",
        "Authorization: Bearer hunter2",
        "Cookie: a=1; b=hunter2",
        "ghp_hunter2hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_no_secret_is_in_a_log_for_strangers(text: str) -> None:
    """A log for others has no secret of the environment, and no text that looks like a secret."""
    environment = {
        "MY_TOKEN": SECRET,
        "DB_PASSWORD": "two words",
        "AWS_KEY": "p w",
        "PIP_INDEX_URL": "https://ann:sesame@h/simple",
        "OTHER": "https://token-as-user@h/",
        "HOME": "/home/ann",
    }
    assert remove_secrets("plain", environment) == "plain"
    assert remove_secrets("/home/ann: 3 tokens", environment) == "/home/ann: 3 tokens"
    result = remove_secrets(f"before {text} after", environment)
    assert result.startswith("before ")
    assert "*" in result or "GET http://h/x" in result
    secrets = ["hunter", SECRET, "s3c", "words", "p%20w", "sesame", "token-as-user"]
    assert not [secret for secret in secrets if secret in result]
