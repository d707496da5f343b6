"""Partitions that are drained before they are given away: what a join repeats where work is not committed yet."""

from __future__ import annotations

import uuid

import pytest

from tests.clients.scoreboard import Scoreboard
from tests.clients.topics import create_topic
from tests.clients.workers import KINDS, PARTITIONS, QUICK, RECORDS, Worker, counted, produce, set_of_group, until
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
