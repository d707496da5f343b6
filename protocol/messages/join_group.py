"""JoinGroup: join a classic group, or rejoin it for its next generation, and wait until all members have joined.

Version 1 separates the rebalance timeout from the session timeout, 4 hands out the member id first (KIP-394), 5 brings
static members (KIP-345), 7 the protocol type (KIP-559), 8 reasons (KIP-800), 9 lets a leader skip the assignment
(KIP-814).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, binary, boolean, int16, int32, message, string, struct


@struct
class JoinGroupRequestProtocol:
    name: str = string()
    metadata: bytes = binary()


@message(ApiKey.JOIN_GROUP, versions="0-9", flexible="6+")
class JoinGroupRequest:
    group_id: str = string()
    session_timeout_ms: int = int32()
    rebalance_timeout_ms: int = int32(versions="1+", default=-1)
    member_id: str = string()
    group_instance_id: str | None = string(versions="5+", nullable="5+", default=None)
    protocol_type: str = string()
    protocols: tuple[JoinGroupRequestProtocol, ...] = array(JoinGroupRequestProtocol)
    reason: str | None = string(versions="8+", nullable="8+", default=None)


@struct
class JoinGroupResponseMember:
    member_id: str = string()
    group_instance_id: str | None = string(versions="5+", nullable="5+", default=None)
    metadata: bytes = binary()


@message(ApiKey.JOIN_GROUP, versions="0-9", flexible="6+")
class JoinGroupResponse:
    throttle_time_ms: int = int32(versions="2+")
    error_code: int = int16()
    generation_id: int = int32(default=-1)
    protocol_type: str | None = string(versions="7+", nullable="7+", default=None)
    protocol_name: str | None = string(nullable="7+")
    leader: str = string()
    skip_assignment: bool = boolean(versions="9+")
    member_id: str = string()
    members: tuple[JoinGroupResponseMember, ...] = array(JoinGroupResponseMember)
