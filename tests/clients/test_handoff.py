"""Partitions that are drained before they are given away: what a join repeats where work is not committed yet."""

from __future__ import annotations

import time
import uuid

import pytest
from confluent_kafka.admin import AdminClient

from tests.clients.scoreboard import Scoreboard
from tests.clients.topics import create_topic
from tests.clients.workers import (
    KINDS,
    PARTITIONS,
    QUICK,
    RECORDS,
    Stage,
    Worker,
    counted,
    produce,
    set_of_group,
    until,
)
from tests.gateway_process import GatewayFactory


@pytest.mark.parametrize("kind", KINDS)
def test_drained_partitions_are_read_once(gateway_factory: GatewayFactory, kind: str) -> None:
    """The first consumer was given everything and has committed nothing when the second one joins."""
    gateway = gateway_factory(QUICK)
    topic, group, board = create_topic(gateway.bootstrap, PARTITIONS), f"g-{uuid.uuid4().hex[:8]}", Scoreboard()
    set_of_group(gateway.bootstrap, group, group_handoff_mode="drain")
    produce(gateway.bootstrap, topic)
    first = Worker(kind, "first", board, gateway.bootstrap, topic, group)
    second = Worker(kind, "second", board, gateway.bootstrap, topic, group)
    try:
        first.thread.start()
        board.wait_for(lambda: len(board.deliveries) == RECORDS, "all records")
        second.thread.start()
        until(lambda: counted(gateway, "group_handoffs_pending") == {"": 2.0}, "no partition is waited for")
        assert all(each.member == "first" for each in board.deliveries)
        first.finish()
        board.wait_settled({"first", "second"}, PARTITIONS)
        produce(gateway.bootstrap, topic)
        board.wait_for(lambda: len(board.deliveries) >= 2 * RECORDS, "the new records")
        first.finish()
        second.finish()
    finally:
        second.thread.stop()
        first.thread.stop()
    assert not board.failures
    # An eager consumer reads again what it keeps, too: it begins anew at what is committed. That is no handoff.
    given = {
        name: {(e.partition, e.offset) for e in board.deliveries if e.member == name} for name in ("first", "second")
    }
    assert not given["first"] & given["second"]
    assert set(counted(gateway, "group_handoffs_total")) <= {"drained", "acked", "source_left", "superseded"}
    assert counted(gateway, "group_handoffs_forced_total") == {"": 0.0}


@pytest.mark.parametrize("kind", ["eager", "cooperative"])
def test_a_held_member_of_a_short_session_stays_a_member(gateway_factory: GatewayFactory, kind: str) -> None:
    """28 of the acceptance list: a session of six seconds, and what its member waits for takes two of them."""
    session_s = 6.0
    stage = Stage(gateway_factory(QUICK), kind)
    admin = AdminClient({"bootstrap.servers": stage.gateway.bootstrap})

    def member_ids() -> set[str]:
        described = admin.describe_consumer_groups([stage.group])[stage.group].result(30)
        return {member.member_id for member in described.members}

    try:
        first = stage.read_everything()
        stage.start("second")
        stage.wait_pending(2.0)
        began_s, held = time.monotonic(), member_ids()
        assert len(held) == 2
        stage.board.wait_settled({"first", "second"}, PARTITIONS)
        held_s = time.monotonic() - began_s
        assert session_s / 4 < held_s < session_s + 3, "not held, or for longer than librdkafka waits for an answer"
        revocations = list(stage.board.revoked)
        until(lambda: time.monotonic() - began_s > 2 * session_s, "two sessions have not passed")
        assert counted(stage.gateway, "group_handoffs_pending") == {"": 2.0}, "it waits no more"
        assert member_ids() == held
        first.finish()
        until(lambda: counted(stage.gateway, "group_handoffs_pending") == {"": 0.0}, "it waits still")
        produce(stage.gateway.bootstrap, stage.topic)
        stage.board.wait_for(lambda: any(each.member == "second" for each in stage.board.deliveries), "it reads")
        assert member_ids() == held
        assert stage.board.revoked == revocations
        assert stage.board.lost == []
    finally:
        stage.stop()
    given = {
        name: {(e.partition, e.offset) for e in stage.board.deliveries if e.member == name}
        for name in ("first", "second")
    }
    assert not given["first"] & given["second"]
