"""Measure group traffic at frame level: heartbeats per second, and how long 500 members take to join one group.

Frames are encoded once and answers are counted, so that the client costs little of the two cores it shares with the
gateway.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from protocol import codec
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.headers import RequestHeader, decode_response_header, encode_request_header
from protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse

JOIN_VERSION, SYNC_VERSION, HEARTBEAT_VERSION = 9, 5, 4
MEMBER_ID_REQUIRED = ErrorCode.MEMBER_ID_REQUIRED
FRAME_HEAD_BYTES = 4 + 5
"""The length, and the response header v1 without tagged fields."""
CONNECTED_AT_ONCE = 500
METADATA = bytes.fromhex("0001000000010001740000000000000000")


def frame(api_key: ApiKey, version: int, correlation_id: int, request: object) -> bytes:
    header = encode_request_header(RequestHeader(api_key, version, correlation_id, "bench"))
    body = b"".join(bytes(chunk) for chunk in codec.encode(request, version))
    return struct.pack(">i", len(header) + len(body)) + header + body


@dataclass(slots=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        return cls(*await asyncio.open_connection(host, port, limit=16 * 1024 * 1024))

    async def receive(self, api_key: ApiKey, version: int, response: type) -> object:
        size = struct.unpack(">i", await self.reader.readexactly(4))[0]
        body = await self.reader.readexactly(size)
        _, position = decode_response_header(api_key, version, body)
        return codec.decode(response, version, body, position)[0]

    async def ask(self, api_key: ApiKey, version: int, request: object, response: type) -> object:
        self.writer.write(frame(api_key, version, 1, request))
        return await self.receive(api_key, version, response)


def join_request(group_id: str, member_id: str = "") -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group_id,
        session_timeout_ms=60_000,
        rebalance_timeout_ms=60_000,
        member_id=member_id,
        protocol_type="consumer",
        protocols=(JoinGroupRequestProtocol(name="range", metadata=METADATA),),
    )


async def join(connection: Connection, group_id: str, member_id: str = "") -> JoinGroupResponse:
    """Join in the two steps of KIP-394: first to receive an id, then with that id. The call waits until the join phase
    completes.
    """
    while True:
        request = join_request(group_id, member_id)
        answer = await connection.ask(ApiKey.JOIN_GROUP, JOIN_VERSION, request, JoinGroupResponse)
        assert isinstance(answer, JoinGroupResponse)
        if answer.error_code == 0:
            return answer
        if answer.error_code not in (MEMBER_ID_REQUIRED, ErrorCode.REBALANCE_IN_PROGRESS):
            raise RuntimeError(f"JoinGroup answered {answer.error_code}")
        member_id = answer.member_id


async def sync(connection: Connection, group_id: str, joined: JoinGroupResponse) -> SyncGroupResponse:
    assignments = ()
    if joined.leader == joined.member_id:
        assignments = tuple(
            SyncGroupRequestAssignment(member_id=member.member_id, assignment=METADATA) for member in joined.members
        )
    answer = await connection.ask(
        ApiKey.SYNC_GROUP,
        SYNC_VERSION,
        SyncGroupRequest(
            group_id=group_id,
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=assignments,
        ),
        SyncGroupResponse,
    )
    assert isinstance(answer, SyncGroupResponse)
    return answer


async def join_wave(host: str, port: int, members: int) -> float:
    """Return the seconds from the last member's JoinGroup until all members hold their assignment of one generation.

    Members join an existing group whose leader holds the join phase open until all have joined. Every member but the
    last is parked first, so the time measured is that of completion, answers and the sync round.
    """
    group_id = f"bench-wave-{time.time_ns()}"
    connections = [await Connection.open(host, port) for _ in range(members)]
    leader = await join(connections[0], group_id)
    await sync(connections[0], group_id, leader)
    ids: list[str] = []
    for connection in connections[1:]:
        answer = await connection.ask(ApiKey.JOIN_GROUP, JOIN_VERSION, join_request(group_id), JoinGroupResponse)
        assert isinstance(answer, JoinGroupResponse)
        if answer.error_code != MEMBER_ID_REQUIRED:
            raise RuntimeError(f"JoinGroup answered {answer.error_code}")
        ids.append(answer.member_id)

    async def settle(connection: Connection, member_id: str) -> int:
        connection.writer.write(frame(ApiKey.JOIN_GROUP, JOIN_VERSION, 1, join_request(group_id, member_id)))
        joined = await connection.receive(ApiKey.JOIN_GROUP, JOIN_VERSION, JoinGroupResponse)
        assert isinstance(joined, JoinGroupResponse)
        if joined.error_code:
            raise RuntimeError(f"JoinGroup answered {joined.error_code}")
        synced = await sync(connection, group_id, joined)
        if synced.error_code or not synced.assignment:
            raise RuntimeError(f"SyncGroup answered {synced.error_code}")
        return joined.generation_id

    waiting = [asyncio.create_task(settle(*pair)) for pair in zip(connections[2:], ids[1:], strict=True)]
    waiting.append(asyncio.create_task(settle(connections[1], ids[0])))
    await asyncio.sleep(0)
    first = asyncio.create_task(rejoin(connections[0], group_id, leader.member_id))
    started = time.perf_counter()
    generations = await asyncio.gather(*waiting, first)
    elapsed = time.perf_counter() - started
    if len(set(generations)) != 1:
        raise RuntimeError(f"members ended in different generations {set(generations)}")
    for connection in connections:
        connection.writer.close()
    return elapsed


@dataclass(frozen=True, slots=True)
class Crowd:
    seconds: float
    refused: int
    """Number of answers that sent a client to another node, for example after a lease had lapsed. The client then tried
    there.
    """


async def crowd(host: str, port: int, groups: int) -> Crowd:
    """Return the seconds until `groups` groups of one member each are stable, if all join at once, as after an outage.

    Each member has a connection of its own and tries again if it is refused, as clients do.
    """
    name = f"bench-crowd-{time.time_ns()}"
    connections: list[Connection] = []
    for begin in range(0, groups, CONNECTED_AT_ONCE):
        count = min(CONNECTED_AT_ONCE, groups - begin)
        connections += await asyncio.gather(*(Connection.open(host, port) for _ in range(count)))
    refused = 0

    async def settle(connection: Connection, group_id: str) -> None:
        nonlocal refused
        while True:
            try:
                synced = await sync(connection, group_id, await join(connection, group_id))
            except RuntimeError:
                refused += 1
            else:
                if synced.error_code == 0:
                    return
                refused += 1
            await asyncio.sleep(0.1)

    started = time.perf_counter()
    await asyncio.gather(*(settle(each, f"{name}-{index}") for index, each in enumerate(connections)))
    elapsed = time.perf_counter() - started
    for connection in connections:
        connection.writer.close()
    return Crowd(elapsed, refused)


async def rejoin(connection: Connection, group_id: str, member_id: str) -> int:
    joined = await join(connection, group_id, member_id)
    await sync(connection, group_id, joined)
    return joined.generation_id


@dataclass(frozen=True, slots=True)
class Rate:
    requests: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


class Counter(asyncio.Protocol):
    """Keeps `window` copies of one request in flight and counts answers of a known size."""

    def __init__(self, request: bytes, answer_bytes: int, window: int) -> None:
        self.request, self.answer_bytes, self.window = request, answer_bytes, window
        self.received = 0
        self.answered = 0
        self.running = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def start(self) -> None:
        assert self.transport is not None
        self.running = True
        self.transport.write(self.request * self.window)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        answered = self.received // self.answer_bytes
        fresh, self.answered = answered - self.answered, answered
        if self.running and fresh and self.transport is not None:
            self.transport.write(self.request * fresh)


async def heartbeats(
    host: str, port: int, *, connections: int, window: int, seconds: float, groups: Sequence[str] = ()
) -> Rate:
    """Return the heartbeats answered per second, of `connections` members of as many groups, with `window` requests in
    flight on each.

    If the node is one of several, `groups` must name groups that this node coordinates.
    """
    loop = asyncio.get_running_loop()
    counters: list[Counter] = []
    keepers: list[Connection] = []
    for index in range(connections):
        keeper = await Connection.open(host, port)
        keepers.append(keeper)
        group_id = groups[index] if groups else f"bench-heartbeat-{index}-{time.time_ns()}"
        joined = await join(keeper, group_id)
        await sync(keeper, group_id, joined)
        request = frame(
            ApiKey.HEARTBEAT,
            HEARTBEAT_VERSION,
            7,
            HeartbeatRequest(group_id=group_id, generation_id=joined.generation_id, member_id=joined.member_id),
        )
        body = b"".join(bytes(chunk) for chunk in codec.encode(HeartbeatResponse(), HEARTBEAT_VERSION))
        make_counter = partial(Counter, request, FRAME_HEAD_BYTES + len(body), window)
        _, counter = await loop.create_connection(make_counter, host, port)
        counters.append(counter)
    for counter in counters:
        counter.start()
    await asyncio.sleep(0.5)
    before, started = sum(counter.answered for counter in counters), time.perf_counter()
    await asyncio.sleep(seconds)
    requests, elapsed = sum(counter.answered for counter in counters) - before, time.perf_counter() - started
    for counter in counters:
        counter.running = False
        assert counter.transport is not None
        counter.transport.close()
    for keeper in keepers:
        keeper.writer.close()
    return Rate(requests, elapsed)
