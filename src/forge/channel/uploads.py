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
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rattler_build import upload_package_to_anaconda, upload_package_to_prefix

from forge.channel import gate, verify
from forge.channel.local import Channel
from forge.channel.places import FORMS, Unreadable, Web, parse, refuse_credentials
from forge.errors import BuildFailed, ForgeError

MEANING = {
    401: "the credential is missing, wrong or out of date",
    403: "the credential may not write to this channel",
    404: "there is no such channel; make it on the web site first",
    409: "a file of that name is there already, perhaps of another publisher at this moment",
    413: "the server takes no file of this size",
}
# What GitHub gives a job that may ask for an identity (`id-token: write`)
IDENTITY = "ACTIONS_ID_TOKEN_REQUEST_TOKEN"
S3 = (
    "the bindings of rattler-build 0.73 upload no file to S3. Publish to a folder and copy that "
    "with aws s3 sync, index files last, as docs/publishing.md shows"
)


@dataclass(frozen=True)
class Service:
    """A kind of server. `api` and `files` are its public URLs; another server replaces both.

    `key` and `server` are the environment variables that rattler-build has for it.
    """

    host: str
    api: str
    files: str
    key: str
    server: str
    send: Callable[[Path, str, str, str | None], None]


def _to_prefix(package: Path, api: str, channel: str, key: str | None) -> None:
    # a Sigstore attestation needs the identity of trusted publishing, which an API key replaces
    attest = key is None and IDENTITY in os.environ
    upload_package_to_prefix([str(package)], api, channel, api_key=key, generate_attestation=attest)


def _to_anaconda(package: Path, api: str, owner: str, key: str | None) -> None:
    upload_package_to_anaconda([str(package)], owner, channel=["main"], api_key=key, url=api)


SERVICES = {
    service.host: service
    for service in (
        Service(
            "prefix.dev", "https://prefix.dev", "https://repo.prefix.dev",
            "PREFIX_API_KEY", "PREFIX_SERVER_URL", _to_prefix,
        ),
        Service(
            "anaconda.org", "https://api.anaconda.org", "https://conda.anaconda.org",
            "ANACONDA_API_KEY", "ANACONDA_SERVER_URL", _to_anaconda,
        ),
    )
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
        try:
            hashes = verify.hashes(Web(f"{other or service.files}/{self.name}"))
        except Unreadable as error:
            raise Unreadable(
                f"{error}. A private channel is read with what rattler's store holds for the "
                f"host, not with {service.key}"
            ) from None
        packages = gate.admitted(source, hashes.get)
        todo = sorted(packages.keys() - hashes.keys())
        for count, name in enumerate(todo):
            path, api = source.path(packages[name]), other or service.api
            # A process of its own: the uploader holds the GIL, so that no Ctrl-C would come
            # through. The credential reaches it as it reached us.
            command = [sys.executable, "-m", "forge.channel.uploads", service.host, path]
            child = subprocess.run(
                [*command, api, self.name], stdin=subprocess.DEVNULL, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            if child.returncode:
                ended = f"the uploader ended with status {child.returncode}"
                text = child.stdout.strip() or child.stderr.strip() or ended
                raise BuildFailed(
                    f"{name} was not uploaded ({count} of {len(todo)} were): "
                    f"{_explain(text, service, api)}"
                )
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
        raise ForgeError(S3)
    name = parts.path.strip("/")
    if parts.scheme != "https" or parts.netloc not in SERVICES or not name or "/" in name:
        raise ForgeError(f"--to {to} is none of: {FORMS}")
    return Destination(SERVICES[parts.netloc], name)


def _explain(text: str, service: Service, api: str) -> str:
    """A failure in one line. What a server answers may repeat the credential that it was sent."""
    known = secrets(service, api)
    for secret in sorted(known, key=len, reverse=True):  # a name may be a part of its password
        text = text.replace(secret, "***")
    status = re.search(r"\bHTTP (\d{3})", text)
    meaning = MEANING.get(int(status[1]), "") if status else ""
    if "already exists" in text:
        meaning = MEANING[409]
    elif "API key" in text or "token required" in text:
        meaning = f"set {service.key}, or store a credential with pixi auth login"
    elif not status:
        meaning = (
            f"is {service.key}, or what is stored for the host, valid, and may it write there?"
        )
    answer = text if known or not status else f"HTTP {status[1]}"
    return " ".join(". ".join(filter(None, (answer, meaning))).split())


def secrets(service: Service, api: str) -> set[str]:
    """The credential that is used for a server, as far as it can be known here.

    The variable comes first, then the file that RATTLER_AUTH_FILE names; a keyring tells nothing.
    """
    if key := os.environ.get(service.key):
        return {key}
    host = urlsplit(api).hostname or ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        data = json.loads(Path(os.environ.get("RATTLER_AUTH_FILE", "")).read_text())
        for name, entry in data.items():
            if name == host or (name.startswith("*.") and f".{host}".endswith(name[1:])):
                return _strings(entry)
    return set()


def _strings(value: object) -> set[str]:
    if isinstance(value, dict):
        return {text for inner in value.values() for text in _strings(inner)}
    return {value} if value and isinstance(value, str) else set()


def main() -> None:
    """Send one package: HOST PACKAGE API CHANNEL. The reason of a failure goes to stdout."""
    host, package, api, channel = sys.argv[1:]
    service, status = SERVICES[host], 0
    try:
        service.send(Path(package), api, channel, os.environ.get(service.key) or None)
    except Exception as error:  # RattlerBuildError and what the client raises below it
        print(error)
        status = 1
    sys.stdout.flush()
    os._exit(status)  # the bindings sometimes abort while Python shuts down


if __name__ == "__main__":
    main()
