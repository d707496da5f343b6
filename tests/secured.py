"""Gateways that require authentication, and the client's side of SASL, implemented here."""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.wire import WireClient

USERS = {"alice": "alice-secret", "bob": 'bob "quoted"; secret'}
AUTHORIZER = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}
"""Settings of a gateway that checks ACLs."""
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True)
class Secured:
    gateway: GatewayProcess
    open: str
    """Address of the listener without authentication."""
    sasl: str


def jaas() -> str:
    escaped = {user: password.replace("\\", "\\\\").replace('"', '\\"') for user, password in USERS.items()}
    users = " ".join(f'user_{user}="{password}"' for user, password in escaped.items())
    return f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"


def start_secured(factory: GatewayFactory, more: dict[str, str] | None = None, **given: Any) -> Secured:
    first, second = free_ports(2)
    settings = {
        "listeners": f"OPEN://127.0.0.1:{first},ASKING://127.0.0.1:{second}",
        "listener.security.protocol.map": "OPEN:PLAINTEXT,ASKING:SASL_PLAINTEXT",
        "listener.name.asking.sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "listener.name.asking.plain.sasl.jaas.config": jaas(),
        "group.initial.rebalance.delay.ms": "0",
    }
    gateway = factory(settings={**settings, **(more or {})}, **given)
    return Secured(gateway, f"127.0.0.1:{first}", f"127.0.0.1:{second}")


class Authority:
    """Makes certificates with OpenSSL, in a directory of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self.certificate, self._key = directory / f"{name}.crt", directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def issue(
        self, subject: str, *, password: str | None = None, days: int = 2, names: tuple[str, ...] = ("localhost",)
    ) -> Certificate:
        """Issue a certificate for `names`. With -1 days it is already expired. `subject` is written as in OpenSSL:
        /CN=..., the most significant part first.
        """
        stem = self._directory / f"issued-{len(list(self._directory.iterdir()))}"
        key, request, certificate, whole = (stem.with_suffix(f".{end}") for end in ("key", "csr", "crt", "pem"))
        extensions = stem.with_suffix(".ext")
        hosts = ",".join(f"DNS:{name}" for name in names)
        extensions.write_text(f"subjectAltName={hosts},IP:127.0.0.1\n")
        secret = ("-nodes",) if password is None else ("-passout", f"pass:{password}")
        _openssl(
            *("req", "-newkey", "rsa:2048", "-utf8", "-subj", subject, *secret),
            *("-keyout", str(key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", str(days), "-extfile", str(extensions), "-out", str(certificate)),
        )
        whole.write_text(key.read_text() + certificate.read_text())
        return Certificate(key, certificate, whole)


@dataclass(frozen=True)
class Certificate:
    key: Path
    certificate: Path
    whole: Path
    """File that contains both the certificate and the key."""


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


def plain_token(user: str, password: str, authorization_id: str = "") -> bytes:
    return f"{authorization_id}\0{user}\0{password}".encode()


async def authenticate(client: WireClient, token: bytes, *, mechanism: str = "PLAIN", version: int = 2) -> Any:
    """Send the token, and return the answer."""
    answer = await client.send(SaslHandshakeRequest(mechanism=mechanism), 1)
    assert answer.error_code == 0, answer
    return await client.send(SaslAuthenticateRequest(auth_bytes=token), version)


class ScramClient:
    """The client's side of SCRAM (RFC 5802)."""

    def __init__(
        self, hash_name: str, user: str, password: str, nonce: str = "client-nonce", *, extensions: str = ""
    ) -> None:
        """`extensions` are written as in the protocol: `,tokenauth=true`."""
        self._hash, self._password, self._nonce = hash_name, password, nonce
        name = user.replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={name},r={nonce}{extensions}"
        self.first = f"n,,{self._bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        fields = dict(part.split("=", 1) for part in server_first.decode().split(","))
        assert fields["r"].startswith(self._nonce)
        assert len(fields["r"]) > len(self._nonce) + 16
        salt, iterations = base64.b64decode(fields["s"]), int(fields["i"])
        salted = hashlib.pbkdf2_hmac(self._hash, self._password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._hash)
        stored_key = hashlib.new(self._hash, client_key).digest()
        without_proof = f"c=biws,r={fields['r']}"
        signed = f"{self._bare},{server_first.decode()},{without_proof}".encode()
        signature = hmac.digest(stored_key, signed, self._hash)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        server_key = hmac.digest(salted, b"Server Key", self._hash)
        self.expected = b"v=" + base64.b64encode(hmac.digest(server_key, signed, self._hash))
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()
