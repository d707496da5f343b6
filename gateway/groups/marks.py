"""How far consumers were served, so that a partition can be given away once its old owner has committed that far.

The one idea: a mark is written before the bytes leave, under the connection that asked and under its client id and
host, since a Fetch names no member and most clients fetch on another connection than they heartbeat on. Marks only
rise; what two readers of one name were served is taken together, which can make a wait longer and never shorter. A
wait has a deadline of its own, so what was forgotten here for lack of room costs at most that.

Served is not delivered: clients prefetch. Java's consumer asks for no more of a partition while it still has some, so
what lies below the offset that it asked for has gone to the application; that is its mark. Others ask on while they
hold many batches, so for them it is the end of what was served, and they may never process all of it. For them it is
remembered when what was served: `commit_pace.py` tells by that when such a consumer has stopped.

Markers of transactions are served and never delivered: a consumer that has read what lies before them may commit that
offset, or the one behind them. So a mark ends before the markers that end what was served.
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
"""Connections, and client ids at hosts; those longest silent are forgotten first."""
MAX_PARTITIONS = 20_000
"""Partitions of each client. The one asked for longest ago is forgotten first."""
RECENT_S = 30.0
"""A consumer asks again within this time. A partition that was not asked for may have been served by another node."""
CLIENTS_MOVE_S = 300.0
"""Within it clients ask the node that they are pointed to since the live nodes are others (`metadata.max.age.ms`)."""
MAX_SERVED = 16
"""Moments remembered of one consumer and partition. Even."""
SERVED_APART_S = 0.1
ASKS_WHEN_IT_HAS_NOTHING = "apache-kafka-java"
"""`client_software_name` of clients that hold one answer at a time."""

Partition = tuple[UUID, int]
Client = tuple[str, ...]
"""A connection's id alone, or a client's id and host."""

_BATCH_HEAD = struct.Struct(">q13xhi")
"""Base offset, attributes, and the last offset's delta."""
_IS_CONTROL = 0x20
"""Bit of the attributes."""


@dataclass(slots=True)
class Mark:
    offset: int
    start: int
    """The offset at which the consumer began, as far as this node knows."""
    began_here: bool
    """True if the consumer cannot have been served anything before, neither by this node in an earlier run nor by
    another node.
    """
    at_s: float
    """When it was last fetched."""
    markers: tuple[int, int] = (0, 0)
    """The last run of transaction markers at the end of an answer: where it begins, and where it ends."""
    served: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Ends of what was served, and when it was first served so far. Rising; the older, the coarser."""

    def rise(self, offset: int) -> None:
        begin, end = self.markers
        self.offset = max(self.offset, begin if begin < offset <= end else offset)

    def note(self, end: int, at_s: float) -> None:
        """Records up to `end` are served."""
        served = self.served
        if served and end <= served[-1][0]:
            return
        if served and at_s - served[-1][1] < SERVED_APART_S:
            served[-1] = (end, served[-1][1])
            return
        served.append((end, at_s))
        if len(served) > MAX_SERVED:
            # Of two neighbours in the older half the time of the first stays.
            half = MAX_SERVED // 2
            served[:half] = [(served[place + 1][0], served[place][1]) for place in range(0, half, 2)]

    def served_s(self, offset: int) -> float | None:
        """When this record was served, or a moment before. None: that is unknown."""
        if offset < self.start or not self.served or offset >= self.served[-1][0]:
            return None
        return self.served[bisect_right(self.served, (offset, float("inf")))][1]

    def see(self, markers: tuple[int, int]) -> None:
        begin, end = self.markers
        self.markers = (begin, markers[1]) if markers[0] == end else markers


class Marks:
    """The marks of one node. `wanted` says whether any group waits for what is served, `alone` whether no other node
    lives, and `nodes_since_s` since when the live nodes are unchanged."""

    def __init__(
        self,
        wanted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = lambda: 0.0,
        alone: Callable[[], bool] = lambda: True,
        nodes_since_s: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        self._wanted = wanted
        self._clock = clock
        self._alone = alone
        self._nodes_since_s = nodes_since_s
        self._marks: OrderedDict[Client, OrderedDict[Partition, Mark]] = OrderedDict()
        self.complete_since_s = clock()
        """From here on nothing is missing that this node has served."""
        self._was_wanted = False

    @property
    def are_complete(self) -> bool:
        """Return whether a consumer that has not asked here has asked nowhere, nor recently a node that is lost."""
        return self._alone() and self._silent_s() > RECENT_S

    def is_whole(self, mark: Mark, *, leads: bool) -> bool:
        """Return whether the consumer was served no more than this: it has asked here recently, and no other consumer
        has since.

        `leads`: clients of the partition are sent to this node. If the live nodes have changed, another node may have
        led the partition since the mark. A client that was sent to another node may ask that node at any time.
        """
        now_s, moved_s = self._clock(), self._nodes_since_s()
        if self.are_complete:
            return True
        if now_s - mark.at_s >= RECENT_S:
            return False
        return mark.at_s >= moved_s if self._alone() else leads and now_s - moved_s > RECENT_S

    def _silent_s(self) -> float:
        """Return for how many seconds a client that belongs here, and has not asked here, has asked no other node."""
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
        """These are about to be sent, if any."""
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
        """Return the mark of the member: that of its own connection, if it fetches there, else that of its name."""
        for client in ((connection_id or "",), (client_id, client_host)):
            mark = self._marks.get(client, _NOTHING).get(partition)
            if mark is not None:
                return mark
        return None

    def _mark(self, client: Client, partition: Partition, fetch_offset: int) -> Mark:
        marks = self._marks.get(client)
        if marks is None:
            marks = self._marks[client] = OrderedDict()
            if len(self._marks) > MAX_CLIENTS:
                self._marks.popitem(last=False)
                self.complete_since_s = self._clock()
        else:
            self._marks.move_to_end(client)
        mark = marks.get(partition)
        if mark is None:
            began_here = fetch_offset <= 0 or self._silent_s() > RECENT_S
            mark = marks[partition] = Mark(fetch_offset, fetch_offset, began_here, self._clock())
            if len(marks) > MAX_PARTITIONS:
                marks.popitem(last=False)
                self.complete_since_s = self._clock()
            return mark
        mark.at_s = self._clock()
        marks.move_to_end(partition)
        return mark


_NOTHING: OrderedDict[Partition, Mark] = OrderedDict()
