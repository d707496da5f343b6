"""A node forwards the requests of a client to another node, which believes only nodes of its own database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import structlog.testing

from gateway.net.connection import ConnectionLimits
from gateway.net.context import ConnectionInfo, Principal
from gateway.net.forwarding import Forwarder, Part, Several, Whole
from gateway.net.holdings import Holdings
from gateway.net.node_proof import CLAIM, HELLO, NODE_KEY, NONCE_BYTES, WELCOME, NodeDoor, NodeGuard, derive_key
from gateway.net.requests import Admission, Order
from gateway.net.server import Server
from gateway.net.upstream import Called
from gateway.operate.metrics import Metrics
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, KafkaError, ProtocolError
from protocol.framing import Frame
from storage.types import Node, NodeId
from tests.gateway.net.words import framed
from tests.steps.waiting import until
from tests.wire import read_frame

KEY = derive_key(b"secret")
THERE = NodeId(7)
ORDERS = {
    int(ApiKey.JOIN_GROUP): Order.PARKED,
    int(ApiKey.HEARTBEAT): Order.PIPELINED,
}


def request(api_key: ApiKey, correlation_id: int, text: bytes) -> bytes:
    return struct.pack(">hhi", api_key, 0, correlation_id) + text


class Echo:
    """Answers each request with its own text. A request whose text has a gate waits for it."""

    def __init__(self) -> None:
        self.served: list[tuple[bytes, ConnectionInfo]] = []
        self.arrival = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gates: dict[bytes, asyncio.Event] = {}

    def admission(self, frame: Frame) -> Admission:
        return Admission(ORDERS.get(frame[0] << 8 | frame[1], Order.ALONE))

    async def handle(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        if len(frame) < 8:
            raise ProtocolError("torn")
        text = bytes(frame[8:])
        self.served.append((text, connection))
        self.arrival.set()
        try:
            if text in self.gates:
                await self.gates[text].wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return (framed(bytes(frame[4:8]) + text),)

    async def refuse(self, frame: Frame, code: ErrorCode, message: str | None) -> Sequence[Buffer]:
        assert message
        return (framed(bytes(frame[4:8]) + code.name.encode()),)

    async def serves(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.served) < count:
                self.arrival.clear()
                await self.arrival.wait()


class ToNode:
    """Routes every request to one node."""

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.refreshed = 0
        self.only_if_awaited = False
        self.several: Several | None = None

    def route(self, frame: Frame) -> Whole | Several:
        if self.several is not None:
            return self.several
        return Whole(self.node, ("group",))

    def outlives_client(self, frame: Frame) -> bool:
        return not self.only_if_awaited or frame[1] == ApiKey.LEAVE_GROUP

    async def refresh(self, group_ids: Sequence[str]) -> None:
        self.refreshed += 1


class TooLarge:
    """A request about two nodes, whose merged response is larger than any that is sent."""

    def __init__(self, node: Node | None) -> None:
        self.node = node

    async def parts(self, frame: Frame) -> list[Part]:
        return [Part(self.node, frame), Part(None, frame)]

    async def merged(self, frame: Frame, answers: Sequence[bytes], holdings: Holdings) -> Sequence[Buffer]:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "The answer would be too large.")


@dataclass
class Served:
    """A server, and the ids of its ended connections."""

    server: Server
    metrics: Metrics
    port: int
    ended: dict[str, bool] = field(default_factory=dict[str, bool])
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    def closed(self, connection_id: str, by_peer: bool) -> None:
        self.ended[connection_id] = by_peer
        self.ending.set()

    def refused(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("sluice_protocol_errors_total", {"reason": reason}) or 0.0


@contextlib.asynccontextmanager
async def served(
    requests: Echo | NodeDoor | Forwarder, guard: Callable[[], NodeGuard] | None = None
) -> AsyncIterator[Served]:
    metrics = Metrics()
    made = Served(Server(metrics, ConnectionLimits()), metrics, 0)
    made.port = await made.server.bind("127.0.0.1", 0, "NODES")
    await made.server.serve(
        requests, made.closed, guards={} if guard is None else {"NODES": guard}, shared={"NODES": ("all", 9092)}
    )
    try:
        yield made
    finally:
        await made.server.close()


@dataclass
class Two:
    """A node that forwards all requests to another one."""

    here: Served
    there: Served
    echo: Echo
    """Requests that the called node has served."""
    router: ToNode
    forwarder: Forwarder

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.here.port)
        try:
            yield reader, writer
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def two(key: bytes = KEY, node_id: int = THERE, *, guarded: bool = False) -> AsyncIterator[Two]:
    echo = Echo()
    door = NodeDoor(echo, KEY, lambda: THERE)
    guard = (lambda: NodeGuard(door, Strict())) if guarded else None
    async with served(door, guard) as there:
        node = Node(NodeId(node_id), {"NODES": ("127.0.0.1", there.port)})
        router = ToNode(node)
        forwarder = Forwarder(
            Echo(), router, lambda called: Called(called, called.listeners["NODES"], key, None), Metrics()
        )
        async with served(forwarder) as here:
            yield Two(here, there, echo, router, forwarder)


class Strict:
    """A guard that no client passes."""

    max_request_bytes = 1000

    def __init__(self) -> None:
        self.passed: Callable[[], None] = lambda: None

    def admission(self, frame: Frame) -> Admission:
        return Admission()

    async def handle(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        raise ProtocolError("not authenticated")


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(read_frame(reader), 10)


@pytest.mark.parametrize("guarded", [False, True])
async def test_client_is_stated_with_the_proof(guarded: bool) -> None:
    client = ConnectionInfo("id", "/10.1.2.3", "CLIENTS", Principal("alice", by_token=True), shared=("all", 9092))
    client.client_software_name, client.client_software_version = "client", "1"
    async with two(guarded=guarded) as both:
        chunks = await both.forwarder.handle(request(ApiKey.HEARTBEAT, 1, b"a"), client)
        assert b"".join(chunks) == framed(b"\0\0\0\1a")
        ((_, seen),) = both.echo.served
        assert (seen.client_host, seen.listener, seen.shared) == ("/10.1.2.3", "CLIENTS", ("all", 9092))
        assert (str(seen.principal), seen.principal.by_token) == ("User:alice", True)
        assert (seen.client_software_name, seen.client_software_version) == ("client", "1")
        assert seen.connection_id != client.connection_id
        client.lose_peer()


async def test_proof_longer_than_a_clients_first_requests_is_accepted() -> None:
    """`sasl.server.max.receive.size` bounds what clients send before they have authenticated."""
    client = ConnectionInfo("id", "/10.1.2.3", principal=Principal("a" * Strict.max_request_bytes))
    async with two(guarded=True) as both:
        chunks = await both.forwarder.handle(request(ApiKey.HEARTBEAT, 1, b"a"), client)
        assert b"".join(chunks) == framed(b"\0\0\0\1a")
        client.lose_peer()


async def test_requests_of_one_client_keep_their_order() -> None:
    """The first requests are sent before the connection to the other node exists."""
    async with two() as both, both.client() as (reader, writer):
        writer.write(framed(*(request(ApiKey.HEARTBEAT, number, b"%d" % number) for number in range(50))))
        for number in range(50):
            assert await answer(reader) == struct.pack(">i", number) + b"%d" % number
        assert [text for text, _ in both.echo.served] == [b"%d" % number for number in range(50)]
        assert len({seen.connection_id for _, seen in both.echo.served}) == 1


async def test_two_clients_have_two_connections() -> None:
    async with two() as both, both.client() as one, both.client() as other:
        for reader, writer in (one, other):
            writer.write(framed(request(ApiKey.HEARTBEAT, 1, b"a")))
            await answer(reader)
        assert len({seen.connection_id for _, seen in both.echo.served}) == 2


async def test_called_node_learns_that_the_client_has_gone() -> None:
    async with two() as both:
        both.echo.gates[b"parked"] = asyncio.Event()
        async with both.client() as (_, writer):
            writer.write(framed(request(ApiKey.JOIN_GROUP, 1, b"parked")))
            await both.echo.serves(1)
        await asyncio.wait_for(both.echo.cancelled.wait(), 10)
        await asyncio.wait_for(both.there.ending.wait(), 10)
        ((_, seen),) = both.echo.served
        assert both.there.ended == {seen.connection_id: True}
        assert both.forwarder.upstreams == 0


class Silent:
    """A node that proves itself, receives one request and then reads nothing more, as a frozen or muting node does."""

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self.closing = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        door, info = NodeDoor(Echo(), KEY, lambda: THERE), ConnectionInfo("id", "/127.0.0.1")
        for _ in range(2):
            writer.writelines(await door.handle(await read_frame(reader), info))
        await read_frame(reader)
        self.received.set()
        await self.closing.wait()
        writer.close()


async def test_node_that_reads_nothing_costs_no_memory_for_clients_that_have_gone() -> None:
    """The requests that wait to be sent would count towards no limit."""
    silent = Silent()
    server = await asyncio.start_server(silent.serve, "127.0.0.1", 0)
    async with two() as both:
        both.router.node = Node(THERE, {"NODES": ("127.0.0.1", server.sockets[0].getsockname()[1])})
        async with both.client() as (_, writer):
            writer.write(framed(request(ApiKey.JOIN_GROUP, 1, b"a"), request(ApiKey.JOIN_GROUP, 2, bytes(8_000_000))))
            await asyncio.wait_for(silent.received.wait(), 10)
            (connection,) = both.here.server.connections
            await until(lambda: connection.in_flight == 2, "both requests are sent", seconds=10)
        await until(lambda: both.forwarder.upstreams == 0, "no connection is left", seconds=10)
    silent.closing.set()
    server.close()


@pytest.mark.parametrize("reset", [False, True])
async def test_request_before_the_end_is_finished(reset: bool) -> None:
    """A consumer sends LeaveGroup and closes its connection at once."""
    async with two() as both:
        both.echo.gates[b"first"] = asyncio.Event()
        async with both.client() as (_, writer):
            writer.write(framed(request(ApiKey.LEAVE_GROUP, 1, b"first"), request(ApiKey.LEAVE_GROUP, 2, b"second")))
            await both.echo.serves(1)
            (connection,) = both.here.server.connections
            if reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
        await until(lambda: connection.info.peer_gone, "the node sees the end", seconds=10)
        both.echo.gates[b"first"].set()
        await both.echo.serves(2)
        assert [text for text, _ in both.echo.served] == [b"first", b"second"]
        await until(lambda: both.forwarder.upstreams == 0, "no connection is left", seconds=10)


async def test_requests_of_a_client_that_has_gone_share_a_connection() -> None:
    async with two() as both:
        both.echo.gates[b"first"] = asyncio.Event()
        async with both.client() as (_, writer):
            beats = [request(ApiKey.HEARTBEAT, number, b"beat") for number in range(50)]
            writer.write(framed(request(ApiKey.LEAVE_GROUP, 1, b"first"), *beats))
            await both.echo.serves(1)
            (connection,) = both.here.server.connections
        await until(lambda: connection.info.peer_gone, "the node sees the end", seconds=10)
        both.echo.gates[b"first"].set()
        await both.echo.serves(51)
        assert len({seen.connection_id for _, seen in both.echo.served}) == 2
        await until(lambda: both.forwarder.upstreams == 0, "no connection is left", seconds=10)


async def test_change_for_a_client_that_has_gone_is_not_forwarded() -> None:
    """A node that was frozen finds the end of the connection right behind the request. The client may have repeated the
    request through another node, and may have made later changes."""
    async with two() as both, both.client() as (reader, writer):
        both.router.only_if_awaited = True
        writer.write(framed(request(ApiKey.OFFSET_COMMIT, 1, b"awaited")))
        assert await answer(reader) == b"\0\0\0\1awaited"
        gone = socket.create_connection(("127.0.0.1", both.here.port))
        gone.sendall(framed(request(ApiKey.OFFSET_COMMIT, 1, b"stale"), request(ApiKey.END_TXN, 2, b"stale")))
        gone.close()
        await asyncio.wait_for(both.here.ending.wait(), 10)
        writer.write(framed(request(ApiKey.OFFSET_COMMIT, 2, b"later")))
        assert await answer(reader) == b"\0\0\0\2later"
        assert [text for text, _ in both.echo.served] == [b"awaited", b"later"]


async def test_client_gets_no_response_behind_a_request_that_was_skipped() -> None:
    """A client that has closed one direction may still read, and would take the response for that of the skipped
    request."""
    async with two() as both:
        both.router.only_if_awaited = True
        half = socket.create_connection(("127.0.0.1", both.here.port))
        half.sendall(framed(request(ApiKey.OFFSET_COMMIT, 1, b"skipped"), request(ApiKey.LEAVE_GROUP, 2, b"left")))
        half.shutdown(socket.SHUT_WR)
        reader, writer = await asyncio.open_connection(sock=half)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert [text for text, _ in both.echo.served] == [b"left"]


async def test_changes_of_one_client_keep_their_order() -> None:
    async with two() as both, both.client() as (reader, writer):
        both.router.only_if_awaited = True
        writer.write(framed(*(request(ApiKey.HEARTBEAT, number, b"%d" % number) for number in range(50))))
        for number in range(50):
            assert await answer(reader) == struct.pack(">i", number) + b"%d" % number
        assert [text for text, _ in both.echo.served] == [b"%d" % number for number in range(50)]


async def test_leave_does_not_overtake_the_join_before_it() -> None:
    """A client that closes while it joins sends both. If the leave came first, the join would add a member that has
    gone."""
    async with two() as both, both.client() as (reader, writer):
        both.router.only_if_awaited = True
        writer.write(framed(request(ApiKey.JOIN_GROUP, 1, b"join"), request(ApiKey.LEAVE_GROUP, 2, b"leave")))
        for text in (b"join", b"leave"):
            assert (await answer(reader))[4:] == text
        assert [text for text, _ in both.echo.served] == [b"join", b"leave"]


async def test_request_at_a_lost_node_gets_a_retriable_code() -> None:
    async with two() as both, both.client() as (reader, writer):
        both.echo.gates[b"slow"] = asyncio.Event()
        writer.write(framed(request(ApiKey.END_TXN, 1, b"slow")))
        await both.echo.serves(1)
        for connection in both.there.server.connections:
            connection.close()
        assert await answer(reader) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"
        assert both.router.refreshed == 1
        writer.write(framed(request(ApiKey.OFFSET_FETCH, 2, b"again")))
        assert await answer(reader) == b"\0\0\0\2again"


async def test_node_that_refuses_connections_is_no_hang() -> None:
    async with two() as both, both.client() as (reader, writer):
        await both.there.server.close()
        writer.write(framed(request(ApiKey.OFFSET_FETCH, 1, b"a"), request(ApiKey.INIT_PRODUCER_ID, 2, b"b")))
        assert await answer(reader) == b"\0\0\0\1NOT_COORDINATOR"
        assert await answer(reader) == b"\0\0\0\2COORDINATOR_LOAD_IN_PROGRESS"
        both.router.node = None
        writer.write(framed(request(ApiKey.HEARTBEAT, 3, b"c")))
        assert await answer(reader) == b"\0\0\0\3COORDINATOR_NOT_AVAILABLE"


async def test_node_that_is_no_longer_alive_is_dropped() -> None:
    async with two() as both, both.client() as (reader, writer):
        both.echo.gates[b"frozen"] = asyncio.Event()
        writer.write(framed(request(ApiKey.HEARTBEAT, 1, b"frozen")))
        await both.echo.serves(1)
        node = both.router.node
        assert node is not None
        both.forwarder.drop_gone([node])
        assert both.forwarder.upstreams == 1
        both.forwarder.drop_gone([Node(node.node_id, node.listeners, incarnation=node.incarnation + 1)])
        assert await answer(reader) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"


async def test_stopping_node_refuses_what_waits_elsewhere() -> None:
    async with two() as both, both.client() as (reader, writer):
        both.echo.gates[b"parked"] = both.echo.gates[b"slow"] = asyncio.Event()
        writer.write(framed(request(ApiKey.JOIN_GROUP, 1, b"parked"), request(ApiKey.HEARTBEAT, 2, b"slow")))
        await both.echo.serves(2)
        both.forwarder.drain()
        assert await answer(reader) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"
        both.echo.gates[b"slow"].set()
        assert await answer(reader) == b"\0\0\0\2slow"
        writer.write(framed(request(ApiKey.JOIN_GROUP, 3, b"parked later")))
        both.echo.gates[b"parked later"] = asyncio.Event()
        assert await answer(reader) == b"\0\0\0\3COORDINATOR_NOT_AVAILABLE"


@pytest.mark.parametrize("parked", [False, True])
async def test_client_of_a_stopping_node_is_not_taken_for_gone(parked: bool) -> None:
    """Its group would remove it, and rebalance, unless it returned soon through another node."""
    async with two() as both, both.client() as (reader, writer):
        writer.write(framed(request(ApiKey.HEARTBEAT, 1, b"a")))
        await answer(reader)
        if parked:
            both.echo.gates[b"parked"] = asyncio.Event()
            writer.write(framed(request(ApiKey.JOIN_GROUP, 2, b"parked")))
            await both.echo.serves(2)
        both.here.server.stop_reading()
        both.forwarder.drain()
        await both.here.server.close()
        await asyncio.wait_for(both.there.ending.wait(), 10)
        assert list(both.there.ended.values()) == [False]


@pytest.mark.parametrize(("code", "refreshed"), [(ErrorCode.NOT_COORDINATOR, 1), (ErrorCode.NONE, 0)])
async def test_refusal_of_a_former_coordinator_leads_to_a_look(code: ErrorCode, refreshed: int) -> None:
    async with two() as both, both.client() as (reader, writer):
        text = struct.pack(">ih", 0, code)
        writer.write(framed(request(ApiKey.HEARTBEAT, 1, text)))
        assert await answer(reader) == b"\0\0\0\1" + text
        assert both.router.refreshed == refreshed


async def test_merged_response_that_is_too_large_is_refused() -> None:
    async with two() as both, both.client() as (reader, writer):
        both.router.several = TooLarge(both.router.node)
        writer.write(framed(request(ApiKey.DESCRIBE_GROUPS, 1, b"a")))
        assert await answer(reader) == b"\0\0\0\1POLICY_VIOLATION"


async def test_response_that_waits_for_another_nodes_is_counted() -> None:
    text = bytes(100_000)
    async with two() as both, both.client() as (reader, writer):
        both.router.several = TooLarge(both.router.node)
        both.echo.gates[text] = asyncio.Event()
        writer.write(framed(request(ApiKey.DESCRIBE_GROUPS, 1, text)))
        await both.echo.serves(1)
        held = partial(both.here.metrics.registry.get_sample_value, "sluice_held_bytes")
        await until(held, "the response is counted", holds=lambda count: count and count > 2 * len(text), seconds=10)
        both.echo.gates[text].set()
        await answer(reader)
        await until(held, "nothing is held", holds=lambda count: not count, seconds=10)


# --- strangers --------------------------------------------------------------------------------------------------------


async def test_node_of_another_database_is_refused() -> None:
    async with two(key=derive_key(b"another secret")) as both, both.client() as (reader, writer):
        writer.write(framed(request(ApiKey.HEARTBEAT, 1, b"a")))
        assert await answer(reader) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"
        assert both.echo.served == []


async def test_address_that_leads_to_another_node_is_refused() -> None:
    async with two(node_id=8) as both, both.client() as (reader, writer):
        writer.write(framed(request(ApiKey.HEARTBEAT, 1, b"a")))
        assert await answer(reader) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"
        assert both.echo.served == []


async def test_impostor_gets_no_request() -> None:
    """A server that took a node's address accepts every proof. It must not receive what the client sends."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for response in (bytes(2 * NONCE_BYTES), WELCOME, b"\0\0\0\1a"):
                received.append(await read_frame(reader))
                writer.write(framed(response))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with two() as both, both.client() as (reader, writer):
        both.router.node = Node(THERE, {"NODES": ("127.0.0.1", server.sockets[0].getsockname()[1])})
        writer.write(framed(request(ApiKey.HEARTBEAT, 1, b"a")))
        assert await answer(reader) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"
    server.close()
    assert [frame[:3] for frame in received] == [NODE_KEY + HELLO]


async def test_impostor_cannot_answer_a_request_that_was_not_sent() -> None:
    """Correlation ids are small numbers, which a server at a former node's address can guess. It could confirm a commit
    of offsets that no node has seen."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await read_frame(reader)
            writer.write(framed(bytes(2 * NONCE_BYTES), b"\0\0\0\1committed"))
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with two() as both, both.client() as (reader, writer):
        both.router.node = Node(THERE, {"NODES": ("127.0.0.1", server.sockets[0].getsockname()[1])})
        writer.write(framed(request(ApiKey.OFFSET_COMMIT, 1, b"a")))
        assert await answer(reader) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"
    server.close()


class Tap:
    """Passes the bytes of one connection on to a node, and keeps those of the calling node. `change` may alter its
    frames."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = lambda frame: frame) -> None:
        self.port = port
        self.change = change
        self.frames: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frame = await read_frame(reader)
                self.frames.append(frame)
                to_there.write(framed(self.change(frame)))
                writer.write(framed(await read_frame(there)))
        writer.close()
        to_there.close()


async def tapped(both: Two, tap: Tap) -> bytes:
    """Send one request through the tap, and return its response."""
    server = await asyncio.start_server(tap.serve, "127.0.0.1", 0)
    assert both.router.node is not None
    both.router.node = Node(both.router.node.node_id, {"NODES": ("127.0.0.1", server.sockets[0].getsockname()[1])})
    async with both.client() as (reader, writer):
        writer.write(framed(request(ApiKey.HEARTBEAT, 1, b"a")))
        response = await answer(reader)
    server.close()
    return response


async def refused(both: Two, *frames: bytes) -> None:
    """Send frames to the called node. It must close the connection at the last one, and serve nothing."""
    before = len(both.echo.served)
    reader, writer = await asyncio.open_connection("127.0.0.1", both.there.port)
    for frame in frames[:-1]:
        writer.write(framed(frame))
        await answer(reader)
    writer.write(framed(frames[-1], request(ApiKey.HEARTBEAT, 1, b"stolen")))
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert len(both.echo.served) == before


@pytest.mark.parametrize("guarded", [False, True])
async def test_recorded_proof_is_worthless(guarded: bool) -> None:
    async with two(guarded=guarded) as both:
        tap = Tap(both.there.port)
        assert await tapped(both, tap) == b"\0\0\0\1a"
        hello, claim = tap.frames[:2]
        await refused(both, hello, claim)
        await refused(both, claim)
        await refused(both, hello, hello, claim)
        assert both.there.refused("node_proof") == 3


async def test_altered_statement_is_refused() -> None:
    def change(frame: bytes) -> bytes:
        return frame.replace(b'"ANONYMOUS"', b'"root"     ')

    async with two() as both:
        assert await tapped(both, Tap(both.there.port, change)) == b"\0\0\0\1COORDINATOR_NOT_AVAILABLE"
        assert both.echo.served == []
        assert both.there.refused("node_proof") == 1


@pytest.mark.parametrize("guarded", [False, True])
async def test_stranger_cannot_speak_for_a_client(guarded: bool) -> None:
    stated = json.dumps(
        {"principal": ["User", "root", False], "host": "/", "listener": "NODES", "shared": None, "software": ["", ""]}
    ).encode()
    nonce, hello = bytes(NONCE_BYTES), NODE_KEY + HELLO + bytes(NONCE_BYTES)
    async with two(guarded=guarded) as both:
        await refused(both, NODE_KEY)
        await refused(both, NODE_KEY + HELLO + b"short")
        await refused(both, NODE_KEY + b"\7" + nonce)
        await refused(both, hello, NODE_KEY + CLAIM)
        await refused(both, hello, NODE_KEY + CLAIM + bytes(32) + stated)
        # The answer to a hello proves the called node, and must not prove the caller.
        reader, writer = await asyncio.open_connection("127.0.0.1", both.there.port)
        writer.write(framed(hello))
        proof = (await answer(reader))[NONCE_BYTES:]
        writer.write(framed(NODE_KEY + CLAIM + proof + stated))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert both.echo.served == []


async def test_stranger_at_the_address_of_a_node_sends_no_more_than_a_proof() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">i", 100_000_000) + bytes(100_000))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with two() as both:
        both.router.node = Node(THERE, {"NODES": ("127.0.0.1", server.sockets[0].getsockname()[1])})
        client = ConnectionInfo("id", "/10.1.2.3")
        with structlog.testing.capture_logs() as lines:
            await both.forwarder.handle(request(ApiKey.HEARTBEAT, 1, b"a"), client)
    server.close()
    (line,) = lines
    assert "frame of 100000000 bytes, the limit is" in line["why"]


async def test_guarded_listener_serves_clients_as_before() -> None:
    """A hello does not open the listener, and a client without a proof meets the guard of clients."""
    async with two(guarded=True) as both:
        await refused(both, request(ApiKey.HEARTBEAT, 1, b"a"))
        await refused(both, NODE_KEY + HELLO + bytes(NONCE_BYTES), request(ApiKey.HEARTBEAT, 1, b"a"))
