"""The shorter functions for usual commits: `append_plain` and `append_one` have the same effects and results as
`append_chunks`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from storage.append_group import AppendGroup
from storage.log import LogStore
from storage.queries import statement
from storage.types import Appended, NewBatch, PartitionKey, Refusal, Topic
from tests.storage.batches import new_batch, offsets, read
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

PRODUCERS = (40, 41, 42)
TRANSACTIONAL = 42

WAITING = "select exists (select from pg_locks where not granted and $1 = any (pg_blocking_pids(pid)))"


async def append_by(
    sql: asyncpg.Connection, name: str, batches: Sequence[NewBatch], object_id: int | None = None
) -> Outcomes:
    """Append by `append_chunks`, or by a shorter function. If the shorter function declines, use `append_chunks`."""
    group = AppendGroup(batches)
    records = None
    position = None if object_id is None else 1_000
    if object_id is None:
        records = [b"".join(group.buffers(candidate)) for candidate in range(len(group.candidates))]
    decided: asyncpg.Record | None = None
    outcomes: Outcomes = ()
    if name == "append_plain":
        arguments = group.plain_arguments(object_id=object_id, position=position, records=records)
        assert arguments is not None
        decided = await sql.fetchrow(statement(name), *arguments)
        assert decided is not None
        assert not decided["sealed"]
        if decided["undecided"]:
            assert decided["transaction_id"] is None
            decided = None
        else:
            outcomes = group.settle_plain(decided)
    elif name == "append_one":
        arguments = group.one_arguments(records or ())
        assert arguments is not None
        decided = await sql.fetchrow(statement(name), *arguments)
        assert decided is not None
        if decided["undecided"]:
            assert decided["transaction_id"] is None
            decided = None
        else:
            outcomes = group.settle_one(decided)
    if decided is None:
        arguments = group.arguments(wait=False, object_id=object_id, position=position, records=records)
        decided = await sql.fetchrow(statement("append_chunks"), *arguments)
        assert decided is not None
        assert not decided["sealed"]
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
    """Make a batch that continues its producer's sequence after `last`, or one that repeats, skips or restarts the
    sequence.
    """
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


def run_of(key: PartitionKey, last: NewBatch, chance: random.Random, *, usual: bool) -> list[NewBatch]:
    """Make consecutive batches of one producer. Unless they must be `usual`, some of them repeat, skip or restart the
    sequence.
    """
    if not usual and chance.randrange(3) == 0:
        return [idempotent_batch(key, last, chance)._replace(is_transactional=last.producer_id == TRANSACTIONAL)]
    batches: list[NewBatch] = []
    for _ in range(chance.choice([1, 1, 2, 3, 5])):
        records = chance.randrange(1, 5)
        following = (last.base_sequence + last.record_count) % 2**31
        last = new_batch(
            key,
            size_bytes=chance.randrange(70, 300),
            records=records,
            max_timestamp_ms=chance.choice([-1, 5, 500]),
            producer=(last.producer_id, last.producer_epoch, following),
            fill=chance.randrange(256),
        )._replace(is_transactional=last.producer_id == TRANSACTIONAL)
        batches.append(last)
    return batches


OPEN = """
select p.partition_index, o.producer_id, o.producer_epoch, o.first_offset, o.begins_at_zero
from open_transaction o
join partition p using (partition_key)
where p.topic_id = $1
order by p.partition_index, o.producer_id
"""


async def written(sql: asyncpg.Connection, topic: Topic) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await sql.fetch(WRITTEN, topic.topic_id)]


async def twins(make_topic: MakeTopic, sql: asyncpg.Connection) -> tuple[Topic, Topic]:
    """Make two topics in the same state. Of the four partitions of each, one has been emptied and one has had another
    leader.
    """
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
            for name, topic in (("append_plain", short), ("append_chunks", long))
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
    for name, topic in (("append_plain", short), ("append_chunks", long)):
        chance = random.Random(7)
        results.append([])
        # The first sequence is so high that later sequences wrap around.
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


@pytest.mark.parametrize("in_object", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_both_functions_append_the_same_runs_of_several_producers(
    make_topic: MakeTopic, sql: asyncpg.Connection, seed: int, in_object: bool
) -> None:
    short, long = await twins(make_topic, sql)
    object_id = await sql.fetchval("insert into log_object default values returning object_id") if in_object else None
    results: list[list[Outcomes]] = []
    for name, topic in (("append_plain", short), ("append_chunks", long)):
        chance = random.Random(seed)
        results.append([])
        keys = [partition.partition_key for partition in topic.partitions]
        last = {
            (key, producer): new_batch(key, producer=(producer, 0, 2**31 - 90))
            for key in keys
            for producer in PRODUCERS
        }
        for turn in range(150):
            if turn % 10 == 0:
                # The transaction ends in one half of the partitions. Then a new transaction enlists the other half.
                await sql.execute(
                    "delete from open_transaction where partition_key = any ($1)", keys[turn // 10 % 2 :: 2]
                )
                await sql.execute(
                    "insert into open_transaction (partition_key, producer_id, producer_epoch, begins_at_zero)"
                    " select unnest($1::bigint[]), $2, 0, $3 on conflict do nothing",
                    keys[(turn // 10 + 1) % 2 :: 2],
                    TRANSACTIONAL,
                    chance.randrange(2) == 0,
                )
            batches: list[NewBatch] = []
            for key in chance.sample(keys, chance.randrange(1, 5)):
                runs = [
                    run_of(key, last[key, producer], chance, usual=turn % 5 > 0)
                    for producer in chance.sample(PRODUCERS, chance.randrange(1, 4))
                ]
                runs += [[new_batch(key)]] * chance.randrange(2)
                # Batches of several producers alternate. The batches of each producer stay in order.
                while runs:
                    run = chance.choice(runs)
                    batches.append(run[0])
                    runs = [(each[1:] if each is run else each) for each in runs]
                    runs = [each for each in runs if each]
            outcomes = await append_by(sql, name, batches, object_id)
            for batch, outcome in zip(batches, outcomes, strict=True):
                if batch.producer_id >= 0 and isinstance(outcome, Appended) and not outcome.duplicate:
                    last[batch.partition_key, batch.producer_id] = batch
            results[-1].append(outcomes)
    assert results[0] == results[1]
    assert await written(sql, short) == await written(sql, long)
    for query in (STATES, OPEN):
        rows = [[tuple(row) for row in await sql.fetch(query, topic.topic_id)] for topic in (short, long)]
        assert rows[0] == rows[1]
    assert any(outcome.open_since_offset for turn in results[0] for outcome in turn if isinstance(outcome, Appended))


@pytest.mark.parametrize("place", ["statement", "segment"])
async def test_a_repeated_run_is_answered_with_its_first_offsets(log: LogStore, key: PartitionKey) -> None:
    def run() -> list[NewBatch]:
        return [new_batch(key, records=2, producer=(5, 0, 2 * number)) for number in range(3)]

    assert await log.append(run(), wait=False) == [Appended(2 * number, 0, 0) for number in range(3)]
    assert await log.append(run(), wait=False) == [Appended(2 * number, 0, 0, duplicate=True) for number in range(3)]
    assert offsets((await read(log, key)).batches) == [(0, 1), (2, 3), (4, 5)]


async def test_the_shortest_path_appends_the_same(make_topic: MakeTopic, sql: asyncpg.Connection) -> None:
    short, long = await twins(make_topic, sql)
    results: list[list[Outcomes]] = []
    for name, topic in (("append_one", short), ("append_chunks", long)):
        chance = random.Random(3)
        results.append([])
        last = {p.partition_key: new_batch(p.partition_key, producer=(40, 0, 2**31 - 90)) for p in topic.partitions}
        for _ in range(250):
            key = chance.choice(list(last))
            if chance.randrange(6) == 0:
                batches = [
                    new_batch(key, records=chance.randrange(1, 5), max_timestamp_ms=chance.choice([-1, 5, 500]))
                    for _ in range(chance.randrange(1, 4))
                ]
            else:
                batches = [idempotent_batch(key, last[key], chance)]
            outcomes = await append_by(sql, name, batches)
            for batch, outcome in zip(batches, outcomes, strict=True):
                if batch.producer_id >= 0 and isinstance(outcome, Appended) and not outcome.duplicate:
                    last[batch.partition_key] = batch
            results[-1].append(outcomes)
    assert results[0] == results[1]
    assert await written(sql, short) == await written(sql, long)
    states = [[tuple(row) for row in await sql.fetch(STATES, topic.topic_id)] for topic in (short, long)]
    assert states[0] == states[1]


async def test_an_object_that_takes_no_more_appends_is_reported_and_nothing_is_written(
    make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    topic = await make_topic("sealed", 1)
    object_id = await sql.fetchval("insert into log_object (sealed_at) values (now()) returning object_id")
    group = AppendGroup([new_batch(topic.partitions[0].partition_key)])
    arguments = group.plain_arguments(object_id=object_id, position=0)
    assert arguments is not None
    decided = await sql.fetchrow(statement("append_plain"), *arguments)
    assert decided is not None
    assert decided["sealed"]
    assert decided["transaction_id"] is None
    assert await written(sql, topic) == []


async def test_a_plain_batch_inside_a_transaction_of_its_producer_is_refused_by_both_functions(
    make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    topic = await make_topic("open", 1)
    key = topic.partitions[0].partition_key
    await append_by(sql, "append_plain", [new_batch(key, producer=(5, 0, 0))])
    await sql.execute(
        "insert into open_transaction (partition_key, producer_id, producer_epoch, first_offset, begins_at_zero)"
        " values ($1, 5, 0, 0, false)",
        key,
    )
    for name in ("append_one", "append_plain", "append_chunks"):
        assert await append_by(sql, name, [new_batch(key, producer=(5, 0, 1))]) == [Refusal.INVALID_TXN_STATE]


@pytest.mark.parametrize("count", [1, 2])
async def test_a_batch_of_a_producer_that_is_just_forgotten_begins_a_new_state(
    database_url: str, make_topic: MakeTopic, log: LogStore, sql: asyncpg.Connection, count: int
) -> None:
    topic = await make_topic("forgotten", 1)
    key = topic.partitions[0].partition_key
    first, *later = [new_batch(key, records=2, producer=(5, 0, 2 * number)) for number in range(count + 1)]
    await append_by(sql, "append_plain", [first])
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("delete from sluice.producer_state")
            appending = asyncio.create_task(log.append(later, wait=False))
            async with asyncio.timeout(20):
                while not await other.fetchval(WAITING, other.get_server_pid()):
                    assert not appending.done()
                    await asyncio.sleep(0.01)
    finally:
        await other.close()
    assert await appending == [Appended(2 + 2 * number, 0, 0) for number in range(count)]
    assert await log.append(later, wait=False) == [
        Appended(2 + 2 * number, 0, 0, duplicate=True) for number in range(count)
    ]
    (state,) = await sql.fetch(STATES, topic.topic_id)
    rest = [-1] * (5 - count)
    assert (state["batch_count"], state["next_sequence"]) == (count, 2 + 2 * count)
    assert state["first_sequences"] == state["base_offsets"] == [2 + 2 * number for number in range(count)] + rest
    assert state["last_sequences"] == [3 + 2 * number for number in range(count)] + rest


async def test_both_functions_refuse_the_same_batches_and_append_the_rest(
    database_url: str, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    short, long = await twins(make_topic, sql)
    await sql.execute("update partition set deleted = true where partition_index = 3")
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("select from sluice.partition where partition_index = 0 for no key update")
            for name, topic in (("append_plain", short), ("append_chunks", long)):
                alone = [new_batch(topic.partitions[0].partition_key, producer=(5, 0, 0)), new_batch(PartitionKey(0))]
                assert await append_by(sql, name, alone) == [Refusal.PARTITION_BUSY, Refusal.UNKNOWN_PARTITION]
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

    def is_plain(*batches: NewBatch) -> bool:
        return AppendGroup(batches).plain_arguments() is not None

    def of_producer(sequence: int, *, epoch: int = 0, transactional: bool = False) -> NewBatch:
        return new_batch(other, producer=(5, epoch, sequence))._replace(is_transactional=transactional)

    assert is_plain(new_batch(key), new_batch(other), new_batch(key))
    assert is_plain(new_batch(key), of_producer(0), new_batch(other), of_producer(1))
    assert is_plain(of_producer(2**31 - 1), of_producer(0)), "sequences wrap"
    assert is_plain(*(of_producer(sequence) for sequence in range(5)))
    assert not is_plain(*(of_producer(sequence) for sequence in range(6))), "more than the partition remembers"
    assert not is_plain(of_producer(0), of_producer(2)), "a gap"
    assert not is_plain(of_producer(0), of_producer(0)), "a repeat"
    assert not is_plain(of_producer(0), of_producer(1, epoch=1))
    assert not is_plain(of_producer(0), of_producer(1, transactional=True))
    large = new_batch(key, size_bytes=700_000)
    assert not is_plain(large, new_batch(key, size_bytes=700_000)), "two chunks of one partition"


def test_only_a_lone_chunk_takes_the_shortest_path() -> None:
    key = PartitionKey(1)

    def is_one(*batches: NewBatch) -> bool:
        return AppendGroup(batches).one_arguments([b""]) is not None

    producing = new_batch(key, producer=(5, 0, 0))
    assert is_one(producing)
    assert is_one(new_batch(key), new_batch(key))
    assert not is_one(producing, new_batch(key))
    assert not is_one(producing._replace(is_transactional=True))
    assert not is_one(new_batch(key), new_batch(PartitionKey(2)))
