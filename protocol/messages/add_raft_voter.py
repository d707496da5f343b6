"""AddRaftVoter: add a controller to the voters of the metadata log (KIP-853, KIP-1186)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int16, int32, message, string, struct, uint16, uuid


@struct
class Listener:
    name: str = string()
    host: str = string()
    port: int = uint16()


@message(ApiKey.ADD_RAFT_VOTER, versions="0-1", flexible="0+")
class AddRaftVoterRequest:
    cluster_id: str | None = string(nullable="0+", default="")
    timeout_ms: int = int32()
    voter_id: int = int32()
    voter_directory_id: UUID = uuid()
    listeners: tuple[Listener, ...] = array(Listener)
    ack_when_committed: bool = boolean(versions="1+", default=True)


@message(ApiKey.ADD_RAFT_VOTER, versions="0-1", flexible="0+")
class AddRaftVoterResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default="")
