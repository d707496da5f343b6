"""Heartbeat: keep a classic member's session alive, and learn of a rebalance.

Version 3 brings static members (KIP-345).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import int16, int32, message, string


@message(ApiKey.HEARTBEAT, versions="0-4", flexible="4+")
class HeartbeatRequest:
    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string(versions="3+", nullable="3+", default=None)


@message(ApiKey.HEARTBEAT, versions="0-4", flexible="4+")
class HeartbeatResponse:
    throttle_time_ms: int = int32(versions="1+")
    error_code: int = int16()
