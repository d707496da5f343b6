"""The spans of a real node: what a collector receives of requests, commits and rebalances."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, Producer

from gateway.net.context import ConnectionInfo, RequestContext
from gateway.tracing.exporter import Exporter
from gateway.tracing.spans import Span
from gateway.tracing.traces import Traces
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.heartbeat import HeartbeatRequest
from tests.closing import close
from tests.conftest import gateways
from tests.gateway.tracing.otlp import Collector, Received, collecting
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.postgres import Databases
from tests.steps.waiting import wait_for
from tests.wire import WireClient

LATE_S = 120.0
HOSTILE = "x\x1b]0;owned\x07" + "y" * 1_000


class Kept:
    """Replaces the queue of an exporter and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)


def traces(kept: Kept, sample: float = 1, chance: float = 0.5) -> Traces:
    return Traces(cast(Exporter, kept), sample, chance=lambda: chance)


def context(client_id: str | None = "client") -> RequestContext[object]:
    connection = ConnectionInfo("connection-1", "/10.1.2.3")
    return RequestContext(ApiKey.HEARTBEAT, 4, 77, client_id, connection, None)


def test_a_request_becomes_a_span_that_ended_now() -> None:
    kept = Kept()
    before_ns = time.time_ns()
    traces(kept).request(context(HOSTILE), 0.25, ErrorCode.NOT_COORDINATOR, 99)
    (span,) = kept.spans
    assert (span.name, span.error) == ("heartbeat", "NOT_COORDINATOR")
    assert before_ns <= span.end_ns <= time.time_ns()
    assert span.end_ns - span.start_ns == 250_000_000
    found = dict(span.attributes)
    client_id = str(found.pop("messaging.client.id"))
    assert client_id.isprintable()
    assert len(client_id) <= 249
    assert found == {
        "messaging.system": "kafka",
        "network.peer.address": "10.1.2.3",
        "kafka.api.version": 4,
        "kafka.error.code": 16,
        "sluice.listener": "PLAINTEXT",
        "sluice.answer.bytes": 99,
        "error.type": "NOT_COORDINATOR",
    }


@pytest.mark.parametrize(("chance", "spans"), [(0.09, ["heartbeat", "commit"]), (0.1, [])])
def test_a_share_of_successful_requests_and_commits_has_spans(chance: float, spans: list[str]) -> None:
    kept = Kept()
    observed: list[tuple[int, int, float]] = []
    made = traces(kept, 0.1, chance)
    made.request(context(), 0.1, 0, 9)
    made.commits(lambda *commit: observed.append(commit))(3, 1000, 0.5)
    assert [span.name for span in kept.spans] == spans
    assert observed == [(3, 1000, 0.5)]


def test_a_failed_request_always_has_a_span() -> None:
    kept = Kept()
    traces(kept, 0.0).request(context(None), 0.1, 4711, 9)
    (span,) = kept.spans
    assert span.error == "4711"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def node(postgres: Databases, collector: Collector) -> Iterator[GatewayProcess]:
    with gateways(postgres) as factory:
        yield factory(
            environment={"SLUICE_OTLP_ENDPOINT": collector.url, "SLUICE_OTLP_HEADERS": "authorization=Bearer t"}
        )


def first(collector: Collector, fits: Callable[[Received], bool], what: str) -> Received:
    """Wait until the collector has a matching span, and return the first one."""
    return wait_for(lambda: list(filter(fits, list(collector.spans))), what, seconds=LATE_S)[0]


def test_a_producer_and_a_group_leave_spans_of_their_requests_commits_and_rebalance(
    node: GatewayProcess, collector: Collector
) -> None:
    producer = Producer({"bootstrap.servers": node.bootstrap, "client.id": "shop"})
    producer.produce("traced", b"record")
    assert producer.flush(60) == 0
    reading: dict[str, Any] = {"bootstrap.servers": node.bootstrap, "group.id": "billing", "client.id": "billing-1"}
    consumer = Consumer({**reading, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe(["traced"])
        wait_for(lambda: consumer.poll(1), "the record arrives", seconds=LATE_S)
        rebalance = first(collector, lambda span: span.name == "rebalance", "a span of the rebalance")
    finally:
        close(consumer)
    produce = first(collector, lambda span: span.name == "produce", "a span of the produce request")
    commit = first(collector, lambda span: span.name == "commit", "a span of the commit")
    assert produce.attributes["messaging.client.id"] == "shop"
    assert produce.attributes["network.peer.address"] == "127.0.0.1"
    assert produce.attributes["kafka.error.code"] == 0
    assert cast(int, produce.attributes["sluice.answer.bytes"]) > 0
    assert produce.error is None
    assert produce.start_ns <= commit.start_ns <= commit.end_ns <= produce.end_ns
    assert commit.attributes["sluice.commit.batches"] == 1
    assert commit.attributes["db.system.name"] == "postgresql"
    assert rebalance.attributes["messaging.consumer.group.name"] == "billing"
    assert rebalance.attributes["sluice.group.members"] == 1
    assert rebalance.start_ns < rebalance.end_ns
    assert {span.resource["service.instance.id"] for span in collector.spans} == {node.bootstrap}
    assert {headers["authorization"] for _, headers in collector.requests} == {"Bearer t"}


async def test_a_refused_request_leaves_a_span_with_the_error(node: GatewayProcess, collector: Collector) -> None:
    async with await WireClient.connect(node.bootstrap, client_id="stranger") as client:
        answer = await client.send(HeartbeatRequest(group_id="nobody", generation_id=1, member_id="m"), 4)
    error = ErrorCode(answer.error_code).name
    assert answer.error_code
    found = first(
        collector,
        lambda span: (span.name, span.attributes.get("messaging.client.id")) == ("heartbeat", "stranger"),
        "a span of the heartbeat",
    )
    assert (found.error, found.attributes["error.type"]) == (error, error)


def test_a_node_serves_without_its_collector_and_says_so_once(gateway_factory: GatewayFactory) -> None:
    (port,) = free_ports(1)
    node = gateway_factory(environment={"SLUICE_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
    producer = Producer({"bootstrap.servers": node.bootstrap})
    text = "the collector does not take traces"
    for number in range(3):
        producer.produce("untraced", b"record %d" % number)
        assert producer.flush(60) == 0
        wait_for(lambda: text in node.log_text(), "the line of the log", seconds=LATE_S)
    assert node.stop() == 0
    assert node.log_text().count(text) == 1
    assert "Traceback" not in node.log_text()
