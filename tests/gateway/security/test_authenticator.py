"""Requests that an authenticator lets run concurrently. No client that waits for its answers can test this."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway.config.mechanisms import LOGIN_MODULES
from gateway.config.security import SaslSettings
from gateway.net.context import ConnectionInfo
from gateway.net.requests import Admission, Order, UnanswerableError
from gateway.security.authenticator import EXCHANGES, ListenerSasl
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from tests.secured import plain_token
from tests.wire import encode_frame

FETCH_LIKE = b"\0\1"
PARKED = Admission(Order.PARKED, bulky=True)


class Requests:
    def admission(self, frame: Any) -> Admission:
        return PARKED


class Counts:
    def authenticated(self, *_: Any, **__: Any) -> None:
        pass


async def test_reauthenticating_client_may_send_no_more_than_before() -> None:
    settings = SaslSettings(("PLAIN",), {"alice": "secret"}, {"PLAIN": 60_000}, 1_000)
    unused = cast("Any", None)
    shared = ListenerSasl("L", settings, unused, cast("Any", Requests()), cast("Any", Counts()), failure_delay_ms=0)
    guard, connection = shared.guard(), ConnectionInfo("connection", "/127.0.0.1")

    async def say(request: Any, version: int) -> None:
        await guard.handle(encode_frame(request, version, 1)[4:], connection)

    await say(SaslHandshakeRequest(mechanism="PLAIN"), 1)
    await say(SaslAuthenticateRequest(auth_bytes=plain_token("alice", "secret")), 2)
    await say(SaslHandshakeRequest(mechanism="PLAIN"), 1)
    with pytest.raises(UnanswerableError, match="bytes to authenticate"):
        await say(SaslAuthenticateRequest(auth_bytes=plain_token("alice", "s" * 1_000)), 2)
    with pytest.raises(UnanswerableError):
        await say(SaslAuthenticateRequest(auth_bytes=plain_token("alice", "secret")), 2)


def test_unauthenticated_client_may_send_little_under_any_settings() -> None:
    for allowed, taken in ((1_000, 1_000), (524_288, 64 * 1024)):
        settings, unused = SaslSettings(("PLAIN",), {}, {}, allowed), cast("Any", None)
        shared = ListenerSasl("L", settings, unused, unused, cast("Any", Counts()), failure_delay_ms=0)
        assert shared.guard().max_request_bytes == taken


async def test_tokens_are_handled_one_at_a_time() -> None:
    settings = SaslSettings(("PLAIN",), {"alice": "secret"}, {}, 1_000)
    unused = cast("Any", None)
    shared = ListenerSasl("L", settings, unused, cast("Any", Requests()), cast("Any", Counts()), failure_delay_ms=0)
    guard = shared.guard()
    connection = ConnectionInfo("connection", "/127.0.0.1")
    assert guard.admission(FETCH_LIKE).order is Order.ALONE
    await guard.handle(encode_frame(SaslHandshakeRequest(mechanism="PLAIN"), 1, 1)[4:], connection)
    assert guard.admission(FETCH_LIKE).order is Order.ALONE
    token = SaslAuthenticateRequest(auth_bytes=plain_token("alice", "secret"))
    await guard.handle(encode_frame(token, 2, 2)[4:], connection)
    assert str(connection.principal) == "User:alice"
    assert guard.admission(FETCH_LIKE) == PARKED


def test_each_mechanism_of_the_settings_has_an_exchange() -> None:
    assert list(EXCHANGES) == list(LOGIN_MODULES)
