"""SCRAM (RFC 5802, RFC 7677) as Kafka speaks it: messages, keys, and one exchange seen from the server.

The one idea: the server holds no password. For each user it stores a salt, a number of iterations and two keys. With
these it verifies that the client knows the password, and proves to the client that it knows the keys.

As upstream: passwords and names are read as UTF-8 without SASLprep, channel binding is not supported, and `tokenauth`
is the only extension that is read (KIP-48). It does no I/O.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.types import ScramCredential

MIN_ITERATIONS, MAX_ITERATIONS = 4096, 16384
"""Upstream's bounds, for both mechanisms."""
DEFAULT_ITERATIONS = 4096
MAX_MESSAGE_BYTES = 16 * 1024
"""Largest message of a client; no client sends more."""
SALT_BYTES = NONCE_BYTES = 24
TOKEN_AUTH = "tokenauth"


class ScramMechanism(IntEnum):
    """The mechanisms, with Kafka's numbers (KIP-554)."""

    SHA_256 = 1
    SHA_512 = 2

    @property
    def mechanism(self) -> str:
        """Name of the mechanism in SASL."""
        return f"SCRAM-{self.name.replace('_', '-')}"

    @property
    def hash_name(self) -> str:
        return self.name.replace("_", "").lower()


MECHANISMS = {each.mechanism: each for each in ScramMechanism}


class ScramError(Exception):
    """The exchange has failed; the text is for our log, never for the client."""


# --- keys -------------------------------------------------------------------------------------------------------------


def salted_password(mechanism: ScramMechanism, password: str, salt: bytes, iterations: int) -> bytes:
    """Derive the salted password. This takes milliseconds of processor time, by design, without the interpreter's
    lock."""
    return hashlib.pbkdf2_hmac(mechanism.hash_name, password.encode(), salt, iterations)


def credential(user: str, mechanism: ScramMechanism, salted: bytes, salt: bytes, iterations: int) -> ScramCredential:
    """Return the credential to store for a salted password."""
    from storage.types import ScramCredential  # commands do not need it

    stored_key = hashlib.new(mechanism.hash_name, _mac(mechanism, salted, b"Client Key")).digest()
    return ScramCredential(user, int(mechanism), iterations, salt, stored_key, _mac(mechanism, salted, b"Server Key"))


def decoy(user: str, mechanism: ScramMechanism, secret: bytes) -> ScramCredential:
    """Return a credential for a user that does not exist. It is the same at each call, and no password matches it."""
    from storage.types import ScramCredential

    def derived(what: str) -> bytes:
        return hmac.digest(secret, f"{what} {int(mechanism)} {user}".encode("utf-8", "surrogatepass"), "sha512")

    size_bytes = hashlib.new(mechanism.hash_name).digest_size
    stored_key, server_key = derived("stored key")[:size_bytes], derived("server key")[:size_bytes]
    return ScramCredential(
        user, int(mechanism), DEFAULT_ITERATIONS, derived("salt")[:SALT_BYTES], stored_key, server_key
    )


def _mac(mechanism: ScramMechanism, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, mechanism.hash_name)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


# --- messages ---------------------------------------------------------------------------------------------------------

_SASL_NAME = r"(?:[\x01-\x2b\x2d-\x3c\x3e-\x7f]|=2C|=3D)+"
_VALUE = r"[\x01-\x2b\x2d-\x7f]+"
_NONCE = r"[\x21-\x2b\x2d-\x7e]+"
BASE64 = r"(?:[a-zA-Z0-9/+]{4})*(?:[a-zA-Z0-9/+]{3}=|[a-zA-Z0-9/+]{2}==)?"
_CLIENT_FIRST = re.compile(
    rf"n,(?:a=(?P<authorization_id>{_SASL_NAME}))?,"
    rf"(?P<bare>(?P<mandatory>m={_VALUE},)?n=(?P<name>{_SASL_NAME}),r=(?P<nonce>{_NONCE})(?P<extensions>(?:,[A-Za-z]+={_VALUE})*))",
    re.DOTALL,
)
_CLIENT_FINAL = re.compile(
    rf"(?P<without_proof>c=(?P<binding>{BASE64}),r=(?P<nonce>{_NONCE})(?:,[A-Za-z]+={_VALUE})*),p=(?P<proof>{BASE64})",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ClientFirst:
    name: str
    authorization_id: str
    """Authorization id as the client sent it; empty if the client asks for none."""
    nonce: str
    bare: str
    """The message without its head: the part that is signed."""
    by_token: bool = False
    """True if the name is a delegation token's id, and the password its secret."""


def parse_client_first(message: bytes) -> ClientFirst:
    found = _CLIENT_FIRST.fullmatch(_text(message))
    if found is None:
        raise ScramError("the client's first message is malformed")
    if found["mandatory"]:
        # RFC 5802, 5.1. Kafka omits the extension from the text it signs, so no proof would match.
        raise ScramError("the client demands an extension (m=) that no server knows")
    name = found["name"].replace("=2C", ",").replace("=3D", "=")
    extensions = dict(part.split("=", 1) for part in found["extensions"].split(",")[1:])
    by_token = extensions.get(TOKEN_AUTH, "").lower() == "true"
    return ClientFirst(name, found["authorization_id"] or "", found["nonce"], found["bare"], by_token)


def _text(message: bytes) -> str:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ScramError(f"a message of {len(message)} bytes")
    return message.decode("utf-8", "replace")


class ScramServer:
    """One exchange, begun with the client's first message and its user's credential; `finish` reads the last
    message."""

    def __init__(self, first: ClientFirst, known: ScramCredential) -> None:
        self._mechanism = ScramMechanism(known.mechanism)
        self._known = known
        self._client_nonce = first.nonce
        self._nonce = first.nonce + base64.b64encode(secrets.token_bytes(NONCE_BYTES)).decode()
        salt = base64.b64encode(known.salt).decode()
        self.first = f"r={self._nonce},s={salt},i={known.iterations}".encode()
        """The server's first message."""
        self._signed = f"{first.bare},{self.first.decode()},"

    def finish(self, message: bytes) -> bytes:
        """Return the server's last message. Raise ScramError if the client has not proved that it knows the
        password."""
        found = _CLIENT_FINAL.fullmatch(_text(message))
        if found is None:
            raise ScramError("the client's final message is malformed")
        if found["nonce"] == self._client_nonce + self._nonce:
            raise ScramError(
                "the client repeats its own nonce, as librdkafka before 2.6.1 does, which servers with the fix of "
                "CVE-2024-56128 refuse: upgrade the client, or use PLAIN over TLS"
            )
        if found["nonce"] != self._nonce:
            raise ScramError("the client's final message has another nonce")
        signed = (self._signed + found["without_proof"]).encode()
        proof, known = base64.b64decode(found["proof"]), self._known
        signature = _mac(self._mechanism, known.stored_key, signed)
        if len(proof) != len(signature):
            raise ScramError("the client's proof is of another length")
        proven = hashlib.new(self._mechanism.hash_name, _xor(proof, signature)).digest()
        if not hmac.compare_digest(proven, known.stored_key):
            raise ScramError("wrong password, or no such user")
        return b"v=" + base64.b64encode(_mac(self._mechanism, known.server_key, signed))
