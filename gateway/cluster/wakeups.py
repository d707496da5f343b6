"""Announce appends to the other nodes, and wake the fetches that are parked here when other nodes announce theirs.

The one idea: an announcement is a numbered hint. After a commit, never inside it, a node announces which partitions
ended where: at once after a quiet time, else together with everything within ANNOUNCE_INTERVAL_S, because Postgres
serialises commits that notify. A node that hears of an end beyond its own wakes the fetches that wait there. As long as
a node hears everything, an end without an announced change is still valid, and a parked fetch asks Postgres nothing.

Missed announcements are found without a question: each node stores with its registration how many it has sent. If a
node has heard fewer, has just begun to listen, or a neighbour died with appends unannounced, the node looks at the
partitions with waiting fetches, all in one query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import structlog

from gateway.cluster.clock import boot_time_s
from gateway.cluster.membership import Membership
from gateway.log.tail import Tail
from storage.errors import StorageError
from storage.types import Node, PartitionKey, PartitionState

logger = structlog.get_logger(__name__)

ANNOUNCE_INTERVAL_S = 0.005
"""Shortest interval between two announcements of a node: at most two hundred per second."""

MAX_PAYLOAD_BYTES = 7_000
"""Largest payload of a notification. Postgres accepts 7,999 bytes."""

MAX_GATHERED = 20_000
"""Maximal number of partitions whose ends wait to be announced. If there are more, this node announces that the other
nodes must read the ends themselves."""

LOOK_INTERVAL_S = 1.0
"""Interval at which the ends of watched partitions are read while they are in doubt."""

MAX_LOOKED_AT = 5_000
"""Maximal number of partitions that one query reads."""

UNKNOWN = "?"
"""Replaces the ends in an announcement if appends may have happened that no announcement describes."""

Announce = Callable[[Sequence[str]], Awaitable[None]]
ReadStates = Callable[[Iterable[PartitionKey]], Awaitable[Mapping[PartitionKey, PartitionState]]]


class Wakeups:
    """`appended` and `in_doubt` are called by the appender, `heard` with payloads, `hearing` and `deaf` by the
    listener. `announce_all` and `look` are passes of a supervisor."""

    def __init__(
        self,
        tail: Tail,
        membership: Membership,
        announce: Announce,
        read_states: ReadStates,
    ) -> None:
        self._tail = tail
        self._membership = membership
        self._announce = announce
        self._read_states = read_states
        self._ends: dict[PartitionKey, int] = {}
        self._unknown = False
        self._gathered = asyncio.Event()
        self._sent = 0
        self._heard: dict[tuple[int, int], int] = {}
        self._promised: dict[tuple[int, int], int] = {}
        self._look_due = asyncio.Event()
        self._hears = False
        self.counts = {"sent": 0, "merged": 0, "heard": 0, "missed": 0, "late": 0}
        """Counts of payloads sent and heard, of ends merged into a later one, of gaps in the numbers of payloads, and
        of payloads that arrived after a later one."""
        tail.trust_since(float("inf"))

    # --- telling --------------------------------------------------------------------------------------------------

    def appended(self, key: PartitionKey, high_watermark: int) -> None:
        """Note a durable commit. If there are no other nodes, nothing is announced."""
        if not self._membership.has_other_brokers:
            return
        if key in self._ends:
            self.counts["merged"] += 1
        elif len(self._ends) >= MAX_GATHERED:
            self._unknown = True
            self._ends.clear()
        if high_watermark > self._ends.get(key, -1):
            self._ends[key] = high_watermark
        self._gathered.set()

    @property
    def announced(self) -> int:
        """Number of announcements that have been sent."""
        return self._sent

    def in_doubt(self) -> None:
        """Note a commit without an outcome: it may become durable later. Fetches that wait here are checked too,
        with other nodes or without."""
        self._look_due.set()
        if self._membership.has_other_brokers:
            self._unknown = True
            self._gathered.set()

    async def announce_all(self) -> None:
        """Wait for announcements and send them. Raise StorageError: then the next announcement asks the other nodes to
        read the ends themselves, because this one may be lost.
        """
        await self._gathered.wait()
        self._gathered.clear()
        payloads = self._payloads()
        try:
            await self._announce(payloads)
        except StorageError:
            self._unknown = True
            self._gathered.set()
            raise
        self._sent += len(payloads)
        self.counts["sent"] += len(payloads)
        await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def _payloads(self) -> list[str]:
        ends, unknown = self._ends, self._unknown
        self._ends, self._unknown = {}, False
        bodies: list[str] = [UNKNOWN] if unknown else []
        part: list[str] = []
        size = 0
        for key, end in ends.items():
            text = f"{key}={end}"
            if size + len(text) > MAX_PAYLOAD_BYTES:
                bodies.append(",".join(part))
                part, size = [], 0
            part.append(text)
            size += len(text) + 1
        if part:
            bodies.append(",".join(part))
        node = self._membership.self_node
        return [
            f"{node.node_id}.{node.incarnation}:{number}:{body}" for number, body in enumerate(bodies, self._sent + 1)
        ]

    # --- hearing --------------------------------------------------------------------------------------------------

    def hearing(self) -> None:
        """Note that the listener receives again. Earlier reads may be out of date."""
        self._hears = True
        self._heard.clear()
        self._promised.clear()
        self._trust_from_now()

    def deaf(self) -> None:
        """Note that the listener does not receive. Known ends are then valid for a moment only."""
        self._hears = False
        self._tail.trust_since(float("inf"))
        self._look_due.set()

    def heard(self, payload: str) -> None:
        """Process another node's announcement, and ignore an echo of this node's own."""
        try:
            sender, number_text, body = payload.split(":")
            node_id, incarnation = map(int, sender.split("."))
            number = int(number_text)
            ends = [] if body == UNKNOWN else [tuple(map(int, end.split("="))) for end in body.split(",")]
            pairs = [(PartitionKey(key), end) for key, end in ends]
        except ValueError:
            logger.warning("notification ignored: it cannot be read", payload=payload[:100])
            return
        me = self._membership.self_node
        if (node_id, incarnation) == (me.node_id, me.incarnation):
            return
        self.counts["heard"] += 1
        expected = self._heard.get((node_id, incarnation), number - 1) + 1
        self._heard[node_id, incarnation] = max(number, expected - 1)
        if number < expected:
            self.counts["late"] += 1
        if number > expected:
            self._missed(f"{number - expected} announcements of node {node_id}")
        now_s = asyncio.get_running_loop().time()
        if body == UNKNOWN:
            self._tail.doubt(now_s)
            self._look_due.set()
        for key, end in pairs:
            self._tail.heard(key, end, now_s)

    def nodes_seen(self, alive: Sequence[Node], gone: bool) -> None:
        """Receive the live nodes of a pass. `gone` is true if a node is missing, perhaps with appends that it has not
        announced.
        """
        now_s = asyncio.get_running_loop().time()
        registered_for_s = self._membership.registered_until_s - boot_time_s()
        self._tail.trust_until(now_s + registered_for_s if self._membership.has_other_brokers else float("inf"))
        me = self._membership.self_node
        others = {(int(node.node_id), node.incarnation): node.announced for node in alive if node.node_id != me.node_id}
        for sender, promised in self._promised.items():
            # `promised` was read in the previous pass. An announcement that was sent until then has arrived by now, or
            # will never arrive.
            if sender in others and promised > self._heard[sender]:
                self._heard[sender] = promised
                self._missed(f"announcements of node {sender[0]}")
        for sender, announced in others.items():
            self._heard.setdefault(sender, announced)
        for sender in self._heard.keys() - others.keys():
            del self._heard[sender]
        self._promised = others
        if gone:
            self._tail.doubt(now_s)
            self._look_due.set()

    def registered(self) -> None:
        """Note that this node has registered (again). Nodes that have not seen the registration yet may not announce to
        it."""
        if self._hears:
            self._trust_from_now()

    def _missed(self, what: str) -> None:
        self.counts["missed"] += 1
        logger.info("announcements missed", missed=what)
        self._trust_from_now()

    def _trust_from_now(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._tail.trust_since(max(now_s, self._membership.known_since_s))
        self._look_due.set()

    # --- looking --------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Wait until ends are in doubt, and read those with waiting fetches. Raise StorageError."""
        loop = asyncio.get_running_loop()
        if not self._tail.doubtful(loop.time()):
            await self._look_due.wait()
        # Clear the reason before the read: a reason that arrives during the read must cause another one.
        self._look_due.clear()
        started_s = loop.time()
        keys = self._tail.watched()
        for first in range(0, len(keys), MAX_LOOKED_AT):
            states = await self._read_states(keys[first : first + MAX_LOOKED_AT])
            # The tail remembers no announcement for a partition that was not watched during the read.
            watched = frozenset(self._tail.watched())
            for key, state in states.items():
                if key in watched:
                    self._tail.observe(key, state, started_s)
        await asyncio.sleep(LOOK_INTERVAL_S)
