"""Assignments that simulated leaders make. Their bytes contain the generation and the member for
which they were made.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.coordinator.facts import MemberId
from gateway.coordinator.requests import JoinedMember
from protocol.consumer import (
    Assignment,
    TopicPartition,
    decode_assignment,
    encode_assignment,
)

PARTITIONS = 8
CONSUMER = "consumer"


def assign(members: Sequence[JoinedMember], generation_id: int, protocol_type: str) -> dict[MemberId, bytes]:
    """Assign every partition to one member. In every fifth generation leave one member out and assign to an invented
    id.
    """
    slots = sorted(members, key=lambda member: member.group_instance_id or member.member_id)
    if generation_id % 5 == 0 and len(slots) > 1:
        slots = slots[:-1]
    assignments = {
        member.member_id: _write(
            generation_id, member.member_id, tuple(range(at, PARTITIONS, len(slots))), protocol_type
        )
        for at, member in enumerate(slots)
    }
    if generation_id % 5 == 0:
        assignments[MemberId("made-up")] = b"\x00"
    return assignments


def _write(generation_id: int, member_id: MemberId, partitions: tuple[int, ...], protocol_type: str) -> bytes:
    stamp = f"{generation_id} {member_id}".encode()
    if protocol_type == CONSUMER:
        return encode_assignment(Assignment(1, (TopicPartition("t", partitions),), stamp))
    return stamp + b" " + ",".join(map(str, partitions)).encode()


def read(assignment: bytes, protocol_type: str) -> tuple[int, str, tuple[int, ...]] | None:
    """Return generation, member and partitions, or None for an empty assignment."""
    if not assignment:
        return None
    if protocol_type == CONSUMER:
        decoded = decode_assignment(assignment)
        generation_id, member_id = (decoded.user_data or b"").decode().split(" ")
        partitions = tuple(each for topic in decoded.assigned_partitions for each in topic.partitions)
        return int(generation_id), member_id, partitions
    generation_id, member_id, partitions = assignment.decode().split(" ")
    return int(generation_id), member_id, tuple(int(each) for each in partitions.split(",") if each)
