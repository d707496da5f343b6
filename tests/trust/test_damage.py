"""Damaged disks: flipped bits, lost and misdirected writes, truncated and removed files, in segments and in Postgres.

A read returns the record that was acknowledged, or an error. It never returns other bytes, and never an empty answer
below the end of the log.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.records import Record, build_batch, iter_records
from storage.embedded import EmbeddedPostgres
from tests.frames.members import create_topic
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient

TOPIC = "damaged"
RECORDS = 40
ROUNDS = int(os.environ.get("SLUICE_TEST_DAMAGES", "1"))
"""Number of damages of each kind. A long run uses 100 and more."""
SEED = int(os.environ.get("SLUICE_TEST_SEED", "1"))
PAGES = 4
"""Number of damaged Postgres pages in each round."""
BITS = 50
"""Number of bits that are flipped in a file. Most of a page is empty, so a few flipped bits could go unnoticed."""
SECTOR = 512
INDEX_OF_THE_LOG = "^(chunk|partition|topic|log_object)"
"""Tables and indexes by which Postgres finds a record, as a regular expression."""
STORAGE_WORDS = ("invalid page", "page verification failed", "could not read", "unexpected data", "KAFKA_STORAGE_ERROR")

Damage = Callable[[Path, random.Random], None]


def _change(path: Path, position: int, new: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, new, position)
    finally:
        os.close(fd)


def flip_a_bit(path: Path, chance: random.Random) -> None:
    position = chance.randrange(path.stat().st_size)
    (byte,) = path.read_bytes()[position : position + 1]
    _change(path, position, bytes([byte ^ 1 << chance.randrange(8)]))


def lose_a_sector(path: Path, chance: random.Random) -> None:
    position = chance.randrange(path.stat().st_size) // SECTOR * SECTOR
    _change(path, position, bytes(min(SECTOR, path.stat().st_size - position)))


def misdirect_a_write(path: Path, chance: random.Random) -> None:
    """Write the bytes of one sector to the place of another sector."""
    sectors = max(path.stat().st_size // SECTOR, 2)
    source, target = chance.sample(range(sectors), 2)
    _change(path, target * SECTOR, path.read_bytes()[source * SECTOR :][:SECTOR])


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


SEGMENT_DAMAGES: tuple[Damage, ...] = (flip_a_bit, lose_a_sector, misdirect_a_write, truncate, remove)


@pytest.fixture
def gateway(gateway_factory: GatewayFactory) -> GatewayProcess:
    return gateway_factory({"log.store.inline.max.bytes": "0", "log.store.roll.ms": "500"}, embedded=True)


async def filled(gateway: GatewayProcess) -> dict[int, bytes]:
    """Produce RECORDS batches of one record, and return the values by offset."""
    chance = random.Random(SEED)
    values: dict[int, bytes] = {}
    async with await WireClient.connect(gateway.bootstrap) as client:
        await create_topic(client, TOPIC)
        for offset in range(RECORDS):
            values[offset] = chance.randbytes(chance.randint(10, 6_000))
            batch = build_batch([Record(0, int(time.time() * 1000), None, values[offset], ())])
            partition = PartitionProduceData(index=0, records=batch)
            topics = (TopicProduceData(name=TOPIC, partition_data=(partition,)),)
            answer = await client.send(ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=topics), 9)
            assert answer.responses[0].partition_responses[0].error_code == ErrorCode.NONE
    return values


async def read_all(gateway: GatewayProcess, values: dict[int, bytes]) -> dict[ErrorCode, int]:
    """Fetch from every offset. Assert that each answer is an error or the record. Return the number of answers by error
    code.
    """
    codes: dict[ErrorCode, int] = {}
    async with await WireClient.connect(gateway.bootstrap) as client:
        for offset, value in values.items():
            wanted = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1)
            topics = (FetchTopic(topic=TOPIC, partitions=(wanted,)),)
            request = FetchRequest(replica_id=-1, max_wait_ms=0, min_bytes=0, max_bytes=1, topics=topics)
            answer = (await client.send(request, 11)).responses[0].partitions[0]
            code = ErrorCode(answer.error_code)
            codes[code] = codes.get(code, 0) + 1
            if code is ErrorCode.NONE:
                assert answer.records, f"offset {offset} has no bytes"
                found = [record for record in iter_records(bytes(answer.records)) if record.offset == offset]
                assert [record.value for record in found] == [value], f"offset {offset} has other bytes"
    return codes


@asynccontextmanager
async def restored(gateway: GatewayProcess, damaged: Path) -> AsyncIterator[None]:
    """Stop the gateway, and put the directory back when the context ends."""
    gateway.stop()
    saved = gateway.data_dir / "saved"
    await asyncio.to_thread(subprocess.run, ["cp", "-a", str(damaged), str(saved)], check=True)
    try:
        yield
    finally:
        if gateway.running:
            gateway.stop()
        shutil.rmtree(damaged)
        saved.rename(damaged)


@pytest.mark.timeout(60 + 30 * ROUNDS * len(SEGMENT_DAMAGES))
async def test_damaged_segment_is_answered_with_a_storage_error_and_no_other_bytes(gateway: GatewayProcess) -> None:
    values = await filled(gateway)
    chance = random.Random(SEED)
    seen: set[ErrorCode] = set()
    for damage in SEGMENT_DAMAGES * ROUNDS:
        async with restored(gateway, gateway.data_dir / "log"):
            segment = chance.choice(
                [path for path in (gateway.data_dir / "log").glob("*.segment") if path.stat().st_size]
            )
            damage(segment, chance)
            gateway.start()
            codes = await read_all(gateway, values)
        assert codes.keys() <= {ErrorCode.NONE, ErrorCode.KAFKA_STORAGE_ERROR}, f"{damage.__name__}: {codes}"
        seen |= codes.keys()
    assert ErrorCode.KAFKA_STORAGE_ERROR in seen, "no damage was met"
    gateway.start()
    assert await read_all(gateway, values) == {ErrorCode.NONE: RECORDS}


@pytest.mark.timeout(60 + 300 * ROUNDS)
async def test_damaged_page_of_postgres_is_answered_with_an_error_or_stops_the_node(gateway: GatewayProcess) -> None:
    values = await filled(gateway)
    url = EmbeddedPostgres(gateway.data_dir).running_url()
    assert url is not None
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("checkpoint")
        rows = await connection.fetch(
            "select c.relname, pg_relation_filepath(c.oid) as path from pg_class c"
            " join pg_namespace n on n.oid = c.relnamespace"
            " where n.nspname = 'sluice' and c.relkind in ('r', 'i') and c.relname ~ $1 and pg_relation_size(c.oid) > 0"
            " order by c.relname",
            INDEX_OF_THE_LOG,
        )
    finally:
        await connection.close()
    files = {row["relname"]: gateway.data_dir / "postgres" / row["path"] for row in rows}
    chance = random.Random(SEED)
    refused = 0
    assert len(files) > 3
    for table in chance.choices([*files], k=PAGES * ROUNDS):
        async with restored(gateway, gateway.data_dir / "postgres"):
            for _ in range(BITS):
                flip_a_bit(files[table], chance)
            try:
                gateway.start()
            except AssertionError:
                assert any(word in gateway.log_text() for word in STORAGE_WORDS), gateway.log_tail()
                refused += 1
                continue
            codes = await read_all(gateway, values)
            refused += codes.keys() != {ErrorCode.NONE}
    assert refused, "no damage was met"
    gateway.start()
    assert await read_all(gateway, values) == {ErrorCode.NONE: RECORDS}
