"""Requests that a streams group accepts or refuses because of the member's ids, in single steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, RequestId
from gateway.coordinator.streams.identity import MAX_HOST_BYTES, MAX_TAGS_BYTES, check_request
from gateway.coordinator.streams.model import Endpoint, StreamsGroupHeartbeat
from gateway.coordinator.streams.topology import Subtopology, TopicInfo, Topology
from protocol.errors import ErrorCode, KafkaError

TASK = frozenset({("0", 0)})
NONE = frozenset[tuple[str, int]]()
JOIN = StreamsGroupHeartbeat(
    request_id=RequestId(1),
    connection_id=ConnectionId("c"),
    connection_number=1,
    client_id="client",
    client_host="host",
    member_id=MemberId("m"),
    member_epoch=0,
    rebalance_timeout_ms=60_000,
    topology=Topology(0, (Subtopology("0", ("words",)),)),
    active=NONE,
    standby=NONE,
    warmup=NONE,
    process_id="p",
)
BEAT = replace(
    JOIN,
    member_epoch=3,
    rebalance_timeout_ms=-1,
    topology=None,
    process_id=None,
    active=None,
    standby=None,
    warmup=None,
)
LEAVE = replace(BEAT, member_epoch=-1)
WIDE_CHANGELOG = Topology(0, (Subtopology("0", ("words",), state_changelog_topics=(TopicInfo("log", 2),)),))


@pytest.mark.parametrize(
    "event",
    [
        JOIN,
        replace(JOIN, process_id=None),
        BEAT,
        LEAVE,
        replace(JOIN, instance_id="i"),
        replace(BEAT, instance_id="i"),
        replace(LEAVE, instance_id="i"),
        replace(LEAVE, member_epoch=-2, instance_id="i"),
        replace(BEAT, active=TASK, standby=NONE, warmup=NONE),
    ],
    ids=lambda e: e.member_epoch,
)
def test_valid_streams_heartbeat_is_accepted(event: StreamsGroupHeartbeat):
    check_request(event)


@pytest.mark.parametrize(
    ("event", "changed"),
    [
        (JOIN, {"member_id": MemberId("")}),
        (JOIN, {"instance_id": ""}),
        (JOIN, {"rack_id": ""}),
        (JOIN, {"rebalance_timeout_ms": -1}),
        (JOIN, {"rebalance_timeout_ms": 0}),
        (JOIN, {"topology": None}),
        (JOIN, {"active": TASK}),
        (JOIN, {"standby": TASK}),
        (JOIN, {"warmup": TASK}),
        (JOIN, {"has_source_patterns": True}),
        (JOIN, {"user_endpoint": Endpoint("é" * (MAX_HOST_BYTES // 2 + 1), 1)}),
        (BEAT, {"client_tags": (("zone", "a"), ("rack", "é" * (MAX_TAGS_BYTES // 2)))}),
        (LEAVE, {"instance_id": ""}),
        (BEAT, {"topology": JOIN.topology}),
        (BEAT, {"active": TASK}),
        (BEAT, {"active": TASK, "standby": NONE}),
        (BEAT, {"member_epoch": -2}),
        (BEAT, {"member_epoch": -3}),
        (BEAT, {"rebalance_timeout_ms": -5}),
    ],
)
def test_invalid_streams_heartbeat_is_refused(event: StreamsGroupHeartbeat, changed: dict[str, Any]):
    with pytest.raises(KafkaError) as refused:
        check_request(replace(event, **changed))
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_a_changelog_may_not_name_its_partitions():
    with pytest.raises(KafkaError) as refused:
        check_request(replace(JOIN, topology=WIDE_CHANGELOG))
    assert refused.value.code is ErrorCode.STREAMS_INVALID_TOPOLOGY
