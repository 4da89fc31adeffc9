# SPDX-License-Identifier: BSD-3-Clause
"""Uploads to prefix.dev and anaconda.org, through rattler-build's own uploaders.

The credential is rattler-build's: PREFIX_API_KEY or ANACONDA_API_KEY, else what rattler's store
holds for the host (RATTLER_AUTH_FILE, the keyring, pixi auth login).
"""

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rattler_build import upload_package_to_anaconda, upload_package_to_prefix

from forge.channel import gate, verify
from forge.conda.local import Channel
from forge.conda.location import Location, refuse_credentials
from forge.errors import BuildFailed, ForgeError

FORMS = "a folder, https://prefix.dev/CHANNEL or https://anaconda.org/OWNER"
# host -> where its channels are read, and the variable of its API key
SERVERS = {
    "prefix.dev": ("https://repo.prefix.dev", "PREFIX_API_KEY"),
    "anaconda.org": ("https://conda.anaconda.org", "ANACONDA_API_KEY"),
}
# bytes of a file, where a limit is documented (prefix-dev/prefix-dev#68)
LARGEST = {"prefix.dev": 10**9}
# GitHub sets it in a job that may ask for an identity (`id-token: write`)
IDENTITY = "ACTIONS_ID_TOKEN_REQUEST_TOKEN"


@dataclass(frozen=True)
class ServerChannel:
    """A channel on a server that indexes what it is sent."""

    host: str
    name: str

    def publish(self, source: Channel) -> tuple[int, int]:
        """Upload what the server lacks, once the gate has admitted every package.

        Returns how many packages were uploaded and how many the server then has. Raises ForgeError
        for what the gate refuses, BuildFailed for a failed upload; a second run uploads the rest.
        """
        files, variable = SERVERS[self.host]
        hashes = verify.hashes(Location(f"{files}/{self.name}"))
        packages = gate.admitted(source, hashes.get, LARGEST.get(self.host), hashes.keys())
        missing = sorted(packages.keys() - hashes.keys())
        # the uploader holds the GIL, so no handler could run: let Ctrl-C end the process
        handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            for name in missing:
                self._upload(source.path(packages[name]), os.environ.get(variable) or None)
        except Exception as error:  # RattlerBuildError, and what its client raises
            raise BuildFailed(
                f"{name} was not uploaded: {error}. Check {variable} or pixi auth "
                "login, then publish again to upload the rest"
            ) from None
        finally:
            signal.signal(signal.SIGINT, handler)
        return len(missing), len(hashes) + len(missing)

    def _upload(self, package: Path, key: str | None) -> None:
        files, url = [str(package)], f"https://{self.host}"
        if self.host == "anaconda.org":
            upload_package_to_anaconda(files, self.name, channel=["main"], api_key=key)
        else:  # a Sigstore attestation needs the identity of trusted publishing: no API key
            attest = key is None and IDENTITY in os.environ
            upload_package_to_prefix(
                files, url, self.name, api_key=key, generate_attestation=attest
            )


def destination(to: str) -> Path | ServerChannel:
    """What `--to` names: a folder, or a channel on a server.

    Raises ForgeError for any other URL, and for one that carries a credential.
    """
    refuse_credentials(to)
    scheme, host, path = urlsplit(to)[:3]
    if scheme == "https" and host in SERVERS and re.fullmatch(r"/[^/]+/?", path):
        return ServerChannel(host, path.strip("/"))
    if scheme in ("", "file") and (folder := Location(to).folder):
        return folder
    raise ForgeError(
        f"--to {to} is not {FORMS}. For S3, publish to a folder and copy that with aws s3 sync, "
        "index files last (docs/publishing.md)"
    )
