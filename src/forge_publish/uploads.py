# SPDX-License-Identifier: BSD-3-Clause
"""Publishing to servers that index by themselves, through rattler-build's own uploaders.

Credentials are an environment variable or what rattler's store holds for the host (the file that
RATTLER_AUTH_FILE names, the keyring): never an option, never an argument of a child process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rattler_build import upload_package_to_anaconda, upload_package_to_prefix

from forge_publish import gate, verify
from forge_publish.places import FORMS, Web, parse, refuse_credentials
from forge_store.channel import Channel
from forge_store.project import BuildFailed, ForgeError

MEANING = {
    401: "the credential is missing, wrong or out of date",
    403: "the credential may not write to this channel",
    404: "there is no such channel; make it on the web site first",
    409: "a file of that name is there already, perhaps of another publisher at this moment",
    413: "the server takes no file of this size",
}
S3 = (
    "the bindings of rattler-build 0.73 upload no file to S3. Publish to a folder and copy that, "
    "packages first and index files last: aws s3 sync DIR {url} --exclude '*repodata*' --exclude "
    "'*run_exports*' && aws s3 sync DIR {url} --exclude '.*'"
)


@dataclass(frozen=True)
class Service:
    """A kind of server. `api` and `files` are its public URLs; another server replaces both.

    `key` and `server` are the environment variables that rattler-build has for it.
    """

    api: str
    files: str
    key: str
    server: str
    send: Callable[[Path, str, str, str | None], None]


def _to_prefix(package: Path, api: str, channel: str, key: str | None) -> None:
    upload_package_to_prefix([str(package)], api, channel, api_key=key)


def _to_anaconda(package: Path, api: str, owner: str, key: str | None) -> None:
    upload_package_to_anaconda([str(package)], owner, channel=["main"], api_key=key, url=api)


SERVICES = {
    "prefix.dev": Service(
        "https://prefix.dev", "https://repo.prefix.dev", "PREFIX_API_KEY", "PREFIX_SERVER_URL",
        _to_prefix,
    ),
    "anaconda.org": Service(
        "https://api.anaconda.org", "https://conda.anaconda.org", "ANACONDA_API_KEY",
        "ANACONDA_SERVER_URL", _to_anaconda,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Destination:
    """A channel of a service, as the rest of the URL names it."""

    service: Service
    name: str

    def publish(self, source: Channel) -> tuple[int, int]:
        """Upload what is not there yet, one package after another, after the gate.

        Returns how many packages were uploaded and how many are there now. Raises ForgeError for
        what the gate refuses, BuildFailed for the first upload that fails; the same command goes
        on with the rest.
        """
        service = self.service
        other = os.environ.get(service.server)
        if other:
            refuse_credentials(other)
        index = verify.read_index(Web(f"{other or service.files}/{self.name}"))
        hashes = {name: record["sha256"] for name, record in index.records.items()}
        packages = gate.admitted(source, hashes.get)
        todo = sorted(packages.keys() - hashes.keys())
        key = os.environ.get(service.key) or None
        for count, name in enumerate(todo):
            try:
                service.send(source.path(packages[name]), other or service.api, self.name, key)
            except Exception as error:  # RattlerBuildError and what the client raises below it
                raise BuildFailed(
                    f"{name} was not uploaded ({count} of {len(todo)} were): "
                    f"{_explain(str(error), service)}"
                ) from None
        return len(todo), len(hashes) + len(todo)


def destination(to: str) -> Path | Destination:
    """Where `--to` leads: a folder, or a channel of a service.

    Raises ForgeError for another URL, and for one that carries a credential.
    """
    if "://" not in to or to.startswith("file://"):
        return parse(to).path
    refuse_credentials(to)
    parts = urlsplit(to)
    if parts.scheme == "s3":
        raise ForgeError(S3.format(url=to))
    name = parts.path.strip("/")
    if parts.scheme != "https" or parts.netloc not in SERVICES or not name or "/" in name:
        raise ForgeError(f"--to {to} is none of: {FORMS}")
    return Destination(SERVICES[parts.netloc], name)


def _explain(text: str, service: Service) -> str:
    """A failure in one line. What a server answers may repeat the credential that it was sent."""
    known = secrets(service)
    for secret in known:
        text = text.replace(secret, "***")
    status = re.search(r"\b(?:HTTP(?: status [a-z ]+)?)[ (]*(\d{3})", text)
    meaning = MEANING.get(int(status[1]), "") if status else ""
    if not meaning and ("API key" in text or "token required" in text):
        meaning = f"set {service.key}, or store a credential with pixi auth login"
    answer = text if known or not status else f"HTTP {status[1]}"
    return " ".join(f"{answer}. {meaning}".split()).rstrip(". ")


def secrets(service: Service) -> set[str]:
    """The credentials that can be known here: the variable's and the auth file's."""
    found = {os.environ.get(service.key, "")}
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(Path(os.environ.get("RATTLER_AUTH_FILE", "")).read_text())
        for entry in data.values():
            found |= {v for kind in entry.values() for v in _strings(kind)}
    return found - {""}


def _strings(value: object) -> set[str]:
    if isinstance(value, dict):
        return {text for inner in value.values() for text in _strings(inner)}
    return {value} if isinstance(value, str) else set()
