"""Background work of the node on its stores: retention, purge, compaction, and expiry.

The one idea: each job is a pass that reads the current state and brings it nearer to what the configs say. The next
pass completes one that was cut short. A job on the whole log runs on one node, which holds the job's lease. The lease
only saves work: each job is safe beside a second run (log starts only rise, compaction runs are fenced). Offsets expire
on the node that holds their group's lease.

`gateway/cluster/jobs.py` (for jobs) and `gateway/operate/supervisor.py` decide when a pass runs and what happens if it
fails. SQL is storage's, and `gateway/log/compactor.py` decides what compaction keeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

import structlog

from gateway.cluster.clock import ClusterClock, wall_ms
from gateway.cluster.jobs import Job
from gateway.config.topic import TopicConfig
from gateway.coordinator.machine import Summary
from gateway.groups.journal import Journal
from gateway.log.catalog import Catalog
from gateway.log.compactor import MAX_KEYS, clean, index_keys
from gateway.log.offset_map import OffsetMap
from gateway.log.tail import Tail
from gateway.net.pieces import in_pieces, mapped
from gateway.operate.deletions import Deletions
from gateway.transactions.coordinator import Transactions
from storage import retention
from storage.compaction import AbortedSpan, CompactionPolicy, CompactionRun, CompactionStore, DirtyRange
from storage.errors import StorageConflict
from storage.journal import JournalStore
from storage.log import LogStore
from storage.monitor import Monitor
from storage.offsets import KnownGroups, OffsetStore
from storage.pool import Database
from storage.producers import ProducerStore
from storage.releases import drop_unused_functions
from storage.retention import UNLIMITED, RetentionPolicy
from storage.roller import Roller
from storage.tokens import TokenStore
from storage.transactions import TransactionStore
from storage.types import (
    CoordinatorLease,
    Partition,
    PartitionKey,
    ReadRequest,
    ReadResult,
    Refusal,
    StoredBatch,
    Topic,
)

logger = structlog.get_logger(__name__)
compaction_logger = structlog.get_logger("gateway.log.compactor")
"""Name that all log lines about compaction share, so that a search for it finds all of them."""

DELETION_INTERVAL_MS = 1_000
"""Interval between checks for topics whose failed deletion is due again; a new deletion wakes the job."""
ROLL_INTERVAL_MS = 10_000
SWEEP_INTERVAL_MS = 30_000
COMPACTION_INTERVAL_MS = 1_000
"""Shortest interval between checks of a topic with a small segment.ms. Other topics are checked every
log.cleaner.backoff.ms.
"""

ROUNDS_PER_PASS = 20
"""Maximal number of rounds in one pass. A round at its bound has left work for the next one."""

RANGES_PER_PASS = 10
CHUNK_BYTES = 4 * 1024 * 1024
"""Number of bytes of batches that are read, decoded and replaced at a time."""

SEGMENT_BYTES = 1024 * 1024 * 1024
"""Uncompacted bytes above which compaction no longer waits for segment.ms: a broker closes a segment by size, too."""

JOURNAL_INTERVAL_MS = 3_600_000
SQL_COMMITS_INTERVAL_MS = 1_000
FUNCTIONS_INTERVAL_MS = 3_600_000
CLOCK_INTERVAL_MS = 60_000
MAX_SKEW_MS = 60_000
"""If the clocks differ by more than this, a warning is logged."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Maximal number of rows that one statement of a pass removes or moves."""

    producers: int = 10_000
    offsets: int = 10_000
    groups: int = 500
    tokens: int = 1_000


STEPS = Steps()


@dataclass(frozen=True, slots=True)
class Pass:
    name: str
    run: Callable[[], Awaitable[None]]
    interval_ms: int
    job: Job | None = None
    """Job whose lease the node must hold. None if every node runs the pass for itself."""


@dataclass(slots=True)
class Maintenance:
    """The passes of one node. `leases` returns the leases held now, `groups` the groups in memory of a shard held by
    one."""

    database: Database
    log: LogStore
    roller: Roller
    catalog: Catalog
    tail: Tail
    leases: Callable[[], Sequence[CoordinatorLease]]
    groups: Callable[[int], Sequence[Summary]]
    deletions: Deletions
    transactions: Transactions
    journal: Journal | None = None
    job_lease: Callable[[Job], CoordinatorLease | None] = lambda _: None
    """Returns the lease of a job if this node currently holds it."""
    clock: ClusterClock = field(default_factory=ClusterClock)
    node_id: Callable[[], int] = lambda: 0
    steps: Steps = STEPS

    def passes(self) -> list[Pass]:
        """Return the passes for the supervisor."""
        broker = self.catalog.broker
        compaction = Compaction(self.database, self.log, self.catalog, cluster_ms=self.clock.now_ms)
        journal = [] if self.journal is None else [Pass("journal", self.keep_journal, JOURNAL_INTERVAL_MS)]
        expire_ms, forget_ms = (
            broker.offsets_retention_check_interval_ms,
            broker.producer_id_expiration_check_interval_ms,
        )
        return [
            *journal,
            Pass("journal of SQL commits", self.journal_sql_commits, SQL_COMMITS_INTERVAL_MS, Job.METADATA),
            Pass("retention", self.retain, broker.log_retention_check_interval_ms, Job.RETENTION),
            Pass("deletion", self.deletions.run, DELETION_INTERVAL_MS, Job.DELETION),
            Pass("roll", self.roll, self._roll_interval_ms, Job.ROLL),
            Pass("sweep", self.sweep, SWEEP_INTERVAL_MS, Job.ROLL),
            Pass("compaction", compaction.run, COMPACTION_INTERVAL_MS, Job.COMPACTION),
            Pass("compacted tails", self.drop_compacted, COMPACTION_INTERVAL_MS),
            Pass("producer expiry", self.expire_producers, forget_ms, Job.PRODUCER_EXPIRY),
            Pass(
                "transaction timeouts",
                self.abort_overdue,
                broker.transaction_abort_timed_out_transaction_cleanup_interval_ms,
                Job.TRANSACTION_TIMEOUTS,
            ),
            Pass(
                "transactional id expiry",
                self.expire_transactional_ids,
                broker.transaction_remove_expired_transaction_cleanup_interval_ms,
                Job.PRODUCER_EXPIRY,
            ),
            Pass("token expiry", self.expire_tokens, broker.delegation_token_expiry_check_interval_ms, Job.METADATA),
            Pass("functions", self.drop_functions, FUNCTIONS_INTERVAL_MS, Job.FUNCTIONS),
            Pass("clock", self.compare_clocks, CLOCK_INTERVAL_MS),
            Pass("offset expiry", _from_the_second_on(self.expire_offsets), expire_ms),
        ]

    async def compare_clocks(self) -> None:
        """Follow Postgres' clock, which dates and ages everything. Warn if this machine's own clock differs, because
        it would mislead people who read logs or set clients' clocks by it."""
        shown: list[int] = []

        async def ask() -> int:
            shown.append(await Monitor(self.database).now_ms())
            return shown[-1]

        sent_ms, sent = wall_ms(), time.monotonic()
        await self.clock.compare(ask)
        (database_ms,) = shown
        # Postgres read its clock at an unknown moment during the call, so the call's duration explains a difference of
        # up to that length.
        took_ms = (time.monotonic() - sent) * 1000
        skew_ms = sent_ms - database_ms
        if skew_ms > MAX_SKEW_MS or skew_ms + took_ms < -MAX_SKEW_MS:
            logger.warning(
                "this node's clock differs from Postgres': check its time service",
                ahead_s=round((skew_ms + took_ms / 2) / 1000),
            )

    async def retain(self) -> None:
        """Remove batches that retention.ms, retention.bytes and DeleteRecords have released."""
        policies = [
            _retention_policy(partition.partition_key, self.catalog.config(topic))
            async for topic, partition in in_pieces(_partitions(self.catalog.topics()))
        ]
        for _ in range(ROUNDS_PER_PASS):
            done = await retention.apply(self.database, policies, moved=self.tail.log_start_moved)
            if done.deleted_batches:
                logger.info(
                    "retention removed batches", deleted_batches=done.deleted_batches, deleted_bytes=done.deleted_bytes
                )
            if done.complete:
                return

    async def keep_journal(self) -> None:
        """Make the days that the journal is about to need, and drop those past group.journal.retention.{ms,bytes}."""
        store, broker = JournalStore(self.database), self.catalog.broker
        await store.make_partitions()
        dropped = await store.retain(broker.group_journal_retention_ms, broker.group_journal_retention_bytes)
        if dropped:
            await store.make_partitions()
            logger.info("days of the journal dropped", days=dropped)

    async def journal_sql_commits(self) -> None:
        """Move the offsets that SQL transactions have committed to the journal, and the commits that were fenced."""
        store, node_id = JournalStore(self.database), self.node_id()
        await store.take_sql_refusals(node_id)
        for _ in range(ROUNDS_PER_PASS):
            if await store.take_sql_commits(node_id, self.steps.offsets) < self.steps.offsets:
                return

    async def drop_compacted(self) -> None:
        """Drop batches from memory that compaction has replaced, on any node."""
        keys = [
            partition.partition_key
            async for topic, partition in in_pieces(_partitions(self.catalog.topics()))
            if self.catalog.config(topic).cleanup_compact and self.tail.holds(partition.partition_key)
        ]
        if keys:
            for key, end_offset in (await CompactionStore(self.database, self.log).cleaned_to(keys)).items():
                self.tail.compacted(key, end_offset)

    @property
    def _roll_interval_ms(self) -> int:
        age_ms = self.catalog.broker.log_store_roll_ms
        return ROLL_INTERVAL_MS if age_ms < 0 else max(100, min(ROLL_INTERVAL_MS, age_ms))

    async def roll(self) -> None:
        """Move inline bytes to their permanent place, and free the places without live bytes; repeat while there is
        work."""
        lease = self.job_lease(Job.ROLL)
        try:
            for _ in range(ROUNDS_PER_PASS):
                moved_bytes = await self.roller.roll(lease=lease)
                if not moved_bytes:
                    return
                logger.debug("inline bytes moved", moved_bytes=moved_bytes)
        except StorageConflict as error:
            logger.info("moving of bytes stopped: another node does it", reason=str(error))

    async def sweep(self) -> None:
        """Rewrite segments and objects with few live bytes, and delete those that no chunk names."""
        try:
            await self.roller.sweep(lease=self.job_lease(Job.ROLL))
        except StorageConflict as error:
            logger.info("moving of bytes stopped: another node does it", reason=str(error))

    async def drop_functions(self) -> None:
        """Drop the SQL functions of releases that no node runs any more."""
        if dropped := await drop_unused_functions(self.database):
            logger.info("functions of former releases dropped", schemas=dropped)

    async def expire_producers(self) -> None:
        """Forget the sequences of producers that have been idle for producer.id.expiration.ms."""
        idle_ms = self.catalog.broker.producer_id_expiration_ms
        store = ProducerStore(self.database)
        for _ in range(ROUNDS_PER_PASS):
            if await store.expire(idle_ms, self.steps.producers) < self.steps.producers:
                return

    async def abort_overdue(self) -> None:
        """Abort transactions that took longer than their timeout: readers with read_committed wait behind them."""
        await self.transactions.abort_overdue()

    async def expire_transactional_ids(self) -> None:
        """Forget ids that have begun no transaction for transactional.id.expiration.ms."""
        idle_ms = self.catalog.broker.transactional_id_expiration_ms
        store = TransactionStore(self.database)
        for _ in range(ROUNDS_PER_PASS):
            if await store.expire(idle_ms, self.steps.producers) < self.steps.producers:
                return

    async def expire_tokens(self) -> None:
        """Remove delegation tokens with which no client can log in any more."""
        store = TokenStore(self.database)
        for _ in range(ROUNDS_PER_PASS):
            gone = await store.delete_expired(self.steps.tokens)
            if gone:
                logger.info("delegation tokens expired", tokens=len(gone))
            if len(gone) < self.steps.tokens:
                return

    async def expire_offsets(self) -> None:
        """Remove offsets past offsets.retention.minutes, and the empty groups that have none left."""
        retention_ms = self.catalog.broker.offsets_retention_minutes * 60_000
        store = OffsetStore(self.database)
        for lease in self.leases():
            for _ in range(ROUNDS_PER_PASS):
                try:
                    expired = await store.expire(
                        lease,
                        retention_ms,
                        lambda shard=lease.shard: _known(self.groups(shard)),
                        group_limit=self.steps.groups,
                        offset_limit=self.steps.offsets,
                    )
                except StorageConflict:
                    logger.info("offset expiry stopped: another node owns the shard", shard=lease.shard)
                    break
                if expired.offset_count:
                    logger.info("offsets expired", offsets=expired.offset_count)
                if expired.deleted_groups:
                    logger.info("empty groups removed", groups=expired.deleted_groups)
                    if self.journal is not None:
                        self.journal.expired(expired.deleted_groups)
                if expired.offset_count < self.steps.offsets and len(expired.deleted_groups) < self.steps.groups:
                    break


def _from_the_second_on(run: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Skip the first pass. At start, a group without members or offsets probably gets its members back in a moment,
    and its generation must not begin anew."""
    passes = iter([_nothing])

    async def run_later() -> None:
        await next(passes, run)()

    return run_later


async def _nothing() -> None:
    pass


def _known(groups: Sequence[Summary]) -> KnownGroups:
    generation_ids = {group.group_id: group.generation_id for group in groups}
    return KnownGroups(subscriptions(groups), unsettled(groups), generation_ids)


def subscriptions(groups: Sequence[Summary]) -> dict[str, frozenset[str]]:
    """Return the topics of each Stable consumer group with known subscriptions: offsets of other topics may expire."""
    return {
        group.group_id: group.subscribed_topics
        for group in groups
        if group.subscribed_topics is not None and _settled(group)
    }


def unsettled(groups: Sequence[Summary]) -> list[str]:
    """Return the groups whose offsets may not expire: they have members, and are rebalancing or have an opaque
    protocol."""
    return [
        group.group_id
        for group in groups
        if group.state != "Empty" and not (_settled(group) and group.subscribed_topics is not None)
    ]


def _settled(group: Summary) -> bool:
    return group.is_stable and group.protocol_type in ("consumer", "streams")


def _partitions(topics: Sequence[Topic]) -> Iterator[tuple[Topic, Partition]]:
    return ((topic, partition) for topic in topics for partition in topic.partitions)


def _retention_policy(key: PartitionKey, config: TopicConfig) -> RetentionPolicy:
    # A pass also visits topics without limits, because DeleteRecords leaves rows to remove there.
    if not config.cleanup_delete:
        return RetentionPolicy(key, UNLIMITED, UNLIMITED)
    return RetentionPolicy(key, config.retention_ms, config.retention_bytes)


class Compaction:
    """Find dirty partitions of compacted topics and clean them, chunk by chunk, off the event loop's thread."""

    def __init__(
        self,
        database: Database,
        log_store: LogStore,
        catalog: Catalog,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        cluster_ms: Callable[[], int] = wall_ms,
        max_keys: int = MAX_KEYS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._max_keys = max_keys
        self._chunk_bytes = chunk_bytes
        self._monotonic = monotonic
        self._cluster_ms = cluster_ms
        self._log = log_store
        self._store = CompactionStore(database, log_store)
        self._catalog = catalog
        self._due_s: dict[UUID, float] = {}
        """For each compacted topic, the time of its next check."""
        self._failed: set[PartitionKey] = set()
        """Partitions that could not be cleaned. They stay the dirtiest, and wait until a pass has room for them."""

    async def run(self) -> None:
        """Run one pass: clean the dirtiest partitions of the topics that are due. Raise the error of a partition that
        cannot be cleaned after the others have been."""
        topics = await self.due_topics()
        if not topics:
            return
        configs: dict[PartitionKey, TopicConfig] = {}
        async for topic, config in in_pieces(topics):
            configs.update((part.partition_key, config) for part in topic.partitions)

        async def policies(*, wait_for_segment: bool) -> list[CompactionPolicy]:
            return await mapped(
                lambda part: _compaction_policy(*part, wait_for_segment=wait_for_segment),
                [(key, config) for key, config in configs.items() if key not in self._failed],
            )

        waiting = await policies(wait_for_segment=True)
        ranges = await self._store.dirty_ranges(waiting, limit=RANGES_PER_PASS)
        found = {dirty.partition_key for dirty in ranges}
        # A second search ignores segment.ms, for logs that have grown too much to wait for it.
        pressing = await policies(wait_for_segment=False)
        ranges += [
            dirty
            for dirty in await self._store.dirty_ranges(pressing, limit=RANGES_PER_PASS)
            if dirty.partition_key not in found and dirty.dirty_bytes >= SEGMENT_BYTES
        ]
        compaction_logger.debug("compaction looked", topics=len(topics), dirty_partitions=len(ranges))
        if len(ranges) < RANGES_PER_PASS:
            self._failed.difference_update(configs)
        problem: Exception | None = None
        for dirty in ranges:
            try:
                await self._clean(dirty, configs[dirty.partition_key])
            except StorageConflict as error:
                compaction_logger.info("compaction overtaken", partition_key=dirty.partition_key, reason=str(error))
                self._failed.add(dirty.partition_key)
            except Exception as error:  # noqa: BLE001 - raised below
                compaction_logger.warning("compaction failed", partition_key=dirty.partition_key, reason=str(error))
                self._failed.add(dirty.partition_key)
                problem = error
        if problem is not None:
            raise problem

    async def due_topics(self) -> list[tuple[Topic, TopicConfig]]:
        """Return the compacted topics to check in this pass: each after log.cleaner.backoff.ms, or its segment.ms if
        shorter."""
        now_s = self._monotonic()
        backoff_ms = self._catalog.broker.log_cleaner_backoff_ms
        compacted = [
            (topic, config)
            async for topic in in_pieces(self._catalog.topics())
            if (config := self._catalog.config(topic)).cleanup_compact
        ]
        due = [(topic, config) for topic, config in compacted if self._due_s.get(topic.topic_id, 0.0) <= now_s]
        due_s = {topic.topic_id: self._due_s.get(topic.topic_id, 0.0) for topic, _ in compacted}
        for topic, config in due:
            due_s[topic.topic_id] = now_s + min(backoff_ms, config.segment_ms) / 1000
        self._due_s = due_s
        return due

    async def _clean(self, dirty: DirtyRange, config: TopicConfig) -> None:
        index, end_offset = await self._index(dirty)
        run = await self._store.begin(replace(dirty, end_offset=end_offset))
        compaction_logger.debug(
            "compaction begins",
            partition_key=run.partition_key,
            clean_to=end_offset,
            dirty_bytes=dirty.dirty_bytes,
        )
        dropped_records = 0
        offset = dirty.log_start_offset
        while chunk := await self._read(run.partition_key, offset, end_offset):
            cleaned = await asyncio.to_thread(
                clean,
                chunk,
                index,
                await self._aborted(run.partition_key, chunk),
                now_ms=self._cluster_ms(),
                delete_retention_ms=config.delete_retention_ms,
            )
            if cleaned.removed:
                await self._store.replace(run, cleaned.removed, cleaned.added)
                compaction_logger.debug(
                    "batches compacted",
                    partition_key=run.partition_key,
                    removed=len(cleaned.removed),
                    rewritten=len(cleaned.added),
                    dropped_records=cleaned.dropped_records,
                )
                dropped_records += cleaned.dropped_records
            offset = chunk[-1].last_offset + 1
        await self._finish(run, dropped_records)

    async def _finish(self, run: CompactionRun, dropped_records: int) -> None:
        await self._store.finish(run)
        compaction_logger.info(
            "partition compacted",
            partition_key=run.partition_key,
            clean_to=run.end_offset,
            dropped_records=dropped_records,
        )

    async def _index(self, dirty: DirtyRange) -> tuple[OffsetMap, int]:
        """Return the keys of the dirty range, and where the index ends: at the range's end unless it fills up
        earlier."""
        index = OffsetMap(dirty.first_dirty_offset, self._max_keys)
        offset = dirty.first_dirty_offset
        while chunk := await self._read(dirty.partition_key, offset, dirty.end_offset):
            aborted = await self._aborted(dirty.partition_key, chunk)
            full_at = await asyncio.to_thread(index_keys, chunk, index, aborted)
            if full_at is not None:
                return index, full_at
            offset = chunk[-1].last_offset + 1
        return index, dirty.end_offset

    async def _aborted(self, key: PartitionKey, chunk: Sequence[StoredBatch]) -> list[AbortedSpan]:
        """Return the aborted spans, read after the batches. A span that retention has removed by then lies below the
        log start, and so does every record that it could supersede."""
        return await self._store.aborted_between(key, chunk[0].base_offset, chunk[-1].last_offset + 1)

    async def _read(self, key: PartitionKey, offset: int, end_offset: int) -> list[StoredBatch]:
        """Return the next chunk of whole batches below `end_offset`, which is a batch boundary."""
        if offset >= end_offset:
            return []
        (result,) = await self._log.read([ReadRequest(key, offset, self._chunk_bytes)], max_bytes=self._chunk_bytes)
        if result is Refusal.DAMAGED:
            raise StorageConflict(f"the records at offset {offset} cannot be read: run sluice check")
        if not isinstance(result, ReadResult):
            raise StorageConflict(f"partition {key} has been deleted")
        if offset < result.state.log_start_offset:
            return await self._read(key, result.state.log_start_offset, end_offset)
        return [batch for batch in result.batches if batch.last_offset < end_offset]


def _compaction_policy(key: PartitionKey, config: TopicConfig, *, wait_for_segment: bool) -> CompactionPolicy:
    lag_ms = config.min_compaction_lag_ms
    if wait_for_segment:
        lag_ms = max(lag_ms, min(config.segment_ms, config.max_compaction_lag_ms))
    return CompactionPolicy(
        key,
        min_cleanable_dirty_ratio=config.min_cleanable_dirty_ratio,
        min_compaction_lag_ms=lag_ms,
        max_compaction_lag_ms=config.max_compaction_lag_ms,
    )
