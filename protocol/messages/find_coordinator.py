"""FindCoordinator: find the node that coordinates a group or a transactional id.

Version 1 brings the key's type, 4 many keys in one request (KIP-699), 5 the code TRANSACTION_ABORTABLE, 6 share groups
(KIP-932).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, message, string, struct


@message(ApiKey.FIND_COORDINATOR, versions="0-6", flexible="3+")
class FindCoordinatorRequest:
    key: str = string(versions="0-3")
    key_type: int = int8(versions="1+")
    coordinator_keys: tuple[str, ...] = array(string, versions="4+")


@struct
class Coordinator:
    key: str = string()
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")


@message(ApiKey.FIND_COORDINATOR, versions="0-6", flexible="3+")
class FindCoordinatorResponse:
    throttle_time_ms: int = int32(versions="1+")
    error_code: int = int16(versions="0-3")
    error_message: str | None = string(versions="1-3", nullable="1-3")
    node_id: int = int32(versions="0-3")
    host: str = string(versions="0-3")
    port: int = int32(versions="0-3")
    coordinators: tuple[Coordinator, ...] = array(Coordinator, versions="4+")
