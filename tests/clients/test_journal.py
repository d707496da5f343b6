"""Events that a gateway writes into its journal while stock consumers join, work, leave and fail (docs/journal.md)."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import asyncpg
import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from gateway.cli import main
from protocol.errors import ErrorCode
from tests.closing import close
from tests.frames.members import Member, fresh, member, settle
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import until, wait_for

PARTITIONS = 4
RECORDS = 40
PATIENCE_S = 30.0
BEAT_S = 0.05

Rows = Sequence[Mapping[str, Any]]


def query(gateway: GatewayProcess, sql: str, *given: object) -> Rows:
    async def ask() -> Rows:
        connection = await asyncpg.connect(gateway.database_url)
        try:
            await connection.execute("set search_path = sluice")
            return [dict(row) for row in await connection.fetch(sql, *given)]
        finally:
            await connection.close()

    return asyncio.run(ask())


def events(gateway: GatewayProcess, group: str) -> Rows:
    return query(gateway, "select * from journal_event where group_id = $1 order by seq", group)


def journal_of(gateway: GatewayProcess, group: str, until: Callable[[Rows], bool]) -> Rows:
    """Return the group's events once they satisfy `until`. The journal's writer lags behind the events."""
    return wait_for(lambda: events(gateway, group), "the journal has the events", holds=until)


def kinds(rows: Rows) -> list[tuple[str, str | None]]:
    return [(row["kind"], row["reason"]) for row in rows]


def has(kind: str, reason: str | None = None, times: int = 1) -> Callable[[Rows], bool]:
    return lambda rows: sum(row["kind"] == kind and reason in (None, row["reason"]) for row in rows) >= times


@pytest.fixture
def topic(gateway: GatewayProcess) -> str:
    name = f"journal-{uuid.uuid4().hex[:8]}"
    filled(gateway, name, PARTITIONS, RECORDS)
    return name


def filled(gateway: GatewayProcess, topic: str, partitions: int, records: int) -> None:
    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
    producer = confluent_kafka.Producer({"bootstrap.servers": gateway.bootstrap})
    for number in range(records):
        producer.produce(topic, b"record", partition=number % partitions)
    assert producer.flush(30) == 0


def consumer(gateway: GatewayProcess, group: str, topic: str, client_id: str, **more: Any) -> confluent_kafka.Consumer:
    opened = confluent_kafka.Consumer(
        {
            "bootstrap.servers": gateway.bootstrap,
            "group.id": group,
            "client.id": client_id,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **more,
        }
    )
    opened.subscribe([topic])
    return opened


CLASSIC = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 200}
PROTOCOLS = {
    "eager": {**CLASSIC, "partition.assignment.strategy": "range"},
    "cooperative": {**CLASSIC, "partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}


def poll_until(members: Sequence[confluent_kafka.Consumer], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, [len(one.assignment()) for one in members]
        for one in members:
            one.poll(0.05)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_journal_records_joins_ownership_commits_and_leaves(
    gateway: GatewayProcess, topic: str, protocol: str
) -> None:
    group, given = f"g-{uuid.uuid4().hex[:8]}", PROTOCOLS[protocol]
    first = consumer(gateway, group, topic, "first", **given)
    poll_until([first], lambda: len(first.assignment()) == PARTITIONS)
    first.commit(offsets=[TopicPartition(topic, 1, 7)], asynchronous=False)
    second = consumer(gateway, group, topic, "second", **given)
    poll_until([first, second], lambda: len(first.assignment()) == len(second.assignment()) == PARTITIONS // 2)
    close(first)
    poll_until([second], lambda: len(second.assignment()) == PARTITIONS)
    close(second)
    rows = journal_of(gateway, group, has("member_left", "leave", 2))

    assert [row["client_id"] for row in rows if (row["kind"], row["reason"]) == ("member_joined", "new")] == [
        "first",
        "second",
    ]
    assert [row["client_id"] for row in rows if row["kind"] == "member_left"] == ["first", "second"]
    triggers = [row["reason"] for row in rows if row["kind"] == "rebalance_started"]
    assert triggers[:2] == ["member_joined", "member_joined"]
    assert triggers[-2:] == ["member_left", "member_left"]
    assert set(triggers[2:-2]) <= {"member_rejoined"}
    assert rows[-1]["state_after"] == "Empty"
    for before, after in itertools.pairwise(rows):
        assert after["state_before"] == before["state_after"], "a state does not follow from the one before"
    assert rows[0]["state_before"] is None
    made = [row for row in rows if row["kind"] == "generation_created"]
    completed = [row for row in rows if row["kind"] == "rebalance_completed"]
    assert completed[-1]["member_count"] == 1
    assert 2 in {row["member_count"] for row in completed}
    assert all(row["wait_ms"] is not None for row in completed)
    members = query(gateway, "select * from journal_member where group_id = $1 order by seq", group)
    assert {row["client_id"] for row in members} == {"first", "second"}
    assert {row["generation_id"] for row in members} <= {row["generation_id"] for row in made}

    owners: dict[int, str] = {}
    for row in query(gateway, "select * from journal_ownership where group_id = $1 order by seq", group):
        assert (row["topic"], row["topic_id"] is not None) == (topic, True)
        if row["change"] == "assigned":
            assert owners.setdefault(row["partition"], row["member_id"]) == row["member_id"], "two owners"
        else:
            assert owners.pop(row["partition"]) == row["member_id"]
    assert owners == {}, "who left has let go of everything"

    (commit,) = query(gateway, "select * from journal_offset where group_id = $1", group)
    first_id = next(row["member_id"] for row in rows if row["kind"] == "member_joined")
    assert (commit["kind"], commit["member_id"], commit["partition"]) == ("commit", first_id, 1)
    assert (commit["offset"], commit["log_start_offset"], commit["log_end_offset"]) == (7, 0, RECORDS // PARTITIONS)
    assert (commit["error_code"], commit["topic"], commit["generation_id"]) == (0, topic, made[0]["generation_id"])
    numbers = query(
        gateway,
        "select seq from journal_event union all select seq from journal_member union all "
        "select seq from journal_ownership union all select seq from journal_offset union all "
        "select seq from journal_handoff order by 1",
    )
    assert [row["seq"] for row in numbers] == list(range(1, len(numbers) + 1)), "numbers without holes"


def test_the_journal_records_a_missed_heartbeat(gateway: GatewayProcess, capsys: Any) -> None:
    group, session_ms = fresh("late"), 6_000

    async def scene() -> str:
        async with member(gateway.bootstrap, group, session_timeout_ms=session_ms) as one:
            await settle(one)
            assert await one.heartbeat() == ErrorCode.NONE
            # The test must wait, because it checks an effect of time itself.
            await asyncio.sleep(session_ms * 0.7 / 1000)
            assert await one.heartbeat() == ErrorCode.NONE
            await one.leave()
            return one.member_id

    member_id = asyncio.run(scene())
    rows = journal_of(gateway, group, has("member_left"))
    (gap,) = [row for row in rows if row["kind"] == "heartbeat_gap"]
    assert (gap["member_id"], gap["state_before"], gap["state_after"]) == (member_id, "Stable", "Stable")
    assert session_ms * 2 / 3 < gap["wait_ms"] < session_ms
    assert any(f"{member_id} was silent for " in row["what"] for row in history(capsys, gateway, group))


def test_the_journal_records_a_lost_member_and_its_refused_commits(
    gateway_factory: GatewayFactory, capsys: Any
) -> None:
    gateway = gateway_factory({"group.min.session.timeout.ms": "100", "group.connection.grace.ms": "-1"})
    group, name = fresh("lost"), fresh("lost-topic")
    filled(gateway, name, 1, 5)

    async def scene() -> tuple[str, int]:
        async with (
            member(gateway.bootstrap, group, session_timeout_ms=1_000) as silent,
            member(gateway.bootstrap, group, session_timeout_ms=10_000) as lively,
        ):
            await settle(silent, lively)
            old = silent.generation_id
            # The member's session ends, and the remaining member starts the next generation.
            await told_to_rejoin(lively)
            assert (await lively.join()).error_code == ErrorCode.NONE
            assert await silent.commit(name, 3) == ErrorCode.UNKNOWN_MEMBER_ID
            return silent.member_id, old

    silent_id, generation_id = asyncio.run(scene())
    rows = journal_of(gateway, group, has("member_expired", "session_timeout"))
    lost = next(row for row in rows if row["kind"] == "member_expired")
    assert (lost["member_id"], lost["generation_id"]) == (silent_id, generation_id)
    assert 1_000 <= lost["wait_ms"] < 10_000
    started = rows[rows.index(lost) + 1]
    assert (started["kind"], started["reason"], started["member_id"]) == (
        "rebalance_started",
        "member_expired",
        silent_id,
    )
    (commit,) = wait_for(lambda: query(gateway, "select * from journal_offset where error_code <> 0"))
    assert (commit["member_id"], commit["generation_id"], commit["offset"]) == (silent_id, generation_id, 3)
    assert (commit["error_code"], commit["log_end_offset"]) == (ErrorCode.UNKNOWN_MEMBER_ID, 5)

    told = history(capsys, gateway, group)
    assert any(re.search("is lost: not heard within its session, silent for", row["what"]) for row in told)
    assert any(f"refused, UNKNOWN_MEMBER_ID: {name}[0] to 3 of 5" in row["what"] for row in told)
    assert [row["seq"] for row in told] == sorted(row["seq"] for row in told)


async def told_to_rejoin(waiting: Member) -> None:
    """Send heartbeats, as a client does, until an answer announces a rebalance."""
    for _ in range(int(PATIENCE_S / BEAT_S)):
        if await waiting.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS:
            return
        await asyncio.sleep(BEAT_S)
    raise AssertionError("no rebalance")


def history(capsys: Any, gateway: GatewayProcess, group: str) -> list[dict[str, Any]]:
    assert gateway.database_url is not None
    capsys.readouterr()
    assert main(["groups", "history", group, "--database-url", gateway.database_url, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_history_command_finds_the_database_by_the_data_directory(
    gateway_factory: GatewayFactory, capsys: Any
) -> None:
    gateway = gateway_factory(embedded=True)
    group = fresh("embedded")

    async def scene() -> None:
        async with member(gateway.bootstrap, group) as one:
            await settle(one)
            await one.leave()

    asyncio.run(scene())
    directory = ["--data-dir", str(gateway.data_dir)]

    def history_of_the_group() -> str:
        return "" if main(["groups", "history", group, *directory]) else capsys.readouterr().out

    shown = wait_for(history_of_the_group, "the journal has the end", holds=lambda found: " leaves" in found)
    assert shown.splitlines()[0].split() == ["TIME", "GENERATION", "STATE", "WHAT"]
    assert "generation 1: 1 member, range, led by" in shown
    assert main(["groups", "history", "nobody", *directory]) == 1
    assert capsys.readouterr().err == "sluice: the journal has no rows of group nobody\n"


def counted(gateway: GatewayProcess, name: str) -> float:
    with urllib.request.urlopen(f"{gateway.metrics_url}/metrics", timeout=10) as answer:
        found = re.search(rf"^sluice_{name}_total (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_a_lost_journal_table_raises_a_counter_and_causes_no_rebalance(
    gateway_factory: GatewayFactory, capsys: Any
) -> None:
    gateway = gateway_factory()
    group = fresh("gone")

    async def scene() -> None:
        async with member(gateway.bootstrap, group) as one:
            await settle(one)
            await asyncio.to_thread(journal_of, gateway, group, has("rebalance_completed"))
            await asyncio.to_thread(query, gateway, "alter table journal_event rename to journal_gone")
            async with member(gateway.bootstrap, group) as two:
                held = asyncio.create_task(two.join())
                await told_to_rejoin(one)
                await one.join()
                assert (await held).error_code == ErrorCode.NONE
                await until(lambda: asyncio.to_thread(counted, gateway, "journal_dropped_rows"), "rows are dropped")
                assert await one.heartbeat() == ErrorCode.NONE
            await asyncio.to_thread(query, gateway, "alter table journal_gone rename to journal_event")
            await one.leave()

    asyncio.run(scene())
    rows = journal_of(gateway, group, has("member_left", "leave"))
    dropped = query(gateway, "select * from journal_event where kind = 'rows_dropped'")
    assert sum(row["row_count"] for row in dropped) == counted(gateway, "journal_dropped_rows") > 0
    after = [row for row in rows if row["seq"] > dropped[0]["seq"]]
    assert after[0]["kind"] == "loaded", "who reads on must be told anew what is so"


def test_a_disabled_journal_stays_empty(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"group.journal.enable": "false"})

    async def scene() -> None:
        async with member(gateway.bootstrap, fresh("off")) as one:
            await settle(one)

    asyncio.run(scene())
    gateway.stop()
    assert query(gateway, "select first_seq, next_seq from journal_position") == [{"first_seq": 1, "next_seq": 1}]
