"""Handing partitions over in consumer groups: events that report it, and commits that must precede the next owner."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from gateway.coordinator.consumer.handoff import draining
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import (
    Drained,
    HandoffBegun,
    HandoffEnd,
    HandoffEnded,
    HandoffMode,
    HandoffSettings,
)
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.requests import HandoffProgress
from gateway.coordinator.settings import ConsumerSettings, Settings
from gateway.groups.marks import Marks
from gateway.net.context import ConnectionInfo
from protocol.errors import ErrorCode

from .scene import Scene, topic_id

TIMEOUT_MS = 20_000


class Handing(Scene):
    def __init__(self, mode: HandoffMode) -> None:
        super().__init__({"t": 2}, ConsumerSettings(handoff=HandoffSettings(mode, TIMEOUT_MS)))
        self.begun: list[HandoffBegun] = []
        self.ended: list[HandoffEnded] = []

    def play(self, event: Any) -> Any:
        from gateway.coordinator.consumer.machine import step

        taken = step(self.group, event, self.cluster, self.now_ms, self.settings)
        self.begun += [fact for fact in taken.facts if isinstance(fact, HandoffBegun)]
        self.ended += [fact for fact in taken.facts if isinstance(fact, HandoffEnded)]
        self.group = taken.group
        return taken.replies[0][1] if taken.replies else None

    @property
    def reasons(self) -> list[HandoffEnd]:
        return [fact.reason for fact in self.ended]

    def drained(self, source: str, partition: int, mark: int | None, committed: int) -> None:
        self.play(HandoffProgress((Drained(topic_id("t"), partition, MemberId(source), mark, committed),)))


def moved(mode: HandoffMode) -> tuple[Handing, int]:
    """Return a scene where a owns both partitions of t and b joins. The coordinator revokes one partition from a, and a
    releases it.
    """
    scene = Handing(mode)
    assert scene.told(scene.join("a")) == (1, {"t": {0, 1}})
    assert scene.told(scene.join("b")) == (2, {})
    _, left = scene.beat("a", 1, {"t": {0, 1}})
    assert left is not None
    (gone,) = {0, 1} - left["t"]
    return scene, gone


def test_move_is_reported() -> None:
    scene, gone = moved(HandoffMode.ACK)
    (begun,) = scene.begun
    assert (begun.source, begun.target, begun.partitions) == ("a", "b", ((topic_id("t"), gone),))
    assert scene.beat("b", 2)[1] is None
    scene.now_ms += 700
    scene.beat("a", 1, {"t": {1 - gone}})
    assert scene.reasons == [HandoffEnd.ACKNOWLEDGED]
    assert scene.ended[0].waited_ms == 700
    assert scene.beat("b", 2)[1] == {"t": {gone}}
    assert not scene.group.moving


def test_mode_off_reports_nothing_and_assigns_nothing_early() -> None:
    scene, gone = moved(HandoffMode.OFF)
    assert scene.beat("b", 2)[1] is None
    scene.beat("a", 1, {"t": {1 - gone}})
    assert scene.beat("b", 2)[1] == {"t": {gone}}
    assert not scene.begun
    assert not scene.ended


def test_released_partition_is_drained_before_it_is_assigned() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    assert not draining(scene.group)
    scene.beat("a", 1, {"t": {1 - gone}})
    assert [(each.source, each.partition) for each in draining(scene.group)] == [("a", gone)]
    assert scene.beat("b", 2)[1] is None
    scene.drained("a", gone, mark=5, committed=4)
    scene.drained("a", gone, mark=3, committed=4)
    assert scene.beat("b", 2)[1] is None, "a mark never falls"
    scene.drained("b", gone, mark=None, committed=-1)
    assert scene.beat("b", 2)[1] is None, "of another source"
    scene.drained("a", gone, mark=5, committed=5)
    assert scene.reasons == [HandoffEnd.DRAINED]
    assert scene.ended[0].mark == 5
    assert scene.beat("b", 2)[1] == {"t": {gone}}
    assert not scene.group.moving
    assert not scene.group.drain_deadlines


@pytest.mark.parametrize("mode", [HandoffMode.ACK, HandoffMode.DRAIN])
def test_commit_sent_before_the_release_was_answered_counts_while_it_is_awaited(mode: HandoffMode) -> None:
    """The member does not know its new epoch yet. If the commit were refused, the next owner would repeat its work."""
    scene, gone = moved(mode)
    scene.beat("a", 1, {"t": {1 - gone}})
    reply = scene.commit("a", 1, {"t": {0, 1}})
    if mode is HandoffMode.ACK:
        assert reply.error is ErrorCode.STALE_MEMBER_EPOCH, "the partition is free"
        return
    assert (reply.error, reply.member_epoch) == (ErrorCode.NONE, 2)
    scene.drained("a", gone, mark=5, committed=5)
    assert scene.commit("a", 1, {"t": {gone}}).error is ErrorCode.STALE_MEMBER_EPOCH


def test_partition_never_fetched_is_assigned_at_once() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, {"t": {1 - gone}})
    scene.drained("a", gone, mark=None, committed=-1)
    assert scene.reasons == [HandoffEnd.NEVER_FETCHED]
    assert scene.beat("b", 2)[1] == {"t": {gone}}


def test_records_served_on_the_sources_connection_count_for_any_client_id() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, connection_id=ConnectionId("a's"))
    scene.beat("a", 1, {"t": {1 - gone}}, connection_id=ConnectionId("a's"))
    marks, partition = Marks(), (topic_id("t"), gone)
    marks.served(ConnectionInfo("a's", "/127.0.0.1"), "another id", partition, 0, [struct.pack(">q15xi", 0, 4)])
    (each,) = draining(scene.group)
    mark = marks.of(each.connection_id, each.client_id, each.client_host, partition)
    assert mark is not None
    assert mark.offset == 5


def test_wait_for_a_source_that_does_not_commit_ends() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, {"t": {1 - gone}})
    scene.drained("a", gone, mark=5, committed=0)
    scene.tick(TIMEOUT_MS - 1)
    assert scene.beat("b", 2)[1] is None
    scene.tick(1)
    assert scene.reasons == [HandoffEnd.TIMEOUT]
    assert scene.beat("b", 2)[1] == {"t": {gone}}


@pytest.mark.parametrize("mode", [HandoffMode.ACK, HandoffMode.DRAIN])
@pytest.mark.parametrize("let_go", [True, False])
def test_target_does_not_wait_for_a_source_that_left(mode: HandoffMode, let_go: bool) -> None:
    scene, gone = moved(mode)
    if let_go:
        scene.beat("a", 1, {"t": {1 - gone}})
    scene.heartbeat("a", -1)
    acknowledged = let_go and mode is HandoffMode.ACK
    assert scene.reasons == [HandoffEnd.ACKNOWLEDGED if acknowledged else HandoffEnd.SOURCE_LEFT]
    assert scene.beat("b", 2)[1] == {"t": {0, 1}}
    assert not scene.group.moving


def test_target_does_not_wait_for_a_lost_source() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, {"t": {1 - gone}})
    scene.now_ms += 30_000
    scene.group = CONSUMER.postponed(scene.group, 30_000)
    scene.beat("b", 2)
    scene.tick(scene.settings.session_timeout_ms - 1_000)
    assert HandoffEnd.SOURCE_EXPIRED in scene.reasons or HandoffEnd.TIMEOUT in scene.reasons


def test_leave_of_the_target_returns_the_partition_to_its_source() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, {"t": {1 - gone}})
    scene.heartbeat("b", -1)
    assert scene.reasons == [HandoffEnd.TARGET_LEFT]
    assert scene.beat("a", 2, {"t": {1 - gone}})[1] == {"t": {0, 1}}
    assert not scene.group.moving


def test_replaced_target_waits_for_the_same_source() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, {"t": {1 - gone}})
    scene.join("c")
    scene.heartbeat("b", -1)
    scene.beat("c", 3)
    targets = [each.target for each in scene.group.moving.values()]
    assert targets == ["c"], scene.group.moving
    scene.drained("a", gone, mark=1, committed=1)
    assert scene.beat("c", 4)[1] == {"t": {gone}}


def test_no_member_waits_for_a_deleted_topic() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, {"t": {1 - gone}})
    scene.topics_changed({})
    assert HandoffEnd.PARTITION_DELETED in scene.reasons


def test_new_coordinator_continues_the_wait() -> None:
    scene, gone = moved(HandoffMode.DRAIN)
    scene.beat("a", 1, {"t": {1 - gone}})
    rows = {key: CONSUMER.stored_member(scene.group, key) for key in scene.group.members}
    documents = {key: json.loads(json.dumps(row.document)) for key, row in rows.items() if row is not None}
    settings = Settings(consumer=scene.settings)
    scene.group = CONSUMER.restore("g", CONSUMER.stored(scene.group), documents, None, scene.now_ms, settings)
    assert [(each.source, each.partition) for each in draining(scene.group)] == [("a", gone)]
    assert scene.beat("b", 2, connection_number=2)[1] is None
    scene.tick(TIMEOUT_MS)
    assert scene.reasons == [HandoffEnd.TIMEOUT]
    assert scene.beat("b", 2, connection_number=2)[1] == {"t": {gone}}
