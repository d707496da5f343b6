"""Gateways whose clients must say who they are, and the client's side of SASL by hand."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.wire import WireClient

USERS = {"alice": "alice-secret", "bob": 'bob "quoted"; secret'}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True)
class Secured:
    gateway: GatewayProcess
    open: str
    """Where nobody is asked."""
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


def plain_token(user: str, password: str, authorization_id: str = "") -> bytes:
    return f"{authorization_id}\0{user}\0{password}".encode()


async def authenticate(client: WireClient, token: bytes, *, mechanism: str = "PLAIN", version: int = 2) -> Any:
    """The answer to the token."""
    answer = await client.send(SaslHandshakeRequest(mechanism=mechanism), 1)
    assert answer.error_code == 0, answer
    return await client.send(SaslAuthenticateRequest(auth_bytes=token), version)


class ScramClient:
    """RFC 5802, the client's side."""

    def __init__(self, hash_name: str, user: str, password: str, nonce: str = "client-nonce") -> None:
        self._hash, self._password, self._nonce = hash_name, password, nonce
        name = user.replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={name},r={nonce}"
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
