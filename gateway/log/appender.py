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
producer's batch was not written, the producer's later batches are not written either and get the same answer, until
the producer repeats the lost batch or numbers anew. There are two reasons. A partition that does not know the producer
yet accepts any first sequence, and would then refuse the earlier batch when the producer repeats it. And a partition
that knows the producer would refuse the later batch with OUT_OF_ORDER_SEQUENCE. librdkafka then numbers anew everything
that is not acknowledged, also a repeat that is on its way. If that repeat is written and its answer is lost, the record
is there twice.
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

    @property
    def stream(self) -> tuple[int, int]:
        """The partition and producer whose sequence numbers the batch continues, if its producer is idempotent."""
        return self.batch.partition_key, self.batch.producer_id


class _Lost(NamedTuple):
    """A batch of an idempotent producer that may not have been written."""

    producer_epoch: int
    base_sequence: int
    until_s: float
    """Event-loop time until which later batches of the producer are refused."""


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
        self._broken: OrderedDict[tuple[int, int], _Lost] = OrderedDict()
        """Per stream the first batch that was perhaps not written and has not been repeated. The oldest is first."""

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
        pending = _Pending(batch, len(batch.records), outcome, outcome if request is None else request)
        if self._broken and self._follows_lost(pending, loop.time()):
            _fail([pending], _predecessor_lost())
            return outcome
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
            self._fail_followers(given_up, queue)
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
                self._fail_followers(group, queue)

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

    def _follows_lost(self, pending: _Pending, now_s: float) -> bool:
        """Return True if the batch follows a lost one that its producer has not repeated."""
        lost = self._broken.get(pending.stream)
        if lost is None or _precedes(pending.batch, lost):
            return False
        if _resumes(pending.batch, lost) or lost.until_s <= now_s:
            del self._broken[pending.stream]
            return False
        return True

    def _fail_followers(self, unwritten: Sequence[_Pending], queue: deque[_Pending]) -> None:
        """Fail the batches that idempotent producers have queued behind batches that were not, or perhaps not,
        written. Stop at the batch with which a producer begins to repeat them or to number anew. Remember the lost
        batches that are not repeated yet."""
        until_s = asyncio.get_running_loop().time() + self._broken_s
        broken: dict[tuple[int, int], _Lost] = {}
        for pending in unwritten:
            batch = pending.batch
            if batch.producer_id >= 0:
                broken.setdefault(pending.stream, _Lost(batch.producer_epoch, batch.base_sequence, until_s))
        if not broken:
            return
        followers: list[_Pending] = []
        for _ in range(len(queue)):
            pending = queue.popleft()
            lost = broken.get(pending.stream)
            if lost is None or _precedes(pending.batch, lost):
                queue.append(pending)
            elif _resumes(pending.batch, lost):
                del broken[pending.stream]
                queue.append(pending)
            else:
                followers.append(pending)
        self._forget(followers)
        _fail(followers, _predecessor_lost())
        for stream, lost in broken.items():
            self._broken.pop(stream, None)
            self._broken[stream] = lost
        while len(self._broken) > self._max_broken:
            self._broken.popitem(last=False)

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


def _predecessor_lost() -> StorageUnavailable:
    return StorageUnavailable("an earlier batch of this producer was not written")


def _precedes(batch: NewBatch, lost: _Lost) -> bool:
    """Return True if the batch comes before the lost one: a repeat of a batch whose answer did not reach the client, or
    a batch of a fenced producer. Postgres decides about both."""
    if batch.producer_epoch != lost.producer_epoch:
        return batch.producer_epoch < lost.producer_epoch
    return 0 < (lost.base_sequence - batch.base_sequence) % SEQUENCES < SEQUENCES // 2


def _resumes(batch: NewBatch, lost: _Lost) -> bool:
    return batch.base_sequence == lost.base_sequence or batch.producer_epoch != lost.producer_epoch


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
