"""A whole node: what an operator sees of it, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from platform import python_version

import asyncpg
import pytest

from gateway.apis import SERVED
from gateway.app import App
from gateway.building.undo import StartError
from gateway.config.settings import load
from gateway.net.context import Role
from gateway.version import program_version
from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.describe_cluster import DescribeClusterRequest
from protocol.messages.describe_quorum import DescribedPartition, DescribedTopic, DescribeQuorumRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.metadata import MetadataRequest
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.gateway.data_plane import batch_of
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.steps.waiting import until, wait_for
from tests.wire import WireClient


def get(gateway: GatewayProcess, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{gateway.metrics_url}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sample(text: str, name: str) -> float:
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


async def create_topic(client: WireClient, name: str, partitions: int = 1) -> None:
    topic = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
    response = await client.send(CreateTopicsRequest(topics=(topic,), timeout_ms=10_000), 7)
    assert response.topics[0].error_code == ErrorCode.NONE


async def test_partitions_that_storage_could_not_serve_are_counted(gateway: GatewayProcess) -> None:
    """Produce answers each partition with an error of its own, so the request as a whole does not fail."""
    client = await WireClient.connect(gateway.bootstrap)
    await create_topic(client, "unwritable")
    data = PartitionProduceData(index=0, records=batch_of(b"1"))
    asked = ProduceRequest(
        acks=-1,
        timeout_ms=10_000,
        topic_data=(TopicProduceData(name="unwritable", partition_data=(data,)),),
    )
    database = await asyncpg.connect(gateway.database_url)
    try:
        await database.execute("alter table sluice.chunk add constraint full_disk check (false) not valid")
        answer = await client.send(asked, 9)
    finally:
        await database.execute("alter table sluice.chunk drop constraint full_disk")
        await database.close()
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert sample(get(gateway, "/metrics")[1], 'sluice_storage_errors_total{api="produce"}') > 0


async def test_health_version_and_metrics(gateway: GatewayProcess) -> None:
    client = await WireClient.connect(gateway.bootstrap)
    await create_topic(client, "metered", 2)
    commit = OffsetCommitRequest(
        group_id="metered-group",
        topics=(
            OffsetCommitRequestTopic(
                name="metered",
                partitions=(OffsetCommitRequestPartition(partition_index=1, committed_offset=0),),
            ),
        ),
    )
    assert (await client.send(commit, 9)).topics[0].partitions[0].error_code == ErrorCode.NONE
    assert get(gateway, "/livez") == (200, "ok\n")
    assert get(gateway, "/readyz") == (200, "ok\n")
    assert json.loads(get(gateway, "/version")[1])["name"] == "sluice"
    status, links = get(gateway, "/")
    assert status == 200
    assert re.findall(r'href="([^"]+)"', links) == ["/metrics", "/livez", "/readyz", "/version"]
    # A node's background jobs start a moment after its first answer.
    wait_for(lambda: sample(get(gateway, "/metrics")[1], "sluice_exporter_up") == 1)
    status, text = get(gateway, "/metrics")
    assert status == 200
    assert f'sluice_build_info{{python="{python_version()}",version="{program_version()}"}} 1.0' in text
    assert sample(text, "kafka_brokers") == 1
    assert sample(text, 'kafka_topic_partitions{topic="metered"}') == 2
    assert sample(text, 'kafka_topic_partition_current_offset{partition="1",topic="metered"}') == 0
    assert sample(text, 'kafka_topic_partition_oldest_offset{partition="1",topic="metered"}') == 0
    assert sample(text, 'kafka_topic_partition_leader{partition="1",topic="metered"}') == 1
    labels = 'consumergroup="metered-group",partition="1",topic="metered"'
    assert sample(text, f"kafka_consumergroup_current_offset{{{labels}}}") == 0
    assert sample(text, f"kafka_consumergroup_lag{{{labels}}}") == 0
    assert sample(text, 'kafka_consumergroup_lag_sum{consumergroup="metered-group",topic="metered"}') == 0
    assert sample(text, 'kafka_consumergroup_members{consumergroup="metered-group"}') == 0
    assert sample(text, "sluice_connections") >= 1
    assert sample(text, 'sluice_requests_total{api="create_topics",error="NONE",version="7"}') >= 1
    assert sample(text, 'sluice_request_duration_seconds_count{api="create_topics",version="7"}') >= 1
    assert sample(text, "sluice_coordinator_leases") == 50
    for failures in ("sluice_background_failures_total", "sluice_internal_errors_total"):
        counts = re.findall(rf"^{failures}\{{.*\}} (.+)$", text, re.MULTILINE)
        assert set(counts) == {"0.0"}, "every background pass works, and every request"
    loops = set(re.findall(r'^sluice_background_last_success_age_seconds\{loop="([^"]+)"\}', text, re.MULTILINE))
    assert {"leases", "reconciliation", "retention", "compaction", "offset expiry"} <= loops
    await client.close()


async def test_bytes_and_sizes_are_counted_by_topic(gateway: GatewayProcess) -> None:
    name = f"bytes-{uuid.uuid4().hex[:8]}"
    records = batch_of(b"x" * 1000)
    async with await WireClient.connect(gateway.bootstrap) as client:
        await create_topic(client, name)

        def counted(metric: str) -> list[str]:
            return re.findall(rf'^{metric}\{{[^}}]*topic="{name}"\}} (\S+)$', get(gateway, "/metrics")[1], re.MULTILINE)

        assert counted("sluice_topic_bytes_in_total") == counted("sluice_topic_bytes_out_total") == []
        data = PartitionProduceData(index=0, records=records)
        produced = ProduceRequest(
            acks=1, timeout_ms=10_000, topic_data=(TopicProduceData(name=name, partition_data=(data,)),)
        )
        for _ in range(2):
            assert (await client.send(produced, 9)).responses[0].partition_responses[0].error_code == 0
        asked = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1_000_000)
        fetching = FetchRequest(
            max_wait_ms=10_000,
            min_bytes=2 * len(records),
            max_bytes=1_000_000,
            topics=(FetchTopic(topic=name, partitions=(asked,)),),
        )
        await client.send(fetching, 11)
        assert counted("sluice_topic_bytes_in_total") == [f"{2.0 * len(records)}"]
        assert counted("sluice_topic_bytes_out_total") == [f"{2.0 * len(records)}"]
        assert counted("sluice_topic_partition_size_bytes") == [f"{2.0 * len(records)}"]
        deleted = DeleteTopicsRequest(topics=(DeleteTopicState(name=name),), topic_names=(name,), timeout_ms=10_000)
        await client.send(deleted, 5)
        wait_for(lambda: not counted("sluice_topic_bytes_in_total") + counted("sluice_topic_bytes_out_total"))


async def test_monotonic_metrics_are_counters(gateway: GatewayProcess) -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", get(gateway, "/metrics")[1], re.MULTILINE))
    for name in (
        *("leases_moved", "reconcile_operations", "reconcile_wakes_merged", "damaged_chunks"),
        *("wakeups_sent", "wakeups_merged", "wakeups_heard", "wakeups_missed", "wakeups_late"),
    ):
        assert types[f"sluice_{name}_total"] == "counter", name


def test_warnings_about_the_configuration_are_lines_of_the_log(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"num.network.threads": "4"})
    (line,) = [line for line in gateway.log_text().splitlines() if "num.network.threads" in line]
    said = json.loads(line)
    assert said["level"] == "warning"
    assert "has no effect here" in said["reason"]


async def test_invalid_bytes_are_logged_counted_and_affect_no_other_client(gateway: GatewayProcess) -> None:
    rude, polite = await WireClient.connect(gateway.bootstrap), await WireClient.connect(gateway.bootstrap)
    rude.send_bytes(b"GET / HTTP/1.1\r\n\r\n")
    await rude.closed_by_peer()
    assert (await polite.send(ApiVersionsRequest(client_software_name="w", client_software_version="1"), 4)).api_keys
    assert sample(get(gateway, "/metrics")[1], 'sluice_protocol_errors_total{reason="frame_size"}') >= 1
    assert "not the Kafka protocol" in gateway.log_text()
    await polite.close()


async def test_sigterm_answers_parked_requests_and_ends_within_five_seconds(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"group.initial.rebalance.delay.ms": "60000"})
    joining, fetching, idle = [await WireClient.connect(gateway.bootstrap) for _ in range(3)]
    await create_topic(fetching, "quiet")
    protocols = (JoinGroupRequestProtocol(name="range", metadata=b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"),)
    join = JoinGroupRequest(
        group_id="g",
        session_timeout_ms=30_000,
        rebalance_timeout_ms=60_000,
        protocol_type="consumer",
        protocols=protocols,
    )
    parked_join = joining.send_nowait(join, 3)
    fetch = FetchRequest(
        max_wait_ms=60_000,
        min_bytes=1,
        topics=(FetchTopic(topic="quiet", partitions=(FetchPartition(partition=0, partition_max_bytes=1000),)),),
    )
    parked_fetch = fetching.send_nowait(fetch, 11)
    # This request is answered after the two above were read, because the node serves connections in turn.
    await idle.send(HeartbeatRequest(group_id="h", generation_id=1, member_id="m"), 4)
    stopped = asyncio.create_task(asyncio.to_thread(gateway.stop))
    began = time.monotonic()
    assert (await parked_join).error_code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    fetched = await parked_fetch
    assert (fetched.error_code, fetched.responses[0].partitions[0].error_code) == (0, 0)
    await idle.closed_by_peer()
    assert await stopped == 0
    assert time.monotonic() - began < 5
    for client in (joining, fetching, idle):
        await client.close()


async def test_a_postgres_that_does_not_answer_delays_neither_probe_nor_scrape_nor_the_end(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory(embedded=True)
    client = await WireClient.connect(gateway.bootstrap)
    gateway.pause_postgres()
    parked = client.send_nowait(CreateTopicsRequest(topics=(CreatableTopic(name="late"),), timeout_ms=60_000), 7)
    began = time.monotonic()
    code, text = await asyncio.to_thread(get, gateway, "/readyz")
    assert code == 503
    assert "database: no answer" in text
    assert sample((await asyncio.to_thread(get, gateway, "/metrics"))[1], "sluice_exporter_up") == 0
    assert time.monotonic() - began < 8
    began = time.monotonic()
    assert await asyncio.to_thread(gateway.stop) == 0
    assert time.monotonic() - began < 8
    parked.cancel()
    await client.close()


async def test_a_restart_after_a_kill_takes_its_groups_back_at_once(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(environment={"SLUICE_NODE_TTL_MS": "60000"})
    gateway.kill()
    gateway.start()
    client = await WireClient.connect(gateway.bootstrap)
    answer = await client.send(HeartbeatRequest(group_id="g", generation_id=1, member_id="m"), 4)
    assert answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID, "this node coordinates the group, without waiting a minute"
    await client.close()


async def test_a_start_waits_for_a_lock_that_another_session_holds(gateway_factory: GatewayFactory) -> None:
    """Three starts run concurrently, because Postgres refuses a lock only after five seconds."""

    async def start_beside_a_lock(gateway: GatewayProcess, table: str) -> None:
        gateway.stop()
        assert gateway.database_url is not None
        session = await asyncpg.connect(gateway.database_url)
        async with session.transaction():
            await session.execute(f"lock table sluice.{table} in share row exclusive mode")
            start = asyncio.create_task(asyncio.to_thread(gateway.start))
            async with asyncio.timeout(60):
                while "waiting for a lock" not in gateway.log_tail():
                    assert not start.done(), table
                    await asyncio.sleep(0.05)
        await session.close()
        await start

    tables = ("coordinator_lease", "node", "sql_door")
    await asyncio.gather(*(start_beside_a_lock(gateway_factory(), table) for table in tables))


async def test_each_listener_shows_its_own_address_of_every_node(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    ports = free_ports(4)
    for inside, outside in (ports[:2], ports[2:]):
        settings = {
            "listeners": f"INSIDE://127.0.0.1:{inside},OUTSIDE://127.0.0.1:{outside}",
            "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT",
        }
        gateway_factory(settings, database_url=database_url)
    # The node that started last knows of both nodes.
    for port, told in ((inside, {ports[0], ports[2]}), (outside, {ports[1], ports[3]})):
        client = await WireClient.connect(f"127.0.0.1:{port}")
        answer = await client.send(MetadataRequest(), 13)
        assert {each.port for each in answer.brokers} == told
        await client.close()


async def test_controller_listener_serves_the_controllers_apis(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """The controllers' listener serves other APIs, and a client of another listener does not see the controllers."""
    broker, controller, alone = free_ports(3)
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
    }
    gateway_factory({"listeners": f"PLAINTEXT://127.0.0.1:{alone}"}, database_url=database_url)
    gateway_factory(settings, database_url=database_url)
    client = await WireClient.connect(f"127.0.0.1:{controller}")
    asked = ApiVersionsRequest(client_software_name="tests", client_software_version="1")
    versions = await client.send(asked, 4)
    assert [each.api_key for each in versions.api_keys] == [
        int(line.api_key) for line in sorted(SERVED, key=lambda line: line.api_key) if Role.CONTROLLER in line.roles
    ]
    controllers = await client.send(DescribeClusterRequest(endpoint_type=2), 1)
    assert [(each.host, each.port) for each in controllers.brokers] == [("127.0.0.1", controller)]
    await create_topic(client, "made-by-a-controller")
    quorum = DescribeQuorumRequest(
        topics=(DescribedTopic(topic_name="__cluster_metadata", partitions=(DescribedPartition(),)),)
    )
    async with asyncio.timeout(30):
        # There is no leader while a lease moves from one node to the other.
        while (partition := (await client.send(quorum, 2)).topics[0].partitions[0]).error_code:
            assert partition.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert partition.high_watermark > 0
    assert len(partition.current_voters) == 2
    client.send_only(MetadataRequest(), 13)
    await client.closed_by_peer()
    await client.close()
    for port in (broker, alone):
        client = await WireClient.connect(f"127.0.0.1:{port}")
        metadata = await client.send(MetadataRequest(topics=None), 13)
        assert "made-by-a-controller" in {each.name for each in metadata.topics}
        mismatched = await client.send(DescribeClusterRequest(endpoint_type=2), 1)
        assert mismatched.error_code == ErrorCode.MISMATCHED_ENDPOINT_TYPE
        await client.close()
    # The node that started last knows of both nodes.
    client = await WireClient.connect(f"127.0.0.1:{broker}")
    assert {each.port for each in (await client.send(MetadataRequest(), 13)).brokers} == {broker, alone}
    assert {each.port for each in (await client.send(DescribeClusterRequest(), 1)).brokers} == {broker, alone}
    await client.close()


def app_of(database_url: str, directory: Path, *assignments: str) -> App:
    flags = {"database-url": database_url, "listen": "127.0.0.1:0", "metrics-listen": "off", "data-dir": str(directory)}
    return App(load(flags, ["console.listen=", *assignments], {}).settings)


async def test_failed_start_leaves_no_lease_behind(database_url: str, tmp_path: Path) -> None:
    """Another node would do the jobs only once their leases have expired."""
    session = await asyncpg.connect(database_url)

    async def held() -> int:
        return await session.fetchval(
            "select count(*) from sluice.coordinator_lease where kind = 'jobs' and expires_at > clock_timestamp()"
        )

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        app = app_of(database_url, tmp_path, f"console.listen=127.0.0.1:{taken.getsockname()[1]}")
        try:
            with pytest.raises(StartError, match=r"console\.listen"):
                await app.start()
            await until(held, "the node has jobs")
        finally:
            await app.stop()
    assert await held() == 0
    await session.close()


async def test_start_that_is_cancelled_leaves_no_registration_behind(database_url: str, tmp_path: Path) -> None:
    session = await asyncpg.connect(database_url)

    async def alive() -> int:
        return await session.fetchval("select count(*) from sluice.node where expires_at > clock_timestamp()")

    app = app_of(database_url, tmp_path)
    async with session.transaction():
        await session.execute("lock table sluice.acl in access exclusive mode")
        starting = asyncio.create_task(app.start())
        try:
            await until(alive, "the node is registered")
            assert not starting.done()
            starting.cancel()
            await asyncio.wait((starting,))
        finally:
            await app.stop()
    assert await alive() == 0
    await session.close()
