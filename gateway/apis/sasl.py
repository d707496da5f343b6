"""SaslHandshake and SaslAuthenticate outside of an authentication: on a listener without authentication, or after it
has ended.

During an authentication `gateway/security/authenticator.py` answers them before dispatch.
"""

from __future__ import annotations

from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest, SaslAuthenticateResponse
from protocol.messages.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse


async def sasl_handshake(_request: SaslHandshakeRequest, _context: RequestContext[object]) -> SaslHandshakeResponse:
    raise KafkaError(ErrorCode.ILLEGAL_SASL_STATE)


async def sasl_authenticate(
    _request: SaslAuthenticateRequest, _context: RequestContext[object]
) -> SaslAuthenticateResponse:
    raise KafkaError(ErrorCode.ILLEGAL_SASL_STATE, "SaslAuthenticate request received after successful authentication")
