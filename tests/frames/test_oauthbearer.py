"""OAUTHBEARER frame by frame: which clients authenticate, for how long, and how a refused client is answered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from protocol.messages.metadata import MetadataRequest
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from tests.clients.workers import counted
from tests.conftest import gateways
from tests.gateway_process import GatewayFactory
from tests.postgres import Databases
from tests.secured import Secured, authenticate, start_secured
from tests.tokens import Issuer, client_first, key_set, oauth_settings
from tests.wire import WireClient

MECHANISM = "OAUTHBEARER"
FAILED = ErrorCode.SASL_AUTHENTICATION_FAILED
GENERIC = f"Authentication failed during authentication due to invalid credentials with SASL mechanism {MECHANISM}"
INVALID = '{"status":"invalid_token"}'


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture(scope="module")
def secured(postgres: Databases, issuer: Issuer) -> Iterator[Secured]:
    path = issuer.key.with_suffix(".jwks")
    path.write_bytes(key_set(issuer.jwk()))
    with gateways(postgres) as factory:
        more = {"listener.name.asking.oauthbearer.connections.max.reauth.ms": "200000"}
        yield start_secured(factory, {**oauth_settings(path.as_uri()), **more})


async def test_client_with_a_token_is_served_until_the_token_expires(secured: Secured, issuer: Issuer) -> None:
    async with await WireClient.connect(secured.sasl) as client:
        first = client_first(issuer.token(), "alice", "traceId=1\x01")
        answer = await authenticate(client, first, mechanism=MECHANISM)
        assert (answer.error_code, answer.error_message, answer.auth_bytes) == (0, None, b"")
        assert answer.session_lifetime_ms == 200_000, "sessions end before"
        assert (await client.send(MetadataRequest(topics=()), 12)).brokers
    async with await WireClient.connect(secured.sasl) as client:
        first = client_first(issuer.token(exp=int(time.time()) + 100))
        answer = await authenticate(client, first, mechanism=MECHANISM)
        assert 90_000 < answer.session_lifetime_ms <= 100_000, "the token ends before"


async def test_expired_token_is_accepted_within_the_clock_skew_alone(secured: Secured, issuer: Issuer) -> None:
    async with await WireClient.connect(secured.sasl) as client:
        first = client_first(issuer.token(exp=int(time.time()) - 1, iat=1))
        answer = await authenticate(client, first, mechanism=MECHANISM)
        assert (answer.error_code, answer.session_lifetime_ms) == (0, 0)
        client.send_only(MetadataRequest(topics=()), 12)
        await client.closed_by_peer()


@pytest.mark.parametrize("last", [b"\x01", b"a token that is taken"])
async def test_refused_client_receives_the_reason_before_the_close(
    secured: Secured, issuer: Issuer, last: bytes
) -> None:
    token = issuer.token(iss="https://somebody-else")
    async with await WireClient.connect(secured.sasl) as client:
        answer = await authenticate(client, client_first(token), mechanism=MECHANISM)
        assert (answer.error_code, answer.auth_bytes) == (0, INVALID.encode())
        told = last if last == b"\x01" else client_first(issuer.token())
        answer = await client.send(SaslAuthenticateRequest(auth_bytes=told), 2)
        assert (answer.error_code, answer.error_message) == (FAILED, INVALID if last == b"\x01" else GENERIC)
        await client.closed_by_peer()
    said = secured.gateway.log_text()
    assert "issuer is not ours" in said
    assert not any(part in said for part in token.split("."))


async def test_another_request_after_a_refused_token_closes_the_connection(secured: Secured) -> None:
    async with await WireClient.connect(secured.sasl) as client:
        answer = await authenticate(client, client_first("x.y.z"), mechanism=MECHANISM)
        assert answer.auth_bytes == INVALID.encode()
        answer = await client.send(MetadataRequest(topics=()), 12)
        assert not answer.brokers
        await client.closed_by_peer()


async def test_malformed_messages_and_other_names(secured: Secured, issuer: Issuer) -> None:
    token = issuer.token()
    other = (
        "Authentication failed: Client requested an authorization id (bob) that is different from the token's "
        "principal name (alice)"
    )
    for message, told in (
        (client_first(token, "bob"), other),
        (b"", GENERIC),
        (b"\x01", GENERIC),
        (b"n,,\x01\x01", GENERIC),
        (b"n,,\x01host=a\x01\x01", GENERIC),
        (f"n,,\x01auth=Basic {token}\x01\x01".encode(), GENERIC),
        (f"n,,\x01auth=Bearer {token}\x01".encode(), GENERIC),
        (client_first(token) + b"x", GENERIC),
        (client_first(token, "", "b4d=x\x01"), GENERIC),
        (client_first(token, "", f"a={'x' * 40_000}\x01"), GENERIC),
    ):
        async with await WireClient.connect(secured.sasl) as client:
            answer = await authenticate(client, message, mechanism=MECHANISM)
            assert (answer.error_code, answer.error_message) == (FAILED, told)
            await client.closed_by_peer()


async def test_connection_is_closed_without_a_refusal_if_the_token_cannot_be_checked(
    gateway_factory: GatewayFactory, issuer: Issuer, tmp_path: Path
) -> None:
    """A client that receives an authentication failure gives up; a client whose connection ends tries again."""
    path = tmp_path / "keys"
    more = {"listener.name.asking.oauthbearer.sasl.oauthbearer.jwks.endpoint.retry.backoff.ms": "1"}
    secured = start_secured(gateway_factory, {**oauth_settings(path.as_uri()), **more})
    async with await WireClient.connect(secured.sasl) as client:
        await client.send(SaslHandshakeRequest(mechanism=MECHANISM), 1)
        with pytest.raises(ConnectionError):
            await client.send(SaslAuthenticateRequest(auth_bytes=client_first(issuer.token())), 2)
    assert counted(secured.gateway, "protocol_errors_total").get("token_keys") == 1
    path.write_bytes(key_set(issuer.jwk()))
    async with await WireClient.connect(secured.sasl) as client:
        assert not (await authenticate(client, client_first(issuer.token()), mechanism=MECHANISM)).error_code
