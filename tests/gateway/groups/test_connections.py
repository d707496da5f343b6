"""Limits on the memory of connections that have sent requests of groups."""

from __future__ import annotations

from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, RequestId
from gateway.coordinator.requests import Heartbeat
from gateway.groups.connections import GroupsOfConnections


def test_groups_of_all_connections_together_are_bounded() -> None:
    """A client may name another group in each request, and open many connections."""
    known = GroupsOfConnections(bound=3)

    def note(connection: str, *group_ids: str) -> None:
        request = Heartbeat(RequestId(1), ConnectionId(connection), MemberId("m"), None, 1)
        for group_id in group_ids:
            known.note(group_id, request)

    note("a", "g1", "g2", "g1", "g2")
    note("b", "g1", "g2")
    assert known.take(ConnectionId("b")) == {"g1"}
    note("c", "g1", "g2")
    assert known.take(ConnectionId("a")) == {"g1", "g2"}
    note("c", "g3", "g4", "g5")
    assert known.take(ConnectionId("c")) == {"g1", "g3", "g4"}
    assert known.take(ConnectionId("c")) == set()
