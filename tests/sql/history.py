"""Attack the SQL door and compare the topics with the tables: `python -m tests.sql.history [--minutes 30] [--seed 7]`.

The one idea: each event is a row, too. Every transaction that updates an account stores the event's token with the
account's new version in `event`. So afterwards the tables hold exactly the records that must exist, in their order.
This includes a commit whose outcome its client never learned. Exit code 0 if every promise was kept, 1 if not.
"""

# The type stubs of confluent_kafka declare only a part of its API.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tests.closing import close
from tests.gateway_process import ROOT
from tests.postgres import LoopThread
from tests.trust.patience import PATIENT
from tests.trust.workloads import create_topics
from tests.trust.world import World, world

TOPICS: Mapping[str, int] = {"door-0": 3, "door-1": 3, "door-2": 3}
ACCOUNTS = 5
"""Number of accounts of each table. All writers share them. Few accounts make deadlocks and waits for row locks
frequent.
"""
WRITERS, CONSUMERS, PRODUCERS = 8, 4, 2
NODES = 2
LARGE = 12_000
"""Number of records of a transaction that is too large for one statement of the relay (the node that copies SQL records
to the log).
"""
LARGE_IN_VIGIL = 3
"""About this many large transactions are committed in each third of a run. Short runs have fewer: see LARGE_PAUSE_S."""
LARGE_PAUSE_S = 5.0
"""The shortest mean pause between two large transactions."""
GROUP = "sums"
PACE_S = 0.03
POLL_S = 0.1
SETTLE_S = 240.0
OPEN_S = 600.0
"""How long one transaction must stay open (see Vigil), at most a third of the run. Postgres is not killed in that time.
"""
HELD_S = 20.0
"""How long a consumer keeps its transaction open and waits until the group continues without it."""

COMMIT = "select kafka.commit_offset($1, $2, $3, $4, generation => $5, member => $6)"
CUT = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""Errors of a connection that a fault has cut. asyncpg raises InternalClientError for some connections that end while
it prepares a statement."""

Record = tuple[str, str, str, int]
"""Topic, key, token and amount."""


@dataclass
class Findings:
    """Violations of each promise, as sentences, and counts of events."""

    violations: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    counts: Counter[str] = field(default_factory=Counter[str])

    def broke(self, promise: str, sentence: str) -> None:
        self.violations.setdefault(promise, []).append(sentence)


# --- checks -------------------------------------------------------------------------------------------------------


def compare(log: Sequence[Record], expected: Mapping[tuple[str, str], Sequence[tuple[str, int]]]) -> list[str]:
    """Return a sentence for each key whose records are not the expected tokens and amounts in their order.

    `log` holds each partition's records in the order of their offsets. `expected` holds the tokens and amounts by topic
    and key.
    """
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for topic, key, token, amount in log:
        found.setdefault((topic, key), []).append((token, amount))
    sentences: list[str] = []
    for place in sorted({*found, *expected}):
        have, want = found.get(place, []), list(expected.get(place, ()))
        if have == want:
            continue
        have_count, want_count = Counter(have), Counter(want)
        lost, extra = (want_count - have_count).total(), (have_count - want_count).total()
        why = f"{lost} records are missing and {extra} are too many" if lost or extra else "the order differs"
        sentences.append(f"{place[0]}, key {place[1]}: {why} ({len(have)} in the log, {len(want)} expected)")
    return sentences


def sums_of(log: Iterable[Record]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the count and the sum of amounts by topic and key."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for topic, key, _, amount in log:
        count, total = sums.get((topic, key), (0, 0))
        sums[(topic, key)] = (count + 1, total + amount)
    return sums


# --- writers ------------------------------------------------------------------------------------------------------


class Vigil:
    """The time in which one transaction must stay open: from `begin_s` (monotonic clock) until it has been open for
    `length_s`.
    """

    def __init__(self, begin_s: float, length_s: float) -> None:
        self.begin_s = begin_s
        self.length_s = length_s
        self.ended = False

    def holds(self) -> bool:
        return self.begin_s <= time.monotonic() and not self.ended


class Writers:
    """SQL clients that move amounts between accounts, and a session that stays open."""

    def __init__(
        self, database_url: str, loop: LoopThread, findings: Findings, chance: random.Random, vigil: Vigil
    ) -> None:
        self._url = database_url
        self._vigil = vigil
        self._findings = findings
        self._stopping = False
        work: list[Coroutine[Any, Any, None]] = [self._write(random.Random(chance.random())) for _ in range(WRITERS)]
        work += [self._stay_open(), self._write_much(random.Random(chance.random()))]
        self._tasks: list[Future[None]] = [loop.submit(each) for each in work]

    def finish(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.result(SETTLE_S)

    async def _write(self, chance: random.Random) -> None:
        connection: asyncpg.Connection | None = None
        while not self._stopping:
            try:
                if connection is None or connection.is_closed():
                    connection = await connect(self._url, "door writer")
                await self._transaction(connection, chance)
            except asyncpg.DeadlockDetectedError:
                self._findings.counts["deadlocks"] += 1
            except CUT:
                self._findings.counts["transactions cut"] += 1
                if connection is not None:
                    connection.terminate()
                connection = None
            except asyncpg.PostgresError as error:
                self._findings.broke("a writer meets only deadlocks and cuts", repr(error))
            await asyncio.sleep(chance.uniform(0, 2 * PACE_S))  # a pause, which sets the writer's rate
        if connection is not None:
            connection.terminate()  # the attack may have broken it, and nothing is open in it

    async def _transaction(self, connection: asyncpg.Connection, chance: random.Random) -> None:
        places = [(topic, f"account-{number}") for topic in TOPICS for number in range(ACCOUNTS)]
        transaction = connection.transaction()
        await transaction.start()
        try:
            for topic, key in chance.sample(places, chance.randint(1, 4)):
                early = chance.random() < 0.1
                if chance.random() < 0.3:
                    savepoint = connection.transaction()
                    await savepoint.start()
                    await move(connection, topic, key, chance, early=early)
                    await (savepoint.rollback() if chance.random() < 0.5 else savepoint.commit())
                else:
                    await move(connection, topic, key, chance, early=early)
        except asyncpg.DeadlockDetectedError:
            await transaction.rollback()
            raise
        if chance.random() < 0.15:
            await transaction.rollback()
            self._findings.counts["transactions rolled back"] += 1
        else:
            await transaction.commit()
            self._findings.counts["transactions committed"] += 1

    async def _write_much(self, chance: random.Random) -> None:
        """Commit transactions that the relay must append in several pieces: about ten of them in a run of more than a
        minute.
        """
        pause_s = max(self._vigil.length_s / LARGE_IN_VIGIL, LARGE_PAUSE_S)
        connection: asyncpg.Connection | None = None
        while not self._stopping:
            try:
                if connection is None or connection.is_closed():
                    connection = await connect(self._url, "door writer")
                async with connection.transaction():
                    await move_often(connection, chance.choice(list(TOPICS)), "account-0", chance)
                self._findings.counts["large transactions"] += 1
            except asyncpg.DeadlockDetectedError:
                self._findings.counts["deadlocks"] += 1
            except CUT:
                self._findings.counts["transactions cut"] += 1
                if connection is not None:
                    connection.terminate()
                connection = None
            await until_stopped(lambda: self._stopping, chance.uniform(0, 2 * pause_s))
        if connection is not None:
            await connection.close()

    async def _stay_open(self) -> None:
        """Produce for an account of its own in a transaction that commits late. Begin again if a fault cuts the
        connection. During the vigil (see Vigil) no fault may cut it.
        """
        chance = random.Random(0)
        while not self._stopping:
            keeps = self._vigil.holds()
            opened_s = 0.0
            try:
                connection = await connect(self._url, "door sleeper")
                try:
                    async with connection.transaction():
                        await move(connection, "door-0", "open", chance, early=True)
                        opened_s = time.monotonic()
                        while not self._ends(keeps, opened_s):
                            await asyncio.sleep(0.2)
                            await connection.fetchval("select 1")
                    if keeps and not self._stopping:
                        self._findings.counts["seconds of the open session"] = int(time.monotonic() - opened_s)
                        self._vigil.ended = True
                finally:
                    connection.terminate()
            except CUT as error:
                if keeps and opened_s:
                    self._findings.broke("the open session is not cut", repr(error))
                self._findings.counts["open sessions cut"] += 1
                await asyncio.sleep(0.2)

    def _ends(self, keeps: bool, opened_s: float) -> bool:
        """Return True if the open transaction must commit now. A transaction that is open when the vigil begins
        commits, so that the vigil's own can start.
        """
        if keeps:
            return self._stopping or time.monotonic() - opened_s >= self._vigil.length_s
        return self._stopping or self._vigil.holds()


async def connect(url: str, name: str) -> asyncpg.Connection:
    settings = {"application_name": name, "deadlock_timeout": "50ms"}
    try:
        return await asyncpg.connect(url, timeout=10, command_timeout=60, server_settings=settings)
    except asyncpg.CannotConnectNowError as error:  # Postgres is still recovering
        raise ConnectionError(str(error)) from error


async def _until(met: Callable[[], Awaitable[Any]], within_s: float) -> None:
    """Await `met` repeatedly until its result is true. Raise TimeoutError after `within_s`."""
    deadline_s = time.monotonic() + within_s
    for _ in iter(lambda: time.monotonic() < deadline_s, False):
        if await met():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError


async def move(connection: asyncpg.Connection, topic: str, key: str, chance: random.Random, *, early: bool) -> None:
    """Update an account and produce its event. Chance decides which of the two comes first.

    A record that is staged before the account's lock is taken shows whether offsets follow the locks.
    """
    token, amount = uuid.uuid4().hex, chance.randint(-100, 100)
    value = json.dumps({"token": token, "amount": amount})
    produce_first = chance.random() < 0.5
    if produce_first:
        await connection.execute("select kafka.produce($1, $2::text, $3::text)", topic, value, key)
        if early:
            await connection.execute("set constraints all immediate")
    version: Any = await connection.fetchval(
        "update account set version = version + 1, balance = balance + $3 where topic = $1 and key = $2"
        " returning version",
        topic,
        key,
        amount,
    )
    await connection.execute("insert into event values ($1, $2, $3, $4, $5)", topic, key, version, token, amount)
    if not produce_first:
        await connection.execute("select kafka.produce($1, $2::text, $3::text)", topic, value, key)


async def move_often(connection: asyncpg.Connection, topic: str, key: str, chance: random.Random) -> None:
    """Update an account LARGE times by one statement and produce the events."""
    moved = [(uuid.uuid4().hex, chance.randint(-100, 100)) for _ in range(LARGE)]
    version: Any = await connection.fetchval(
        "update account set version = version + $3, balance = balance + $4 where topic = $1 and key = $2"
        " returning version",
        *(topic, key, LARGE, sum(amount for _, amount in moved)),
    )
    await connection.execute(
        "insert into event select $1, $2, $3 + n, token, amount"
        " from unnest($4::text[], $5::bigint[]) with ordinality e (token, amount, n)",
        *(topic, key, version - LARGE, [token for token, _ in moved], [amount for _, amount in moved]),
    )
    await connection.execute(
        "select kafka.produce_many($1, $2::text[], $3::text[])",
        *(topic, [json.dumps({"token": token, "amount": amount}) for token, amount in moved], [key] * LARGE),
    )


async def until_stopped(stopped: Callable[[], bool], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await _until(_answered(stopped), seconds)


def _answered(asked: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return asked()

    return answer


class Stock:
    """An idempotent producer of librdkafka that writes into the same topics."""

    def __init__(self, bootstrap: str, number: int, seed: int) -> None:
        self.key = f"stock-{number}"
        self.sent: dict[tuple[str, str], list[tuple[str, int]]] = {(topic, self.key): [] for topic in TOPICS}
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self._failures: list[str] = []
        self._producer = Producer(
            {
                **PATIENT,
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "message.timeout.ms": 0,
            }
        )
        self._thread = threading.Thread(target=self._run, name=self.key, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(PACE_S):
            topic = self._chance.choice(list(TOPICS))
            token, amount = uuid.uuid4().hex, self._chance.randint(-100, 100)
            self._producer.produce(
                topic, json.dumps({"token": token, "amount": amount}), self.key, on_delivery=self._delivered
            )
            self.sent[(topic, self.key)].append((token, amount))
            self._producer.poll(0)

    def _delivered(self, error: object, _message: object) -> None:
        if error is not None:
            self._failures.append(str(error))

    def finish(self, findings: Findings) -> None:
        self._stopping.set()
        self._thread.join(SETTLE_S)
        left = self._producer.flush(SETTLE_S)
        if left or self._failures:
            findings.broke("stock producers deliver everything", f"{left} are left, {self._failures[:3]}")


# --- consumers ----------------------------------------------------------------------------------------------------


class Summing:
    """A stock consumer that stores its sums and its position in one transaction. The commit names the generation of its
    assignment, so a later generation fences it.
    """

    def __init__(self, bootstrap: str, database_url: str, loop: LoopThread, findings: Findings, seed: int) -> None:
        self._url = database_url
        self._loop = loop
        self._findings = findings
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self._connection: asyncpg.Connection | None = None
        self._backend: tuple[int, Any] | None = None
        self._generation = -1
        self._member = ""
        self._rewind = False
        self._failure: BaseException | None = None
        self._was_late = False
        """True once this consumer has tried to commit with an old generation."""
        self._consumer = Consumer(
            {
                **PATIENT,
                "bootstrap.servers": bootstrap,
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6_000,
                "max.poll.interval.ms": 6_000,
                "partition.assignment.strategy": "range",
            }
        )
        self._thread = threading.Thread(target=self._guarded, name=f"summing-{seed}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def finish(self) -> None:
        self._thread.join(SETTLE_S)
        if self._failure is not None or self._thread.is_alive():
            self._findings.broke("every consumer works until it is stopped", repr(self._failure))

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._failure = error
            raise

    def _run(self) -> None:
        # librdkafka joins again only after it has called on_revoke. So when on_assign runs, Postgres shows the
        # generation of this assignment. Otherwise the member has left the group, and every commit of it is fenced.
        self._consumer.subscribe(list(TOPICS), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)
        while not self._stopping.is_set():
            try:
                messages = [each for each in self._consumer.consume(200, 0.2) if each.error() is None]
                if self._rewind:
                    self._seek_to_committed()
                    continue
                if messages:
                    self._store(messages)
            except (KafkaException, *CUT):
                self._rewind = True
        close(self._consumer)
        if self._connection is not None:
            self._connection.terminate()

    def _assigned(self, _consumer: object, _partitions: object) -> None:
        self._member = self._consumer.memberid() or ""
        self._generation = -1
        with contextlib.suppress(*CUT):
            self._generation = self._sql(self._read_generation())

    def _revoked(self, _consumer: object, _partitions: object) -> None:
        self._generation = -1

    async def _read_generation(self) -> int:
        connection = await self._open()
        found: Any = await connection.fetchval(
            "select g.generation_id from sluice.consumer_group g join sluice.group_member m using (group_id)"
            " where g.group_id = $1 and m.member_id = $2",
            GROUP,
            self._member,
        )
        return -1 if found is None else found

    def _sql(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.submit(coroutine).result(SETTLE_S)

    async def _open(self) -> asyncpg.Connection:
        """Return the open connection, or a new one after the previous one's server process has ended.

        The old server process may still commit; a connection opened before that would read the old position and count
        records twice.
        """
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        connection = await connect(self._url, "door consumer")
        if self._backend is not None:
            gone = "select not exists (select from pg_stat_activity where pid = $1 and backend_start = $2)"
            await _until(lambda: connection.fetchval(gone, *self._backend or ()), SETTLE_S)
        row: Any = await connection.fetchrow(
            "select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()"
        )
        self._backend = (row["pid"], row["backend_start"])
        self._connection = connection
        return connection

    def _seek_to_committed(self) -> None:
        if self._generation < 0 and self._consumer.assignment():
            self._assigned(None, None)
        offsets: dict[tuple[str, int], int] = self._sql(self._committed())
        for place in self._consumer.assignment():
            offset = offsets.get((place.topic, place.partition), 0)
            self._consumer.seek(TopicPartition(place.topic, place.partition, offset))
        self._rewind = False

    async def _committed(self) -> dict[tuple[str, int], int]:
        connection = await self._open()
        rows: Any = await connection.fetch('select topic, partition, "offset" from kafka.committed($1)', GROUP)
        return {(row["topic"], row["partition"]): row["offset"] for row in rows}

    def _store(self, messages: Sequence[Any]) -> None:
        log: list[Record] = [record_of(message) for message in messages]
        ends = {(each.topic(), each.partition()): each.offset() + 1 for each in messages}
        held = self._chance.choice(["before", "after"]) if self._chance.random() < 0.005 else ""
        if self._generation > 0 and (not self._was_late or self._chance.random() < 0.02):
            held, self._was_late = "late", True
        try:
            self._sql(self._commit(sums_of(log), ends, held))
        except asyncpg.PostgresError as error:
            if getattr(error, "sqlstate", "") == "SL001":
                self._findings.counts["commits fenced"] += 1
            elif isinstance(error, asyncpg.DeadlockDetectedError):
                self._findings.counts["deadlocks of consumers"] += 1
            elif not isinstance(error, CUT):
                self._findings.broke("a consumer meets only fences and cuts", repr(error))
            self._rewind = True
        else:
            self._findings.counts["commits of offsets"] += 1
            if held == "late":
                self._findings.broke("a commit of an old generation is fenced", f"generation {self._generation} - 1")

    async def _commit(
        self, sums: Mapping[tuple[str, str], tuple[int, int]], ends: Mapping[tuple[str, int], int], held: str
    ) -> None:
        connection = await self._open()
        generation, member = self._generation - (held == "late"), self._member
        try:
            async with connection.transaction():
                if held == "before":
                    await self._hold(generation)
                for (topic, key), (count, total) in sorted(sums.items()):
                    await connection.execute(
                        "insert into sums values ($1, $2, $3, $4) on conflict (topic, key) do update"
                        " set count = sums.count + excluded.count, total = sums.total + excluded.total",
                        *(topic, key, count, total),
                    )
                for (topic, partition), offset in sorted(ends.items()):
                    await connection.execute(COMMIT, GROUP, topic, partition, offset, generation, member)
                if held == "after":
                    await self._hold(generation)
        except CUT:
            connection.terminate()
            raise

    async def _hold(self, generation: int) -> None:
        """Wait until the group has a later generation. The consumer seems to hang in that time."""
        self._findings.counts["consumers hung"] += 1
        other = await connect(self._url, "door observer")
        try:
            changed = "select generation_id <> $2 from sluice.consumer_group where group_id = $1"
            with contextlib.suppress(TimeoutError):  # perhaps no other member can continue, either
                await _until(lambda: other.fetchval(changed, GROUP, generation), HELD_S)
        finally:
            other.terminate()


def record_of(message: Any) -> Record:
    value = json.loads(message.value())
    return message.topic(), message.key().decode(), value["token"], value["amount"]


# --- faults -------------------------------------------------------------------------------------------------------


class Faults:
    """Faults of a run. Each method causes one fault and returns after the fault has ended."""

    def __init__(self, attacked: World, loop: LoopThread, chance: random.Random, vigil: Vigil) -> None:
        self._vigil = vigil
        self._attacked = attacked
        self._loop = loop
        self._chance = chance
        self._next: list[Callable[[], str]] = [self._gateway, self._postgres, self._dump]

    def any(self) -> str:
        """Cause one fault and return a sentence that describes it. Every run begins with a dump, a kill of Postgres and
        a kill of a node.
        """
        # Killed sessions are the most frequent fault, because everything else continues to work.
        self._next = self._next or [self._sessions] * 5 + [self._gateway] * 2 + [self._postgres, self._dump]
        return self._next.pop(self._chance.randrange(len(self._next)))()

    def _sessions(self) -> str:
        async def end() -> int:
            try:
                connection = await connect(self._attacked.database_url, "door killer")
            except CUT:
                return 0
            try:
                count: Any = await connection.fetchval(
                    "select count(pg_terminate_backend(pid)) from (select pid from pg_stat_activity"
                    " where application_name in ('door writer', 'door consumer') order by random() limit $1) chosen",
                    self._chance.randint(1, 4),
                )
                return count
            except CUT:
                return 0
            finally:
                connection.terminate()

        return f"{self._loop.run(end())} sessions are terminated."

    def _gateway(self) -> str:
        node = self._chance.choice(self._attacked.nodes)
        node.process.kill()
        node.process.start()
        return f"Node {node.name} is killed and starts again."

    def _postgres(self) -> str:
        if self._vigil.holds():
            return f"Postgres is spared: a session must stay open. {self._sessions()}"
        self._attacked.kill_postgres()
        return "Postgres is killed and recovers."

    def _dump(self) -> str:
        async def directory() -> str:
            connection = await connect(self._attacked.database_url, "door killer")
            try:
                found: Any = await connection.fetchval("show data_directory")
                return found
            finally:
                connection.terminate()

        try:
            pid = int((Path(self._loop.run(directory())) / "postmaster.pid").read_text().split("\n", 1)[0])
            program = Path(psutil.Process(pid).exe()).with_name("pg_dump")
        except (*CUT, psutil.NoSuchProcess):
            return "Postgres recovers, so nothing is dumped."
        ended = subprocess.run(
            [program, "--file=/dev/null", self._attacked.database_url], capture_output=True, check=False, timeout=120
        )
        return f"pg_dump ends with {ended.returncode}."


# --- one run ------------------------------------------------------------------------------------------------------

SCHEMA = """
create table account (topic text, key text, version bigint not null, balance bigint not null, primary key (topic, key));
create table event (topic text, key text, version bigint, token text not null, amount bigint not null,
    primary key (topic, key, version));
create table sums (topic text, key text, count bigint not null, total bigint not null, primary key (topic, key))
"""


def run(seed: int, seconds: float, *, root: Path = ROOT, say: Callable[[str], None] = print) -> Findings:
    """Attack a cluster for `seconds`, wait until it has settled, and judge. Nodes run from the sources in `root`."""
    chance = random.Random(seed)
    findings = Findings()
    loop = LoopThread()
    try:
        with world(NODES, root) as attacked:
            create_topics(attacked.bootstrap, TOPICS, {})
            loop.run(_prepare(attacked.database_url))
            vigil = Vigil(time.monotonic() + seconds / 3, min(OPEN_S, seconds / 3))
            writers = Writers(attacked.database_url, loop, findings, chance, vigil)
            stock = [Stock(attacked.bootstrap, number, chance.randrange(2**31)) for number in range(PRODUCERS)]
            consumers = [
                Summing(attacked.bootstrap, attacked.database_url, loop, findings, chance.randrange(2**31))
                for _ in range(CONSUMERS)
            ]
            faults = Faults(attacked, loop, chance, vigil)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s + (0 if vigil.ended else SETTLE_S):
                time.sleep(chance.uniform(0.5, 4.0))  # the pause between two faults
                say(faults.any())
                findings.counts["faults"] += 1
            attacked.heal()
            say("All faults have ended; workloads finish.")
            if not vigil.ended:
                findings.broke("a session stays open", f"none lived for {vigil.length_s:.0f} s")
            writers.finish()
            for producer in stock:
                producer.finish(findings)
            _judge(attacked, loop, stock, consumers, findings)
    finally:
        loop.close()
    return findings


async def _prepare(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(SCHEMA)
    for topic in TOPICS:
        for key in [*(f"account-{number}" for number in range(ACCOUNTS)), "open"]:
            await connection.execute("insert into account values ($1, $2, 0, 0)", topic, key)
    await connection.close()


async def _settled(url: str) -> tuple[list[Any], list[Any]]:
    """Return accounts and events once each record has its offset."""
    connection = await asyncpg.connect(url)
    try:
        whole: Any = await connection.fetchval("select kafka.flush('200 seconds')", timeout=SETTLE_S)
        assert whole, "records have no offsets 200 seconds after the last fault"
        accounts = await connection.fetch("select * from account order by topic, key")
        events = await connection.fetch("select * from event order by topic, key, version")
        return accounts, events
    finally:
        await connection.close()


async def _sums(url: str) -> tuple[dict[tuple[str, str], tuple[int, int]], dict[tuple[str, int], int]]:
    """Return the consumers' sums and the group's offsets, as one snapshot shows them."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            sums: Any = await connection.fetch("select * from sums")
            offsets: Any = await connection.fetch('select topic, partition, "offset" from kafka.committed($1)', GROUP)
    finally:
        await connection.close()
    return (
        {(row["topic"], row["key"]): (row["count"], row["total"]) for row in sums},
        {(row["topic"], row["partition"]): row["offset"] for row in offsets},
    )


def _judge(
    attacked: World, loop: LoopThread, stock: Sequence[Stock], consumers: Sequence[Summing], findings: Findings
) -> None:
    accounts, events = loop.submit(_settled(attacked.database_url)).result(SETTLE_S)
    expected: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for row in events:
        expected.setdefault((row["topic"], row["key"]), []).append((row["token"], row["amount"]))
    # Check that the tables agree with each other. If they do not, Postgres or this checker is wrong.
    for row in accounts:
        stored = expected.get((row["topic"], row["key"]), [])
        assert row["version"] == len(stored), row
        assert row["balance"] == sum(amount for _, amount in stored), row
    for producer in stock:
        expected |= {place: sent for place, sent in producer.sent.items() if sent}
    log, ends = read_all(attacked.bootstrap)
    findings.counts["records of SQL"] = len(events)
    findings.counts["records"] = len(log)
    for sentence in compare(log, expected):
        findings.broke("records are the committed rows, in the order of their locks", sentence)
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        sums, offsets = loop.run(_sums(attacked.database_url))
        behind = {place: end for place, end in ends.items() if offsets.get(place, 0) < end}
        if not behind or time.monotonic() > deadline_s:
            break
        time.sleep(0.5)
    for consumer in consumers:
        consumer.stop()
    for consumer in consumers:
        consumer.finish()
    if behind:
        findings.broke("consumers reach the end", f"{offsets} of {ends}")
    wanted = sums_of(log)
    for place in sorted({*wanted, *sums}):
        if wanted.get(place) != sums.get(place):
            findings.broke(
                "consumers' sums are exact", f"{place}: {sums.get(place)} stored, {wanted.get(place)} in the log"
            )


def read_all(bootstrap: str) -> tuple[list[Record], dict[tuple[str, int], int]]:
    """Return all records and the end offset of each partition. Raise AssertionError if they cannot be read in time."""
    consumer = Consumer({**PATIENT, "bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False})
    try:
        places = [TopicPartition(topic, index, 0) for topic, count in TOPICS.items() for index in range(count)]
        ends = {(place.topic, place.partition): _end_of(consumer, place) for place in places}
        left = {place for place, end in ends.items() if end}
        consumer.assign(places)
        log: list[Record] = []
        deadline_s = time.monotonic() + SETTLE_S
        while left:
            assert time.monotonic() < deadline_s, f"the ends of {sorted(left)} cannot be read"
            for message in consumer.consume(500, 0.5):
                if message.error() is None:
                    log.append(record_of(message))
                    place: Any = (message.topic(), message.partition())
                    if (message.offset() or 0) + 1 == ends[place]:
                        left.discard(place)
        return log, ends
    finally:
        consumer.close()


def _end_of(consumer: Consumer, place: TopicPartition) -> int:
    """Return the end offset of a partition. A client may ask a killed node that it still knows; it gets no answer and
    asks again.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        try:
            return consumer.get_watermark_offsets(place, timeout=10)[1]
        except KafkaException:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sql.history", description="Attack the SQL door.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults come (10)")
    parser.add_argument("--seed", type=int, help="chooses transactions and faults (a new one each time)")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    _say(f"Seed {seed}, {arguments.minutes:g} minutes.")
    findings = run(seed, arguments.minutes * 60, say=_say)
    for promise, sentences in findings.violations.items():
        _say(f"FAIL {promise}")
        for sentence in sentences[:20]:
            _say(f"       {sentence}")
    _say(", ".join(f"{count} {name}" for name, count in sorted(findings.counts.items())))
    _say("Some promise was broken." if findings.violations else "Every promise was kept.")
    return 1 if findings.violations else 0


if __name__ == "__main__":
    sys.exit(main())
