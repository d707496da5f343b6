"""RemoveRaftVoter: remove a controller from the voters of the metadata log (KIP-853)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import int16, int32, message, string, uuid


@message(ApiKey.REMOVE_RAFT_VOTER, versions="0", flexible="0+")
class RemoveRaftVoterRequest:
    cluster_id: str | None = string(nullable="0+", default="")
    voter_id: int = int32()
    voter_directory_id: UUID = uuid()


@message(ApiKey.REMOVE_RAFT_VOTER, versions="0", flexible="0+")
class RemoveRaftVoterResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default="")
