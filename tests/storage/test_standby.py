"""A synchronous standby that does not respond: nothing is acknowledged that it does not have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.coordinator.transactions import InitProducer
from storage.errors import StorageUnavailable
from storage.log import LogStore
from storage.pool import Database
from storage.topics import TopicStore
from storage.types import NewTopic, Topic
from tests.gateway.data_plane import DataPlane
from tests.postgres import LoopThread, cluster_directory
from tests.standby import ReplicatedPostgres
from tests.storage.batches import append, new_batch
from tests.templates import migrate_at

STATEMENT_MS = 500


@pytest.fixture(scope="module")
def replicated() -> Iterator[ReplicatedPostgres]:
    loop = LoopThread()
    with cluster_directory() as directory:
        server = ReplicatedPostgres(loop, directory)
        loop.run(migrate_at(server.primary.url))
        yield server
        server.stop()
    loop.close()


async def test_batch_that_the_standby_lacks_is_not_acknowledged_as_a_duplicate(replicated: ReplicatedPostgres) -> None:
    """Postgres ends a cancelled wait for the standby by a commit that others see. A producer that repeats its batch
    must wait for the standby again, because a failover would lose the batch."""
    database = await Database.open(replicated.primary.url, statement_timeout_ms=STATEMENT_MS)
    log = LogStore(database)
    (topic,) = await TopicStore(database).create([NewTopic("orders", 1, {})])
    assert isinstance(topic, Topic)
    key = topic.partitions[0].partition_key
    await append(log, new_batch(key, producer=(7, 0, 0)))
    with replicated.sleeping_standby():
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await log.append([new_batch(key, producer=(7, 0, 1))])
    assert await append(log, new_batch(key, producer=(7, 0, 1))) == [1]
    await database.close()


async def test_end_of_a_transaction_that_the_standby_lacks_is_not_acknowledged(replicated: ReplicatedPostgres) -> None:
    """A client repeats an EndTxn that was not answered. By then the producer's row says that the transaction has ended,
    and a failover would open it again."""
    database = await Database.open(replicated.primary.url, statement_timeout_ms=STATEMENT_MS)
    node = DataPlane(database, tail_bytes=2**20, committers=1, name="node-1")
    await node.membership.join()
    topic = await node.create_topic("payments")
    producer = await node.transactions.initialize("payer", InitProducer(60_000))
    identity = "payer", producer.producer_id, producer.producer_epoch
    await node.transactions.add(*identity, [topic.partitions[0].partition_key])
    with replicated.sleeping_standby():
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await node.transactions.end(*identity, committed=True)
    await node.transactions.end(*identity, committed=True)
    await database.close()
