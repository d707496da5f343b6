"""The journal's numbers follow the order of commits. Its days are created and dropped without blocking a writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from storage.migrate import migrate
from storage.pool import SESSION_SETTINGS, Database

INSERT_EVENT = """
insert into journal_event (seq, at_ms, node_id, group_id, group_type, kind, generation_id)
values (journal_reserve(1), 0, 1, 'g', 'classic', 'loaded', 1) returning seq
"""
DAY_MS = 86_400_000


async def an_old_day(connection: asyncpg.Connection) -> None:
    """Create partitions of a day long past, with one row, which gets the next number."""
    for table in ("event", "member", "ownership", "offset", "handoff"):
        await connection.execute(
            f"create table journal_{table}_20200101 partition of journal_{table} "
            "for values from ('2020-01-01 00:00:00+00') to ('2020-01-02 00:00:00+00')"
        )
    await connection.execute(
        "insert into journal_event (seq, written_at, at_ms, node_id, group_id, group_type, kind, generation_id) "
        "values (journal_reserve(1), '2020-01-01 12:00:00+00', 0, 1, 'g', 'classic', 'loaded', 1)"
    )


@pytest.fixture
async def writers(empty_database_url: str) -> AsyncIterator[list[asyncpg.Connection]]:
    database = await Database.open(empty_database_url)
    await migrate(database)
    await database.close()
    opened = [await asyncpg.connect(empty_database_url, server_settings=dict(SESSION_SETTINGS)) for _ in range(2)]
    await opened[0].execute("select journal_make_partitions(2)")
    yield opened
    for connection in opened:
        await connection.close()


async def test_numbers_become_visible_in_order(writers: list[asyncpg.Connection]) -> None:
    first, second = writers
    began = first.transaction()
    await began.start()
    assert await first.fetchval(INSERT_EVENT) == 1
    later = asyncio.ensure_future(second.fetchval(INSERT_EVENT))
    done, _ = await asyncio.wait([later], timeout=0.3)
    assert not done, "a second writer must not be visible before the first"
    await began.commit()
    assert await asyncio.wait_for(later, 60) == 2
    assert await first.fetchval("select next_seq from journal_position") == 3


async def test_a_rolled_back_event_leaves_no_hole(writers: list[asyncpg.Connection]) -> None:
    first, second = writers
    began = first.transaction()
    await began.start()
    await first.fetchval(INSERT_EVENT)
    await began.rollback()
    assert await second.fetchval(INSERT_EVENT) == 1


async def test_partitions_are_created_once_and_ahead_of_time(writers: list[asyncpg.Connection]) -> None:
    first, _ = writers
    assert await first.fetchval("select journal_make_partitions(2)") == 0
    assert await first.fetchval("select journal_make_partitions(3)") == 5
    assert await first.fetchval("select count(*) from pg_inherits where inhparent = 'journal_event'::regclass") == 4


async def test_retention_drops_whole_days_and_records_the_first_remaining_row(
    writers: list[asyncpg.Connection],
) -> None:
    first, _ = writers
    await an_old_day(first)
    assert await first.fetchval(INSERT_EVENT) == 2
    assert await first.fetchval("select journal_retain($1, -1)", DAY_MS) == 1
    assert await first.fetch("select seq from journal_event") == [(2,)]
    assert await first.fetchrow("select first_seq, next_seq from journal_position") == (2, 3)
    assert await first.fetchval("select journal_retain($1, -1)", DAY_MS) == 0


async def test_retention_drops_the_oldest_days_above_the_bound_in_bytes(writers: list[asyncpg.Connection]) -> None:
    first, _ = writers
    await an_old_day(first)
    assert await first.fetchval(INSERT_EVENT) == 2
    days = (
        "select sum(pg_total_relation_size(i.inhrelid)) from pg_inherits i join pg_class p on p.oid = i.inhparent "
        "where p.relkind = 'p' and p.relname like 'journal%'"
    )
    assert await first.fetchval("select journal_retain(-1, -1)") == 0
    taken = int(await first.fetchval(days) or 0)
    assert await first.fetchval("select journal_retain(-1, $1)", taken) == 0
    assert await first.fetchval("select journal_retain(-1, $1)", taken - 1) == 1
    assert await first.fetch("select seq from journal_event") == [(2,)]
    # The present day is dropped too if it alone is too large, and is created again.
    assert await first.fetchval("select journal_retain(-1, 0)") == 1
    assert await first.fetchval("select count(*) from journal_event") == 0
    assert await first.fetchrow("select first_seq, next_seq from journal_position") == (3, 3)
    assert await first.fetchval("select journal_make_partitions(2)") == 5
    assert await first.fetchval(INSERT_EVENT) == 3


async def test_retention_skips_a_day_locked_by_a_dump_and_blocks_no_writer(
    writers: list[asyncpg.Connection],
) -> None:
    first, second = writers
    await an_old_day(first)
    dumping = first.transaction()
    await dumping.start()
    # pg_dump takes this lock, for as long as the dump lasts.
    await first.execute("lock table journal_ownership in access share mode")
    before = await first.fetchval("select first_seq from journal_position")
    assert await asyncio.wait_for(second.fetchval("select journal_retain($1, -1)", DAY_MS), 60) == 0
    assert await asyncio.wait_for(second.fetchval(INSERT_EVENT), 60) == 2
    assert await first.fetchval("select first_seq from journal_position") == before
    await dumping.rollback()
    assert await second.fetchval("select journal_retain($1, -1)", DAY_MS) == 1


async def test_retention_and_a_writer_do_not_deadlock(writers: list[asyncpg.Connection]) -> None:
    first, second = writers
    await an_old_day(first)
    began = first.transaction()
    await began.start()
    assert await first.fetchval("select journal_reserve(1)") == 2
    retention = asyncio.ensure_future(second.fetchval("select journal_retain($1, -1)", DAY_MS))
    await asyncio.wait([retention], timeout=0.3)
    await first.execute(
        "insert into journal_event (seq, at_ms, node_id, group_id, group_type, kind, generation_id) "
        "values (2, 0, 1, 'g', 'classic', 'loaded', 1)"
    )
    await began.commit()
    assert await asyncio.wait_for(retention, 60) == 1
