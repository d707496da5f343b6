"""Write internal topics while a client reads them.

The one idea is level-triggered writing. The keys in the log say what has been written, the tables say what is true, and
the writer appends the difference through the path of all records. So the next look makes up for a crash, a lease that
moved, and an append that was lost or late. The first look at an empty log writes a snapshot.

Every node follows a topic from its first Fetch, because each node writes the records of its own owners. Nodes that
serve readers announce this repeatedly. Ten minutes after the last read only the records remain. A client that merely
asks for the end of the log counts as a reader once an hour, for one minute. No commit, heartbeat or transaction waits
for this module. Only a client that asks for the end of the log waits, until this node has written its first snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog

from gateway.cluster.clock import wall_ms
from gateway.cluster.leases import partition_of
from gateway.cluster.wake import Wake
from gateway.internal_log.record import Unsettled
from gateway.internal_log.sources import Owned, Source
from gateway.log.appender import Appender
from gateway.log.catalog import Catalog
from gateway.net.pieces import in_pieces
from protocol.coordinator_records import owner_of
from protocol.errors import ProtocolError
from protocol.records import Record, build_batch, iter_records
from storage.errors import StorageError, StorageUnavailable
from storage.log import LogStore
from storage.types import Appended, NewBatch, Partition, PartitionKey, ReadRequest, ReadResult, Refusal, Topic

logger = structlog.get_logger(__name__)

FOLLOWED_S = 600.0
"""How long a topic is written after a client has last read it."""
ASK_AGAIN_S = 3600.0
"""Minimum time between two requests for a topic's end that count as reading. Exporters request the ends of all topics
for ever, and read none.
"""
TELL_S = 30.0
"""How often this node announces to the other nodes that a topic is read."""
WHOLE_S = 30.0
"""How often the writer reads the state of all owners. It then finds changes without a notification, such as expired
offsets.
"""
IDLE_S = 60.0
GATHER_S = 0.02
"""Changes within this time are written together."""
READY_S = 5.0
"""How long a request for a log's end waits for the first pass."""

OWNERS_AT_A_TIME = 50
BATCH_RECORDS = 250
BATCH_BYTES = 256 * 1024
READ_BYTES = 1024 * 1024
READ_APART_BYTES = 64 * 1024
"""A larger batch is read in a thread."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds for one topic that clients read."""

    asked_s: float = 60.0
    """How long the node writes a topic for a client that asked for the topic's end but fetches nothing."""
    changed: int = 10_000
    """Number of changed owners that are remembered. If more have changed, the writer checks all owners."""
    keys: int = 1_000_000
    """Keys that a node remembers, some 200 MB. With more keys the topic is not written."""


BOUNDS = Bounds()


@dataclass(slots=True, eq=False)
class _Followed:
    """One topic that clients read."""

    source: Source
    until_s: float
    is_read_here: bool = False
    """True if a client has read the topic here since the last announcement."""
    tell_due_s: float = 0.0
    whole_due_s: float = 0.0
    changed: set[str] = field(default_factory=set[str])
    topic: Topic | None = None
    written: dict[str, dict[bytes, bytes]] = field(default_factory=dict[str, dict[bytes, bytes]])
    """For each owner, its keys in the log, each with a digest of its value."""
    key_count: int = 0
    read_to: dict[PartitionKey, int] = field(default_factory=dict[PartitionKey, int])
    """The offset up to which `written` includes the records of other nodes."""
    log_starts: dict[PartitionKey, int] = field(default_factory=dict[PartitionKey, int])
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the writer has checked all owners once, or when it cannot."""
    is_too_large: bool = False
    has_lost: bool = False
    """True if the log may have lost records since this pass began."""

    def forget(self) -> None:
        """Forget the contents of the log, so that the next pass reads it again."""
        self.written, self.key_count, self.is_too_large = {}, 0, False
        self.read_to, self.log_starts, self.whole_due_s = {}, {}, 0.0


@dataclass(slots=True)
class _Pending:
    """Records that are being appended to one partition."""

    records: list[tuple[str, bytes, bytes | None]] = field(default_factory=list[tuple[str, bytes, bytes | None]])
    size_bytes: int = 0


class InternalLogs:
    """The internal topics of one node. `run` is a pass of a supervisor."""

    def __init__(
        self,
        catalog: Catalog,
        log: LogStore,
        appender: Appender,
        sources: Iterable[Source],
        tell: Callable[[str], Awaitable[None]],
        now_ms: Callable[[], int] = wall_ms,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """`tell` sends its argument to `heard` on every node, this one included."""
        self._catalog = catalog
        self._log = log
        self._appender = appender
        self._sources = {source.topic: source for source in sources}
        self._tell = tell
        self._now_ms = now_ms
        self._bounds = bounds
        self._followed: dict[str, _Followed] = {}
        self._ask_again_s: dict[str, float] = {}
        self._wake = Wake()
        self._loop = asyncio.get_running_loop()

    # --- who reads ------------------------------------------------------------------------------------------------

    def seen(self, topic_name: str) -> None:
        """Note that a client reads the topic through this node."""
        self._read_here(self._follow(topic_name, FOLLOWED_S))

    def _read_here(self, followed: _Followed | None) -> None:
        if followed is not None and not followed.is_read_here:
            followed.is_read_here = True
            if followed.tell_due_s <= self._loop.time():
                self._wake("read")

    async def ready(self, topic_name: str) -> None:
        """Wait briefly until this node has written its own state, because a client asks for the topic's first or last
        offset. Return at once if the client asks repeatedly without reading.
        """
        followed = self._followed.get(topic_name)
        now_s = self._loop.time()
        if followed is None and self._ask_again_s.get(topic_name, now_s) <= now_s:
            followed = self._follow(topic_name, self._bounds.asked_s)
            self._read_here(followed)
            if followed is not None:
                self._ask_again_s[topic_name] = now_s + ASK_AGAIN_S
        if followed is not None and not followed.begun.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(followed.begun.wait(), READY_S)

    def heard(self, payload: str) -> None:
        """Note that a client reads a topic through some node. The payload is the topic's name and for how many seconds
        it must be written."""
        topic_name, _, seconds = payload.partition(" ")
        if seconds.isdecimal():
            self._follow(topic_name, min(float(seconds), FOLLOWED_S))

    def _follow(self, topic_name: str, for_s: float) -> _Followed | None:
        until_s = self._loop.time() + for_s
        followed = self._followed.get(topic_name)
        if followed is not None:
            # A node with a reader announces it again before that time, because TELL_S is at most half of every period.
            followed.until_s = until_s
            return followed
        source = self._sources.get(topic_name)
        if source is None:
            return None
        followed = self._followed[topic_name] = _Followed(source, until_s)
        source.follow(lambda owner: self._changed(followed, owner))
        self._wake("followed")
        logger.info("internal topic followed", topic=topic_name)
        return followed

    def _leave(self, topic_name: str) -> None:
        self._followed.pop(topic_name).source.leave()
        logger.info("internal topic no longer followed", topic=topic_name)

    # --- what changes ---------------------------------------------------------------------------------------------

    def _changed(self, followed: _Followed, owner: str) -> None:
        if len(followed.changed) < self._bounds.changed:
            followed.changed.add(owner)
        else:
            followed.whole_due_s = 0.0
        self._wake("changed")

    def forget(self) -> None:
        """Forget the contents of all logs, because the database may have lost records."""
        for followed in self._followed.values():
            followed.forget()
            followed.has_lost = True
            self._wake("forgotten")

    def shards_moved(self) -> None:
        """Read the state of all owners, because this node has become responsible for further ones."""
        for followed in self._followed.values():
            followed.whole_due_s = 0.0
            self._wake("shards")

    # --- the pass -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Wait for a change or for the next complete look, then append what is new. Raise StorageError."""
        if await self._wake.wait(self._pause_s()) == "changed":
            await asyncio.sleep(GATHER_S)
        for name, followed in list(self._followed.items()):
            if followed.until_s <= self._loop.time():
                self._leave(name)
                continue
            if followed.is_read_here and followed.tell_due_s <= self._loop.time():
                followed.is_read_here = False
                followed.tell_due_s = self._loop.time() + TELL_S
                await self._tell(f"{name} {round(max(followed.until_s - self._loop.time(), 0))}")
            try:
                await self._write(followed)
            except BaseException:
                # The outcome of the append is unknown. The log will show it.
                followed.whole_due_s = 0.0
                raise

    def _pause_s(self) -> float:
        due = [followed.whole_due_s for followed in self._followed.values() if not followed.is_too_large]
        return max(min(due, default=float("inf")) - self._loop.time(), 0.0) if due else IDLE_S

    async def _write(self, followed: _Followed) -> None:
        topic = self._catalog.get(followed.source.topic)
        if topic is None:
            followed.whole_due_s = self._loop.time() + WHOLE_S
            followed.begun.set()
            return
        if followed.topic is None or _another(followed.topic, topic):
            followed.forget()
        followed.topic = topic
        whole = followed.whole_due_s <= self._loop.time()
        changed, followed.changed = followed.changed, set()
        if followed.is_too_large:
            return
        followed.has_lost = False
        if whole:
            await self._read_log(followed, topic)
        await self._write_own(followed, topic, self._all(followed) if whole else in_pieces(changed))
        if followed.key_count > self._bounds.keys:
            logger.warning("internal topic not written: it has too many keys", topic=topic.name, keys=self._bounds.keys)
            followed.written, followed.is_too_large = {}, True
            followed.begun.set()
        if followed.has_lost:
            # This pass may have read or written a log that has been replaced in the meantime.
            followed.forget()
        elif whole:
            followed.whole_due_s = self._loop.time() + WHOLE_S
            followed.begun.set()

    async def _write_own(self, followed: _Followed, topic: Topic, owners: AsyncIterable[str]) -> None:
        """Write the records of the owners that belong to this node, unless they have too many keys."""
        some: list[str] = []
        async for owner in owners:
            if followed.source.is_own(owner):
                some.append(owner)
            if len(some) == OWNERS_AT_A_TIME:
                await self._write_owners(followed, topic, some)
                some = []
            if followed.key_count > self._bounds.keys:
                break
        await self._write_owners(followed, topic, some)

    async def _all(self, followed: _Followed) -> AsyncGenerator[str]:
        """Yield the owners of the keys in the log, then the other existing owners."""
        async for owner in in_pieces(list(followed.written)):
            yield owner
        async for owner in followed.source.owners():
            if owner not in followed.written:
                yield owner

    async def _write_owners(self, followed: _Followed, topic: Topic, owners: Sequence[str]) -> None:
        if not owners:
            return
        pending: dict[int, _Pending] = {}
        async for owned in followed.source.read(owners):
            index = partition_of(owned.owner, len(topic.partitions))
            await self._write_owned(followed, topic.partitions[index], owned, pending.setdefault(index, _Pending()))
        for index, records in pending.items():
            await self._append(followed, topic.partitions[index], records)

    async def _write_owned(self, followed: _Followed, partition: Partition, owned: Owned, pending: _Pending) -> None:
        known = followed.written.get(owned.owner, {})
        gone = dict.fromkeys(known)
        new = [(key, value) for key, value in owned.beginning if key not in known and isinstance(value, bytes)]
        for key, value in new:
            await self._put(followed, partition, pending, (owned.owner, key, value))
        if owned.now is not None:
            async for key, value in owned.now:
                gone.pop(key, None)
                if not isinstance(value, Unsettled) and known.get(key) != _digest(value):
                    await self._put(followed, partition, pending, (owned.owner, key, value))
        for key in gone:
            await self._put(followed, partition, pending, (owned.owner, key, None))

    async def _put(
        self, followed: _Followed, partition: Partition, pending: _Pending, record: tuple[str, bytes, bytes | None]
    ) -> None:
        _, key, value = record
        pending.records.append(record)
        pending.size_bytes += len(key) + len(value or b"")
        if len(pending.records) >= BATCH_RECORDS or pending.size_bytes >= BATCH_BYTES:
            await self._append(followed, partition, pending)

    async def _append(self, followed: _Followed, partition: Partition, pending: _Pending) -> None:
        if not pending.records:
            return
        records, pending.records, pending.size_bytes = pending.records, [], 0
        now_ms = self._now_ms()
        batch = build_batch([Record(offset, now_ms, key, value) for offset, (_, key, value) in enumerate(records)])
        appended = await self._appender.submit(
            NewBatch(partition.partition_key, bytearray(batch), len(records), now_ms), request=followed
        )
        if not isinstance(appended, Appended):
            raise StorageUnavailable(f"records of an internal topic were refused: {appended.value}")
        for owner, key, value in records:
            _note(followed, owner, key, value)

    # --- what stands in the log -----------------------------------------------------------------------------------

    async def _read_log(self, followed: _Followed, topic: Topic) -> None:
        """Read what any node has written so far."""
        keys = [partition.partition_key for partition in topic.partitions]
        states = await self._log.states(keys)
        if any(key in states and start < states[key].log_start_offset for key, start in followed.log_starts.items()):
            # An administrator has deleted records, and with them what had been written.
            followed.forget()
        followed.log_starts = {key: state.log_start_offset for key, state in states.items()}
        for key in keys:
            state = states.get(key)
            if state is None:
                continue
            offset = max(followed.read_to.get(key, 0), state.log_start_offset)
            while offset < state.high_watermark:
                (result,) = await self._log.read([ReadRequest(key, offset, READ_BYTES)], max_bytes=READ_BYTES)
                if not isinstance(result, ReadResult):
                    raise _unreadable(topic, result)
                if not result.batches:
                    break
                for batch in result.batches:
                    if len(batch.records) > READ_APART_BYTES:
                        found = await asyncio.to_thread(_keys_and_values, batch.records)
                    else:
                        found = _keys_and_values(batch.records)
                    async for owner, record_key, value in in_pieces(found):
                        _note(followed, owner, record_key, value)
                    offset = batch.last_offset + 1
            followed.read_to[key] = max(offset, state.high_watermark)


def _keys_and_values(batch: bytes | bytearray | memoryview) -> list[tuple[str, bytes, bytes | None]]:
    """Return owner, key and value of each record. Skip foreign records, for example those that a client wrote before
    the topic was internal."""
    found: list[tuple[str, bytes, bytes | None]] = []
    for record in iter_records(batch):
        if record.key is not None:
            with suppress(ProtocolError):
                found.append((owner_of(record.key), record.key, record.value))
    return found


def _note(followed: _Followed, owner: str, key: bytes, value: bytes | None) -> None:
    keys = followed.written.setdefault(owner, {})
    before = len(keys)
    if value is None:
        keys.pop(key, None)
    else:
        keys[key] = _digest(value)
    followed.key_count += len(keys) - before
    if not keys:
        del followed.written[owner]


def _digest(value: bytes) -> bytes:
    return blake2b(value, digest_size=16).digest()


def _another(known: Topic, topic: Topic) -> bool:
    """True if the topic was replaced or has another number of partitions, so that an owner may belong to another
    partition."""
    return known.topic_id != topic.topic_id or len(known.partitions) != len(topic.partitions)


def _unreadable(topic: Topic, refusal: Refusal) -> StorageError:
    return StorageUnavailable(f"{topic.name} cannot be read: {refusal.value}")
