"""RenewDelegationToken: prolong a token (KIP-48)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import binary, int16, int32, int64, message


@message(ApiKey.RENEW_DELEGATION_TOKEN, versions="1-2", flexible="2+")
class RenewDelegationTokenRequest:
    hmac: bytes = binary()
    renew_period_ms: int = int64()


@message(ApiKey.RENEW_DELEGATION_TOKEN, versions="1-2", flexible="2+")
class RenewDelegationTokenResponse:
    error_code: int = int16()
    expiry_timestamp_ms: int = int64()
    throttle_time_ms: int = int32()
