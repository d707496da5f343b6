"""A whole node: what an operator sees, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request

from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.metadata import MetadataRequest
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
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
    status, text = get(gateway, "/metrics")
    assert status == 200
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
    assert "sluice_background_failures_total{" not in text, "every background pass works"
    assert "sluice_internal_errors_total{" not in text
    loops = set(re.findall(r'^sluice_background_last_success_age_seconds\{loop="([^"]+)"\}', text, re.MULTILINE))
    assert {"leases", "reconciliation", "retention", "compaction", "offset expiry"} <= loops
    await client.close()


async def test_rubbish_is_logged_and_counted_and_hurts_nobody_else(gateway: GatewayProcess) -> None:
    rude, polite = await WireClient.connect(gateway.bootstrap), await WireClient.connect(gateway.bootstrap)
    rude.send_bytes(b"GET / HTTP/1.1\r\n\r\n")
    await rude.closed_by_peer()
    assert (await polite.send(ApiVersionsRequest(client_software_name="w", client_software_version="1"), 4)).api_keys
    assert sample(get(gateway, "/metrics")[1], 'sluice_protocol_errors_total{reason="frame_size"}') >= 1
    assert "not the Kafka protocol" in gateway.log_text()
    await polite.close()


async def test_sigterm_answers_what_is_parked_and_ends_within_five_seconds(gateway_factory: GatewayFactory) -> None:
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
    # Answered after the two above were read, for the node takes connections in turn.
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


async def test_each_listener_tells_its_own_addresses_of_every_node(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    ports = free_ports(4)
    for inside, outside in (ports[:2], ports[2:]):
        settings = {
            "listeners": f"INSIDE://127.0.0.1:{inside},OUTSIDE://127.0.0.1:{outside}",
            "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT",
        }
        gateway_factory(settings, database_url=database_url)
    # The node that started last knows both.
    for port, told in ((inside, {ports[0], ports[2]}), (outside, {ports[1], ports[3]})):
        client = await WireClient.connect(f"127.0.0.1:{port}")
        answer = await client.send(MetadataRequest(), 13)
        assert {each.port for each in answer.brokers} == told
        await client.close()
