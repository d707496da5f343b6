"""SaslHandshake: choose the mechanism of the authentication (KIP-43). It was never made flexible."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, message, string


@message(ApiKey.SASL_HANDSHAKE, versions="0-1", flexible="none")
class SaslHandshakeRequest:
    mechanism: str = string()


@message(ApiKey.SASL_HANDSHAKE, versions="0-1", flexible="none")
class SaslHandshakeResponse:
    error_code: int = int16()
    mechanisms: tuple[str, ...] = array(string)
