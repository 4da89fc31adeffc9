# SPDX-License-Identifier: BSD-3-Clause
"""A Sigstore of the tests' own: a certificate authority, both logs, and what they sign.

Nothing here is reached over a network. The formats are those of sigstore/protobuf-specs
(bundle v0.3, trusted root v0.1), RFC 6962 (timestamps of certificates) and C2SP tlog-checkpoint.
"""

import base64
import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

ISSUER = "https://token.actions.githubusercontent.com"
PUBLISHED = "https://schemas.conda.org/attestations-publish-1.schema.json"  # CEP 27
_ORIGIN = "rekor.test"
_START = datetime(2026, 1, 1, tzinfo=UTC)
_SIGNED = _START + timedelta(days=1)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class _Key:
    """An ECDSA key on P-256."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.public = self._key.public_key()
        self.der = self.public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.id = hashlib.sha256(self.der).digest()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data, ec.ECDSA(SHA256()))

    def certify(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        return builder.sign(self._key, SHA256())


def _builder(subject: str, issuer: str, key: _Key, days: int) -> x509.CertificateBuilder:
    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])

    return (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_SIGNED - timedelta(days=days))
        .not_valid_after(_SIGNED + timedelta(days=days))
    )


class Sigstore:
    """Signs attestations as Fulcio and Rekor would; `trusted_root` makes a client believe it."""

    def __init__(self) -> None:
        self._authority, self._ctlog, self._rekor = _Key(), _Key(), _Key()
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._root = self._authority.certify(
            _builder("authority", "authority", self._authority, 400)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._subject_id(), critical=False)
        )

    def _subject_id(self) -> x509.SubjectKeyIdentifier:
        return x509.SubjectKeyIdentifier.from_public_key(self._authority.public)

    @property
    def trusted_root(self) -> str:
        """What a client trusts, as the text of a trusted_root.json."""
        valid = {"start": _START.isoformat().replace("+00:00", "Z")}

        def log(key: _Key, url: str) -> dict[str, Any]:
            public = {"rawBytes": _b64(key.der), "keyDetails": "PKIX_ECDSA_P256_SHA_256"}
            return {
                "baseUrl": url, "hashAlgorithm": "SHA2_256",
                "publicKey": public | {"validFor": valid}, "logId": {"keyId": _b64(key.id)},
            }  # fmt: skip

        der = self._root.public_bytes(Encoding.DER)
        authority = {
            "subject": {"organization": "tests", "commonName": "authority"},
            "uri": "https://fulcio.test", "validFor": {"start": "2025-01-01T00:00:00Z"},
            "certChain": {"certificates": [{"rawBytes": _b64(der)}]},
        }  # fmt: skip
        return json.dumps({
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self._rekor, f"https://{_ORIGIN}")],
            "ctlogs": [log(self._ctlog, "https://ctlog.test")],
            "certificateAuthorities": [authority], "timestampAuthorities": [],
        })  # fmt: skip

    def attest(self, name: str, sha256: str, channel: str, identity: str) -> dict[str, Any]:
        """The bundle of one package file, signed by the workflow `identity` for `channel`."""
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": name, "digest": {"sha256": sha256}}],
            "predicateType": PUBLISHED, "predicate": {"targetChannel": channel},
        }  # fmt: skip
        payload, kind = json.dumps(statement).encode(), "application/vnd.in-toto+json"
        key = _Key()
        certificate = self._certificate(key, identity)
        header = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode()
        signature = key.sign(header + payload)
        envelope = {
            "payload": _b64(payload), "payloadType": kind,
            "signatures": [{"sig": _b64(signature)}],
        }  # fmt: skip
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": _b64(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [self._entry(envelope, payload, certificate)],
            },
            "dsseEnvelope": envelope,
        }

    def _certificate(self, key: _Key, identity: str) -> x509.Certificate:
        """A certificate for a workflow, with the timestamp of the log of certificates in it."""
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        fulcio = ObjectIdentifier("1.3.6.1.4.1.57264.1.8")  # the issuer, as a UTF8String
        builder = (
            _builder("", "authority", key, 1)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.public), False
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]), True
            )
            .add_extension(
                x509.UnrecognizedExtension(fulcio, _tagged(0x0C, ISSUER.encode())), False
            )
        )
        signed = self._authority.certify(builder).tbs_certificate_bytes
        stamp = int(_SIGNED.timestamp() * 1000).to_bytes(8, "big")
        entry = b"\0\1" + self._authority.id + len(signed).to_bytes(3, "big") + signed
        signature = self._ctlog.sign(b"\0\0" + stamp + entry + b"\0\0")
        sct = b"\0" + self._ctlog.id + stamp + b"\0\0" + b"\4\3" + _sized(signature)
        listed = _tagged(0x04, _sized(_sized(sct)))
        embedded = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
        return self._authority.certify(
            builder.add_extension(x509.UnrecognizedExtension(embedded, listed), critical=False)
        )

    def _entry(
        self, envelope: dict[str, Any], payload: bytes, certificate: x509.Certificate
    ) -> dict[str, Any]:
        """The entry of the log of signatures: the only one, so its hash is the tree's root."""
        canonical = json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode()
        digests = {"envelopeHash": canonical, "payloadHash": payload}
        spec: dict[str, Any] = {
            name: {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}
            for name, data in digests.items()
        }
        verifier = _b64(certificate.public_bytes(Encoding.PEM))
        signature = envelope["signatures"][0]["sig"]
        spec["signatures"] = [{"signature": signature, "verifier": verifier}]
        body = json.dumps(
            {"apiVersion": "0.0.1", "kind": "dsse", "spec": spec},
            sort_keys=True, separators=(",", ":"),
        ).encode()  # fmt: skip
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"{_ORIGIN}\n1\n{_b64(root)}\n".encode()
        mark = _b64(self._rekor.id[:4] + self._rekor.sign(note))
        time = int(_SIGNED.timestamp())
        promise = {
            "body": _b64(body), "integratedTime": time,
            "logID": self._rekor.id.hex(), "logIndex": 0,
        }  # fmt: skip
        promised = json.dumps(promise, sort_keys=True, separators=(",", ":")).encode()
        return {
            "logIndex": "0", "logId": {"keyId": _b64(self._rekor.id)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"}, "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": _b64(self._rekor.sign(promised))},
            "inclusionProof": {
                "logIndex": "0", "rootHash": _b64(root), "treeSize": "1", "hashes": [],
                "checkpoint": {"envelope": note.decode() + f"\n\u2014 {_ORIGIN} {mark}\n"},
            },
            "canonicalizedBody": _b64(body),
        }  # fmt: skip


def _sized(data: bytes) -> bytes:
    """TLS: two bytes of length first."""
    return len(data).to_bytes(2, "big") + data


def _tagged(tag: int, data: bytes) -> bytes:
    """DER, of at most 255 bytes."""
    return bytes([tag, *([0x81] if len(data) > 127 else []), len(data)]) + data
