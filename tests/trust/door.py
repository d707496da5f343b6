"""SQL clients at work: transactions that produce records, and a consumer that commits its offsets with its results.

The one idea: each record has a row that the same transaction inserts. So afterwards the tables show which records must
exist. This includes a commit whose outcome its client never learned.
"""

# The type stubs of confluent_kafka declare only a part of its API.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import asyncpg
import confluent_kafka
from confluent_kafka import KafkaException, TopicPartition

from tests.sql.history import CUT, connect
from tests.trust.checks import Place
from tests.trust.history import number_in
from tests.trust.patience import CALL_S, FINISH_S, PATIENT, WorkloadError
from tests.trust.workloads import Workload

WRITERS = 3
ROLLED_BACK = 0.1
"""Share of its transactions that a writer rolls back."""
PAUSE_S = 0.05
SCHEMA = """
create table trust_key (key text primary key, version bigint not null);
create table trust_row (key text not null, version bigint not null, value bigint not null, primary key (key, version));
create table trust_result (partition integer not null, position bigint not null, value bigint not null)
"""


class SqlDoor(Workload):
    """Writers with a key each, and one consumer of all partitions. `database_url` is called for each new connection,
    because a failover changes the URL.
    """

    def __init__(
        self, bootstrap: str, database_url: Callable[[], str], topic: str, *, partitions: int, seed: int
    ) -> None:
        super().__init__(f"door-{uuid.uuid4().hex[:6]}")
        self.topic = topic
        self._bootstrap, self._url, self._partitions = bootstrap, database_url, partitions
        self._seed = seed
        self._written = threading.Event()
        self._writing = WRITERS
        self._lock = threading.Lock()
        self._backend: tuple[int, Any] | None = None
        self.committed = 0
        """Number of transactions whose commit Postgres acknowledged."""
        asyncio.run(self._prepare())
        for number in range(WRITERS):
            self._thread(lambda number=number: asyncio.run(self._write(number)), f"{self.name}-w{number}")
        self._thread(lambda: asyncio.run(self._process()), f"{self.name}-consumer")

    async def _prepare(self) -> None:
        connection = await connect(self._url(), "trust")
        await connection.execute(SCHEMA)
        await connection.executemany(
            "insert into trust_key values ($1, 0)", [(f"key-{number}",) for number in range(WRITERS)]
        )
        await connection.close()

    # --- writers --------------------------------------------------------------------------------------------------

    async def _write(self, number: int) -> None:
        chance = random.Random(self._seed * 100 + number)
        connection: asyncpg.Connection | None = None
        value = number
        while not self._stopping.is_set():
            try:
                if connection is None or connection.is_closed():
                    connection = await connect(self._url(), "trust writer")
                await self._transaction(connection, f"key-{number}", value, chance)
            except CUT:
                if connection is not None:
                    connection.terminate()
                connection = None
            value += WRITERS
            await asyncio.sleep(chance.uniform(0, 2 * PAUSE_S))  # a pause between two transactions of a writer
        if connection is not None:
            connection.terminate()
        with self._lock:
            self._writing -= 1
            if not self._writing:
                self._written.set()

    async def _transaction(self, connection: asyncpg.Connection, key: str, value: int, chance: random.Random) -> None:
        transaction = connection.transaction()
        await transaction.start()
        # If the outcome of a transaction is unknown, the row lock orders this transaction and the writer's next one.
        version: Any = await connection.fetchval(
            "update trust_key set version = version + 1 where key = $1 returning version", key
        )
        await connection.execute("insert into trust_row values ($1, $2, $3)", key, version, value)
        await connection.execute("select kafka.produce($1, $2::text, $3::text)", self.topic, str(value), key)
        if chance.random() < ROLLED_BACK:
            await transaction.rollback()
            return
        await transaction.commit()
        self.committed += 1

    # --- the consumer ---------------------------------------------------------------------------------------------

    async def _process(self) -> None:
        """Process records until the writers have ended and each of their records has a result."""
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self._bootstrap, "group.id": self.name, "enable.auto.commit": False, **PATIENT}
        )
        connection: asyncpg.Connection | None = None
        flushed = False
        try:
            while True:
                try:
                    if connection is None or connection.is_closed():
                        connection = await self._opened()
                        await self._seek(connection, consumer)
                    if self._written.is_set() and not flushed:
                        flushed = await connection.fetchval("select kafka.flush('5 seconds')")
                    messages = await asyncio.to_thread(consumer.consume, 100, 0.2)
                    messages = [message for message in messages if message.error() is None]
                    if messages:
                        await self._store(connection, messages)
                    elif flushed and await self._is_done(consumer):
                        return
                except CUT:
                    if connection is not None:
                        connection.terminate()
                    connection = None
        finally:
            consumer.close()
            if connection is not None:
                connection.terminate()

    async def _opened(self) -> asyncpg.Connection:
        """Open a connection, once the server process of the previous connection has ended. That process may still
        commit until then.
        """
        connection = await connect(self._url(), "trust consumer")
        deadline_s = time.monotonic() + FINISH_S
        gone = "select not exists (select from pg_stat_activity where pid = $1 and backend_start = $2)"
        while self._backend is not None and not await connection.fetchval(gone, *self._backend):
            if time.monotonic() > deadline_s:
                raise WorkloadError(f"{self.name}: a server process outlives its connection by {FINISH_S:.0f} s")
            await asyncio.sleep(PAUSE_S)
        row: Any = await connection.fetchrow(
            "select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()"
        )
        self._backend = (row["pid"], row["backend_start"])
        return connection

    async def _seek(self, connection: asyncpg.Connection, consumer: confluent_kafka.Consumer) -> None:
        rows: Any = await connection.fetch('select partition, "offset" from kafka.committed($1)', self.name)
        offsets = {row["partition"]: row["offset"] for row in rows}
        consumer.assign([TopicPartition(self.topic, index, offsets.get(index, 0)) for index in range(self._partitions)])

    async def _store(self, connection: asyncpg.Connection, messages: Sequence[confluent_kafka.Message]) -> None:
        results: list[tuple[int, int, int]] = []
        for message in messages:
            partition, offset, value = message.partition(), message.offset(), message.value()
            assert partition is not None
            assert offset is not None
            results.append((partition, offset, number_in(value)))
        ends = {partition: offset + 1 for partition, offset, _ in sorted(results)}
        async with connection.transaction():
            await connection.executemany("insert into trust_result values ($1, $2, $3)", results)
            for partition, offset in ends.items():
                await connection.execute(
                    "select kafka.commit_offset($1, $2, $3, $4)", self.name, self.topic, partition, offset
                )

    async def _is_done(self, consumer: confluent_kafka.Consumer) -> bool:
        """Return whether the consumer's position is the end of every partition."""
        for part in consumer.position([TopicPartition(self.topic, index) for index in range(self._partitions)]):
            try:
                bounds = await asyncio.to_thread(consumer.get_watermark_offsets, part, CALL_S)
            except KafkaException:
                return False
            if bounds is None or bounds[1] > max(part.offset, 0):
                return False
        return True

    # --- what the tables say --------------------------------------------------------------------------------------

    def rows(self) -> Mapping[str, Sequence[int]]:
        """Return the values of committed rows by key, in the order of the row locks."""
        found: dict[str, list[int]] = {}
        for row in asyncio.run(self._fetched("select key, value from trust_row order by key, version")):
            found.setdefault(row["key"], []).append(row["value"])
        return found

    def results(self) -> Sequence[tuple[Place, int]]:
        """Return the place and the value of the record of each result."""
        rows = asyncio.run(self._fetched("select partition, position, value from trust_result"))
        return [(Place(self.topic, row["partition"], row["position"]), row["value"]) for row in rows]

    async def _fetched(self, query: str) -> Sequence[Any]:
        connection = await connect(self._url(), "trust")
        try:
            return await connection.fetch(query)
        finally:
            await connection.close()
