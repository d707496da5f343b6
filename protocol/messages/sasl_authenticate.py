"""SaslAuthenticate: one token of a SASL exchange (KIP-152), and how long the session lasts (KIP-368)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import binary, int16, int64, message, string


@message(ApiKey.SASL_AUTHENTICATE, versions="0-2", flexible="2+")
class SaslAuthenticateRequest:
    auth_bytes: bytes = binary()


@message(ApiKey.SASL_AUTHENTICATE, versions="0-2", flexible="2+")
class SaslAuthenticateResponse:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    auth_bytes: bytes = binary()
    session_lifetime_ms: int = int64(versions="1+")
