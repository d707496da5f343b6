"""Share sessions by values: what they may remember."""

from __future__ import annotations

from uuid import UUID

import pytest

from gateway.coordinator.facts import MemberId
from gateway.share.sessions import ShareSessions
from protocol.errors import ErrorCode, KafkaError

TOPIC = UUID(int=1)


def some(count: int) -> list[tuple[UUID, int]]:
    return [(TOPIC, index) for index in range(count)]


def test_what_all_sessions_read_is_bounded() -> None:
    sessions = ShareSessions(max_partitions=10)
    one, _ = sessions.open("s", MemberId("a"), "c")
    sessions.read(one, some(6), ())
    two, _ = sessions.open("s", MemberId("b"), "c")
    with pytest.raises(KafkaError) as refused:
        sessions.read(two, some(5), ())
    assert refused.value.code is ErrorCode.SHARE_SESSION_LIMIT_REACHED
    assert not two.partitions
    # Of those that are read already, that are forgotten, or whose session has ended, there is room again.
    sessions.read(one, some(6), [(TOPIC, 5)])
    sessions.read(two, some(5), ())
    sessions.end(two)
    sessions.read(one, some(10), ())
    again, former = sessions.open("s", MemberId("a"), "c")
    assert former is one
    sessions.read(again, some(10), ())
