"""Play the transaction coordinator: read a producer's row, let the pure rules decide, write the decision.

The one idea: nothing is held here between two requests, so there is no lease, nothing to load, and nothing to lose.
Every node may be asked. If another node has written the row in the meantime, it is read and decided again. Clients are
still sent to one node for each id, so that this is rare, and so that ListTransactions lists every id once.

Markers enter this node's tail as an appended batch does: after the commit, before the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

import structlog

from gateway.cluster.clock import wall_ms
from gateway.cluster.leases import shard_of
from gateway.cluster.membership import Membership
from gateway.coordinator import transactions as rules
from gateway.coordinator.transactions import Decision, InitProducer, Producer, TransactionState
from gateway.log.append_listener import NO_LISTENER, AppendListener
from gateway.log.tail import Tail
from gateway.net.collection import full_collections
from gateway.net.pieces import PIECE, in_pieces
from gateway.net.shared_read import SharedRead
from gateway.transactions.taken_in import TakenIn
from protocol.errors import ErrorCode, KafkaError
from protocol.records import ControlType, end_marker
from storage.errors import StorageError, TransactionTooLarge
from storage.producers import ProducerStore
from storage.transactions import (
    EndedTransaction,
    ListedProducer,
    OverdueTransaction,
    ProducerRecord,
    StoredProducer,
    TransactionStore,
)
from storage.types import AbortedTransaction, Node, Partition, PartitionKey

logger = structlog.get_logger(__name__)

ATTEMPTS = 20
"""How often other nodes may change a row before this node returns an error, and the client must repeat its request."""

OVERDUE_AT_A_TIME = 100
FAILED_AT_A_TIME = 3
"""Overdue transactions that failed to end before and that one pass tries again: each may take as long as a statement
may."""
MAX_FAILED = 10_000
FIRST_DELAY_S, LAST_DELAY_S = 5.0, 300.0
"""Delay before the end of a transaction is tried again after a failure. It doubles with each failure."""
ENDS_AT_ONCE = 3
"""Ends in progress. Each may wait in Postgres for another transaction that holds one of its partitions, and occupies
a connection until then. The other connections are left to appends elsewhere."""
LISTED_AT_A_TIME = 1_000
"""Number of rows that one statement returns."""

_PLACEMENT = 1 << 40
"""Transactional ids are assigned to shards by numbers that no partition has."""


def _always() -> bool:
    return True


IsAwaited = Callable[[], bool]
"""Function that returns whether the client still waits for the answer."""

Decide = Callable[[Producer | None, int], Decision]
"""Function that decides by the producer's row, and by an unused producer id if the row needs a new one."""


class Transactions:
    """The transactional producers of one node."""

    def __init__(
        self,
        store: TransactionStore,
        producers: ProducerStore,
        tail: Tail,
        membership: Membership,
        *,
        overdue_at_a_time: int = OVERDUE_AT_A_TIME,
        first_delay_s: float = FIRST_DELAY_S,
        max_failed: int = MAX_FAILED,
        listener: AppendListener = NO_LISTENER,
        offsets_committed: Callable[[str], None] = lambda _group_id: None,
        observe_end: Callable[[str], None] = lambda _outcome: None,
        state_partition: Callable[[str], Partition | None] = lambda _transactional_id: None,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        """`listener` receives the markers' appends, `offsets_committed` each group for which a transaction committed
        offsets, and `observe_end` how each transaction ended: committed, aborted, fenced or timed_out.

        `state_partition` returns the partition in which Kafka keeps an id, if it exists. Clients are sent to its
        leader, as with Kafka. `now_ms` dates the markers.
        """
        self._store = store
        self._producers = producers
        self._tail = tail
        self._membership = membership
        self._overdue_at_a_time = overdue_at_a_time
        self._first_delay_s = first_delay_s
        self._max_failed = max_failed
        self._ending = asyncio.Semaphore(ENDS_AT_ONCE)
        self._ends: dict[str, tuple[asyncio.Lock, int]] = {}
        """For each id whose EndTxn this node serves: the lock that these requests take, and their number."""
        self._failed: dict[tuple[str, int], tuple[float, float]] = {}
        """Overdue transactions that could not be ended: the last delay, and the loop time of the next attempt."""
        self.taken_in = TakenIn()
        self.listing = SharedRead(self._list)
        """All transactional producers, for ListTransactions."""
        self._listener = listener
        self._offsets_committed = offsets_committed
        self._observe_end = observe_end
        self._state_partition = state_partition
        self._now_ms = now_ms
        self._changed: Callable[[str], None] | None = None

    @property
    def is_followed(self) -> bool:
        """True while a reader wants to know which rows this node writes."""
        return self._changed is not None

    @property
    def store(self) -> TransactionStore:
        """The store, for callers that only read."""
        return self._store

    def follow(self, changed: Callable[[str], None] | None) -> None:
        """Call `changed` with each id whose row this node writes from now on, until it is None."""
        self._changed = changed

    async def _list(self) -> list[ListedProducer]:
        found: list[ListedProducer] = []
        some = await self._store.list_behind("", LISTED_AT_A_TIME)
        while some:
            found += some
            more = len(some) == LISTED_AT_A_TIME
            some = await self._store.list_behind(some[-1].transactional_id, LISTED_AT_A_TIME) if more else []
        return found

    def coordinator_of(self, transactional_id: str) -> Node:
        """Return the node to which clients of the id are sent."""
        partition = self._state_partition(transactional_id)
        if partition is not None:
            leader = self._membership.leader_of_partition(partition)
            if leader is not None:
                return leader
        return self._membership.leader_of(_PLACEMENT + shard_of(transactional_id))

    def coordinates(self, transactional_id: str) -> bool:
        """Return whether this node coordinates the id."""
        return self.coordinator_of(transactional_id).node_id == self._membership.node_id

    async def initialize(
        self, transactional_id: str, asked: InitProducer, *, is_awaited: IsAwaited = _always
    ) -> Producer:
        """Handle InitProducerId: return the producer at its new epoch. Raise KafkaError, StorageError."""

        def decide(producer: Producer | None, fresh_id: int) -> Decision:
            return rules.initialize(producer, asked, fresh_id)

        return await self._carry_out(
            transactional_id, decide, "fenced", raises_epoch=True, from_first_epoch=True, is_awaited=is_awaited
        )

    async def add(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partition_keys: Sequence[PartitionKey] = (),
        group_ids: Sequence[str] = (),
        *,
        named: bool = True,
        is_awaited: IsAwaited = _always,
    ) -> None:
        """Enlist partitions and groups in the transaction. Raise KafkaError, StorageError.

        `named`: the producer has named them. A producer that does not name them begins at sequence 0 in each (KIP-890).
        """
        for attempt in range(ATTEMPTS):
            read = await self._store.read(transactional_id)
            _require_client(is_awaited)
            if attempt and read.started_ms is None:
                # The client has repeated the request elsewhere, and has ended its transaction. Another one with the
                # same epoch would stay open until its timeout, which fences the producer.
                break
            producer = _producer(read)
            decision = rules.add(producer, producer_id, producer_epoch)
            has_other_id = producer is not None and decision.error is ErrorCode.INVALID_PRODUCER_ID_MAPPING
            if has_other_id and not named and partition_keys:
                # A partition remembers a producer whose epochs were used up. Kafka's log refuses its batches as fenced.
                # If the transactional id has expired, Kafka's coordinator refuses them before its log does.
                found = await self._store.in_partition(producer_id, partition_keys[0])
                if found.read is None and found.remembered_epoch != rules.NO_EPOCH:
                    raise KafkaError(ErrorCode.PRODUCER_FENCED)
            if decision.error:
                raise KafkaError(decision.error)
            if named:
                # This node may not know that the topic was created anew. The producer's first batch would be refused,
                # because the new partition is not enlisted, and clients do not repeat such a batch.
                self._require_registration()
            try:
                added = await self._store.add(read, partition_keys, group_ids, begins_at_zero=not named)
            except TransactionTooLarge as error:
                raise KafkaError(ErrorCode.TRANSACTION_ABORTABLE, str(error)) from error
            if added:
                self.taken_in.note(producer_id, producer_epoch, partition_keys)
                self._told(transactional_id)
                return
        raise KafkaError(ErrorCode.CONCURRENT_TRANSACTIONS)

    async def taken_in_by(
        self, transactional_id: str, producer_id: int, producer_epoch: int
    ) -> frozenset[PartitionKey]:
        """Return the partitions that are enlisted in the producer's transaction (upstream:
        TransactionCoordinator.handleVerifyPartitionsInTransaction). Raise KafkaError, StorageError."""
        read = await self._store.read(transactional_id)
        if error := rules.verify(_producer(read), producer_id, producer_epoch):
            raise KafkaError(error)
        partitions = (await self._store.partitions([producer_id])).get(producer_id, ())
        return frozenset([part.partition_key async for part in in_pieces(partitions)])

    async def end(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        committed: bool,
        raise_epoch: bool = False,
        is_awaited: IsAwaited = _always,
    ) -> Producer:
        """Handle EndTxn: when this returns, the transaction has ended for every reader. Raise KafkaError, StorageError.

        With `raise_epoch` (from version 5 on) the returned producer has the id and epoch of the next transaction."""
        outcome = "committed" if committed else "aborted"

        def decide(producer: Producer | None, fresh_id: int) -> Decision:
            if raise_epoch:
                return rules.end_and_raise_epoch(producer, producer_id, producer_epoch, fresh_id, committed=committed)
            return rules.end(producer, producer_id, producer_epoch, committed=committed)

        if raise_epoch:
            return await self._carry_out(transactional_id, decide, outcome, raises_epoch=True)
        # A client may repeat the request while this node still works on it. The client begins its next transaction
        # after the second answer, so the first request must not come after it.
        async with self._one_at_a_time(transactional_id):
            return await self._carry_out(transactional_id, decide, outcome, same_epoch=True, is_awaited=is_awaited)

    def _require_registration(self) -> None:
        """Raise KafkaError if this node was frozen or cut off, so that another one may have served the client in the
        meantime, and topics may have been created anew."""
        if not self._membership.is_registered:
            raise KafkaError(ErrorCode.NOT_COORDINATOR)

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, transactional_id: str) -> AsyncGenerator[None]:
        """Let the requests that enter this end one after the other, in the order of their arrival."""
        lock, users = self._ends.get(transactional_id, (asyncio.Lock(), 0))
        self._ends[transactional_id] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._ends.pop(transactional_id)
            if users > 1:
                self._ends[transactional_id] = lock, users - 1

    async def abort_overdue(self) -> int:
        """Abort every transaction that has been open for longer than its timeout, and complete ends that no node
        continues. Return how many ended. Raise StorageError if an end failed.

        A transaction that could not be ended is tried again later, after all others."""
        ended = 0
        failure: StorageError | None = None
        seen: set[tuple[str, int]] = set()
        again: list[OverdueTransaction] = []
        page = await self._store.overdue(self._overdue_at_a_time)
        while page:
            for overdue in page:
                seen.add(overdue[:2])
                if overdue[:2] in self._failed:
                    again.append(overdue)
                    continue
                try:
                    ended += await self._abort_overdue(overdue)
                except StorageError as error:
                    failure = error
                    self._postpone(overdue)
            more = len(page) == self._overdue_at_a_time
            page = await self._store.overdue(self._overdue_at_a_time, page[-1]) if more else []
        self._failed = {key: delay for key, delay in self._failed.items() if key in seen}
        now_s = asyncio.get_running_loop().time()
        # If memory had no room for the delay of a transaction, the transaction is due at once.
        due_s = {overdue: self._failed.get(overdue[:2], (0.0, now_s))[1] for overdue in again}
        due = sorted((overdue for overdue in again if due_s[overdue] <= now_s), key=due_s.__getitem__)
        for overdue in due[:FAILED_AT_A_TIME]:
            try:
                ended += await self._abort_overdue(overdue)
                self._failed.pop(overdue[:2], None)
            except StorageError as error:
                failure = error
                self._postpone(overdue)
        if failure is not None:
            raise failure
        return ended

    def _postpone(self, overdue: OverdueTransaction) -> None:
        delay_s = min(2 * self._failed.pop(overdue[:2], (self._first_delay_s / 2, 0.0))[0], LAST_DELAY_S)
        if len(self._failed) >= self._max_failed:
            del self._failed[next(iter(self._failed))]
        self._failed[overdue[:2]] = delay_s, asyncio.get_running_loop().time() + delay_s
        logger.warning(
            "an overdue transaction could not be aborted: trying again later",
            transactional_id=overdue.transactional_id,
            delay_s=delay_s,
        )

    async def _abort_overdue(self, overdue: OverdueTransaction) -> bool:
        """Abort the transaction. Return whether this call has ended it. Raise StorageError."""
        try:
            read = await self._store.read(overdue.transactional_id)
            if read.ending is not None:
                await self._complete(read)
                return True
            await self._carry_out(
                overdue.transactional_id,
                rules.time_out,
                "timed_out",
                started_ms=overdue.started_ms,
                raises_epoch=True,
            )
        except KafkaError as error:
            if error.code is not ErrorCode.INVALID_TXN_STATE:  # the transaction has ended by itself
                logger.warning(
                    "an overdue transaction was not aborted",
                    transactional_id=overdue.transactional_id,
                    error=str(error),
                )
            return False
        logger.info("transaction aborted: it took longer than its timeout", transactional_id=overdue.transactional_id)
        return True

    async def abort_in_partition(
        self,
        partition_key: PartitionKey,
        producer_id: int,
        marker_epoch: int,
        transaction_version: int,
        *,
        keeps: Callable[[str], bool] | None = None,
    ) -> bool:
        """Abort the producer's transaction if it has enlisted the partition, or groups that the partition `keeps`.
        Return whether a transaction was aborted. Raise KafkaError, StorageError.

        All of the transaction ends, and the producer is fenced: otherwise it would continue with the rest. The request
        is checked against the epochs that the partition knows. A repeated request finds nothing to abort.
        """
        started_ms: int | None = None
        for _ in range(ATTEMPTS):
            found = await self._store.in_partition(producer_id, partition_key)
            producer = None if found.read is None else _producer(found.read)
            is_open = found.is_enlisted
            if keeps is not None and not is_open:
                # Read after the row: if groups were added in the meantime, the row has changed and nothing is written.
                group_ids = (await self._store.groups([producer_id])).get(producer_id, ())
                is_open = any([keeps(group_id) async for group_id in in_pieces(group_ids)])
            known_epoch = found.remembered_epoch
            if producer is not None and is_open:
                known_epoch = max(known_epoch, producer.producer_epoch)
            if error := rules.judge_marker(marker_epoch, transaction_version, known_epoch, is_open=is_open):
                raise KafkaError(error)
            if found.read is None or producer is None or not is_open:
                return False
            if started_ms is not None and found.read.started_ms != started_ms:
                return False  # that transaction has ended, and another one has begun
            started_ms = found.read.started_ms
            decision = rules.time_out(producer, await self._fresh_id(producer))
            if decision.error:
                raise KafkaError(decision.error)
            if await self._write(found.read, decision, "fenced"):
                logger.info(
                    "transaction aborted: an administrator asked for it",
                    transactional_id=found.read.transactional_id,
                    producer_id=producer_id,
                    partition_key=partition_key,
                )
                return True
        raise KafkaError(ErrorCode.CONCURRENT_TRANSACTIONS)

    async def _carry_out(
        self,
        transactional_id: str,
        decide: Decide,
        outcome: str,
        *,
        started_ms: int | None = None,
        raises_epoch: bool = False,
        same_epoch: bool = False,
        from_first_epoch: bool = False,
        is_awaited: IsAwaited = _always,
    ) -> Producer:
        """Apply a decision and return the producer's new state. Decide again whenever another node has written the row
        in the meantime.

        `outcome` belongs to the transaction that the decision ends. `started_ms` identifies the transaction if the
        producer does not end it itself. `raises_epoch`: the decision may use an id that no producer has had.
        `same_epoch`: the producer's next transaction has the same epoch, so the first read identifies the transaction.
        `from_first_epoch`: raise CONCURRENT_TRANSACTIONS if the epoch has changed since the first read.
        """
        fresh_id = rules.NO_ID
        first_started_ms: int | None = None
        first: StoredProducer | None = None
        for _ in range(ATTEMPTS):
            read = await self._store.read(transactional_id)
            first = first or read
            if same_epoch:
                self._require_registration()
                first_started_ms = first_started_ms or read.started_ms
            if read.ending is not None:
                await self._complete(read)
                read = await self._store.read(transactional_id)
            _require_client(is_awaited)
            if started_ms is not None and read.started_ms != started_ms:
                raise KafkaError(ErrorCode.INVALID_TXN_STATE, "the transaction has ended, and another may have begun")
            if same_epoch and read.started_ms is not None and read.started_ms != first_started_ms:
                raise KafkaError(ErrorCode.INVALID_TXN_STATE, "the transaction has ended, and another has begun")
            if from_first_epoch and _identity(read) != _identity(first):
                # The client may have repeated the request elsewhere, and would be fenced by its own first request. A
                # client that still waits for the answer asks again.
                break
            producer = _producer(read)
            if raises_epoch and fresh_id == rules.NO_ID:
                fresh_id = await self._fresh_id(producer)
            decision = decide(producer, fresh_id)
            if decision.error:
                raise KafkaError(decision.error)
            assert decision.after is not None
            unchanged = decision.after == producer
            if await (self._store.confirm(read) if unchanged else self._write(read, decision, outcome)):
                return decision.after
        raise KafkaError(ErrorCode.CONCURRENT_TRANSACTIONS)

    async def _fresh_id(self, producer: Producer | None) -> int:
        """Return a producer id for the next epoch if that epoch needs a new id; else −1."""
        return await self._producers.allocate_producer_id() if rules.needs_producer_id(producer) else rules.NO_ID

    async def _write(self, read: StoredProducer, decision: Decision, outcome: str) -> bool:
        """Write the decision. Return False if the row has changed since it was read."""
        assert decision.after is not None
        record = _record(decision.after)
        if decision.end is None:
            saved = await self._store.save(read, record)
            self._told(read.transactional_id)
            return saved
        assert read.record is not None
        now_ms = self._now_ms()
        committed = decision.end.committed
        marker = end_marker(
            ControlType.COMMIT if committed else ControlType.ABORT,
            producer_id=read.record.producer_id,
            producer_epoch=decision.end.marker_epoch,
            timestamp_ms=now_ms,
        )

        def write() -> Awaitable[EndedTransaction | None]:
            return self._store.end(read, record, marker, committed=committed, timestamp_ms=now_ms)

        ended = await self._append_markers(write, read.record.producer_id, committed=committed)
        if ended is None:
            return False
        self.taken_in.forget(read.record.producer_id)
        self._observe_end(outcome)
        if ended.has_more:
            await self._complete(await self._store.read(read.transactional_id))
        self._told(read.transactional_id)
        return True

    async def _complete(self, read: StoredProducer) -> None:
        """Mark the remaining partitions of a transaction whose end is decided. Several nodes may do this at once,
        because each step is done by one of them only. Raise StorageError; earlier steps stay, and any node may
        continue."""
        while read.ending is not None:
            producer_id, _, committed = read.ending
            await self._append_markers(partial(self._store.continue_end, read), producer_id, committed=committed)
            read = await self._store.read(read.transactional_id)
        self._told(read.transactional_id)

    async def _append_markers(
        self, write: Callable[[], Awaitable[EndedTransaction | None]], producer_id: int, *, committed: bool
    ) -> EndedTransaction | None:
        """Write the markers, and inform this node's readers of what has ended. Return None if nothing was written."""
        async with self._ending:
            known = False
            try:
                ended = await write()
                if ended is not None:
                    await self._tell(producer_id, ended, committed=committed)
                known = True
            finally:
                if not known:
                    # The transaction may have ended, so other readers of this node must learn of it.
                    self._tail.doubt(asyncio.get_running_loop().time())
                    self._listener.in_doubt()
        return ended

    def _told(self, transactional_id: str) -> None:
        if self._changed is not None:
            self._changed(transactional_id)

    async def _tell(self, producer_id: int, ended: EndedTransaction, *, committed: bool) -> None:
        resume = full_collections.pause() if len(ended.markers) > PIECE else None
        try:
            await self._tell_tail(producer_id, ended, committed=committed)
        finally:
            if resume is not None:
                resume()
        for group_id in ended.group_ids:
            self._offsets_committed(group_id)

    async def _tell_tail(self, producer_id: int, ended: EndedTransaction, *, committed: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        async for marker in in_pieces(ended.markers):
            aborted = None
            if not committed and marker.first_offset is not None:
                aborted = AbortedTransaction(producer_id, marker.first_offset)
            self._tail.record_append(
                marker.partition_key,
                base_offset=marker.base_offset,
                last_offset=marker.base_offset,
                records=marker.records,
                log_start_offset=marker.log_start_offset,
                leader_epoch=marker.leader_epoch,
                now_s=now_s,
                last_stable_offset=marker.last_stable_offset,
                aborted=aborted,
            )
            self._listener.appended(marker.partition_key, marker.base_offset + 1)


def _require_client(is_awaited: IsAwaited) -> None:
    """Raise KafkaError if the client has closed its connection. It may have repeated the request elsewhere before this
    node read the row. Then the row describes the client's next transaction, or a producer that would be fenced."""
    if not is_awaited():
        raise KafkaError(ErrorCode.CONCURRENT_TRANSACTIONS, "the client has gone")


def _identity(read: StoredProducer) -> tuple[int, int] | None:
    """Return the producer id and epoch, or None if there is no row."""
    return None if read.record is None else (read.record.producer_id, read.record.producer_epoch)


def _producer(read: StoredProducer) -> Producer | None:
    record = read.record
    if record is None:
        return None
    return Producer(
        record.producer_id,
        record.producer_epoch,
        record.timeout_ms,
        TransactionState(record.state),
        record.last_producer_epoch,
        record.previous_producer_id,
    )


def _record(producer: Producer) -> ProducerRecord:
    return ProducerRecord(
        producer.producer_id,
        producer.producer_epoch,
        producer.last_producer_epoch,
        producer.previous_producer_id,
        producer.timeout_ms,
        producer.state,
    )
