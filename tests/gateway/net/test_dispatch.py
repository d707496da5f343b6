"""From frame to answer, with a test's own table of APIs: which stage responds to which error."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import threading
from typing import Any, cast

import pytest
import structlog.testing

from gateway.apis import SERVED
from gateway.building.services import Services
from gateway.net import coding, dispatch
from gateway.net.coding import AT_ONCE_ELEMENTS
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.net.dispatch import Dispatch, Handler, Served, Stages
from gateway.net.holdings import Holdings
from gateway.net.ids import MAX_ID_BYTES
from gateway.net.requests import Admission, Order, UnanswerableError
from gateway.operate.loggers import FINEST
from gateway.operate.logs import REQUEST
from gateway.operate.metrics import Metrics
from gateway.quotas.limits import EntityType, QuotaKey, Quotas
from gateway.quotas.throttles import Throttles
from protocol import codec
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, KafkaError, ProtocolError
from protocol.headers import RequestHeader, decode_response_header, encode_request_header
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from protocol.messages.delete_topics import DeleteTopicsRequest
from protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse
from protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from protocol.messages.list_groups import ListedGroup, ListGroupsRequest, ListGroupsResponse
from protocol.messages.metadata import MetadataRequest, MetadataResponse
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from protocol.messages.offset_fetch import OffsetFetchRequest
from protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from protocol.schema import message_schema
from storage.errors import StorageConflict, StorageError, StorageUnavailable

CONNECTION = ConnectionInfo("connection-1", "/127.0.0.1")


async def accept(request: object, context: RequestContext) -> object:
    return codec.response_class(context.api_key)()


def raising(error: Exception) -> Handler:
    async def handler(request: object, context: RequestContext) -> object:
        raise error

    return handler


def line(api_key: ApiKey, min_version: int, max_version: int, handler: Handler, **how: Any) -> Served:
    """Return a line of the table of APIs whose handler is the test's own. Its refusal and its order are those of the
    served API.
    """
    (own,) = [served for served in SERVED if served.api_key is api_key]
    changes = {"min_version": min_version, "max_version": max_version, "handler": handler, **how}
    return dataclasses.replace(own, **changes)


NO_STAGES = Stages()


class Table:
    def __init__(self, *served: Served, stages: Stages = NO_STAGES) -> None:
        self.metrics = Metrics()
        self.dispatch = Dispatch(served, cast(Services, None), self.metrics, stages)

    async def ask(self, request: Any, version: int, *, answered_in: int | None = None) -> Any:
        """Return the response to `request` sent as `version`. The response is decoded as `answered_in`, by default the
        same version.
        """
        schema = message_schema(type(request))
        key = int(schema.api_key)
        known = version in schema.versions
        body = b"".join(bytes(chunk) for chunk in codec.encode(request, version)) if known else b"\x07rubbish"
        chunks = await self.ask_bytes(encode_request_header(RequestHeader(key, version, 77, "client")) + body)
        answer = b"".join(bytes(chunk) for chunk in chunks)
        assert struct.unpack_from(">i", answer)[0] == len(answer) - 4, "the length covers all that follows"
        read_as = version if answered_in is None else answered_in
        correlation_id, position = decode_response_header(key, read_as, answer[4:])
        assert correlation_id == 77
        response, end = codec.decode(codec.response_class(key), read_as, answer[4:], position)
        assert end == len(answer) - 4
        return response

    async def ask_bytes(self, frame: bytes) -> list[Buffer]:
        return list(await self.dispatch.handle(frame, CONNECTION))

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"sluice_{name}_total", labels) or 0.0


HEARTBEAT = line(ApiKey.HEARTBEAT, 0, 4, accept)


async def test_request_is_logged_if_its_logger_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(HEARTBEAT)
    with structlog.testing.capture_logs() as lines:
        await table.ask(HeartbeatRequest(group_id="g", generation_id=3, member_id="m"), 4)
        assert lines == []
        monkeypatch.setattr(FINEST, "is_debug", True)
        await table.ask(HeartbeatRequest(group_id="secret", generation_id=3, member_id="m"), 4)
    (line,) = lines
    assert line.pop("took_ms") > 0
    assert line == {
        "event": "request answered",
        "log_level": "debug",
        "version": 4,
        "client_id": "client",
        "principal": "User:ANONYMOUS",
        "listener": "PLAINTEXT",
        "error_code": 0,
        "answer_bytes": 16,
    }


async def test_answered_and_refused_requests_are_reported_to_the_stage_of_traces() -> None:
    seen: list[tuple[RequestContext, float, int, int]] = []
    stages = Stages(trace=lambda *finished: seen.append(finished))
    request = HeartbeatRequest(group_id="g", generation_id=3, member_id="m")
    await Table(HEARTBEAT, stages=stages).ask(request, 4)
    refusing = line(ApiKey.HEARTBEAT, 0, 4, raising(KafkaError(ErrorCode.NOT_COORDINATOR)))
    await Table(refusing, stages=stages).ask(request, 4)
    for context, took_s, _, answer_bytes in seen:
        assert (context.api_key, context.version, context.client_id) == (ApiKey.HEARTBEAT, 4, "client")
        assert took_s > 0
        assert answer_bytes == 16
    assert [code for _, _, code, _ in seen] == [0, ErrorCode.NOT_COORDINATOR]


async def test_handler_receives_the_request_and_its_client() -> None:
    seen: list[tuple[object, RequestContext, object]] = []

    async def heartbeat(request: HeartbeatRequest, context: RequestContext) -> HeartbeatResponse:
        seen.append((request, context, REQUEST.get()))
        return HeartbeatResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)

    table = Table(line(ApiKey.HEARTBEAT, 0, 4, heartbeat))
    request = HeartbeatRequest(group_id="g", generation_id=3, member_id="m")
    response = await table.ask(request, 4)
    assert response.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    ((received, context, logged),) = seen
    assert received == request
    assert (context.api_key, context.version, context.correlation_id, context.client_id) == (12, 4, 77, "client")
    assert context.connection is CONNECTION
    assert logged == ("connection-1", "heartbeat", 77)
    assert table.count("requests", api="heartbeat", version="4", error="REBALANCE_IN_PROGRESS") == 1


async def test_a_request_of_more_elements_than_its_api_takes_is_refused() -> None:
    request = DeleteTopicsRequest(topic_names=tuple(f"t{number}" for number in range(3_000)), timeout_ms=1)
    table = Table(line(ApiKey.DELETE_TOPICS, 1, 6, accept, max_elements=3_000))
    assert (await table.ask(request, 4)).responses == ()
    table = Table(line(ApiKey.DELETE_TOPICS, 1, 6, accept, max_elements=2_999))
    response = await table.ask(request, 4)
    assert [(each.name, each.error_code) for each in response.responses] == [
        (name, ErrorCode.POLICY_VIOLATION) for name in request.topic_names
    ]


@pytest.mark.parametrize(
    ("count", "error"), [(5_000, ErrorCode.NONE), (5_001, ErrorCode.POLICY_VIOLATION)], ids=["most", "more"]
)
async def test_a_member_of_a_share_group_subscribes_to_so_many_topics(count: int, error: ErrorCode) -> None:
    request = ShareGroupHeartbeatRequest(
        group_id="s",
        member_id="m",
        member_epoch=0,
        subscribed_topic_names=tuple(f"t{number}" for number in range(count)),
    )
    response = await Table(line(ApiKey.SHARE_GROUP_HEARTBEAT, 1, 1, accept)).ask(request, 1)
    assert response.error_code == error


@pytest.mark.parametrize("count", [AT_ONCE_ELEMENTS, AT_ONCE_ELEMENTS + 1])
async def test_only_a_request_of_many_elements_is_decoded_in_a_thread(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded_in: list[threading.Thread] = []

    def decode(*arguments: Any, **how: Any) -> Any:
        request = codec.decode_request(*arguments, **how)
        decoded_in.append(threading.current_thread())
        return request

    monkeypatch.setattr(dispatch, "decode_request", decode)
    monkeypatch.setattr(coding, "decode_request", decode)
    request = DeleteTopicsRequest(topic_names=tuple(f"t{number}" for number in range(count)), timeout_ms=1)
    await Table(line(ApiKey.DELETE_TOPICS, 1, 6, accept)).ask(request, 4)
    (thread,) = decoded_in
    assert (thread is threading.main_thread()) == (count <= AT_ONCE_ELEMENTS)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", None),
        (b"\x00", None),
        (struct.pack(">hhih", 9999, 0, 1, -1), "unknown_api"),
        (struct.pack(">hhih", ApiKey.DESCRIBE_ACLS, 0, 1, -1), "unserved_api"),
        (struct.pack(">hhih", 12, 4, 1, 300), None),
        (struct.pack(">hhih", 12, 0, 1, -1) + b"\x00", None),
    ],
)
async def test_invalid_request_closes_the_connection(frame: bytes, reason: str | None) -> None:
    with pytest.raises(ProtocolError) as raised:
        await Table(HEARTBEAT).ask_bytes(frame)
    if reason is not None:
        assert isinstance(raised.value, UnanswerableError)
        assert raised.value.reason == reason


async def test_only_produce_may_be_larger_than_eight_mebibytes() -> None:
    """Decoding a request that consists of many small elements takes many times its size."""
    table = Table(HEARTBEAT, line(ApiKey.PRODUCE, 3, 13, accept))
    with pytest.raises(UnanswerableError) as raised:
        await table.ask_bytes(struct.pack(">hhih", 12, 0, 1, -1) + bytes(8 * 1024 * 1024))
    assert raised.value.reason == "request_size"
    records = PartitionProduceData(index=0, records=bytes(9 * 1024 * 1024))
    request = ProduceRequest(acks=-1, topic_data=(TopicProduceData(name="t", partition_data=(records,)),))
    assert isinstance(await table.ask(request, 9), ProduceResponse)


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [5, 99, 32767, -1])
async def test_api_versions_of_an_unknown_version_is_answered_in_v0_with_the_list(version: int) -> None:
    table = Table(line(ApiKey.API_VERSIONS, 0, 4, accept), line(ApiKey.PRODUCE, 3, 13, accept, advertised_min=0))
    response: ApiVersionsResponse = await table.ask(ApiVersionsRequest(), version, answered_in=0)
    assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    ranges = {entry.api_key: (entry.min_version, entry.max_version) for entry in response.api_keys}
    assert ranges == {18: (0, 4), 0: (0, 13)}
    assert table.count("unsupported_versions", api="api_versions") == 1


@pytest.mark.parametrize(("version", "answered_in"), [(5, 4), (1, 2)])
async def test_unserved_version_is_answered_in_the_nearest_served_one(version: int, answered_in: int) -> None:
    table = Table(line(ApiKey.HEARTBEAT, 2, 4, accept))
    response = await table.ask(HeartbeatRequest(), version, answered_in=answered_in)
    assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert table.count("unsupported_versions", api="heartbeat") == 1


@pytest.mark.parametrize(
    ("served", "request_type", "version"),
    [
        (line(ApiKey.PRODUCE, 3, 13, accept, advertised_min=0), ProduceRequest, 2),
        (line(ApiKey.OFFSET_FETCH, 1, 10, accept), OffsetFetchRequest, 11),
        (line(ApiKey.METADATA, 0, 12, accept), MetadataRequest, 13),
    ],
)
async def test_an_unserved_version_without_a_place_for_the_code_closes(
    served: Served, request_type: type[Any], version: int
) -> None:
    with pytest.raises(UnanswerableError) as raised:
        await Table(served).ask(request_type(), version)
    assert raised.value.reason == "unsupported_version"


async def test_unserved_version_of_a_forwarded_request_closes() -> None:
    """The node that forwards the request may be newer than this one. It then refuses the request in that version."""
    connection = ConnectionInfo("connection-2", "/127.0.0.1", shared=("all", 9092))
    asked = encode_request_header(RequestHeader(int(ApiKey.HEARTBEAT), 5, 1, "client"))
    with pytest.raises(UnanswerableError) as raised:
        await Table(HEARTBEAT).dispatch.handle(asked, connection)
    assert raised.value.reason == "unsupported_version"


# --- refusals, storage, bugs ------------------------------------------------------------------------------------------


async def test_a_refusal_is_answered_in_the_shape_of_the_api() -> None:
    table = Table(line(ApiKey.HEARTBEAT, 0, 4, raising(KafkaError(ErrorCode.UNKNOWN_MEMBER_ID))))
    assert (await table.ask(HeartbeatRequest(), 3)).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert table.count("requests", api="heartbeat", version="3", error="UNKNOWN_MEMBER_ID") == 1


@pytest.mark.parametrize(
    ("api_key", "request_type", "error", "code"),
    [
        (ApiKey.HEARTBEAT, HeartbeatRequest, StorageUnavailable("gone"), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ApiKey.HEARTBEAT, HeartbeatRequest, StorageConflict("fenced"), ErrorCode.NOT_COORDINATOR),
        (ApiKey.HEARTBEAT, HeartbeatRequest, StorageError("bug"), ErrorCode.UNKNOWN_SERVER_ERROR),
    ],
)
async def test_storage_errors_become_codes(
    api_key: ApiKey, request_type: type[Any], error: StorageError, code: ErrorCode
) -> None:
    table = Table(line(api_key, 0, 4, raising(error)))
    assert (await table.ask(request_type(), 4)).error_code == code
    assert table.count("storage_errors", api=api_key.name.lower()) == 1


async def test_a_bug_is_answered_and_counted() -> None:
    table = Table(line(ApiKey.HEARTBEAT, 0, 4, raising(ZeroDivisionError())))
    assert (await table.ask(HeartbeatRequest(), 4)).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert table.count("internal_errors", api="heartbeat") == 1
    assert table.count("requests", api="heartbeat", version="4", error="UNKNOWN_SERVER_ERROR") == 1


async def test_a_response_that_cannot_be_encoded_is_a_bug_that_is_answered() -> None:
    async def metadata(request: MetadataRequest, context: RequestContext) -> MetadataResponse:
        return MetadataResponse(controller_id=2**40)

    table = Table(line(ApiKey.METADATA, 0, 13, metadata))
    assert (await table.ask(MetadataRequest(), 13)).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert table.count("internal_errors", api="metadata") == 1


# --- produce without answer -------------------------------------------------------------------------------------------

RECORDS = (TopicProduceData(name="t", partition_data=(PartitionProduceData(index=3, records=b"batch"),)),)


async def test_produce_with_acks_0_has_no_answer() -> None:
    async def produce(request: ProduceRequest, context: RequestContext) -> ProduceResponse:
        return ProduceResponse()

    table = Table(line(ApiKey.PRODUCE, 3, 13, produce))
    header = encode_request_header(RequestHeader(0, 9, 1, None))
    body = b"".join(bytes(chunk) for chunk in codec.encode(ProduceRequest(acks=0, topic_data=RECORDS), 9))
    assert await table.ask_bytes(header + body) == []
    assert table.count("requests", api="produce", version="9", error="NONE") == 1


@pytest.mark.parametrize("error", [KafkaError(ErrorCode.INVALID_RECORD), StorageUnavailable("gone"), ValueError()])
async def test_a_refused_produce_with_acks_0_closes_the_connection(error: Exception) -> None:
    table = Table(line(ApiKey.PRODUCE, 3, 13, raising(error)))
    with pytest.raises(UnanswerableError) as raised:
        await table.ask(ProduceRequest(acks=0, topic_data=RECORDS), 9)
    assert raised.value.reason == "acks_0_refused"
    answered: ProduceResponse = await table.ask(ProduceRequest(acks=1, topic_data=RECORDS), 9)
    assert answered.responses[0].partition_responses[0].error_code != 0


async def test_a_handler_may_close_the_connection() -> None:
    table = Table(line(ApiKey.PRODUCE, 3, 13, raising(ProtocolError("refused"))))
    with pytest.raises(ProtocolError, match="refused"):
        await table.ask(ProduceRequest(acks=0, topic_data=RECORDS), 9)
    assert table.count("internal_errors", api="produce") == 0


# --- stages -----------------------------------------------------------------------------------------------------------


async def test_a_request_that_is_not_authorized_is_refused_in_its_shape_and_never_handled() -> None:
    async def authorize(request: object, context: RequestContext) -> None:
        assert str(context.connection.principal) == "User:ANONYMOUS"
        raise KafkaError(ErrorCode.GROUP_AUTHORIZATION_FAILED)

    table = Table(line(ApiKey.HEARTBEAT, 0, 4, raising(AssertionError())), stages=Stages(authorize=authorize))
    assert (await table.ask(HeartbeatRequest(), 4)).error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert table.count("internal_errors", api="heartbeat") == 0


async def test_produce_keeps_its_order_though_a_stage_before_it_is_slow() -> None:
    """A request takes its place when it arrives. The first request passes the slow stage last, and its records still
    enter the log first.
    """
    log: list[int] = []
    gates = [asyncio.Event() for _ in range(4)]

    async def authorize(request: object, context: RequestContext) -> None:
        assert isinstance(request, ProduceRequest)
        await gates[request.timeout_ms].wait()
        if request.timeout_ms == 2:
            raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)

    async def produce(request: ProduceRequest, context: RequestContext) -> ProduceResponse:
        async with context.place:
            log.append(request.timeout_ms)
        return ProduceResponse()

    table = Table(line(ApiKey.PRODUCE, 3, 13, produce), stages=Stages(authorize=authorize))
    connection = ConnectionInfo("c", "/127.0.0.1")
    header = encode_request_header(RequestHeader(0, 9, 1, None))
    running = [
        asyncio.create_task(
            table.dispatch.handle(header + b"".join(codec.encode(ProduceRequest(acks=1, timeout_ms=n), 9)), connection)
        )
        for n in range(4)
    ]
    for gate in reversed(gates):
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*running), 10)
    assert log == [0, 1, 3], "a refused one leaves its place to those behind it, and only to them"


async def test_a_throttled_request_is_answered_with_its_time_and_mutes_its_connection() -> None:
    table = Table(line(ApiKey.HEARTBEAT, 0, 4, accept), stages=Stages(throttle=lambda request, context: 700))
    connection = ConnectionInfo("c", "/127.0.0.1")
    header = encode_request_header(RequestHeader(12, 4, 1, None))
    before = asyncio.get_running_loop().time()
    (answer,) = await table.dispatch.handle(header + b"".join(codec.encode(HeartbeatRequest(), 4)), connection)
    _, position = decode_response_header(12, 4, bytes(answer)[4:])
    assert codec.decode(HeartbeatResponse, 4, bytes(answer)[4:], position)[0].throttle_time_ms == 700
    assert 0.69 < connection.muted_until_s - before < 5


@pytest.mark.parametrize("authorized", [True, False])
@pytest.mark.parametrize(
    "error", [KafkaError(ErrorCode.UNKNOWN_MEMBER_ID), StorageUnavailable("away"), KeyError("bug")]
)
async def test_work_on_a_request_that_fails_mutes_its_connection_too(error: Exception, authorized: bool) -> None:
    quotas = Quotas({frozenset({(EntityType.USER, "ANONYMOUS")}): {QuotaKey.REQUEST_PERCENTAGE: 1e-9}})

    async def authorize(request: object, context: RequestContext) -> None:
        if not authorized:
            raise error

    stages = Stages(authorize=authorize, charge=Throttles(lambda: quotas).around)
    handler = raising(error) if authorized else accept
    table = Table(line(ApiKey.HEARTBEAT, 0, 4, handler), stages=stages)
    connection = ConnectionInfo("c", "/127.0.0.1")
    header = encode_request_header(RequestHeader(12, 4, 1, None))
    (answer,) = await table.dispatch.handle(header + b"".join(codec.encode(HeartbeatRequest(), 4)), connection)
    _, position = decode_response_header(12, 4, bytes(answer)[4:])
    response = codec.decode(HeartbeatResponse, 4, bytes(answer)[4:], position)[0]
    assert response.error_code != ErrorCode.NONE
    assert response.throttle_time_ms == 1000
    assert connection.muted_until_s > 0


# --- admission --------------------------------------------------------------------------------------------------------


def test_order_of_a_request_follows_from_its_line() -> None:
    table = Table(HEARTBEAT, line(ApiKey.FETCH, 4, 18, accept))
    assert table.dispatch.admission(struct.pack(">hh", 1, 9)) == Admission(Order.PARKED, bulky=True)
    assert table.dispatch.admission(struct.pack(">hh", 12, 4)) == Admission(Order.PIPELINED)
    assert table.dispatch.admission(struct.pack(">hh", 9999, 4)) == Admission(Order.ALONE)
    assert table.dispatch.admission(b"\x00") == Admission(Order.ALONE)


def test_request_above_the_size_of_its_line_is_handled_alone() -> None:
    table = Table(line(ApiKey.OFFSET_COMMIT, 2, 10, accept, order=Order.PLACED, alone_above_bytes=100))
    head = struct.pack(">hh", ApiKey.OFFSET_COMMIT, 9)
    assert table.dispatch.admission(head.ljust(100, b"\x00")) == Admission(Order.PLACED)
    assert table.dispatch.admission(head.ljust(101, b"\x00")) == Admission(Order.ALONE)


# --- lengths ------------------------------------------------------------------------------------------------------


async def test_too_long_id_is_refused_before_the_handler_runs() -> None:
    asked: list[object] = []

    async def authorize(request: object, context: RequestContext) -> None:
        asked.append(request)

    table = Table(line(ApiKey.HEARTBEAT, 0, 4, raising(AssertionError())), stages=Stages(authorize=authorize))
    answer = await table.ask(HeartbeatRequest(group_id="g" * (MAX_ID_BYTES + 1)), 4)
    assert answer.error_code == ErrorCode.INVALID_GROUP_ID
    answer = await table.ask(HeartbeatRequest(group_id="g", member_id="m" * (MAX_ID_BYTES + 1)), 4)
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    assert not asked


async def test_a_client_id_that_is_too_long_is_refused() -> None:
    table = Table(HEARTBEAT)
    header = encode_request_header(RequestHeader(ApiKey.HEARTBEAT, 0, 77, "c" * (MAX_ID_BYTES + 1)))
    (answer,) = await table.ask_bytes(header + b"".join(codec.encode(HeartbeatRequest(group_id="g"), 0)))
    assert bytes(answer)[-2:] == ErrorCode.INVALID_REQUEST.to_bytes(2, "big")


LONG_KEYS = FindCoordinatorResponse(coordinators=tuple(Coordinator(key="k" * 32_000) for _ in range(100)))


async def test_an_answer_of_few_long_strings_is_encoded_in_a_thread_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holdings = Holdings(2**30)
    connection = ConnectionInfo("connection-2", "/127.0.0.1", holdings=holdings)
    seen: list[tuple[bool, int]] = []

    def encode_and_look(response: object, version: int) -> list[Buffer]:
        seen.append((threading.current_thread() is threading.main_thread(), holdings.held_bytes))
        return codec.encode_response(response, version)

    async def answer(request: object, context: RequestContext) -> object:
        return LONG_KEYS

    monkeypatch.setattr(coding, "encode_response", encode_and_look)
    table = Table(line(ApiKey.FIND_COORDINATOR, 0, 4, answer))
    header = encode_request_header(RequestHeader(ApiKey.FIND_COORDINATOR, 4, 77, "client"))
    body = b"".join(codec.encode(FindCoordinatorRequest(coordinator_keys=("k",)), 4))
    chunks = await table.dispatch.handle(header + body, connection)
    ((on_loop, held_bytes),) = seen
    assert not on_loop
    assert held_bytes >= sum(map(len, chunks)) - 100, "its room is taken before its bytes are made"
    assert holdings.held_bytes == 0, "the connection counts it from here on"


async def test_a_request_of_few_long_strings_is_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def decode_and_look(*given: Any, **how: Any) -> Any:
        threads.append(threading.current_thread())
        return codec.decode_request(*given, **how)

    monkeypatch.setattr(coding, "decode_request", decode_and_look)
    table = Table(line(ApiKey.FIND_COORDINATOR, 0, 4, accept))
    await table.ask(FindCoordinatorRequest(key_type=1, coordinator_keys=("k" * 32_000,) * 15), 4)
    assert not threads
    await table.ask(FindCoordinatorRequest(key_type=1, coordinator_keys=("k" * 32_000,) * 17), 4)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_an_answer_above_its_bound_is_refused_in_the_shape_of_its_api() -> None:
    group = ListedGroup(group_id="g" * 32_000)

    async def answer(request: object, context: RequestContext) -> object:
        return ListGroupsResponse(groups=(group,) * (coding.MAX_ANSWER_BYTES // 32_000 + 1))

    answered = await Table(line(ApiKey.LIST_GROUPS, 0, 5, answer)).ask(ListGroupsRequest(), 5)
    assert (answered.error_code, answered.groups) == (ErrorCode.POLICY_VIOLATION, ())


async def test_a_refusal_above_the_bound_closes_the_connection() -> None:
    def refuse(request: object, version: int, code: ErrorCode, message: str | None) -> object:
        return ListGroupsResponse(groups=(ListedGroup(group_id="g" * 32_000),) * 2_200)

    table = Table(line(ApiKey.LIST_GROUPS, 0, 5, raising(KafkaError(ErrorCode.INVALID_REQUEST)), refuse=refuse))
    with pytest.raises(UnanswerableError, match="list_groups refused"):
        await table.ask(ListGroupsRequest(), 5)


async def test_a_heavy_answer_waits_for_room_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings = Holdings(1_000)
    holdings.take(1_000)
    waiting = asyncio.create_task(coding.encode_in_thread(LONG_KEYS, 4, holdings))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    holdings.give_back(500)
    assert sum(map(len, await asyncio.wait_for(waiting, 10))) > 3_000_000
    assert holdings.held_bytes == 500
    holdings.take(500)
    monkeypatch.setattr(coding, "PATIENCE_S", 0.05)
    assert await asyncio.wait_for(coding.encode_in_thread(LONG_KEYS, 4, holdings), 10)


async def test_refusal_from_outside_names_every_element_of_a_long_request() -> None:
    """A commit of offsets cannot be forwarded, because its coordinator does not answer."""
    partitions = tuple(OffsetCommitRequestPartition(partition_index=each) for each in range(AT_ONCE_ELEMENTS + 1))
    request = OffsetCommitRequest(group_id="g", topics=(OffsetCommitRequestTopic(name="t", partitions=partitions),))
    frame = encode_request_header(RequestHeader(ApiKey.OFFSET_COMMIT, 9, 77, "client"))
    frame += b"".join(bytes(chunk) for chunk in codec.encode(request, 9))
    table = Table(line(ApiKey.OFFSET_COMMIT, 2, 9, accept))
    chunks = await table.dispatch.refuse(frame, ErrorCode.COORDINATOR_NOT_AVAILABLE, None)
    answer = b"".join(bytes(chunk) for chunk in chunks)[4:]
    _, position = decode_response_header(ApiKey.OFFSET_COMMIT, 9, answer)
    response, _ = codec.decode(OffsetCommitResponse, 9, answer, position)
    (topic,) = response.topics
    assert [(each.partition_index, each.error_code) for each in topic.partitions] == [
        (each, ErrorCode.COORDINATOR_NOT_AVAILABLE) for each in range(AT_ONCE_ELEMENTS + 1)
    ]
