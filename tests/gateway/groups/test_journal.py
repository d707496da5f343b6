"""The journal's writer against Postgres. Rows for which there is no room are counted and reported. Partitions of single
days are created and dropped.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import asyncpg
import pytest

from gateway.config.broker import BrokerConfig
from gateway.coordinator.classic.model import Group, GroupState, Member
from gateway.coordinator.facts import MemberId, MemberSilent
from gateway.groups.journal import BURST_S, Journal, JournaledCommit, summed_up
from gateway.groups.kinds import MACHINES
from gateway.log.catalog import Catalog
from gateway.log.tail import Tail
from gateway.operate.metrics import Metrics
from protocol.shown import MAX_NAME_CHARS
from storage.journal import JournalEvent, JournalStore
from storage.pool import Database
from storage.topics import TopicStore
from tests.steps.waiting import until, until_blocked
from tests.turns import HELD_MS, watched

TOPIC_ID = uuid.uuid4()
ROOM = 3
POLLS, POLL_S = 2_000, 0.01


@dataclass
class Writer:
    journal: Journal
    metrics: Metrics
    observer: asyncpg.Connection

    async def commit(self, offset: int) -> None:
        await self.journal.committed("g", 1, "m", [JournaledCommit(TOPIC_ID, "t", 0, offset, 0, 9, 0)])

    async def offsets(self) -> list[int]:
        return [row[0] for row in await self.observer.fetch('select "offset" from journal_offset order by seq')]

    def counted(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"sluice_{name}_total")


@pytest.fixture
async def writer(database_url: str) -> AsyncIterator[Writer]:
    database = await Database.open(database_url)
    metrics = Metrics()
    catalog = Catalog(TopicStore(database), Tail(1_000_000), BrokerConfig())
    journal = Journal(
        JournalStore(database), MACHINES, catalog, lambda: 1, metrics, max_queued=ROOM, linger_s=0.01, pause_s=0.01
    )
    observer = await asyncpg.connect(database_url, server_settings={"search_path": "sluice"})
    yield Writer(journal, metrics, observer)
    await asyncio.wait_for(journal.close(), 20)
    await observer.close()
    await database.close()


async def until_writing(writer: Writer) -> None:
    """Return when the writer has taken a batch and waits for the position, which the observer holds."""
    await until_blocked(writer.observer)


async def until_dropped(writer: Writer, rows: int) -> None:
    await until(lambda: writer.counted("journal_dropped_rows"), "rows are dropped", holds=lambda found: found == rows)


async def until_written(writer: Writer, rows: int) -> None:
    await until(lambda: writer.counted("journal_rows"), "rows are written", holds=lambda found: found == rows)


async def test_dropped_rows_are_counted_and_reported_in_the_journal(writer: Writer) -> None:
    async with writer.observer.transaction():
        await writer.observer.execute("select 1 from journal_position for update")
        await writer.commit(0)
        await until_writing(writer)
        for offset in range(1, 8):
            await writer.commit(offset)
        assert writer.counted("journal_dropped_rows") == 7 - ROOM
    await asyncio.wait_for(writer.journal.close(), 20)
    assert await writer.offsets() == [0, *range(1, 1 + ROOM)]
    told = await writer.observer.fetch("select seq, row_count from journal_event where kind = 'rows_dropped'")
    assert [tuple(row) for row in told] == [(2 + ROOM, 7 - ROOM)]
    assert writer.counted("journal_rows") == 1 + ROOM + 1


async def test_refused_batch_is_counted_and_reported_in_the_next_one(writer: Writer) -> None:
    await writer.observer.execute("alter table journal_offset rename to gone")
    await writer.commit(0)
    await until_dropped(writer, 1)
    await writer.observer.execute("alter table gone rename to journal_offset")
    await writer.commit(1)
    await asyncio.wait_for(writer.journal.close(), 20)
    assert await writer.offsets() == [1]
    told = await writer.observer.fetch("select seq, row_count from journal_event where kind = 'rows_dropped'")
    assert [tuple(row) for row in told] == [(1, 1)]


async def test_row_that_postgres_refuses_is_dropped_alone(writer: Writer) -> None:
    await writer.observer.execute('alter table journal_offset add check ("offset" not in (3, 4, 11))')
    async with writer.observer.transaction():
        await writer.observer.execute("select 1 from journal_position for update")
        await writer.commit(0)
        await until_writing(writer)
        commits = [JournaledCommit(TOPIC_ID, "t", 0, offset, 0, 9, 0) for offset in range(1, ROOM + 1)]
        await writer.journal.committed("g", 1, "m", commits)
    await until_written(writer, 1 + ROOM - sum(offset <= ROOM for offset in (3, 4, 11)))
    await writer.commit(100)
    await asyncio.wait_for(writer.journal.close(), 20)
    kept = [offset for offset in range(1, ROOM + 1) if offset not in (3, 4, 11)]
    assert await writer.offsets() == [0, *kept, 100]
    assert writer.counted("journal_dropped_rows") == ROOM - len(kept)
    told = await writer.observer.fetch("select row_count from journal_event where kind = 'rows_dropped'")
    assert [row[0] for row in told] == [ROOM - len(kept)]


async def test_a_late_heartbeat_is_one_row_however_large_its_group(writer: Writer) -> None:
    """The entry of a late member must not keep its whole group in memory. Otherwise the queue would have no room if
    many members are late at once.
    """
    member_ids = [MemberId(f"m{number}") for number in range(2 * ROOM)]
    members = {each: Member(each, None, "client", "/host", 10_000, 10_000, ()) for each in member_ids}
    group = Group("g", GroupState.STABLE, True, "consumer", "range", 7, member_ids[0], members)
    for member_id in member_ids[:ROOM]:
        writer.journal.happened(group, group, (MemberSilent(member_id, 6_700),))
    assert writer.counted("journal_dropped_rows") == 0
    await asyncio.wait_for(writer.journal.close(), 20)
    rows = await writer.observer.fetch(
        "select kind, group_type, generation_id, state_before, state_after, member_id, wait_ms from journal_event"
        " order by seq"
    )
    told = ("heartbeat_gap", "classic", 7, "Stable", "Stable")
    assert [tuple(row) for row in rows] == [(*told, member_id, 6_700) for member_id in member_ids[:ROOM]]


async def test_what_happens_to_members_is_written_soon_however_long_commits_linger(database_url: str) -> None:
    """Rows that are not written yet are lost if the node is killed."""
    database = await Database.open(database_url)
    catalog = Catalog(TopicStore(database), Tail(1_000_000), BrokerConfig())
    metrics = Metrics()
    journal = Journal(JournalStore(database), MACHINES, catalog, lambda: 1, metrics, linger_s=3_600)
    member = Member(MemberId("m"), None, "client", "/host", 10_000, 10_000, ())
    group = Group("g", GroupState.STABLE, True, "consumer", "range", 7, member.member_id, {member.member_id: member})
    events = "select count(*) from sluice.journal_event where kind = 'loaded'"

    async def happens(count: int) -> None:
        await journal.committed("g", 7, "m", [JournaledCommit(TOPIC_ID, "t", 0, count, 0, 9, 0)])
        journal.happened(Group("g"), group, ())
        await until(lambda: database.cold.fetch_value(events), "an event", holds=lambda found: found == count)

    await happens(1)
    await happens(2)
    commits = await database.cold.fetch_value("select count(*) from sluice.journal_offset")
    assert commits == 2, "what came before an event is written with it"
    await asyncio.wait_for(journal.close(), 20)
    await database.close()


async def test_names_of_clients_are_written_cut_and_printable(writer: Writer) -> None:
    hostile = "\x1b]0;owned\x07" + "n" * 32_000
    await writer.journal.committed("g", 1, "m" * 300, [JournaledCommit(None, hostile, 0, 1, None, None, 3)])
    member = Member(MemberId("m"), hostile, hostile, "/host", 10_000, 10_000, ((hostile, b""),))
    group = Group("g", GroupState.STABLE, True, "consumer", hostile, 7, member.member_id, {member.member_id: member})
    writer.journal.happened(Group("g"), group, ())
    await asyncio.wait_for(writer.journal.close(), 20)
    offset = await writer.observer.fetchrow("select topic, member_id from journal_offset")
    assert offset is not None
    assert len(offset["topic"]) == MAX_NAME_CHARS
    assert offset["topic"].startswith(r"\x1b]0;owned\x07nnn")
    assert offset["member_id"] == "m" * 300, "an id stays whole"
    for table in ("journal_event", "journal_member"):
        for row in await writer.observer.fetch(f"select * from {table}"):
            for text in (each for each in row.values() if isinstance(each, str)):
                assert text.isprintable(), (table, row)
                assert len(text) <= MAX_NAME_CHARS, (table, row)
    assert await writer.observer.fetchval("select count(*) from journal_member where client_id like '%owned%'") == 1


async def test_missing_days_are_created(writer: Writer) -> None:
    """Days are missing after a restore from a backup, or if a node slept over midnight."""
    await writer.commit(0)
    await until_written(writer, 1)
    today = await writer.observer.fetchval("select 'journal_offset_' || to_char(now() at time zone 'UTC', 'YYYYMMDD')")
    await writer.observer.execute(f"drop table {today}")
    await writer.commit(1)
    await until_dropped(writer, 1)
    await writer.commit(2)
    await asyncio.wait_for(writer.journal.close(), 20)
    assert await writer.offsets() == [2]


async def test_text_that_postgres_cannot_hold_is_restored_on_read(database_url: str) -> None:
    database = await Database.open(database_url)
    store = JournalStore(database)
    await store.make_partitions()
    event = JournalEvent(
        at_ms=1, node_id=1, group_id="a\0b", generation_id=1, group_type="classic", kind="member_left", detail="\0"
    )
    await store.write([event])
    (found,) = (await store.history("a\0b", 10, 10)).events
    assert (found["group_id"], found["detail"]) == ("a\0b", "\0")
    await database.close()


def refused(partition: int, error_code: int) -> JournaledCommit:
    return JournaledCommit(None, "t", partition, 7, None, None, error_code)


async def test_commits_are_summed_up_by_error_and_counted() -> None:
    commits = [refused(0, 3), refused(1, 29), refused(2, 3), refused(3, 3)]
    summed = [refused(0, 3)._replace(commit_count=3), refused(1, 29)]
    assert await summed_up(commits) == summed
    assert await summed_up(summed) == summed


async def test_many_commits_are_summed_up_in_pieces() -> None:
    commits = [refused(number, 3) for number in range(300_000)]
    async with watched() as turns:
        assert await summed_up(commits) == [refused(0, 3)._replace(commit_count=300_000)]
    assert turns.longest_ms < HELD_MS


async def test_a_group_that_commits_faster_than_its_pace_gets_one_row_for_a_request(database_url: str) -> None:
    """Another group, which commits slowly, still gets a row for each of its commits."""
    database = await Database.open(database_url)
    catalog = Catalog(TopicStore(database), Tail(1_000_000), BrokerConfig())
    journal = Journal(JournalStore(database), MACHINES, catalog, lambda: 1, Metrics(), linger_s=0.01, commits_per_s=1)
    within, beyond = BURST_S, 100
    await journal.committed("busy", 1, "m", [refused(number, 0) for number in range(within)])
    await journal.committed("busy", 1, "m", [refused(number, 0) for number in range(beyond)])
    await journal.committed("calm", 1, "m", [refused(number, 0) for number in range(within)])
    await asyncio.wait_for(journal.close(), 20)
    counts = "select group_id, commit_count, count(*) from sluice.journal_offset group by 1, 2 order by 1, 2"
    rows = [tuple(row) for row in await database.cold.fetch(counts)]
    assert rows == [("busy", 1, within), ("busy", beyond, 1), ("calm", 1, within)]
    await database.close()
