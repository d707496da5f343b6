"""Access tokens: signed JWTs (RFC 7515, 7517, 7519), and which of their claims are believed.

The one idea: nothing in a token counts before its signature does. The expected signature is built whole and compared,
never taken apart, because a padding that is parsed can be forged.

RS256, RS384 and RS512 are supported (RFC 7518, 3.3), because they need no more than `pow`. Mirrors upstream's
ValidatorAccessTokenValidator, and from jose4j beneath it the set of required claims. It does no I/O.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

MAX_TOKEN_BYTES = 16 * 1024
MIN_MODULUS_BITS, MAX_MODULUS_BITS = 2048, 8192
MAX_EXPONENT_BITS = 32
MAX_KEYS = 100
"""Maximal number of keys read from a set; further keys are ignored."""
MAX_SECONDS = 2**40
"""Latest time that a token may name."""
MAX_SHOWN = 100
_SPACES = "".join(map(chr, range(1, 33)))
"""Characters that upstream removes around a principal's name (Java's `trim`). Python's `strip` removes more, and two
users of an issuer would become one."""

_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")
_HASHES: Mapping[str, tuple[str, bytes]] = {
    "RS256": ("sha256", bytes.fromhex("3031300d060960864801650304020105000420")),
    "RS384": ("sha384", bytes.fromhex("3041300d060960864801650304020205000430")),
    "RS512": ("sha512", bytes.fromhex("3051300d060960864801650304020305000440")),
}
"""The hash and its DigestInfo prefix (RFC 8017, 9.2), by `alg`."""


class TokenError(Exception):
    """A token that is not believed. The text is for our log: it holds a key's id or a reason, never a secret."""

    def __init__(self, reason: str, subject: str = "") -> None:
        super().__init__(reason)
        self.subject = subject
        """Subject that a signed token names; empty if the token is unsigned or names no subject."""


class UnknownKeyError(TokenError):
    """No key of the set fits; a newer set may exist."""


@dataclass(frozen=True, slots=True)
class RsaKey:
    kid: str | None
    algorithm: str | None
    """The only algorithm that the key is for; None: any."""
    modulus: int
    exponent: int

    @property
    def size_bytes(self) -> int:
        return (self.modulus.bit_length() + 7) // 8


@dataclass(frozen=True, slots=True)
class Expected:
    """Claims that a token must have. Empty `audiences`: the token must not name any; `issuer` None: any issuer."""

    audiences: frozenset[str]
    issuer: str | None
    clock_skew_s: int
    scope_claim: str
    subject_claim: str


@dataclass(frozen=True, slots=True)
class AccessToken:
    subject: str
    expires_s: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A token split into its parts, none of them verified."""

    algorithm: str
    kid: str | None
    signed: bytes
    signature: bytes
    payload: bytes


# --- keys -------------------------------------------------------------------------------------------------------------


def parse_keys(document: bytes) -> Sequence[RsaKey]:
    """Return the supported signature keys of a JWK set, in its order. Raise ValueError if the document is not a JWK
    set."""
    keys: object = _object(document).get("keys")
    if not isinstance(keys, list):
        raise ValueError("there are no keys in it")
    found: list[RsaKey] = []
    for each in cast("list[object]", keys)[:MAX_KEYS]:
        key = _key(cast("dict[str, object]", each)) if isinstance(each, dict) else None
        if key is not None:
            found.append(key)
    return found


def _key(key: Mapping[str, object]) -> RsaKey | None:
    """Return the key; None if it is of another kind or for another use, or too weak or too large to be used."""
    kid, algorithm, n, e = (key.get(name) for name in ("kid", "alg", "n", "e"))
    operations = key.get("key_ops")
    if key.get("kty") != "RSA" or key.get("use", "sig") != "sig" or not isinstance(kid, str | None):
        return None
    if operations is not None and not (isinstance(operations, list) and "verify" in operations):
        return None
    if not (algorithm is None or (isinstance(algorithm, str) and algorithm in _HASHES)):
        return None
    if not (isinstance(n, str) and isinstance(e, str)):
        return None
    try:
        modulus, exponent = (int.from_bytes(decode_base64url(text), "big") for text in (n, e))
    except ValueError:
        return None
    if not MIN_MODULUS_BITS <= modulus.bit_length() <= MAX_MODULUS_BITS or not modulus & 1:
        return None
    if exponent < 3 or not exponent & 1 or exponent.bit_length() > MAX_EXPONENT_BITS:
        return None
    return RsaKey(kid, algorithm, modulus, exponent)


# --- signatures -------------------------------------------------------------------------------------------------------


def parse_token(token: str) -> Signed:
    """Split a token into its parts. Raise TokenError."""
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenError(f"a token of {len(token)} bytes")
    parts = token.split(".")
    if len(parts) != 3:
        raise TokenError("not a signed JWT in its compact form")
    try:
        head, payload, signature = (decode_base64url(part) for part in parts)
        header = _object(head)
    except ValueError as error:
        raise TokenError(f"malformed: {error}") from None
    algorithm, kid = header.get("alg"), header.get("kid")
    if not (isinstance(algorithm, str) and algorithm in _HASHES):
        raise TokenError(f"its signature's algorithm is not accepted: {_shown(algorithm)}")
    if "crit" in header:
        raise TokenError("its header demands an unknown extension (crit)")
    if not isinstance(kid, str | None):
        raise TokenError("its kid is not a string")
    return Signed(algorithm, kid, f"{parts[0]}.{parts[1]}".encode(), signature, payload)


def find_key(token: Signed, keys: Sequence[RsaKey]) -> RsaKey:
    """Return the key that the token names as its signer; if the token names none, the only key of the set. Raise
    UnknownKeyError."""
    fitting = [
        key for key in keys if key.algorithm in (None, token.algorithm) and (token.kid is None or key.kid == token.kid)
    ]
    if len(fitting) != 1:
        raise UnknownKeyError(f"{len(fitting)} keys for {token.algorithm} and kid {_shown(token.kid)}")
    return fitting[0]


def verify(token: Signed, key: RsaKey) -> None:
    """Verify the signature by RSASSA-PKCS1-v1_5 (RFC 8017, 8.2.2). Raise TokenError."""
    hash_name, digest_info = _HASHES[token.algorithm]
    digest = digest_info + hashlib.new(hash_name, token.signed).digest()
    signature = int.from_bytes(token.signature, "big")
    if len(token.signature) != key.size_bytes or signature >= key.modulus:
        raise TokenError(f"its signature does not match the key {_shown(key.kid)}")
    padded = b"\0\1" + b"\xff" * (key.size_bytes - len(digest) - 3) + b"\0" + digest
    found = pow(signature, key.exponent, key.modulus).to_bytes(key.size_bytes, "big")
    if not hmac.compare_digest(found, padded):
        raise TokenError(f"its signature does not match the key {_shown(key.kid)}")


# --- claims -----------------------------------------------------------------------------------------------------------


def check_claims(token: Signed, expected: Expected, now_s: float, nonce: str | None = None) -> AccessToken:
    """Check and return the claims of a token whose signature has been verified. Raise TokenError.

    With `nonce` the token is an ID token: it must repeat the nonce, and no other party may have asked for it (OpenID
    Connect Core 1.0, 3.1.3.7).
    """
    try:
        claims = _object(token.payload)
    except ValueError as error:
        raise TokenError(f"malformed claims: {error}") from None
    subject = _text(claims, expected.subject_claim)
    try:
        expires_s = _check_times(claims, expected.clock_skew_s, now_s)
        _check_parties(claims, expected)
        _check_scopes(claims.get(expected.scope_claim), expected.scope_claim)
        if nonce is not None:
            _check_login(claims, expected, nonce)
    except TokenError as error:
        raise TokenError(str(error), subject) from None
    return AccessToken(subject, expires_s)


def _check_times(claims: Mapping[str, object], clock_skew_s: int, now_s: float) -> float:
    """Return when the token expires."""
    expires_s, issued_s, begins_s = (_seconds(claims, name) for name in ("exp", "iat", "nbf"))
    if expires_s is None or issued_s is None:
        raise TokenError(f"it has no {'exp' if expires_s is None else 'iat'}")
    if now_s - clock_skew_s >= expires_s:
        raise TokenError("it has expired")
    if begins_s is not None and now_s + clock_skew_s < begins_s:
        raise TokenError("it is not valid yet")
    if expires_s < issued_s or (begins_s is not None and expires_s < begins_s):
        raise TokenError("it expires before it is valid")
    return expires_s


def _check_parties(claims: Mapping[str, object], expected: Expected) -> None:
    if expected.issuer is not None and claims.get("iss") != expected.issuer:
        raise TokenError("its issuer is not ours")
    found = claims.get("aud")
    audiences = cast("list[object]", found) if isinstance(found, list) else [] if found is None else [found]
    texts = {each for each in audiences if isinstance(each, str)}
    if (audiences or expected.audiences) and not texts & expected.audiences:
        raise TokenError("it is for another audience")


def _check_login(claims: Mapping[str, object], expected: Expected, nonce: str) -> None:
    found, party = claims.get("nonce"), claims.get("azp")
    if not isinstance(found, str) or not hmac.compare_digest(found.encode("utf-8", "replace"), nonce.encode()):
        raise TokenError("its nonce is not that of the login")
    if party is not None and party not in expected.audiences:
        raise TokenError("another party asked for it (azp)")


def _check_scopes(found: object, name: str) -> None:
    scopes = cast("list[object]", found) if isinstance(found, list) else [found] if isinstance(found, str) else []
    texts = [each.strip() for each in scopes if isinstance(each, str)]
    if len(texts) != len(scopes) or not all(texts) or len(set(texts)) != len(texts):
        raise TokenError(f"its {_shown(name)} are not a list of scopes")


def _text(claims: Mapping[str, object], name: str) -> str:
    found = claims.get(name)
    text = found.strip(_SPACES) if isinstance(found, str) else ""
    if not text or "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise TokenError(f"it names no principal: {_shown(name)} is missing or not a name")
    return text


def _seconds(claims: Mapping[str, object], name: str) -> float | None:
    found = claims.get(name)
    if found is None:
        return None
    # bool is a subclass of int.
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= MAX_SECONDS:
        raise TokenError(f"its {name} is not a time")
    return found


# --- encodings --------------------------------------------------------------------------------------------------------


def decode_base64url(text: str) -> bytes:
    """Decode unpadded text in the one canonical form of its bytes. Raise ValueError for any other text."""
    if _BASE64URL.fullmatch(text) is None or len(text) % 4 == 1:
        raise ValueError("not base64url")
    found = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if base64.urlsafe_b64encode(found).rstrip(b"=") != text.encode():
        raise ValueError("not base64url")
    return found


def _object(document: bytes) -> dict[str, object]:
    """Parse a JSON object that has no name twice. Raise ValueError for any other document."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name twice")
        return made

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        found: object = json.loads(document.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError:
        # The exception's text shows nothing of the document, but its object holds all of it.
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("JSON too deep") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return cast("dict[str, object]", found)


def _shown(value: object) -> str:
    return repr(value[:MAX_SHOWN] if isinstance(value, str) else None)
