"""How far consumers were served, so that a partition can be given away once its previous owner has committed that far.

The one idea: a mark is written before the bytes leave. It is stored under the connection of the Fetch, and under client
id and host, because a Fetch names no member and most clients fetch and heartbeat on different connections. Marks only
rise. Two readers with the same client id and host share a mark, which can make a wait longer but never shorter. Every
wait has a deadline, so a mark that was forgotten for lack of memory costs at most that time.

Served is not delivered, because clients prefetch. Java's consumer does not ask for more of a partition while it still
holds records of it. So the records below its fetch offset have gone to the application, and its mark is that offset.
Other clients fetch again while they hold many batches. Their mark is the end of the records they were served, and they
may never process all of them. For these clients a mark also remembers when records were served. From these times
`commit_pace.py` derives whether such a consumer has stopped.

Transaction markers are served and never delivered. A consumer that has read the records before some markers may commit
the offset before these markers, or the offset after them. So a mark ends before the markers at the end of the served
batches.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from gateway.net.context import ConnectionInfo
from protocol.buffer import Buffer

MAX_CLIENTS = 20_000
"""Clients with marks: connections, and pairs of client id and host. The client that was silent for the longest time is
forgotten first."""
MAX_PARTITIONS = 20_000
"""Partitions with marks per client. The partition that was fetched longest ago is forgotten first."""
MAX_MARKS = 250_000
"""Marks of all clients: some 100 MB. Each request may name another client id, and any number of partitions."""
RECENT_S = 30.0
"""A consumer fetches each of its partitions at least this often. If it does not, another node may have served it."""
CLIENTS_MOVE_S = 300.0
"""Time within which clients notice that the live nodes have changed (`metadata.max.age.ms`), and fetch from the new
leader."""
MAX_SERVED = 16
"""Number of times that are remembered per consumer and partition. It must be even."""
SERVED_APART_S = 0.1
ASKS_WHEN_IT_HAS_NOTHING = "apache-kafka-java"
"""`client_software_name` of clients that fetch a partition only after they have delivered its records."""

Partition = tuple[UUID, int]
Client = tuple[str, ...]
"""A connection's id alone, or a client's id with its host."""

_BATCH_HEAD = struct.Struct(">q13xhi")
"""Base offset, attributes, and last offset delta of a batch."""
_IS_CONTROL = 0x20
"""Bit of a batch's attributes."""


@dataclass(slots=True)
class Mark:
    offset: int
    start: int
    """The offset at which the consumer began, as far as this node knows."""
    began_here: bool
    """True if neither another node nor an earlier process of this node can have served the consumer before."""
    at_s: float
    """Time of the last fetch."""
    markers: tuple[int, int] = (0, 0)
    """First offset, and the offset after the last, of the last run of transaction markers that ended a response."""
    served: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Pairs of an end of served records and the time at which that end was first served. Ends rise. Older pairs are
    further apart."""

    def rise(self, offset: int) -> None:
        begin, end = self.markers
        self.offset = max(self.offset, begin if begin < offset <= end else offset)

    def note(self, end: int, at_s: float) -> None:
        """Note that records up to `end` are served at the time `at_s`."""
        served = self.served
        if served and end <= served[-1][0]:
            return
        if served and at_s - served[-1][1] < SERVED_APART_S:
            served[-1] = (end, served[-1][1])
            return
        served.append((end, at_s))
        if len(served) > MAX_SERVED:
            # Merge each two neighbours of the older half. The earlier time stays.
            half = MAX_SERVED // 2
            served[:half] = [(served[place + 1][0], served[place][1]) for place in range(0, half, 2)]

    def served_s(self, offset: int) -> float | None:
        """Return a time at or before which this record was served; None if it is unknown."""
        if offset < self.start or not self.served or offset >= self.served[-1][0]:
            return None
        return self.served[bisect_right(self.served, (offset, float("inf")))][1]

    def see(self, markers: tuple[int, int]) -> None:
        begin, end = self.markers
        self.markers = (begin, markers[1]) if markers[0] == end else markers


class Marks:
    """The marks of one node. `wanted` returns whether any group needs marks. `alone` returns whether no other node is
    alive. `nodes_since_s` returns the time since which the live nodes are unchanged."""

    def __init__(
        self,
        wanted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = lambda: 0.0,
        alone: Callable[[], bool] = lambda: True,
        nodes_since_s: Callable[[], float] = lambda: float("-inf"),
        *,
        max_marks: int = MAX_MARKS,
    ) -> None:
        self._wanted = wanted
        self._clock = clock
        self._alone = alone
        self._nodes_since_s = nodes_since_s
        self._max_marks = max_marks
        self._marks: OrderedDict[Client, OrderedDict[Partition, Mark]] = OrderedDict()
        self._count = 0
        self.complete_since_s = clock()
        """Time since which this node has not forgotten any mark."""
        self._was_wanted = False

    @property
    def are_complete(self) -> bool:
        """Return whether a consumer without a mark here has fetched from no node, at least not recently from a node
        that has died."""
        return self._alone() and self._silent_s() > RECENT_S

    def is_whole(self, mark: Mark, *, leads: bool) -> bool:
        """Return whether no node has served the consumer further than this mark.

        That is so if the consumer has fetched here recently and clients of the partition are sent to this node
        (`leads`). If the live nodes have changed since the mark, another node may have led the partition. A client that
        was sent to another node may fetch there at any time.
        """
        now_s, moved_s = self._clock(), self._nodes_since_s()
        if self.are_complete:
            return True
        if now_s - mark.at_s >= RECENT_S:
            return False
        return mark.at_s >= moved_s if self._alone() else leads and now_s - moved_s > RECENT_S

    def _silent_s(self) -> float:
        """Return for how many seconds no client without a mark here can have fetched from another node, if its
        partitions are led here."""
        moved_s = self._nodes_since_s() + (0.0 if self._alone() else CLIENTS_MOVE_S)
        return self._clock() - max(self.complete_since_s, moved_s)

    @property
    def wanted(self) -> bool:
        wanted = self._wanted()
        if wanted and not self._was_wanted:
            self.complete_since_s = self._clock()
        self._was_wanted = wanted
        return wanted

    def served(
        self,
        connection: ConnectionInfo,
        client_id: str,
        partition: Partition,
        fetch_offset: int,
        batches: Sequence[Buffer],
    ) -> None:
        """Note that the batches, if any, are about to be sent."""
        begin = end = None
        for batch in reversed(batches):
            base_offset, attributes, last_offset_delta = _BATCH_HEAD.unpack_from(batch)
            end = base_offset + last_offset_delta + 1 if end is None else end
            if not attributes & _IS_CONTROL:
                break
            begin = base_offset
        for client in ((connection.connection_id,), (client_id, connection.client_host)):
            mark = self._mark(client, partition, fetch_offset)
            mark.rise(fetch_offset)
            if begin is not None and end is not None:
                mark.see((begin, end))
            if end is not None and connection.client_software_name != ASKS_WHEN_IT_HAS_NOTHING:
                mark.rise(end)
                mark.note(end, self._clock())

    def of(self, connection_id: str | None, client_id: str, client_host: str, partition: Partition) -> Mark | None:
        """Return the member's mark: the mark of its connection if it fetches there, else the mark of its client id and
        host."""
        for client in ((connection_id or "",), (client_id, client_host)):
            mark = self._marks.get(client, _NOTHING).get(partition)
            if mark is not None:
                return mark
        return None

    def _mark(self, client: Client, partition: Partition, fetch_offset: int) -> Mark:
        marks = self._marks.get(client)
        if marks is None:
            marks = self._marks[client] = OrderedDict()
        else:
            self._marks.move_to_end(client)
        mark = marks.get(partition)
        if mark is not None:
            mark.at_s = self._clock()
            marks.move_to_end(partition)
            return mark
        began_here = fetch_offset <= 0 or self._silent_s() > RECENT_S
        mark = marks[partition] = Mark(fetch_offset, fetch_offset, began_here, self._clock())
        self._count += 1
        if len(marks) > MAX_PARTITIONS:
            marks.popitem(last=False)
            self._forgot(1)
        while len(self._marks) > 1 and (len(self._marks) > MAX_CLIENTS or self._count > self._max_marks):
            _, silent = self._marks.popitem(last=False)
            self._forgot(len(silent))
        return mark

    def _forgot(self, count: int) -> None:
        self._count -= count
        self.complete_since_s = self._clock()


_NOTHING: OrderedDict[Partition, Mark] = OrderedDict()
