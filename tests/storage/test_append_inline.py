"""The short path of small commits: `append_inline` does and returns the same as `append_chunks`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import asyncpg

from storage.append_group import AppendGroup
from storage.queries import statement
from storage.types import Appended, NewBatch, PartitionKey, Refusal, Topic
from tests.storage.batches import new_batch
from tests.storage.conftest import MakeTopic

Outcomes = Sequence[Appended | Refusal]

WRITTEN = """
select
    p.partition_index, c.base_offset, c.last_offset, c.max_timestamp_ms, c.running_max_timestamp_ms,
    c.append_timestamp_ms is null, c.object_id, c.size_bytes, c.appended_bytes, c.batch_count, c.leader_epoch,
    c.inline_slot, c.final_heads, i.partition_key = c.partition_key, i.base_offset, i.records
from chunk c
join partition p using (partition_key)
left join inline_records i on i.slot = c.inline_slot and i.position = c.position
where p.topic_id = $1
order by p.partition_index, c.base_offset
"""


STATES = """
select
    p.partition_index, s.producer_id, s.since_offset, s.update_count, s.producer_epoch, s.next_sequence, s.batch_count,
    s.first_sequences, s.last_sequences, s.base_offsets
from producer_state s
join partition p using (partition_key)
where p.topic_id = $1
order by p.partition_index, s.producer_id, s.since_offset
"""

WAITING = "select exists (select from pg_locks where pid = $1 and not granted)"


async def append_by(sql: asyncpg.Connection, name: str, batches: Sequence[NewBatch]) -> Outcomes:
    group = AppendGroup(batches)
    assert group.is_plain
    records = [b"".join(group.buffers(candidate)) for candidate in range(len(group.candidates))]
    arguments = (
        group.plain_arguments(records) if name == "append_inline" else group.arguments(wait=False, records=records)
    )
    decided = await sql.fetchrow(statement(name), *arguments)
    assert decided is not None
    outcomes = group.settle(decided)
    written = any(isinstance(outcome, Appended) and not outcome.duplicate for outcome in outcomes)
    assert [decided["transaction_id"] is not None, decided["written_lsn"] is not None] == [written, written]
    return outcomes


def group_for(keys: Sequence[PartitionKey], chance: random.Random) -> list[NewBatch]:
    batches = [
        new_batch(
            key,
            size_bytes=chance.randrange(70, 300),
            records=chance.randrange(1, 5),
            max_timestamp_ms=chance.choice([-1, 5, 500, 100_000]),
            fill=chance.randrange(256),
        )
        for key in chance.sample(keys, chance.randrange(1, len(keys) + 1))
        for _ in range(chance.randrange(1, 4))
    ]
    chance.shuffle(batches)
    return batches


def idempotent_batch(key: PartitionKey, last: NewBatch, chance: random.Random) -> NewBatch:
    """Make a batch that continues its producer's sequence after `last`, or one that repeats, skips or restarts it."""
    producer_id, epoch = last.producer_id, last.producer_epoch
    following = (last.base_sequence + last.record_count) % 2**31
    kind = chance.randrange(20)
    if kind == 0:
        return new_batch(key, records=last.record_count, producer=(producer_id, epoch, last.base_sequence))
    if kind == 1:
        return new_batch(key, producer=(producer_id, epoch, (following + 3) % 2**31))
    if kind == 2:
        return new_batch(key, producer=(producer_id, max(epoch - 1, 0), following))
    if kind == 3 and chance.randrange(8) == 0:
        return new_batch(key, producer=(producer_id, epoch + 1, 0))
    records = chance.randrange(1, 5)
    return new_batch(key, records=records, producer=(producer_id, epoch, following))


async def written(sql: asyncpg.Connection, topic: Topic) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await sql.fetch(WRITTEN, topic.topic_id)]


async def twins(make_topic: MakeTopic, sql: asyncpg.Connection) -> tuple[Topic, Topic]:
    """Make two topics in the same state. Of their four partitions one has been emptied and one has had another
    leader."""
    topics = await make_topic("short", 4), await make_topic("long", 4)
    await sql.execute("update partition set leader_epoch = 7 where partition_index = 1")
    await sql.execute(
        "update partition set next_offset = 258, log_start_offset = 258, appended_bytes = 9000, max_timestamp_ms = 400"
        " where partition_index = 2"
    )
    return topics


async def test_both_functions_append_the_same(make_topic: MakeTopic, sql: asyncpg.Connection) -> None:
    short, long = await twins(make_topic, sql)
    for seed in range(40):
        outcomes = [
            await append_by(
                sql,
                name,
                group_for([partition.partition_key for partition in topic.partitions], random.Random(seed)),
            )
            for name, topic in (("append_inline", short), ("append_chunks", long))
        ]
        assert outcomes[0] == outcomes[1]
        assert all(isinstance(outcome, Appended) for outcome in outcomes[0])
    rows = await written(sql, short)
    assert rows == await written(sql, long)
    assert {row[0] for row in rows} == {0, 1, 2, 3}


async def test_both_functions_decide_the_same_about_idempotent_producers(
    make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    short, long = await twins(make_topic, sql)
    results: list[list[Outcomes]] = []
    for name, topic in (("append_inline", short), ("append_chunks", long)):
        chance = random.Random(7)
        results.append([])
        # The first sequence is so high that sequences wrap.
        last = {p.partition_key: new_batch(p.partition_key, producer=(40, 0, 2**31 - 90)) for p in topic.partitions}
        for _ in range(150):
            chosen = chance.sample(list(last), chance.randrange(1, 5))
            batches = [
                new_batch(key) if chance.randrange(6) == 0 else idempotent_batch(key, last[key], chance)
                for key in chosen
            ]
            outcomes = await append_by(sql, name, batches)
            for batch, outcome in zip(batches, outcomes, strict=True):
                if batch.producer_id >= 0 and isinstance(outcome, Appended) and not outcome.duplicate:
                    last[batch.partition_key] = batch
            results[-1].append(outcomes)
    assert results[0] == results[1]
    kinds = {getattr(outcome, "duplicate", outcome) for outcomes in results[0] for outcome in outcomes}
    assert kinds == {False, True, Refusal.OUT_OF_ORDER_SEQUENCE, Refusal.INVALID_PRODUCER_EPOCH}
    assert await written(sql, short) == await written(sql, long)
    states = [[tuple(row) for row in await sql.fetch(STATES, topic.topic_id)] for topic in (short, long)]
    assert states[0] == states[1]


async def test_a_plain_batch_inside_a_transaction_of_its_producer_is_refused_by_both_functions(
    make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    topic = await make_topic("open", 1)
    key = topic.partitions[0].partition_key
    await append_by(sql, "append_inline", [new_batch(key, producer=(5, 0, 0))])
    await sql.execute(
        "insert into open_transaction (partition_key, producer_id, producer_epoch, first_offset, begins_at_zero)"
        " values ($1, 5, 0, 0, false)",
        key,
    )
    for name in ("append_inline", "append_chunks"):
        assert await append_by(sql, name, [new_batch(key, producer=(5, 0, 1))]) == [Refusal.INVALID_TXN_STATE]


async def test_a_batch_of_a_producer_that_is_just_forgotten_begins_a_new_state(
    database_url: str, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    topic = await make_topic("forgotten", 1)
    key = topic.partitions[0].partition_key
    batches = [new_batch(key, records=2, producer=(5, 0, sequence)) for sequence in (0, 2)]
    await append_by(sql, "append_inline", [batches[0]])
    pid = sql.get_server_pid()
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("delete from sluice.producer_state")
            appending = asyncio.create_task(append_by(sql, "append_inline", [batches[1]]))
            async with asyncio.timeout(20):
                while not await other.fetchval(WAITING, pid):
                    assert not appending.done()
                    await asyncio.sleep(0.01)
    finally:
        await other.close()
    assert await appending == [Appended(2, 0, 0)]
    assert await append_by(sql, "append_inline", [batches[1]]) == [Appended(2, 0, 0, duplicate=True)]
    assert [tuple(row) for row in await sql.fetch(STATES, topic.topic_id)] == [
        (0, 5, 2, 0, 0, 4, 1, [2, -1, -1, -1, -1], [3, -1, -1, -1, -1], [2, -1, -1, -1, -1])
    ]


async def test_both_functions_refuse_the_same_batches_and_append_the_rest(
    database_url: str, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    short, long = await twins(make_topic, sql)
    await sql.execute("update partition set deleted = true where partition_index = 3")
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("select from sluice.partition where partition_index = 0 for no key update")
            for name, topic in (("append_inline", short), ("append_chunks", long)):
                batches = [new_batch(partition.partition_key) for partition in topic.partitions]
                assert await append_by(sql, name, batches) == [
                    Refusal.PARTITION_BUSY,
                    Appended(0, 0, 7),
                    Appended(258, 258, 0),
                    Refusal.UNKNOWN_PARTITION,
                ]
    finally:
        await other.close()
    assert await written(sql, short) == await written(sql, long)


def test_a_commit_that_needs_more_decisions_does_not_take_the_short_path() -> None:
    key, other = PartitionKey(1), PartitionKey(2)
    assert AppendGroup([new_batch(key), new_batch(other), new_batch(key)]).is_plain
    producing = new_batch(other, producer=(5, 0, 0))
    assert AppendGroup([new_batch(key), producing]).is_plain
    assert not AppendGroup([producing, new_batch(other, producer=(5, 0, 1))]).is_plain, "two entries of one partition"
    assert not AppendGroup([producing._replace(is_transactional=True)]).is_plain
    large = new_batch(key, size_bytes=700_000)
    assert not AppendGroup([large, new_batch(key, size_bytes=700_000)]).is_plain, "two chunks of one partition"
