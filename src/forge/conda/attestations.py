# SPDX-License-Identifier: BSD-3-Clause
"""Who made what a channel serves: Sigstore attestations (CEP 27) that its index names (CEP 50).

A manifest declares who publishes a channel, [tool.strix-forge.publishers."CHANNEL"]. All that it
serves must then be attested, so that taking an attestation away is no way around it.
"""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import msgpack
import rattler
import zstandard
from rattler import PackageRecord, RepoDataRecord

from forge import network
from forge.conda.index import SHARDS, parse, records
from forge.conda.package import cache_folder, scratch
from forge.errors import ForgeError, NotAttempted, Refused, one_line
from forge.files import require_file
from forge.project import SUBDIRS

BUNDLE = ".sigstore.json"  # beside a package, or the log: what its attestation was written to
LOG = "log-1-0.conda"  # what the log is called in its attestation: rattler takes packages alone
FIELD = "attestations_sha256"  # of a record; the bundles lie at the package's URL + .sigs.SHA256


@dataclass(frozen=True)
class Publisher:
    """Who may attest the packages of a channel.

    `identity` is the workflow in the certificate, `target` the channel in the statement.
    `trusted_root` is a trusted_root.json; by default the public Sigstore's, fetched by TUF. With
    `log_days` the channel's log must be attested as well, and again after so many days.
    """

    identity: str
    target: str
    issuer: str = "https://token.actions.githubusercontent.com"
    trusted_root: str = ""
    log_days: int = 0

    def require_log(self, where: str, log: bytes, bundle: bytes) -> None:
        """Raise Refused for a log that is not attested by the bundle, or not of late."""
        with scratch(cache_folder()) as folder:
            index, bundles = Path(folder, "index.json"), b"[%s]" % bundle
            words = {"name": "log", "version": "1", "build": "0", "build_number": 0}
            index.write_text(json.dumps(words | {"subdir": "noarch", "depends": []}))
            record = PackageRecord.from_index_json(index, sha256=sha256(log).hexdigest())
            url = Path(folder, LOG).as_uri()
            entry = RepoDataRecord(record, LOG, url, url)
            entry.attestations_sha256 = (digest := sha256(bundles)).digest()
            Path(folder, f"{LOG}.sigs.{digest.hexdigest()}").write_bytes(bundles)
            self.require([entry], where)

    def require(self, packages: Iterable[RepoDataRecord], log: str = "") -> None:
        """Raise Refused for the first (or the log there) not attested; NotAttempted if too old."""
        if not hasattr(rattler, "verify_attestation"):
            raise NotAttempted("attestations need py-rattler 0.28: use FORGE_NO_PIXI=1 ./forge")
        require_file(Path(self.trusted_root))
        try:
            policy = rattler.VerificationPolicy.require(
                rattler.Publisher(self.identity, rattler.Issuer(self.issuer)),
                # rattler compares with the address in use, which may be that of a copy
                channel_check=rattler.ChannelCheck.IGNORE,
            )
            root = rattler.TrustedRoot.from_path(self.trusted_root) if self.trusted_root else None
        except ValueError as error:
            raise ForgeError(f"issuer {self.issuer!r:.99}, {self.trusted_root}: {error}") from None

        async def check(package: RepoDataRecord) -> None:
            try:
                client = network.for_indexes()
                found = await rattler.verify_attestation(package, policy, client, root)
                made = found.attestation
                target = (made and made.target_channel) or "no channel"
                if target.rstrip("/") != self.target.rstrip("/"):
                    raise ForgeError(f"attested for {target}, not for {self.target}")
                when = (made and (made.integrated_time or made.signed_at)) or "2000-01-01T00:00Z"
                age = datetime.now(UTC) - datetime.fromisoformat(when)
                if log and age > timedelta(self.log_days):
                    raise ForgeError(f"on {when:.10}, more than {self.log_days} days ago")
            except Exception as error:  # AttestationError is nowhere to be imported from
                why = f"is not attested by {self.identity}: {one_line(str(error))}"
                advice = "Nothing is installed; tell the channel's owner"
                raise Refused(f"{log or package.url} {why}. {advice}") from None

        for package in packages:
            asyncio.run(check(package))


def sidecar(package: Path) -> dict[str, str]:
    """Return what to publish beside a package, by name: its bundle in a list, if it has one."""
    path = package.with_name(package.name + BUNDLE)
    if not path.exists():
        return {}
    try:
        bundle = json.loads(path.read_bytes())
        _ = bundle["dsseEnvelope"]  # a signature of a file alone has none
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ForgeError(f"{path} is not a Sigstore bundle with an attestation") from None
    content = json.dumps([bundle])
    return {f"{package.name}.sigs.{sha256(content.encode()).hexdigest()}": content}


def advertise(staged: Path, published: Path) -> None:
    """Name the published sidecars in a staged index: rattler's indexer does not know the field."""
    for subdir in SUBDIRS:
        found = (path.name.rpartition(".sigs.") for path in (published / subdir).glob("*.sigs.*"))
        known = {package: digest for package, _, digest in found}
        if not known:
            continue
        folder = staged / subdir
        data = parse("repodata.json", (folder / "repodata.json").read_bytes())
        for file in known.keys() & records(data).keys():
            records(data)[file][FIELD] = known[file]
        text = json.dumps(data).encode()
        (folder / "repodata.json").write_bytes(text)
        (folder / "repodata.json.zst").write_bytes(zstandard.compress(text))
        index = parse(SHARDS, (folder / SHARDS).read_bytes())
        for package, digest in index["shards"].items():
            shard = folder / "shards" / f"{digest.hex()}.msgpack.zst"
            data = parse(shard.name, shard.read_bytes())
            for file in known.keys() & records(data).keys():
                records(data)[file][FIELD] = bytes.fromhex(known[file])
            packed = zstandard.compress(msgpack.packb(data, datetime=True))
            shard.unlink()
            index["shards"][package] = name = sha256(packed).digest()
            shard.with_name(f"{name.hex()}.msgpack.zst").write_bytes(packed)
        (folder / SHARDS).write_bytes(zstandard.compress(msgpack.packb(index, datetime=True)))
