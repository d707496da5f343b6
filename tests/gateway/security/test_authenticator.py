"""What an authenticator lets start beside what, which no client that waits for its answers can show."""

from __future__ import annotations

from typing import Any, cast

from gateway.config.security import SaslSettings
from gateway.net.context import ConnectionInfo
from gateway.net.requests import Admission, Order
from gateway.security.authenticator import ListenerSasl
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


async def test_tokens_are_taken_one_by_one_whatever_they_look_like() -> None:
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
