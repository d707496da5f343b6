"""Nodes follow committed changes: deleted topics' data is removed even if a node dies during it, and metrics show the
work."""

from __future__ import annotations

import json
import time

import asyncpg
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from gateway.cluster.jobs import Job
from tests.clients.topics import create_topic
from tests.cluster.conftest import Cluster, metric
from tests.gateway_process import GatewayProcess
from tests.steps.command import output_of
from tests.steps.waiting import until

PATIENCE_S = 60.0
LEASE_OWNER = """
select n.name from sluice.coordinator_lease l join sluice.node n using (node_id, incarnation)
where l.kind = 'jobs' and l.shard = $1 and l.expires_at > clock_timestamp()
"""


def admin(node: GatewayProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": node.bootstrap})


def delete(node: GatewayProcess, topic: str) -> None:
    client = admin(node)
    client.delete_topics([topic])[topic].result(30)


def fill(node: GatewayProcess, topic: str, values: list[bytes], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": node.bootstrap})
    for value in values:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(PATIENCE_S) == 0


def content(node: GatewayProcess, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": node.bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        read: list[bytes | None] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(read) < count:
            assert time.monotonic() < deadline, read
            read += [message.value() for message in consumer.consume(count, 1) if message.error() is None]
        return read
    finally:
        consumer.close()


def deleting(url: str) -> list[dict[str, object]]:
    return json.loads(output_of("nodes", "--deleting", "--json", "--database-url", url))


async def test_a_failing_deletion_is_reported_retried_and_taken_over(cluster: Cluster, database_url: str) -> None:
    nodes = cluster(2)
    topic = create_topic(nodes[0].bootstrap, 3)
    for partition in range(3):
        fill(nodes[0], topic, [b"old"] * 10, partition)
    sql, holder = [await asyncpg.connect(database_url) for _ in range(2)]
    try:
        held = holder.transaction()
        await held.start()
        await holder.execute(
            "select from sluice.partition p join sluice.topic t using (topic_id) where t.name = $1 for update of p",
            topic,
        )
        started = time.monotonic()
        delete(nodes[1], topic)
        create_topic_again(nodes[0], topic)
        assert time.monotonic() - started < 4, "nobody waits for the lock"
        fill(nodes[1], topic, [b"new"])
        assert content(nodes[0], topic, 1) == [b"new"]

        async def failed(times: int) -> bool:
            return (
                await sql.fetchval("select max(delete_failures) from sluice.topic where deleted_at is not null")
                >= times
            )

        await until(lambda: failed(3), "the deletion is not tried again")
        (seen,) = deleting(database_url)
        assert (seen["topic"], seen["partitions_left"]) == (topic, 3)
        assert "lock timeout" in str(seen["error"])
        (exporter,) = [node for node in nodes if metric(node, "sluice_exporter_up") == 1]
        assert metric(exporter, "sluice_pending_tombstones") == metric(exporter, "sluice_failing_tombstones") == 1
        assert metric(exporter, "sluice_pending_tombstone_age_seconds") > 1
        failures = [metric(node, 'sluice_partitions_reconcile_failures_total{cause="delete"}') for node in nodes]
        assert sum(failures) >= 3

        # The node that deletes the topic dies. The topic's row shows that the deletion is not complete.
        owner = await sql.fetchval(LEASE_OWNER, int(Job.DELETION))
        (dying,) = [node for node in nodes if node.bootstrap == owner]
        (other,) = [node for node in nodes if node.bootstrap != owner]
        dying.kill()
        await held.rollback()

        async def gone() -> bool:
            return not await sql.fetchval("select count(*) from sluice.topic where deleted_at is not null")

        await until(gone, "a deletion whose owner died is not taken over")
        assert metric(other, "sluice_topics_removed_total") == 1
        assert metric(other, "sluice_pending_tombstones") == 0
        assert deleting(database_url) == []
        assert await sql.fetchval("select count(*) from sluice.partition where deleted") == 0
        assert content(other, topic, 1) == [b"new"]
    finally:
        await sql.close()
        await holder.close()


def create_topic_again(node: GatewayProcess, topic: str) -> None:
    client = admin(node)
    client.create_topics([NewTopic(topic, 1)])[topic].result(30)


async def test_the_work_of_reconciliation_shows_in_the_metrics(cluster: Cluster, database_url: str) -> None:
    first, second = cluster(1)[0], cluster(1)[0]
    nodes = [first, second]
    topics = [create_topic(node.bootstrap, 20) for node in nodes]

    def total(name: str) -> float:
        return sum(metric(node, name) for node in nodes)

    async def settled() -> bool:
        live = await sql.fetchval(
            "select count(*) from sluice.partition p join sluice.topic t using (topic_id) where t.deleted_at is null"
        )
        return total("sluice_partitions_owned") == live and all(
            metric(node, "sluice_job_leases") == 4 for node in nodes
        )

    async def confirmed() -> bool:
        return total("sluice_pending_tombstones") == 0 and all(
            metric(node, 'sluice_reconcile_operations_total{operation="confirm_remove"}') == 1
            and metric(node, "sluice_reconcile_deferred") == 0
            and metric(node, "sluice_reconcile_passes_skipped_total") > 0
            and metric(node, 'sluice_reconcile_passes_total{trigger="tick"}') > 0
            for node in nodes
        )

    async def heard() -> bool:
        return total("sluice_wakeups_heard_total") > 0

    sql = await asyncpg.connect(database_url)
    try:
        await until(settled, "partitions and jobs are not shared")
        delete(first, topics[0])
        await until(confirmed, "a removal is not confirmed")
        # A reader that waits on one node learns of the other's appends.
        fill(first, topics[1], [b"1"])
        assert content(second, topics[1], 1) == [b"1"]
        await until(heard, "nobody hears of an append")
    finally:
        await sql.close()
    for node in nodes:
        assert metric(node, 'sluice_reconcile_passes_total{trigger="notified"}') > 0
        assert metric(node, "sluice_reconcile_pass_seconds_count") > 0
        assert metric(node, "sluice_reconcile_revision_lag") == 0
        assert metric(node, 'sluice_reconcile_operations_total{operation="install_routed"}') >= 1
        assert metric(node, 'sluice_reconcile_operations_total{operation="install_owned"}') >= 1
        assert metric(node, "sluice_listener_reconnects_total") >= 1
        assert 0 < metric(node, "sluice_partitions_owned") < 100
        for name in ("sluice_pending_tombstones", "sluice_pending_tombstone_age_seconds", "sluice_failing_tombstones"):
            assert metric(node, name) == 0
    # The node that deletes the topic does not need a pass to learn of the deletion.
    assert metric(second, 'sluice_reconcile_operations_total{operation="remove_routed"}') == 1
    assert metric(first, 'sluice_leases_moved_total{kind="groups"}') == 25
    assert metric(first, 'sluice_leases_moved_total{kind="jobs"}') == 4
    assert total("sluice_partitions_removed_total") == 20
    assert total("sluice_partitions_materialised_total") >= 40
    assert total("sluice_topics_removed_total") == 1
    assert total("sluice_wakeups_sent_total") > 0
    assert total("sluice_wakeups_late_total") == 0
