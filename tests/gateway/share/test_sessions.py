"""Limits on the memory of share sessions, for each session and in total."""

from __future__ import annotations

from uuid import UUID

import pytest

from gateway.coordinator.facts import MemberId
from gateway.share import sessions as module
from gateway.share.sessions import ShareSession, ShareSessions
from protocol.errors import ErrorCode, KafkaError
from storage.share import ShareKey

TOPIC = UUID(int=1)


def opened(sessions: ShareSessions, name: str) -> ShareSession:
    session, _ = sessions.open("g", MemberId(name), f"connection of {name}")
    return session


def partitions(count: int, first: int = 0) -> list[tuple[UUID, int]]:
    return [(TOPIC, index) for index in range(first, first + count)]


def refused(sessions: ShareSessions, session: ShareSession, added: list[tuple[UUID, int]]) -> ErrorCode:
    before = dict(session.partitions)
    with pytest.raises(KafkaError) as raised:
        sessions.read(session, added, ())
    assert session.partitions == before
    return raised.value.code


def test_partitions_of_all_sessions_are_bounded() -> None:
    sessions = ShareSessions(max_partitions=10)
    one, two = opened(sessions, "one"), opened(sessions, "two")
    sessions.read(one, partitions(6), ())
    assert refused(sessions, two, partitions(5)) is ErrorCode.SHARE_SESSION_LIMIT_REACHED
    sessions.read(two, partitions(4), ())
    sessions.read(one, (), partitions(1))
    sessions.read(two, partitions(1, first=4), ())
    sessions.end(one)
    sessions.end(one)
    sessions.read(two, partitions(5, first=5), ())
    assert refused(sessions, two, partitions(1, first=10)) is ErrorCode.SHARE_SESSION_LIMIT_REACHED


def test_forgotten_partitions_with_locks_count_too() -> None:
    """Partitions that a client has left but still has acquired records in. A client that moves from partition to
    partition keeps no more of them than one that reads all partitions.
    """
    sessions = ShareSessions(max_partitions=10)
    session = opened(sessions, "one")
    for first in range(0, 8, 2):
        sessions.read(session, partitions(2, first=first), partitions(2, first=first - 2))
        session.acquired_in.update((ShareKey("g", *each), None) for each in session.partitions)
    before = dict(session.partitions)
    sessions.read(session, partitions(1, first=8), partitions(2, first=6))
    assert refused(sessions, session, partitions(2, first=9)) is ErrorCode.SHARE_SESSION_LIMIT_REACHED
    assert before != session.partitions


def test_partitions_of_one_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSION_PARTITIONS", 3)
    sessions = ShareSessions()
    session = opened(sessions, "one")
    sessions.read(session, partitions(3), ())
    assert refused(sessions, session, partitions(1, first=3)) is ErrorCode.INVALID_REQUEST
    sessions.read(session, partitions(1, first=3), partitions(1))


def some(count: int) -> list[tuple[UUID, int]]:
    return [(TOPIC, index) for index in range(count)]


def test_partitions_read_by_all_sessions_are_bounded() -> None:
    sessions = ShareSessions(max_partitions=10)
    one, _ = sessions.open("s", MemberId("a"), "c")
    sessions.read(one, some(6), ())
    two, _ = sessions.open("s", MemberId("b"), "c")
    with pytest.raises(KafkaError) as refused:
        sessions.read(two, some(5), ())
    assert refused.value.code is ErrorCode.SHARE_SESSION_LIMIT_REACHED
    assert not two.partitions
    # Partitions that are already read, that are forgotten, or whose session has ended, use no further memory.
    sessions.read(one, some(6), [(TOPIC, 5)])
    sessions.read(two, some(5), ())
    sessions.end(two)
    sessions.read(one, some(10), ())
    again, former = sessions.open("s", MemberId("a"), "c")
    assert former is one
    sessions.read(again, some(10), ())


def test_memory_is_checked_again_after_a_silence() -> None:
    """The member may have expired, and its group's offsets may have been reset through another node."""
    sessions, leaders = ShareSessions(), object()
    session = opened(sessions, "one")
    sessions.read(session, partitions(2), ())
    session.led_by(10.0, leaders)
    session.unverified.clear()
    session.led_by(10.0 + module.SILENT_S, leaders)
    assert not session.unverified
    session.led_by(10.1 + 2 * module.SILENT_S, leaders)
    assert list(session.unverified) == partitions(2)
