"""Remember which connections have spoken for which groups.

The one idea: a connection outlives a group's place in memory. The end of a connection concerns every group that it
spoke for. And if a group is dropped and read again, a request that arrives on an older connection of a member is as
stale as before. So both memories lie beside the slots, and each has a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClientRequest, ConnectionId, Reply, Request

MAX_GROUPS_PER_CONNECTION = 10_000
"""Maximal number of groups that are informed when a connection closes. If the connection has sent requests for more
groups, the members in those groups expire by their session timeout.
"""

_NO_GROUPS: Set[str] = frozenset()
_NO_NUMBERS: Mapping[MemberId, int] = {}


class GroupsOfConnections:
    """For each open connection, the groups for which it has sent requests: at most `bound` in total."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._group_ids: dict[ConnectionId, set[str]] = {}
        self._count = 0

    def note(self, group_id: str, request: Request[Reply]) -> None:
        """Register the group for the end of the request's connection. The runner calls this as the request arrives:
        once the connection has closed, nothing would remove the registration."""
        if not isinstance(request, ClientRequest):
            return
        group_ids = self._group_ids.get(request.connection_id)
        if group_ids is None:
            group_ids = self._group_ids[request.connection_id] = set()
        if group_id not in group_ids and len(group_ids) < MAX_GROUPS_PER_CONNECTION and self._count < self._bound:
            group_ids.add(group_id)
            self._count += 1

    def take(self, connection_id: ConnectionId) -> Set[str]:
        """Forget the connection, and return the groups for which it has sent requests."""
        group_ids = self._group_ids.pop(connection_id, _NO_GROUPS)
        self._count -= len(group_ids)
        return group_ids

    def open(self) -> frozenset[ConnectionId]:
        return frozenset(self._group_ids)


class NewestConnections:
    """The newest connection numbers of the members of dropped groups, for the time when such a group is read again.

    At most `bound` members are remembered. The group that was dropped first is forgotten first.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._numbers: dict[str, Mapping[MemberId, int]] = {}
        self._members = 0

    def keep(self, group_id: str, numbers: Mapping[MemberId, int]) -> None:
        """Remember the connection numbers of a group that is dropped."""
        if not numbers:
            return
        self.take(group_id)
        self._numbers[group_id] = numbers
        self._members += len(numbers)
        while self._members > self._bound:
            self.take(next(iter(self._numbers)))

    def take(self, group_id: str) -> Mapping[MemberId, int]:
        """Forget the group, and return its remembered connection numbers."""
        numbers = self._numbers.pop(group_id, _NO_NUMBERS)
        self._members -= len(numbers)
        return numbers
