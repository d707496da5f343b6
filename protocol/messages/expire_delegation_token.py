"""ExpireDelegationToken: change the time at which a token ends, or end it at once (KIP-48)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import binary, int16, int32, int64, message


@message(ApiKey.EXPIRE_DELEGATION_TOKEN, versions="1-2", flexible="2+")
class ExpireDelegationTokenRequest:
    hmac: bytes = binary()
    expiry_time_period_ms: int = int64()


@message(ApiKey.EXPIRE_DELEGATION_TOKEN, versions="1-2", flexible="2+")
class ExpireDelegationTokenResponse:
    error_code: int = int16()
    expiry_timestamp_ms: int = int64()
    throttle_time_ms: int = int32()
