"""Group commit: batches queue here in order of arrival and become durable together.

The one idea: commit when idle, and gather arriving batches while a commit runs. So a lone record never waits, and many
concurrent records share one flush. If small requests met at the last commit, the next commit may wait a moment for them
(`gateway/log/gathering.py`). A partition belongs to one committer while it has batches there. So two commits never
touch the same partition, and the order of `submit` is the order of the log. The second committer works only when much
is queued at the first: two committers that alternate single records pay for twice as many commits. If another
transaction holds a partition, the partition moves from its committer to a lane of its own. The lane waits for the lock,
so that the partition delays no other.

This module does not validate and does not assign offsets (Postgres does). It never repeats a commit whose outcome is
unknown: the client decides, and Postgres recognises an idempotent producer's repeat by its sequence. If such a
producer's batch was perhaps not written, its later batches are suspect until the producer has repeated all that were
refused. Before a suspect batch is appended, Postgres is asked which sequence the partition expects. If the batch comes
later, it gets the answer of the lost one. There are two reasons. A partition that does not know the producer yet
accepts any first sequence, and would then refuse the earlier batch when the producer repeats it. And a partition that
knows the producer would refuse the later batch with OUT_OF_ORDER_SEQUENCE. librdkafka then numbers anew everything that
is not acknowledged, also a repeat that is on its way. If that repeat is written and its answer is lost, the record is
there twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import structlog

from gateway.log.append_listener import NO_LISTENER, AppendListener
from gateway.log.gathering import ENOUGH_REQUESTS, Gathering
from gateway.log.tail import Tail
from gateway.operate.logs import NO_REQUEST
from storage.append_group import SEQUENCES
from storage.errors import StorageError, StorageUnavailable
from storage.log import LogStore
from storage.types import Appended, NewBatch, PartitionKey, Refusal

logger = structlog.get_logger(__name__)

CommitObserver = Callable[[int, int, float], None]
"""Called after every durable commit with the number of batches, the bytes and the seconds."""


class _Pending(NamedTuple):
    batch: NewBatch
    size_bytes: int
    outcome: asyncio.Future[Appended | Refusal]
    request: object
    """The request that brought the batch. All batches of one request count as one waiting request."""
    is_suspect: bool = False
    """True if an earlier batch of the producer was perhaps not written."""

    @property
    def stream(self) -> tuple[PartitionKey, int]:
        """The partition and producer whose sequence numbers the batch continues, if its producer is idempotent."""
        return self.batch.partition_key, self.batch.producer_id


class _Lost(NamedTuple):
    """Batches of an idempotent producer that may not have been written, by their base sequences."""

    producer_epoch: int
    first_sequence: int
    last_sequence: int
    """Until the producer has repeated this batch, its batches are suspect."""
    until_s: float
    """Event-loop time from which Postgres alone decides."""


@dataclass(slots=True)
class _Place:
    """The committer that queues a partition's batches, and the number of batches neither settled nor dropped."""

    committer: _Committer
    count: int = 0


QUEUED_AT_ONE_BYTES = 64 * 1024
"""If a committer has more bytes than this queued, the next committer receives the partitions that
have nothing queued.
"""

BROKEN_S = 60.0
"""How long later batches of a producer are refused while the producer does not repeat a lost one. It is longer than the
request timeouts of clients, after which they repeat. Then Postgres decides."""
MAX_BROKEN = 10_000
"""Maximal number of producers, each in one partition, whose lost batches are remembered."""

LANES_AT_ONCE = 2
"""Lanes that may wait in Postgres at once. Each occupies a connection while it waits."""


class Appender:
    """`committers` groups at a time, each at most `max_commit_bytes` and `max_commit_batches` (or one larger). A commit
    waits at most `gather_s` for the clients whose requests shared the last commit.
    """

    def __init__(
        self,
        store: LogStore,
        tail: Tail,
        *,
        committers: int = 2,
        max_commit_bytes: int = 8 * 1024 * 1024,
        max_commit_batches: int = 512,
        gather_s: float = 0.0,
        broken_s: float = BROKEN_S,
        max_broken: int = MAX_BROKEN,
        observe_commit: CommitObserver | None = None,
        listener: AppendListener = NO_LISTENER,
    ) -> None:
        self._store = store
        self._tail = tail
        self._max_commit_bytes = max_commit_bytes
        self._max_commit_batches = max_commit_batches
        self._observe_commit = observe_commit
        self._committers = [_Committer(self, gather_s=gather_s) for _ in range(committers)]
        self._lanes: set[_Committer] = set()
        self._places: dict[PartitionKey, _Place] = {}
        self._waiting_lanes = asyncio.Semaphore(LANES_AT_ONCE)
        self._queued_bytes = 0
        self._listener = listener
        self._broken_s = broken_s
        self._max_broken = max_broken
        self._broken: OrderedDict[tuple[PartitionKey, int], _Lost] = OrderedDict()
        """Per stream the batches that were perhaps not written and have not been repeated. The oldest is first."""

    @property
    def queued_bytes(self) -> int:
        """Bytes submitted and neither settled nor dropped. The node's bound on held bytes
        (`gateway/net/holdings.py`) bounds them too, because a batch that its request gave up after a timeout is
        dropped with the next commit."""
        return self._queued_bytes

    def submit(self, batch: NewBatch, request: object = None) -> asyncio.Future[Appended | Refusal]:
        """Take a place in the log's order, now. The batches of one `request` are submitted one behind the other. The
        future resolves once the batch is durable or refused. It carries StorageUnavailable if Postgres was lost, and
        then the batch may or may not have been written. Cancelling the future gives the batch up: the batch is not
        written unless its commit has begun."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Appended | Refusal] = loop.create_future()
        is_suspect = bool(self._broken) and self._is_suspect(batch, loop.time())
        pending = _Pending(batch, len(batch.records), outcome, outcome if request is None else request, is_suspect)
        self._queued_bytes += pending.size_bytes
        place = self._places.get(batch.partition_key)
        if place is None:
            place = self._places[batch.partition_key] = _Place(self._free_committer())
        place.count += 1
        place.committer.enqueue(pending)
        return pending.outcome

    def _free_committer(self) -> _Committer:
        """Return the first committer that has little to do, or the one with the least."""
        for committer in self._committers:
            if committer.queued_bytes <= QUEUED_AT_ONE_BYTES:
                return committer
        return min(self._committers, key=lambda committer: committer.queued_bytes)

    def settled(self, key: PartitionKey) -> Callable[[], bool]:
        """Return a function that reports whether the commit in progress now, which may hold batches of the
        partition, has ended. Postgres decides anew about the batches of later commits."""
        place = self._places.get(key)
        if place is None:
            return lambda: True
        committer = place.committer
        begun = committer.commits
        return lambda: committer.task is None or committer.commits > begun

    async def drain(self, timeout_s: float) -> bool:
        """Finish what is queued. Return False if the time was too short. Clients repeat the batches that remain."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while tasks := self._tasks():
            remaining_s = deadline_s - loop.time()
            if remaining_s <= 0:
                return False
            await asyncio.wait(tasks, timeout=remaining_s)
        return True

    def _tasks(self) -> list[asyncio.Task[None]]:
        committers = (*self._committers, *self._lanes)
        return [committer.task for committer in committers if committer.task is not None]

    # --- for the committers ---------------------------------------------------------------------------------------

    def take_group(self, queue: deque[_Pending]) -> list[_Pending]:
        """Return the batches of the next commit, or none if every queued batch has been given up."""
        given_up: list[_Pending] = []
        while queue and queue[0].outcome.cancelled():
            given_up.append(queue.popleft())
        if given_up:
            self._forget(given_up)
            self._note_lost(given_up, queue)
        group: list[_Pending] = []
        size_bytes = 0
        while (
            queue
            and len(group) < self._max_commit_batches
            and (not group or size_bytes + queue[0].size_bytes <= self._max_commit_bytes)
            and not queue[0].outcome.cancelled()
        ):
            size_bytes += queue[0].size_bytes
            group.append(queue.popleft())
        return group

    async def commit(self, group: list[_Pending], queue: deque[_Pending]) -> None:
        """Commit the group in one durable transaction. Every future of the group is resolved when this returns or
        raises. If the group was not durable, the batches of `queue`, which wait behind it, that may not be written
        without it are resolved too. Batches of a partition that another transaction holds move to its lane."""
        await self._commit(group, queue, wait=False)

    async def commit_patiently(self, group: list[_Pending], queue: deque[_Pending]) -> None:
        """Commit the group of one partition in the same way, but wait for the transaction that holds the partition."""
        async with self._waiting_lanes:
            await self._commit(group, queue, wait=True)

    async def _commit(self, group: list[_Pending], queue: deque[_Pending], *, wait: bool) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        durable = False
        settled = group
        try:
            if any(pending.is_suspect for pending in group):
                group = settled = await self._without_followers(group)
            results = await self._store.append([pending.batch for pending in group], wait=wait)
            durable = True
            ended_s = loop.time()
            outcomes = list(zip(group, results, strict=True))
            busy = [pending for pending, result in outcomes if result is Refusal.PARTITION_BUSY]
            settled = [pending for pending, result in outcomes if result is not Refusal.PARTITION_BUSY]
            for pending, result in outcomes:
                if result is Refusal.PARTITION_BUSY:
                    continue
                # Into the tail before the answer: the producer's next fetch, on any connection, finds its record.
                if isinstance(result, Appended) and not result.duplicate:
                    self._record(pending.batch, result, ended_s)
                if not pending.outcome.done():
                    pending.outcome.set_result(result)
            if busy:
                self._divert(busy, queue)
            if settled and self._observe_commit is not None:
                self._observe_commit(len(settled), sum(pending.size_bytes for pending in settled), ended_s - started_s)
        except StorageError as error:
            logger.warning("a group commit failed", batches=len(group), error=str(error))
            _fail(group, error)
        finally:
            _fail(settled, StorageUnavailable("the commit ended without an outcome"))
            self._forget(settled)
            if not durable:
                self._tail.doubt(loop.time())
                self._listener.in_doubt()
                self._note_lost(group, queue)

    def _divert(self, busy: Sequence[_Pending], queue: deque[_Pending]) -> None:
        """Give each partition of `busy` a lane of its own, and move its batches from `queue` there in order."""
        moved: dict[PartitionKey, _Committer] = {}
        for pending in busy:
            key = pending.batch.partition_key
            if key not in moved:
                moved[key] = _Committer(self, patient=True)
                self._lanes.add(moved[key])
        waiting = [pending for pending in queue if pending.batch.partition_key in moved]
        rest = [pending for pending in queue if pending.batch.partition_key not in moved]
        queue.clear()
        queue.extend(rest)
        for pending in (*busy, *waiting):
            place = self._places[pending.batch.partition_key]
            place.committer.queued_bytes -= pending.size_bytes
            moved[pending.batch.partition_key].enqueue(pending)
        for key, lane in moved.items():
            self._places[key].committer = lane

    def leave_lane(self, lane: _Committer) -> None:
        """Remove a lane in which no batch waits any more."""
        self._lanes.discard(lane)

    def _is_suspect(self, batch: NewBatch, now_s: float) -> bool:
        """Return True if earlier batches of the producer at the same epoch were perhaps not written."""
        stream = batch.partition_key, batch.producer_id
        lost = self._broken.get(stream)
        if lost is None or batch.producer_epoch < lost.producer_epoch:
            return False
        if batch.producer_epoch > lost.producer_epoch or lost.until_s <= now_s:
            del self._broken[stream]
            return False
        return True

    def _note_lost(self, unwritten: Sequence[_Pending], queue: deque[_Pending]) -> None:
        """Remember batches of idempotent producers that were not, or perhaps not, written. The batches of these
        producers in the queue become suspect."""
        now_s = asyncio.get_running_loop().time()
        for pending in unwritten:
            epoch, sequence = pending.batch.producer_epoch, pending.batch.base_sequence
            if pending.batch.producer_id < 0:
                continue
            lost = self._broken.pop(pending.stream, None)
            if lost is None or lost.producer_epoch < epoch:
                lost = _Lost(epoch, sequence, sequence, now_s)
            if lost.producer_epoch == epoch:
                first = sequence if _is_later(lost.first_sequence, sequence) else lost.first_sequence
                last = sequence if _is_later(sequence, lost.last_sequence) else lost.last_sequence
                lost = _Lost(epoch, first, last, now_s + self._broken_s)
            self._broken[pending.stream] = lost
        for _ in range(len(queue)):
            pending = queue.popleft()
            is_suspect = pending.is_suspect or self._is_suspect(pending.batch, now_s)
            queue.append(pending._replace(is_suspect=is_suspect))
        while len(self._broken) > self._max_broken:
            self._broken.popitem(last=False)

    async def _without_followers(self, group: list[_Pending]) -> list[_Pending]:
        """Fail the suspect batches whose predecessors Postgres does not have, and return the others. Raise
        StorageError."""
        expected = await self._store.expected_sequences({each.stream for each in group if each.is_suspect})
        kept: list[_Pending] = []
        followers: list[_Pending] = []
        for pending in group:
            batch, stream = pending.batch, pending.stream
            if not pending.is_suspect:
                kept.append(pending)
                continue
            lost = self._broken.get(stream)
            if lost is not None and lost.producer_epoch != batch.producer_epoch:
                lost = None
            epoch, sequence = expected.get(stream, (-1, 0))
            if epoch < batch.producer_epoch:
                # The partition would accept any first batch.
                follows = lost is None or _is_later(batch.base_sequence, lost.first_sequence)
            else:
                follows = epoch == batch.producer_epoch and _is_later(batch.base_sequence, sequence)
            if follows:
                followers.append(pending)
                if lost is not None and _is_later(batch.base_sequence, lost.last_sequence):
                    self._broken[stream] = lost._replace(last_sequence=batch.base_sequence)
                continue
            if epoch < batch.producer_epoch or batch.base_sequence == sequence:
                expected[stream] = batch.producer_epoch, (batch.base_sequence + batch.record_count) % SEQUENCES
            if lost is not None and not _is_later(lost.last_sequence, batch.base_sequence):
                del self._broken[stream]
            kept.append(pending._replace(is_suspect=False))
        self._forget(followers)
        _fail(followers, StorageUnavailable("an earlier batch of this producer was not written"))
        return kept

    def _forget(self, settled: Sequence[_Pending]) -> None:
        """Stop counting batches that are settled or dropped."""
        for pending in settled:
            self._queued_bytes -= pending.size_bytes
            place = self._places[pending.batch.partition_key]
            place.committer.queued_bytes -= pending.size_bytes
            place.count -= 1
            if not place.count:
                del self._places[pending.batch.partition_key]

    def _record(self, batch: NewBatch, appended: Appended, now_s: float) -> None:
        self._tail.record_append(
            batch.partition_key,
            base_offset=appended.base_offset,
            last_offset=appended.base_offset + batch.record_count - 1,
            records=batch.records,
            log_start_offset=appended.log_start_offset,
            leader_epoch=appended.leader_epoch,
            now_s=now_s,
            last_stable_offset=appended.open_since_offset,
        )
        self._listener.appended(batch.partition_key, appended.base_offset + batch.record_count)


def _is_later(sequence: int, other: int) -> bool:
    """Return whether a sequence comes after another one. Sequences wrap."""
    return 0 < (sequence - other) % SEQUENCES < SEQUENCES // 2


class _Committer:
    """One queue and at most one running commit. A `patient` committer is the lane of a partition that another
    transaction holds. It exists until its queue is empty."""

    __slots__ = (
        "_appender",
        "_complete",
        "_gathering",
        "_patient",
        "_queue",
        "_requests",
        "commits",
        "queued_bytes",
        "task",
    )

    def __init__(self, appender: Appender, *, patient: bool = False, gather_s: float = 0.0) -> None:
        self._appender = appender
        self._patient = patient
        self._gathering = Gathering(gather_s)
        self._complete: asyncio.Future[None] | None = None
        """Set while a commit waits for more requests."""
        self._requests = 0
        """Number of requests in the queue, while a commit waits for more."""
        self._queue: deque[_Pending] = deque()
        self.task: asyncio.Task[None] | None = None
        self.commits = 0
        """Number of commits that have ended."""
        self.queued_bytes = 0
        """Bytes that are queued or in the running commit."""

    def enqueue(self, pending: _Pending) -> None:
        self._queue.append(pending)
        self.queued_bytes += pending.size_bytes
        if self.task is None:
            self._start()
        elif self._complete is not None:
            self._requests += len(self._queue) < 2 or self._queue[-2].request is not pending.request
            if self._gathering.complete(self._requests, self.queued_bytes):
                _resolve(self._complete)

    def _start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run(), name="committer", context=NO_REQUEST.copy())
        self.task.add_done_callback(self._ended)

    async def _run(self) -> None:
        commit = self._appender.commit_patiently if self._patient else self._appender.commit
        loop = asyncio.get_running_loop()
        while self._queue:
            self._requests = _requests(islice(self._queue, ENOUGH_REQUESTS))
            deadline_s = self._gathering.deadline_s(self._requests, loop.time())
            if deadline_s is not None and not self._gathering.complete(self._requests, self.queued_bytes):
                await self._gather(deadline_s)
            group = self._appender.take_group(self._queue)
            if group:
                began_s = loop.time()
                await commit(group, self._queue)
                self.commits += 1
                left_others = bool(self._queue) and self._queue[-1].request is not group[-1].request
                self._gathering.ended(_requests(group), left_others=left_others, began_s=began_s, now_s=loop.time())

    async def _gather(self, deadline_s: float) -> None:
        """Wait until the queue is complete or the time (of the loop) is up. No commit of this committer runs
        concurrently."""
        loop = asyncio.get_running_loop()
        self._complete = loop.create_future()
        timer = loop.call_at(deadline_s, _resolve, self._complete)
        try:
            await self._complete
        finally:
            self._complete = None
            timer.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a committer of the log failed", exc_info=error)
        if self._queue:
            self._start()
        elif self._patient:
            self._appender.leave_lane(self)


def _requests(pendings: Iterable[_Pending]) -> int:
    """Count the requests that brought these batches. Batches of one request are neighbours."""
    count = 0
    before: object = None
    for pending in pendings:
        if pending.request is not before:
            before = pending.request
            count += 1
    return count


def _resolve(waited: asyncio.Future[None]) -> None:
    if not waited.done():
        waited.set_result(None)


def _fail(group: Sequence[_Pending], error: StorageError) -> None:
    for pending in group:
        if not pending.outcome.done():
            pending.outcome.set_exception(error)
            # If the producer is gone, no task retrieves the exception. Retrieve it here, so that asyncio does not
            # report it as lost.
            pending.outcome.exception()
