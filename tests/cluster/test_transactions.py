"""Transactions of one producer over several nodes. A node may still remember a transaction that
another node has ended.
"""

from __future__ import annotations

from dataclasses import replace

from protocol.errors import ErrorCode
from tests.clients.topics import create_topic
from tests.cluster.conftest import Cluster
from tests.frames.transactions import Transactional, delivered, fetch
from tests.wire import WireClient

OK = ErrorCode.NONE
PRODUCE, END = 12, 5


async def test_a_node_refuses_records_of_a_transaction_that_ended_on_another_node(
    cluster: Cluster,
) -> None:
    one, other = cluster(2)
    partition = (create_topic(one.bootstrap, 1), 0)
    async with await WireClient.connect(one.bootstrap) as first, await WireClient.connect(other.bootstrap) as second:
        producer = Transactional(first, "two nodes")
        assert await producer.initialize() is OK
        for round_ in range(3):
            values = (b"%d" % round_, b"again")
            for client, value in zip((first, second), values, strict=True):
                answer = await replace(producer, client=client).send(partition, value, version=PRODUCE)
                assert answer.error_code == OK, answer
            late = replace(producer, client=second, sequences={partition: 2})
            assert await producer.end(committed=True, version=END) is OK
            refused = await late.send(partition, b"late", version=PRODUCE)
            assert refused.error_code == ErrorCode.INVALID_PRODUCER_EPOCH
        assert len(delivered(await fetch(second, partition, 0, committed=True))) == 6


async def test_a_remembered_transaction_that_is_over_is_looked_up_again(cluster: Cluster) -> None:
    """The client does not enlist partitions itself, and its epoch stays the same."""
    one, other = cluster(2)
    partition = (create_topic(one.bootstrap, 1), 0)
    async with await WireClient.connect(one.bootstrap) as first, await WireClient.connect(other.bootstrap) as second:
        producer = Transactional(first, "out of date")
        assert await producer.initialize() is OK
        assert (await producer.send(partition, b"first", version=PRODUCE)).error_code == OK
        producer.client = second
        assert await producer.end(committed=True, version=4) is OK
        producer.client = first
        answer = await producer.send(partition, b"second", version=PRODUCE)
        assert answer.error_code == ErrorCode.CONCURRENT_TRANSACTIONS, "to be sent again"
        assert (await producer.send(partition, b"second", version=PRODUCE)).base_offset == 2
        assert await producer.end(committed=True, version=END) is OK
        assert delivered(await fetch(second, partition, 0, committed=True)) == [(0, b"first"), (2, b"second")]
