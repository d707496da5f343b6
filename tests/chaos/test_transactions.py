"""Transactions while gateways and Postgres are killed: for every reader each transaction is whole or absent.

SLUICE_TRANSACTION_RUNS=20 python -m pytest tests/chaos/test_transactions.py
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import partial

import asyncpg
import pytest

from tests.chaos.transactions import CommittedReader, Outcome, Progress, TransactionalProducer, assert_whole, ends_of
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.restorable_postgres import RestorablePostgres
from tests.steps.seeds import first_always

RUNS = int(os.environ.get("SLUICE_TRANSACTION_RUNS", "1"))
PARTITIONS = 4
PRODUCERS = 4
FAULTS = 3
BETWEEN = 10
"""Number of transactions between two faults."""
SETTINGS = {"log.store.inline.max.bytes": "2000"}

Fault = Callable[[], None]


def run(seed: int, nodes: Sequence[GatewayProcess], faults: Sequence[Fault], count: int = FAULTS) -> None:
    chance = random.Random(seed)
    bootstrap = ",".join(node.bootstrap for node in nodes)
    topic = create_topic(nodes[0].bootstrap, PARTITIONS)
    progress = Progress()
    producers = [
        TransactionalProducer(number, seed, bootstrap, topic, PARTITIONS, progress) for number in range(PRODUCERS)
    ]
    beside = CommittedReader(bootstrap, topic, PARTITIONS)
    for thread in (beside, *producers):
        thread.start()
    for _ in range(count):
        progress.wait_for(BETWEEN)
        chance.choice(faults)()
    progress.wait_for(BETWEEN)
    for producer in producers:
        producer.stop()
    for producer in producers:
        producer.finish()
    ends = ends_of(bootstrap, topic, PARTITIONS)
    seen = beside.finish(ends)
    outcomes = assert_whole(seen, producers)
    assert outcomes[Outcome.COMMITTED]
    assert outcomes[Outcome.ABORTED]
    for node in nodes:
        afterwards = CommittedReader(node.bootstrap, topic, PARTITIONS)
        afterwards.start()
        assert afterwards.finish(ends) == seen


@pytest.mark.parametrize("seed", range(1, RUNS + 1))
def test_transactions_of_a_killed_node_with_its_postgres_are_whole_or_absent(
    gateway_factory: GatewayFactory, seed: int
) -> None:
    node = gateway_factory(SETTINGS, embedded=True)

    def kill_gateway() -> None:
        node.kill()
        node.start()

    run(seed, [node], [kill_gateway, node.kill_postgres])


@pytest.mark.parametrize("seed", range(1, RUNS + 1))
@pytest.mark.parametrize("faults", first_always([1, FAULTS], 1))
def test_transactions_of_two_killed_nodes_on_one_postgres_are_whole_or_absent(
    gateway_factory: GatewayFactory, restorable: RestorablePostgres, faults: int, seed: int
) -> None:
    """When a backend is killed, Postgres ends all sessions."""
    nodes = [gateway_factory(database_url=restorable.url) for _ in range(2)]

    def restart(node: GatewayProcess) -> None:
        node.kill()
        node.start()

    async def kill_a_backend() -> None:
        connection = await asyncpg.connect(restorable.url)
        try:
            os.kill(await connection.fetchval("select pg_backend_pid()"), signal.SIGKILL)
        finally:
            connection.terminate()

    run(
        seed,
        nodes,
        [partial(restart, nodes[0]), partial(restart, nodes[1]), lambda: asyncio.run(kill_a_backend())],
        faults,
    )
