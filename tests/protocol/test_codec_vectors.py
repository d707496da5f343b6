"""Hand-written bytes from the protocol's tables, encoded and decoded."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import codec, grammar
from protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse, FinalizedFeatureKey
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, ReplicaState
from protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    JoinGroupResponseMember,
)
from protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity, MemberResponse
from protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData

# Texts in hex: "g" 67, "me" 6d65, "i" 69, "bye" 627965, "consumer" 636f6e73756d6572, "range" 72616e6765.

LEAVE_ONE = LeaveGroupRequest(group_id="g", member_id="me")
LEAVE_MANY = LeaveGroupRequest(
    group_id="g", members=(MemberIdentity(member_id="me"), MemberIdentity(group_instance_id="i"))
)
LEAVE_WITH_REASON = LeaveGroupRequest(group_id="g", members=(MemberIdentity(member_id="me", reason="bye"),))

LEFT = LeaveGroupResponse(error_code=25)
LEFT_THROTTLED = LeaveGroupResponse(throttle_time_ms=1, error_code=25)
LEFT_MANY = LeaveGroupResponse(
    members=(
        MemberResponse(member_id="me", group_instance_id=None, error_code=25),
        MemberResponse(member_id="", group_instance_id="i", error_code=82),
    )
)

PROTOCOLS = (JoinGroupRequestProtocol(name="range", metadata=b"\xab"),)
JOIN = {
    "group_id": "g",
    "session_timeout_ms": 10,
    "member_id": "me",
    "protocol_type": "consumer",
    "protocols": PROTOCOLS,
}
JOINED = {"generation_id": 2, "protocol_name": "range", "leader": "me", "member_id": "me"}
PLAIN_PROTOCOLS = "00000001 0005 72616e6765 00000001 ab"
COMPACT_PROTOCOLS = "02 06 72616e6765 02 ab 00"

API_KEYS = (ApiVersion(api_key=18, max_version=4),)
PARTITION_1 = (OffsetDeleteRequestPartition(partition_index=1),)

VECTORS: list[tuple[Any, int, str]] = [
    (LEAVE_ONE, 0, "0001 67 0002 6d65"),
    (LEAVE_ONE, 1, "0001 67 0002 6d65"),
    (LEAVE_ONE, 2, "0001 67 0002 6d65"),
    (LEAVE_MANY, 3, "0001 67 00000002 0002 6d65 ffff 0000 0001 69"),
    (LEAVE_MANY, 4, "02 67 03 03 6d65 00 00 01 02 69 00 00"),
    (LEAVE_MANY, 5, "02 67 03 03 6d65 00 00 00 01 02 69 00 00 00"),
    (LEAVE_WITH_REASON, 5, "02 67 02 03 6d65 00 04 627965 00 00"),
    (LEFT, 0, "0019"),
    (LEFT_THROTTLED, 1, "00000001 0019"),
    (LEFT_THROTTLED, 2, "00000001 0019"),
    (LEFT_MANY, 3, "00000000 0000 00000002 0002 6d65 ffff 0019 0000 0001 69 0052"),
    (LEFT_MANY, 4, "00000000 0000 03 03 6d65 00 0019 00 01 02 69 0052 00 00"),
    (LEFT_MANY, 5, "00000000 0000 03 03 6d65 00 0019 00 01 02 69 0052 00 00"),
    (JoinGroupRequest(**JOIN), 0, "0001 67 0000000a 0002 6d65 0008 636f6e73756d6572" + PLAIN_PROTOCOLS),
    *(
        (
            JoinGroupRequest(**JOIN, rebalance_timeout_ms=20),
            version,
            "0001 67 0000000a 00000014 0002 6d65 0008 636f6e73756d6572" + PLAIN_PROTOCOLS,
        )
        for version in range(1, 5)
    ),
    (
        JoinGroupRequest(**JOIN, group_instance_id="i"),
        5,
        "0001 67 0000000a ffffffff 0002 6d65 0001 69 0008 636f6e73756d6572" + PLAIN_PROTOCOLS,
    ),
    *(
        (
            JoinGroupRequest(**JOIN),
            version,
            "02 67 0000000a ffffffff 03 6d65 00 09 636f6e73756d6572" + COMPACT_PROTOCOLS + "00",
        )
        for version in (6, 7)
    ),
    *(
        (
            JoinGroupRequest(**JOIN, group_instance_id="i", reason="bye"),
            version,
            "02 67 0000000a ffffffff 03 6d65 02 69 09 636f6e73756d6572" + COMPACT_PROTOCOLS + "04 627965 00",
        )
        for version in (8, 9)
    ),
    *(
        (
            JoinGroupResponse(**JOINED, members=(JoinGroupResponseMember(member_id="me", metadata=b"\xab"),)),
            version,
            throttle
            + "0000 00000002 0005 72616e6765 0002 6d65 0002 6d65 00000001 0002 6d65"
            + instance
            + "00000001 ab",
        )
        for version, throttle, instance in ((0, "", ""), (1, "", ""), (2, "00000000", ""), (5, "00000000", "ffff"))
    ),
    (JoinGroupResponse(**JOINED), 6, "00000000 0000 00000002 06 72616e6765 03 6d65 03 6d65 01 00"),
    (
        JoinGroupResponse(**JOINED, protocol_type="consumer"),
        7,
        "00000000 0000 00000002 09 636f6e73756d6572 06 72616e6765 03 6d65 03 6d65 01 00",
    ),
    (
        JoinGroupResponse(error_code=79, protocol_name=None, member_id="me"),
        9,
        "00000000 004f ffffffff 00 00 01 00 03 6d65 01 00",
    ),
    (
        JoinGroupResponse(
            **JOINED,
            skip_assignment=True,
            members=(JoinGroupResponseMember(member_id="me", group_instance_id="i", metadata=b"\xab"),),
        ),
        9,
        "00000000 0000 00000002 00 06 72616e6765 03 6d65 01 03 6d65 02 03 6d65 02 69 02 ab 00 00",
    ),
    (ApiVersionsRequest(), 0, ""),
    (ApiVersionsRequest(client_software_name="me", client_software_version="1"), 3, "03 6d65 02 31 00"),
    (
        ApiVersionsResponse(error_code=35, api_keys=(ApiVersion(api_key=18, max_version=4),)),
        0,
        "0023 00000001 0012 0000 0004",
    ),
    (
        ApiVersionsResponse(
            api_keys=API_KEYS,
            finalized_features_epoch=1,
            finalized_features=(FinalizedFeatureKey(name="me", max_version_level=1, min_version_level=1),),
        ),
        3,
        "0000 02 0012 0000 0004 00 00000000 02  01 08 0000000000000001  02 09 02 03 6d65 0001 0001 00",
    ),
    (
        FetchRequest(
            cluster_id="c",
            replica_state=ReplicaState(replica_id=1, replica_epoch=2),
            topics=(FetchTopic(partitions=(FetchPartition(partition=3, fetch_offset=4, high_watermark=5),)),),
        ),
        18,
        "00000000 00000000 7fffffff 00 00000000 ffffffff 02" + "00" * 16 + "02"
        "00000003 ffffffff 0000000000000004 ffffffff ffffffffffffffff 00000000 01 01 08 0000000000000005 00 01 01"
        "02 00 02 02 63 01 0d 00000001 0000000000000002 00",
    ),
    (
        ProduceRequest(
            acks=-1,
            timeout_ms=30000,
            topic_data=(TopicProduceData(name="me", partition_data=(PartitionProduceData(records=b"\xab" * 130),)),),
        ),
        9,
        "00 ffff 00007530 02 03 6d65 02 00000000 8301" + "ab" * 130 + "00 00 00",
    ),
    (
        OffsetDeleteRequest(
            group_id="g",
            topics=(
                OffsetDeleteRequestTopic(name="me", partitions=(OffsetDeleteRequestPartition(partition_index=1),)),
            ),
        ),
        0,
        "0001 67 00000001 0002 6d65 00000001 00000001",
    ),
]


@pytest.mark.parametrize(
    ("message", "version", "encoded"),
    VECTORS,
    ids=[f"{number}-{type(message).__name__}-v{version}" for number, (message, version, _) in enumerate(VECTORS)],
)
def test_vector_is_encoded_and_decoded(message, version, encoded):
    octets = bytes.fromhex(encoded)
    assert b"".join(codec.encode(message, version)).hex() == octets.hex()
    assert grammar.build(message, version) == octets
    assert codec.decode(type(message), version, octets) == (message, len(octets))
    assert grammar.parse(type(message), version, octets) == (message, len(octets))
