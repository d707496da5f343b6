"""Which access tokens are accepted. Forged, foreign, expired and malformed tokens are not."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config.security import OAuthSettings
from gateway.security.jwks import UNKNOWN_KEY_INTERVAL_S, KeysUnavailableError, Tokens
from gateway.security.jwt import (
    AccessToken,
    Expected,
    RsaKey,
    TokenError,
    UnknownKeyError,
    check_claims,
    decode_base64url,
    find_key,
    parse_keys,
    parse_token,
    verify,
)
from tests.tokens import AUDIENCE, ISSUER, Issuer, base64url, key_set, published

EXPECTED = Expected(frozenset({AUDIENCE}), ISSUER, 30, "scope", "sub")
SHA256 = bytes.fromhex("3031300d060960864801650304020105000420")


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("other"), "second")


def check(token: str, *issuers: Issuer, expected: Expected = EXPECTED, now_s: float | None = None) -> AccessToken:
    keys = parse_keys(key_set(*(each.jwk() for each in issuers)))
    parsed = parse_token(token)
    verify(parsed, find_key(parsed, keys))
    return check_claims(parsed, expected, time.time() if now_s is None else now_s)


@pytest.mark.parametrize("algorithm", ["RS256", "RS384", "RS512"])
def test_signature_by_openssl_is_accepted(issuer: Issuer, other: Issuer, algorithm: str) -> None:
    token = issuer.token(header={"alg": algorithm}, sub=" alice ", exp=2_000_000_000.5)
    assert check(token, other, issuer, now_s=1_999_999_999) == AccessToken("alice", 2_000_000_000.5)


def signed_by(token: str, sign: Callable[[bytes], bytes]) -> str:
    signed = token.rpartition(".")[0]
    return f"{signed}.{base64url(sign(signed.encode()))}"


def test_changed_or_foreign_token_is_refused(issuer: Issuer, other: Issuer) -> None:
    token = issuer.token()
    head, payload, signature = token.split(".")
    forged = base64url(decode_base64url(payload).replace(b"alice", b"admin"))
    flipped = bytearray(decode_base64url(signature))
    flipped[-1] ^= 1
    modulus_more = int.from_bytes(decode_base64url(signature), "big") + issuer.modulus
    for wrong in (
        f"{head}.{forged}.{signature}",
        f"{head}.{payload}.{base64url(bytes(flipped))}",
        f"{head}.{payload}.{base64url(bytes(1) + decode_base64url(signature))}",
        f"{head}.{payload}.{base64url(modulus_more.to_bytes(257, 'big'))}",
        f"{head}.{payload}.{base64url(bytes(256))}",
        signed_by(token, other.sign),
        signed_by(token, lambda data: issuer.sign(data, "RS512")),
    ):
        with pytest.raises(TokenError, match="signature does not match"):
            check(wrong, issuer)
    with pytest.raises(UnknownKeyError):
        check(token, other)


def test_signature_has_exactly_one_form(tmp_path: Path) -> None:
    """A signature plus the RSA modulus would also verify. It is refused, even if it has the same length."""
    issuer = Issuer(tmp_path)
    while issuer.modulus > (1 << 2048) * 9 // 10:
        issuer = Issuer(tmp_path)
    for number in itertools.count():
        token = issuer.token(jti=number)
        more = int.from_bytes(decode_base64url(token.rpartition(".")[2]), "big") + issuer.modulus
        check(token, issuer)
        if more < 1 << 2048:
            break
    with pytest.raises(TokenError, match="signature does not match"):
        check(signed_by(token, lambda _: more.to_bytes(256, "big")), issuer)


@pytest.mark.parametrize(
    "padded",
    [
        lambda digest: b"\0\1" + b"\xff" * 8 + b"\0" + SHA256 + digest + b"\1" * (256 - 11 - 51),
        lambda digest: b"\0\1" + b"\1" * 202 + b"\0" + SHA256 + digest,
        lambda digest: b"\0\2" + b"\xff" * 202 + b"\0" + SHA256 + digest,
        lambda digest: b"\0\1" + b"\xff" * (202 + 19) + b"\0" + digest,
        lambda digest: b"\0\1" + b"\xff" * 204 + b"\0" + b"\x30\x2f\x30\x0b" + SHA256[4:15] + SHA256[17:] + digest,
        lambda digest: bytes(256 - 51) + SHA256 + digest,
    ],
    ids=["garbage behind", "other padding", "another block", "no DigestInfo", "no parameters", "nothing before"],
)
def test_invalid_padding_is_refused(issuer: Issuer, padded: Callable[[bytes], bytes]) -> None:
    def forge(data: bytes) -> bytes:
        block = padded(hashlib.sha256(data).digest())
        assert len(block) == 256
        return issuer.sign_raw(block)

    with pytest.raises(TokenError, match="signature does not match"):
        check(signed_by(issuer.token(), forge), issuer)


def test_algorithm_of_the_token_does_not_choose_the_check(issuer: Issuer) -> None:
    secret = json.dumps(issuer.jwk()).encode()
    by_public_key = _with_header(issuer, {"alg": "HS256"})
    by_public_key = signed_by(by_public_key, lambda data: hmac.digest(secret, data, "sha256"))
    for wrong in (by_public_key, *(_with_header(issuer, {"alg": name}) for name in ("none", "None", "rs256", "PS256"))):
        with pytest.raises(TokenError, match="algorithm is not accepted"):
            check(wrong, issuer)
    for header in ({"alg": None}, {"alg": 5}):
        with pytest.raises(TokenError, match="algorithm is not accepted"):
            check(_with_header(issuer, header), issuer)
    with pytest.raises(TokenError, match="demands an unknown extension"):
        check(_with_header(issuer, {"crit": ["b64"]}), issuer)
    token = parse_token(issuer.token())
    with pytest.raises(UnknownKeyError):
        find_key(token, parse_keys(key_set(issuer.jwk(alg="RS512"))))


def _with_header(issuer: Issuer, header: dict[str, Any]) -> str:
    head = {name: value for name, value in {"alg": "RS256", "kid": "first", **header}.items() if value is not None}
    _, payload, _ = issuer.token().split(".")
    return signed_by(f"{base64url(json.dumps(head).encode())}.{payload}.", issuer.sign)


def test_token_without_a_kid_needs_a_single_key(issuer: Issuer, other: Issuer) -> None:
    token = issuer.token(header={"kid": None})
    assert check(token, issuer).subject == "alice"
    with pytest.raises(UnknownKeyError, match="2 keys"):
        check(token, issuer, other)


NOW = 1_900_000_000


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": NOW - 30}, "has expired"),
        ({"exp": None}, "no exp"),
        ({"iat": None}, "no iat"),
        ({"exp": str(NOW + 9)}, "exp is not a time"),
        ({"exp": True}, "exp is not a time"),
        ({"exp": 2**41}, "exp is not a time"),
        ({"exp": 10**400}, "exp is not a time"),
        ({"exp": float("inf")}, "no JSON"),
        ({"iat": -1}, "iat is not a time"),
        ({"nbf": NOW + 31}, "is not valid yet"),
        ({"iat": NOW + 200}, "expires before"),
        ({"aud": "other"}, "another audience"),
        ({"aud": ["other", 5]}, "another audience"),
        ({"aud": None}, "another audience"),
        ({"iss": "https://other"}, "issuer is not ours"),
        ({"iss": None}, "issuer is not ours"),
        ({"sub": None}, "names no principal"),
        ({"sub": " "}, "names no principal"),
        ({"sub": 5}, "names no principal"),
        ({"sub": "a\0b"}, "names no principal"),
        ({"sub": "\ud800"}, "names no principal"),
        ({"scope": ["a", "a"]}, "not a list of scopes"),
        ({"scope": [" "]}, "not a list of scopes"),
        ({"scope": [5]}, "not a list of scopes"),
    ],
)
def test_token_without_a_required_claim_is_refused(issuer: Issuer, claims: dict[str, Any], reason: str) -> None:
    right = {"iat": NOW - 1, "exp": NOW + 100, **claims}
    with pytest.raises(TokenError, match=reason):
        check(issuer.token(**right), issuer, now_s=NOW)


@pytest.mark.parametrize("space", ["\u00a0", "\u0085", "\u2003", "\u3000"])
def test_subject_keeps_spaces_that_java_does_not_trim(issuer: Issuer, space: str) -> None:
    """An issuer tells "alice" from this name. If the space went, its user would be alice."""
    assert check(issuer.token(sub=f"alice{space}"), issuer).subject == f"alice{space}"


def test_token_with_optional_claims_is_accepted(issuer: Issuer) -> None:
    for claims in ({"exp": NOW - 29}, {"nbf": NOW + 30}, {"aud": ["other", AUDIENCE]}, {"scope": None}, {"scope": "a"}):
        right: dict[str, Any] = {"iat": NOW - 100, "exp": NOW + 100, **claims}
        assert check(issuer.token(**right), issuer, now_s=NOW).subject == "alice"
    anybody = Expected(frozenset(), None, 0, "scp", "client")
    assert check(issuer.token(aud=None, client="c"), issuer, expected=anybody).subject == "c"
    with pytest.raises(TokenError, match="another audience"):
        check(issuer.token(client="c"), issuer, expected=anybody)


def test_malformed_token_is_refused(issuer: Issuer) -> None:
    head, payload, signature = issuer.token().split(".")
    twice = base64url(b'{"alg":"RS256","alg":"none"}')
    deep = base64url(b"[" * 9_000)
    last = "B" if head[-1] != "B" else "C"
    for wrong, reason in (
        ("", "compact form"),
        (f"{head}.{payload}", "compact form"),
        (f"{head}.{payload}.{signature}.x", "compact form"),
        (f"{head}.{payload}.", "not base64url"),
        (f"{head}=.{payload}.{signature}", "not base64url"),
        (f"{head}\n.{payload}.{signature}", "not base64url"),
        (f"{twice}.{payload}.{signature}", "a name twice"),
        (f"{deep}.{payload}.{signature}", "too deep|not JSON"),
        (f"{base64url(b'[]')}.{payload}.{signature}", "not a JSON object"),
        (f"{head}.{payload}.{'A' * 16_384}", "a token of"),
        (f"{base64url(bytes([255]))}.{payload}.{signature}", "malformed"),
    ):
        with pytest.raises(TokenError, match=reason):
            check(wrong, issuer)
    with pytest.raises(ValueError, match="not base64url"):
        decode_base64url("A" + last)
    assert decode_base64url(base64.urlsafe_b64encode(b"\xfb\xff\xff").decode()) == b"\xfb\xff\xff"


def test_unsuitable_keys_are_ignored(issuer: Issuer) -> None:
    def n(bits: int, low: int = 1) -> str:
        return base64url(((1 << (bits - 1)) | low).to_bytes((bits + 7) // 8, "big"))

    for unused in (
        {"n": n(2047)},
        {"n": n(8193)},
        {"n": n(2048, 0)},
        {"e": "AQ"},
        {"e": base64url(b"\2")},
        {"e": base64url(b"\4")},
        {"e": base64url(b"\1\0\0\0\1")},
        {"kty": "oct"},
        {"use": "enc"},
        {"key_ops": ["sign"]},
        {"alg": "HS256"},
        {"kid": 5},
        {"n": "="},
        {"n": None},
    ):
        assert parse_keys(key_set(issuer.jwk(**unused))) == [], unused
    right = [issuer.jwk(e=base64url(b"\3")), issuer.jwk(key_ops=["verify"], alg="RS256"), issuer.jwk(n=n(8192))]
    assert len(parse_keys(key_set(*right))) == 3
    for document in (b"", b"[]", b"{}", b'{"keys":{}}', b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            parse_keys(document)


def test_the_largest_key_is_fast() -> None:
    key = RsaKey(None, None, (1 << 8192) - 1, (1 << 32) - 1)
    head = base64url(b'{"alg":"RS256"}')
    token = parse_token(f"{head}.e30.{base64url(bytes([1]) * 1024)}")
    began_s = time.process_time()
    with pytest.raises(TokenError):
        verify(token, key)
    assert time.process_time() - began_s < 0.02


# --- where keys come from ---------------------------------------------------------------------------------------------


class Times:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def settings(url: str) -> OAuthSettings:
    return OAuthSettings(url, 3_600_000, 1_000, 4_000, (AUDIENCE,), ISSUER, 30, "scope", "sub")


async def test_new_key_is_fetched_and_unknown_kids_cause_few_fetches(issuer: Issuer, other: Issuer) -> None:
    clock = Times()
    with published() as place:
        place.answers["/keys"] = key_set(issuer.jwk())
        tokens = Tokens(settings(f"{place.url}/keys"), clock=clock)
        assert (await tokens.check(issuer.token())).subject == "alice"
        place.answers["/keys"] = key_set(issuer.jwk(), other.jwk())
        for _ in range(3):
            with pytest.raises(UnknownKeyError):
                await tokens.check(other.token())
        assert place.asked == 1, "within the interval nobody is asked"
        clock.now_s += UNKNOWN_KEY_INTERVAL_S
        assert (await tokens.check(other.token())).subject == "alice"
        assert place.asked == 2
        place.answers["/keys"] = key_set(other.jwk())
        clock.now_s += 3_600
        await tokens.check(issuer.token())
        await asyncio.wait_for(asyncio.to_thread(place.until_asked, 3), 10)
        clock.now_s += UNKNOWN_KEY_INTERVAL_S
        with pytest.raises(UnknownKeyError):
            await tokens.check(other.token(header={"kid": "third"}))
        with pytest.raises(UnknownKeyError):
            await tokens.check(issuer.token())
        await tokens.close()


async def test_key_withdrawn_during_a_silence_is_not_accepted(issuer: Issuer, other: Issuer) -> None:
    clock = Times()
    with published() as place:
        place.answers["/keys"] = key_set(issuer.jwk())
        tokens = Tokens(settings(f"{place.url}/keys"), clock=clock)
        await tokens.check(issuer.token())
        place.answers["/keys"] = key_set(other.jwk())
        clock.now_s += 3 * 3_600
        with pytest.raises(UnknownKeyError):
            await tokens.check(issuer.token())
        await tokens.close()


async def test_known_keys_stay_valid_while_the_issuer_cannot_be_asked(issuer: Issuer) -> None:
    """Kafka keeps its keys after a failed refresh, too."""
    clock = Times()
    with published() as place:
        place.answers["/keys"] = key_set(issuer.jwk())
        tokens = Tokens(settings(f"{place.url}/keys"), clock=clock)
        await tokens.check(issuer.token())
        del place.answers["/keys"]
        clock.now_s += 3 * 3_600
        assert (await tokens.check(issuer.token())).subject == "alice"
        assert place.asked == 2
        await tokens.close()


async def test_failed_key_fetches_back_off(issuer: Issuer) -> None:
    clock = Times()
    with published() as place:
        tokens = Tokens(settings(f"{place.url}/keys"), clock=clock)
        for asked, wait_s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 4.0)):
            for _ in range(2):
                with pytest.raises(KeysUnavailableError):
                    await tokens.check(issuer.token())
            assert place.asked == asked
            clock.now_s += wait_s - 0.001
            with pytest.raises(KeysUnavailableError):
                await tokens.check(issuer.token())
            assert place.asked == asked
            clock.now_s += 0.001
        place.answers["/keys"] = key_set(issuer.jwk()) + b" " * 300_000
        with pytest.raises(KeysUnavailableError):
            await tokens.check(issuer.token())
        place.answers["/keys"] = key_set(issuer.jwk())
        clock.now_s += 4
        assert (await tokens.check(issuer.token())).subject == "alice"
        await tokens.close()
