"""Marks: the highest offsets that consumers were served. They only rise, and readers with the same client id count
together.
"""

from __future__ import annotations

import struct
import uuid

import pytest

from gateway.groups import marks as module
from gateway.groups.marks import ASKS_WHEN_IT_HAS_NOTHING, CLIENTS_MOVE_S, MAX_SERVED, RECENT_S, Mark, Marks
from gateway.net.context import ConnectionInfo

PARTITION = (uuid.uuid4(), 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def connection(name: str, software: str = "librdkafka") -> ConnectionInfo:
    return ConnectionInfo(name, "/127.0.0.1", client_software_name=software)


def batch(base_offset: int, records: int, attributes: int = 0) -> bytes:
    return struct.pack(">q13xhi", base_offset, attributes, records - 1)


def marker(base_offset: int) -> bytes:
    return batch(base_offset, 1, 0x30)


def mark_of(marks: Marks, connection_id: str = "elsewhere", client_id: str = "c") -> int | None:
    found = marks.of(connection_id, client_id, "/127.0.0.1", PARTITION)
    return None if found is None else found.offset


def test_mark_is_the_end_of_the_served_records_and_never_falls() -> None:
    marks = Marks()
    marks.served(connection("a"), "c", PARTITION, 0, [batch(0, 10)])
    assert (mark_of(marks), mark_of(marks, "a", "other")) == (10, 10)
    marks.served(connection("a"), "c", PARTITION, 3, [])
    marks.served(connection("a"), "c", PARTITION, -7, [batch(2, 1)])
    assert mark_of(marks) == 10


def test_next_fetch_of_java_confirms_the_previous_records() -> None:
    marks, java = Marks(), connection("a", ASKS_WHEN_IT_HAS_NOTHING)
    marks.served(java, "c", PARTITION, 0, [batch(0, 10)])
    assert mark_of(marks) == 0
    marks.served(java, "c", PARTITION, 10, [batch(10, 10)])
    assert mark_of(marks) == 10


def test_time_of_serving_a_record_is_known() -> None:
    clock = Clock()
    marks = Marks(clock=clock)
    for number in range(MAX_SERVED):
        clock.now_s = float(number)
        marks.served(connection("a"), "c", PARTITION, number * 10, [batch(number * 10, 10)])
    mark = marks.of("a", "c", "/127.0.0.1", PARTITION)
    assert mark is not None
    assert [mark.served_s(offset) for offset in (-1, 0, 9, 10, 19, 155, 159, 160)] == [
        *(None, 0.0, 0.0, 1.0, 1.0, 15.0, 15.0),
        None,
    ]
    clock.now_s = 20.0
    marks.served(connection("a"), "c", PARTITION, 0, [batch(0, 10)])
    assert mark.served_s(5) == 0.0, "when it was served first"
    for number in range(MAX_SERVED, 50 * MAX_SERVED):
        clock.now_s = float(number)
        marks.served(connection("a"), "c", PARTITION, number * 10, [batch(number * 10, 10)])
    assert len(mark.served) <= MAX_SERVED
    last = 50 * MAX_SERVED - 1
    assert mark.served_s(last * 10) == last
    assert mark.served_s(0) == 0.0
    for number in range(last):
        served_s = mark.served_s(number * 10)
        assert served_s is not None
        assert served_s <= number, "what is coarse is never too late"


def test_time_of_serving_is_not_recorded_for_java() -> None:
    marks, java = Marks(), connection("a", ASKS_WHEN_IT_HAS_NOTHING)
    marks.served(java, "c", PARTITION, 0, [batch(0, 10)])
    mark = marks.of("a", "c", "/127.0.0.1", PARTITION)
    assert mark is not None
    assert mark.served_s(5) is None


@pytest.mark.parametrize("software", ["librdkafka", ASKS_WHEN_IT_HAS_NOTHING])
def test_mark_ends_before_trailing_transaction_markers(software: str) -> None:
    marks, member = Marks(), connection("a", software)
    marks.served(member, "c", PARTITION, 0, [batch(0, 10, 0x10), marker(10), marker(11)])
    marks.served(member, "c", PARTITION, 12, [])
    assert mark_of(marks) == 10
    marks.served(member, "c", PARTITION, 12, [marker(12)])
    marks.served(member, "c", PARTITION, 13, [])
    assert mark_of(marks) == 10
    marks.served(member, "c", PARTITION, 13, [batch(13, 1), marker(14), batch(15, 5)])
    marks.served(member, "c", PARTITION, 20, [])
    assert mark_of(marks) == 20
    marks.served(member, "c", PARTITION, 20, [batch(20, 1), marker(21)])
    marks.served(member, "c", PARTITION, 22, [marker(22), batch(23, 1), marker(24)])
    assert mark_of(marks) == (21 if software == ASKS_WHEN_IT_HAS_NOTHING else 24)
    marks.served(member, "c", PARTITION, 25, [])
    assert mark_of(marks) == 24
    marks.served(member, "c", PARTITION, 26, [])
    assert mark_of(marks) == 26, "what lies between was not served here"


def test_members_own_connection_outranks_its_client_id() -> None:
    marks = Marks()
    marks.served(connection("a"), "c", PARTITION, 0, [batch(0, 10)])
    marks.served(connection("b"), "c", PARTITION, 0, [batch(0, 4)])
    assert mark_of(marks, "b") == 4
    assert mark_of(marks, "elsewhere") == 10, "of two that look alike the greater counts"
    assert mark_of(marks, "elsewhere", "nobody") is None


def test_reader_that_began_on_this_node_has_a_complete_mark() -> None:
    clock = Clock()
    marks = Marks(clock=clock)

    def began(client_id: str, fetch_offset: int) -> Mark:
        marks.served(connection(client_id), client_id, PARTITION, fetch_offset, [])
        found = marks.of(None, client_id, "/127.0.0.1", PARTITION)
        assert found is not None
        return found

    assert began("at the start", 0).began_here
    assert not began("goes on after our restart, perhaps", 5).began_here
    clock.now_s = RECENT_S + 1
    assert began("later", 5).began_here
    assert began("later", 5).start == 5


def test_mark_is_incomplete_if_another_node_may_have_served() -> None:
    clock, others, changed_s = Clock(), [True], [0.0]
    marks = Marks(clock=clock, alone=lambda: not others[0], nodes_since_s=lambda: changed_s[0])

    def began_here(client_id: str) -> bool:
        marks.served(connection(client_id), client_id, PARTITION, 5, [])
        found = marks.of(None, client_id, "/127.0.0.1", PARTITION)
        assert found is not None
        return found.began_here

    clock.now_s = 2 * RECENT_S
    assert not began_here("still on its way from another node")
    clock.now_s = CLIENTS_MOVE_S + 2 * RECENT_S
    assert began_here("long pointed here")
    assert not marks.are_complete, "of partitions that others lead"
    others[0], changed_s[0] = False, clock.now_s
    assert not began_here("as the other node is lost")
    assert not marks.are_complete
    clock.now_s += RECENT_S + 1
    assert began_here("long after")
    assert marks.are_complete


def test_mark_is_complete_if_no_other_node_can_have_served() -> None:
    """The partition's clients are redirected to another node, or were for some time. So the mark lacks the records that
    this other node served.
    """
    clock, alone, changed_s = Clock(), [False], [0.0]
    marks = Marks(clock=clock, alone=lambda: alone[0], nodes_since_s=lambda: changed_s[0])
    clock.now_s = 100.0
    marks.served(connection("a"), "c", PARTITION, 0, [batch(0, 10)])
    mark = marks.of("a", "c", "/127.0.0.1", PARTITION)
    assert mark is not None
    assert marks.is_whole(mark, leads=True)
    assert not marks.is_whole(mark, leads=False), "its next Fetch may go to the leader"
    clock.now_s = changed_s[0] = 105.0
    assert not marks.is_whole(mark, leads=True), "another led it, and is gone or was never here"
    clock.now_s = 106.0
    marks.served(connection("a"), "c", PARTITION, 10, [])
    assert not marks.is_whole(mark, leads=True), "nodes do not see at the same moment who leads"
    alone[0] = True
    assert marks.is_whole(mark, leads=True), "there is nobody else"
    changed_s[0] = 107.0
    assert not marks.is_whole(mark, leads=True), "there was until a moment ago"
    clock.now_s = 106.0 + RECENT_S
    assert not marks.is_whole(mark, leads=True), "it is not asking here any more"
    clock.now_s = 107.1 + RECENT_S
    assert marks.is_whole(mark, leads=True), "nor can it have asked anybody else since"


def test_marks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 4)
    clock = Clock()
    marks = Marks(clock=clock)
    clock.now_s = 5.0
    for number in range(3):
        marks.served(connection(f"c{number}"), f"c{number}", PARTITION, 0, [batch(0, 1)])
    assert mark_of(marks, "c0", "c0") is None
    assert mark_of(marks, "c2", "c2") == 1
    assert marks.complete_since_s == 5.0


def test_marks_of_all_clients_together_are_bounded() -> None:
    """One connection may name another client id in each request, each time with all partitions."""
    clock = Clock()
    marks = Marks(clock=clock, max_marks=50)
    topic_id = uuid.uuid4()
    clock.now_s = 5.0
    for number in range(20):
        for index in range(10):
            marks.served(connection("a"), f"c{number}", (topic_id, index), 0, [])

    def are_known(client_id: str) -> list[bool]:
        return [marks.of(None, client_id, "/127.0.0.1", (topic_id, index)) is not None for index in range(10)]

    known = [any(are_known(f"c{number}")) for number in range(20)]
    assert known == [False] * 16 + [True] * 4, "of those and of the connection, ten each"
    assert all(are_known("c19"))
    assert marks.complete_since_s == 5.0


def test_marks_are_complete_since_they_were_requested() -> None:
    clock, wanted = Clock(), [False]
    marks = Marks(lambda: wanted[0], clock)
    assert not marks.wanted
    clock.now_s, wanted[0] = 7.0, True
    assert marks.wanted
    clock.now_s = 9.0
    assert marks.wanted
    assert marks.complete_since_s == 7.0
