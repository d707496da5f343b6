"""The connection over real sockets: order, back-pressure, limits and ends. Its requests are words
instead of Kafka's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.net.connection import MAX_BULKY_IN_FLIGHT, REQUEST_BYTES, Connection, ConnectionLimits
from gateway.net.holdings import SMALL_BYTES, TURNS, Holdings
from gateway.net.server import Tls
from protocol.framing import SCRATCH_BYTES
from tests.gateway.net.words import Accepted, Node, Peer, framed
from tests.secured import Authority


@contextlib.asynccontextmanager
async def node(most_from: Callable[[str], int] = lambda address: 1_000, **limits: Any) -> AsyncIterator[Node]:
    served = Node(ConnectionLimits(**limits))
    served.port = await served.server.bind("127.0.0.1", 0)
    await served.server.serve(served.words, served.connection_closed, most_from=most_from)
    try:
        yield served
    finally:
        await served.server.close()


# --- order ------------------------------------------------------------------------------------------------------------


async def test_answers_come_in_order_of_arrival_though_later_requests_finish_first() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"pwait:1", b"-echo:2", b"-echo:3")
        await served.words.until_started(3)
        assert served.words.started == [b"pwait:1", b"-echo:2", b"-echo:3"]
        assert served.words.finished == [b"-echo:2", b"-echo:3"], "a parked request holds up only answers"
        served.words.gate(b"pwait:1").set()
        assert await peer.answers(3) == [b"pwait:1", b"-echo:2", b"-echo:3"]


async def test_handlers_start_in_order_of_arrival_however_the_bytes_come() -> None:
    bodies = [b"-echo:%d" % index for index in range(2000)]
    async with node() as served:
        peer = await served.connect()
        peer.send(*bodies)
        assert await peer.answers(len(bodies)) == bodies
        assert served.words.started == bodies


async def test_a_frame_may_come_byte_by_byte() -> None:
    async with node() as served:
        peer = await served.connect()
        for byte in framed(b"-echo:a", b"-echo:b"):
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
            await asyncio.sleep(0)
        assert await peer.answers(2) == [b"-echo:a", b"-echo:b"]


async def test_a_large_frame_between_small_ones() -> None:
    large = b"-echo:" + bytes(3_000_000)
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-echo:1", large, b"-echo:2")
        assert await peer.answers(3) == [b"-echo:1", large[:40], b"-echo:2"]


async def test_a_request_without_answer_keeps_its_place() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"lwait:1", b"lsilent:2", b"lecho:3")
        await served.words.until_started(3)
        served.words.gate(b"lwait:1").set()
        assert await peer.answers(2) == [b"lwait:1", b"lecho:3"]


async def test_request_sees_effects_of_earlier_requests() -> None:
    """A pipelined JoinGroup starts when the OffsetCommit before it is done. Other connections do not wait."""
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-wait:commit", b"pwait:join", b"-echo:heartbeat")
        await served.words.until_started(1)
        await served.settle()
        assert [name for name in served.words.started if b"settle" not in name] == [b"-wait:commit"]
        served.words.gate(b"-wait:commit").set()
        assert await peer.answers(1) == [b"-wait:commit"]
        await asyncio.wait_for(served.words.until_started(4), 10)
        served.words.gate(b"pwait:join").set()
        assert await peer.answers(2) == [b"pwait:join", b"-echo:heartbeat"]


async def test_bulky_read_sees_earlier_requests_and_no_later_ones() -> None:
    """An OffsetFetch between two OffsetCommits sees the first and not the second."""
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-wait:before", b"rwait:fetch", b"-echo:after")
        await served.words.until_started(1)
        await served.settle()
        assert [name for name in served.words.started if b"settle" not in name] == [b"-wait:before"]
        served.words.gate(b"-wait:before").set()
        assert await peer.answer() == b"-wait:before"
        await served.settle()
        assert [name for name in served.words.started if b"settle" not in name] == [b"-wait:before", b"rwait:fetch"]
        served.words.gate(b"rwait:fetch").set()
        assert await peer.answers(2) == [b"rwait:fetch", b"-echo:after"]


async def test_pipelined_requests_start_beside_each_other_and_nothing_else_does() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"lwait:1", b"lecho:2", b"-echo:3")
        await served.words.until_started(2)
        await served.settle()
        assert [name for name in served.words.started if b"settle" not in name] == [b"lwait:1", b"lecho:2"]
        served.words.gate(b"lwait:1").set()
        assert await peer.answers(3) == [b"lwait:1", b"lecho:2", b"-echo:3"]


async def test_connections_do_not_delay_each_other() -> None:
    async with node() as served:
        first, second = await served.connect(), await served.connect()
        first.send(b"pwait:1", b"-echo:behind")
        await served.words.until_started(2)
        second.send(b"-echo:2")
        assert await second.answer() == b"-echo:2"


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 1001, 2**31 - 1])
async def test_a_frame_of_an_impossible_size_closes_the_connection(size: int) -> None:
    async with node(max_request_bytes=1000) as served:
        peer = await served.connect()
        peer.writer.write(struct.pack(">i", size))
        assert await peer.ended() == b""
        assert served.closed_for("frame_size") == 1
        assert await asyncio.wait_for(served.gone.get(), 10), "for the coordinator this is a client that failed"


async def test_only_so_many_requests_of_a_connection_are_in_work() -> None:
    async with node(max_in_flight=3) as served:
        peer = await served.connect()
        peer.send(*[b"pwait:%d" % index for index in range(5)])
        await served.words.until_started(3)
        other = await served.connect()
        other.send(b"-echo:other")
        await other.answer()
        assert served.words.started == [b"pwait:0", b"pwait:1", b"pwait:2", b"-echo:other"]
        for index in range(5):
            served.words.gate(b"pwait:%d" % index).set()
        assert await peer.answers(5) == [b"pwait:%d" % index for index in range(5)]


async def test_a_peer_that_does_not_read_its_answers_is_not_read_from() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(*[b"lbig:%04d" % index for index in range(60)])
        await served.words.until_started(60)
        await served.settle()
        peer.send(*[b"lbig:later %04d" % index for index in range(60)])
        await served.settle()
        assert len(served.finished_of(b"lbig")) == 60, "18 MB of answers wait already"
        for _ in range(120):
            assert len(await peer.answer()) == 300_000


async def test_unwritten_answers_count_against_the_bound_of_a_connection() -> None:
    async with node(max_held_bytes=1_000_000) as served:
        peer = await served.connect()
        peer.send(b"pwait:first", *[b"-big:%d" % index for index in range(4)])
        await served.words.until_started(5)
        await served.settle()
        peer.send(b"-echo:more")
        await served.settle()
        assert b"-echo:more" not in served.words.started, "1.2 MB of answers wait behind the parked one"
        served.words.gate(b"pwait:first").set()
        assert [len(answer) for answer in await peer.answers(6)] == [11, *[300_000] * 4, 10]


async def test_bulky_answers_are_made_as_fast_as_they_are_read() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(*[b"bbig:%04d" % index for index in range(400)])
        await served.words.until_started(1)
        await served.settle()
        assert len(served.finished_of(b"bbig")) < 200, "120 MB of answers for a peer that reads none"
        for _ in range(400):
            assert len(await peer.answer()) == 300_000


async def test_only_few_bulky_requests_of_a_connection_run_at_once() -> None:
    asked = MAX_BULKY_IN_FLIGHT + 2
    names = [b"bwait:%d" % index for index in range(asked)]
    async with node() as served:
        peer = await served.connect()
        peer.send(*names)
        await served.words.until_started(MAX_BULKY_IN_FLIGHT)
        other = await served.connect()
        other.send(b"-echo:other")
        await other.answer()
        assert len(served.words.started) == MAX_BULKY_IN_FLIGHT + 1
        for name in names:
            served.words.gate(name).set()
        assert await peer.answers(asked) == names


async def test_no_request_overtakes_one_that_is_held_back() -> None:
    bulky = [b"bwait:%d" % index for index in range(MAX_BULKY_IN_FLIGHT + 1)]
    async with node() as served:
        peer = await served.connect()
        peer.send(*bulky, b"-echo:last")
        await served.words.until_started(MAX_BULKY_IN_FLIGHT)
        await served.settle()
        assert b"-echo:last" not in served.words.started
        for name in bulky:
            served.words.gate(name).set()
        assert await peer.answers(len(bulky) + 1) == [*bulky, b"-echo:last"]
        assert [name for name in served.words.started if b"settle" not in name] == [*bulky, b"-echo:last"]


async def test_a_full_node_holds_back_large_requests_and_lets_small_ones_pass() -> None:
    first_large = b"-wait:first" + bytes(2 * SMALL_BYTES)
    second_large = b"-echo:second" + bytes(2 * SMALL_BYTES)
    async with node(max_node_bytes=SMALL_BYTES) as served:
        first, second, third = [await served.connect() for _ in range(3)]
        first.send(first_large)
        await served.words.until_started(1)
        second.send(second_large)
        for index in range(20):
            third.send(b"-echo:%d" % index)
            await third.answer()
        assert second_large[:40] not in served.words.started
        served.words.gate(first_large[:40]).set()
        assert await first.answer() == first_large[:40]
        assert await second.answer() == second_large[:40]


async def test_a_waiting_connection_that_ends_gives_up_its_turn() -> None:
    large = bytes(2 * SMALL_BYTES)
    async with node(max_node_bytes=SMALL_BYTES) as served:
        first, second, third = [await served.connect() for _ in range(3)]
        first.send(b"-wait:first" + large)
        await served.words.until_started(1)
        second.send(b"-echo:second" + large)
        await served.settle()
        third.send(b"-echo:third" + large)
        second.reset()
        await served.settle()
        served.words.gate((b"-wait:first" + large)[:40]).set()
        assert await third.answer() == (b"-echo:third" + large)[:40]
        assert await asyncio.wait_for(served.gone.get(), 10)
        assert len(served.finished_of(b"-echo:second")) == 1, "what was read of it is done all the same"


async def test_full_node_continues_one_large_frame_until_there_is_room() -> None:
    large = bytes(2 * SMALL_BYTES)
    async with node(max_node_bytes=SMALL_BYTES) as served:
        first, *others = [await served.connect() for _ in range(4)]
        first.send(b"-wait:first" + large)
        await served.words.until_started(1)
        whole = framed(b"-echo:other" + bytes(16 * SMALL_BYTES))
        for peer in others:
            peer.writer.write(whole[: len(whole) // 2])
        await served.settle()
        reading = [connection.is_reading for connection in served.server.connections]
        assert reading.count(False) == 2
        for peer in others:
            peer.writer.write(whole[len(whole) // 2 :])
        served.words.gate((b"-wait:first" + large)[:40]).set()
        for peer in others:
            assert await peer.answer() == whole[4:44]


async def test_full_node_gives_each_connection_a_small_share() -> None:
    """While storage is stopped, thousands of small frames are limited in the same way as large ones."""
    body = b"lwait:" + bytes(1000)
    limit, connections = 100_000, 20
    async with node(max_node_bytes=limit) as served:
        peers = [await served.connect() for _ in range(connections)]
        for peer in peers:
            peer.send(*[body] * 300)
        await served.until_held(limit)
        await served.settle()
        assert served.held_bytes < limit + connections * SMALL_BYTES + connections * len(body)
        served.words.gate(body[:40]).set()
        for peer in peers:
            assert len(await peer.answers(300)) == 300
        assert served.held_bytes == 0


@pytest.mark.parametrize(("held_bytes", "started"), [(SMALL_BYTES, 1), (2 * SMALL_BYTES, 0)])
async def test_a_full_node_starts_one_fetch_of_each_connection_until_it_is_overdrawn(
    held_bytes: int, started: int
) -> None:
    holding = b"-wait:first" + bytes(held_bytes)
    async with node(max_node_bytes=SMALL_BYTES) as served:
        first, second = [await served.connect() for _ in range(2)]
        first.send(holding)
        await served.words.until_started(1)
        second.send(b"bwait:one", b"bwait:two")
        await served.settle()
        fetches = [name for name in served.words.started if name.startswith(b"bwait")]
        assert fetches == [b"bwait:one", b"bwait:two"][:started]
        served.words.gate(holding[:40]).set()
        for name in (b"bwait:one", b"bwait:two"):
            served.words.gate(name).set()
        assert await second.answers(2) == [b"bwait:one", b"bwait:two"]


async def test_memory_for_handling_requests_counts_too() -> None:
    """Handling a thousand requests of two hundred bytes takes six megabytes."""
    async with node(max_node_bytes=10_000_000) as served:
        peer = await served.connect()
        peer.send(*[b"lwait:"] * 100)
        await served.words.until_started(100)
        assert served.held_bytes == 100 * len(b"lwait:") + 99 * REQUEST_BYTES
        served.words.gate(b"lwait:").set()
        await peer.answers(100)
        assert served.held_bytes == 0


async def test_many_large_requests_that_arrive_together_become_whole_one_after_the_other() -> None:
    """The memory limit admits only one of these frames at a time. Each of them is read eventually."""
    async with node(max_node_bytes=200_000) as served:
        peers = [await served.connect() for _ in range(5)]
        whole = framed(b"-echo:large" + bytes(600_000))
        for peer in peers:
            peer.writer.write(whole[:300_000])
        await served.settle()
        for peer in peers:
            peer.writer.write(whole[300_000:])
        for peer in peers:
            assert await peer.answer() == whole[4:44]
        assert served.held_bytes == 0


async def test_half_requests_of_one_address_leave_room_to_others() -> None:
    whole = framed(b"-echo:large" + bytes(600_000))
    async with node(max_node_bytes=800_000) as served:
        halves = [await served.connect("127.0.0.2") for _ in range(20)]
        for peer in halves:
            peer.writer.write(whole[:500_000])
        await served.settle()
        others = [await served.connect() for _ in range(2)]
        for peer in others:
            peer.writer.write(whole[:20_000])
        await served.settle()
        for peer in others:
            peer.writer.write(whole[20_000:])
            assert await peer.answer() == whole[4:44]
        for peer in halves:
            peer.writer.write(whole[500_000:])
        for peer in halves:
            assert await peer.answer() == whole[4:44]
        assert served.held_bytes == 0


async def test_whole_requests_of_one_address_let_no_half_request_of_a_full_one_grow() -> None:
    whole = framed(b"-echo:large" + bytes(600_000))
    async with node(max_node_bytes=800_000) as served:
        halves = [await served.connect("127.0.0.2") for _ in range(20)]
        for peer in halves:
            peer.writer.write(whole[:500_000])
        await served.settle()
        before_bytes = served.held_bytes
        other = await served.connect()
        for _ in range(30):
            other.writer.write(whole[:50_000])
            await served.settle()
            other.writer.write(whole[50_000:])
            assert await other.answer() == whole[4:44]
        await served.settle()
        assert served.held_bytes == before_bytes < 10 * 500_000
        for peer in halves:
            peer.reset()
        for _ in halves:
            await asyncio.wait_for(served.gone.get(), 10)
        assert served.held_bytes == 0


async def test_half_requests_of_two_addresses_leave_room_to_a_third() -> None:
    whole = framed(b"-echo:large" + bytes(6_000_000))
    async with node(max_node_bytes=8_000_000) as served:
        halves = [await served.connect(address) for address in ("127.0.0.2", "127.0.0.3") for _ in range(4)]
        for peer in halves:
            peer.writer.write(whole[:-1])
        await served.until_held(8_000_000)
        before_bytes = 0.0
        while before_bytes < served.held_bytes:
            before_bytes = served.held_bytes
            await served.settle()
        other = await served.connect()
        other.send(b"-echo:other" + bytes(500_000))
        assert (await other.answer()).startswith(b"-echo:other")
        for peer in halves:
            peer.writer.transport.abort()


async def test_addresses_of_an_ipv6_network_have_one_turn() -> None:
    """Otherwise the network's owner could take all turns, and others could send no large request."""
    async with node() as served:
        loop, holdings = asyncio.get_running_loop(), Holdings(100_000)
        addresses = ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
        peers: list[Connection] = []
        for address in addresses:
            scratch = bytearray(SCRATCH_BYTES)
            peer = Connection(served.words, served.server, ConnectionLimits(), holdings, scratch, loop, "PLAINTEXT")
            peer.connection_made(Accepted(address))
            sent = struct.pack(">i", 1_000_000) + bytes(400_000)
            while sent and peer.is_reading:
                place = peer.get_buffer(-1)
                count = min(len(place), len(sent))
                place[:count], sent = sent[:count], sent[count:]
                peer.buffer_updated(count)
            peers.append(peer)
        assert [peer.is_reading for peer in peers] == [True, False, True]
        for peer in peers:
            peer.connection_lost(None)
        assert holdings.held_bytes == 0


async def test_large_request_that_hardly_arrives_is_closed_once_another_waits() -> None:
    whole = framed(b"-echo:large" + bytes(600_000))
    async with node(max_node_bytes=400_000, max_idle_ms=800) as served:
        slow, other = await served.connect(), await served.connect()
        slow.writer.write(whole[:400_000])
        await served.until_held(300_000)

        async def trickle() -> None:
            for byte in whole[400_000:]:
                slow.writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        other.writer.write(whole)
        try:
            assert await other.answer() == whole[4:44]
        finally:
            trickling.cancel()
        assert served.closed_for("slow_request") == 1
        assert await asyncio.wait_for(served.gone.get(), 10), "for the coordinator this is a client that failed"


async def test_large_request_behind_one_that_may_not_start_is_held_to_the_bound() -> None:
    limit = 1_000_000
    async with node(max_node_bytes=limit) as served:
        peers = [await served.connect() for _ in range(4)]
        for peer in peers:
            peer.send(b"rwait:alone", b"-echo:behind it")
            peer.writer.write(framed(b"-echo:large" + bytes(2_000_000))[:-1])
        await served.words.until_started(4)
        await served.until_held(limit // 4)
        await served.settle()
        assert served.held_bytes < 2 * limit


async def test_full_node_holds_few_large_requests_that_may_not_start_even_of_peers_that_have_gone() -> None:
    size = 2_000_000
    async with node(max_node_bytes=SMALL_BYTES) as served:
        first = await served.connect()
        first.send(b"-wait:first" + bytes(2 * SMALL_BYTES))
        await served.words.until_started(1)
        gone = await served.connect("127.0.0.2")
        gone.send(b"-echo:gone" + bytes(size))
        await served.until_held(size)
        gone.reset()
        peers = [await served.connect(f"127.0.0.{3 + number}") for number in range(4)]
        for peer in peers:
            peer.send(b"-echo:large" + bytes(size))
        await served.until_held(TURNS * size)
        await served.settle()
        assert served.held_bytes < TURNS * size + len(peers) * 4 * SMALL_BYTES
        served.words.gate((b"-wait:first" + bytes(2 * SMALL_BYTES))[:40]).set()
        for peer in peers:
            assert (await peer.answer()).startswith(b"-echo:large")
        assert served.finished_of(b"-echo:gone")
        assert served.held_bytes == 0


async def test_peer_with_unread_answers_is_closed_and_its_share_released() -> None:
    async with node(max_node_bytes=10_000_000, max_idle_ms=400) as served:
        deaf = await served.connect()
        deaf.send(*[b"bbig:%04d" % index for index in range(400)])
        assert await asyncio.wait_for(served.gone.get(), 10), "for the coordinator this is a client that failed"
        assert served.closed_for("unread_answers") == 1
        assert served.held_bytes == 0
        reader = await served.connect()
        reader.send(b"bbig:reader")
        assert len(await reader.answer()) == 300_000
        deaf.writer.transport.abort()


async def test_a_slow_reader_is_not_a_stalled_one() -> None:
    async with node(max_idle_ms=400) as served:
        peer = await served.connect()
        peer.send(*[b"bbig:%04d" % index for index in range(60)])
        for _ in range(60):
            assert len(await peer.answer()) == 300_000
            await asyncio.sleep(0.02)
        assert served.closed_for("unread_answers") == 0


async def test_a_muted_connection_starts_nothing_until_its_time() -> None:
    async with node() as served:
        served.words.mute_s = 3.0
        peer = await served.connect()
        loop = asyncio.get_running_loop()
        before = loop.time()
        peer.send(b"-mute:1", b"-echo:2", b"-echo:3")
        assert await peer.answer() == b"-mute:1"
        assert loop.time() - before < 2.9, "its own answer is not delayed (KIP-219)"
        assert await peer.answers(2) == [b"-echo:2", b"-echo:3"]
        assert loop.time() - before >= 2.99, "uvloop counts whole milliseconds"


async def test_connection_stays_muted_if_a_request_in_work_is_throttled_for_longer() -> None:
    """A produce request is throttled when it has been decoded, and may then wait for its commit."""
    async with node() as served:
        served.words.mute_s = 0.5
        peer = await served.connect()
        peer.send(b"pthrottle:1", b"-mute:2", b"-echo:3")
        await served.words.until_started(2)
        served.words.mute_s = 2.0
        loop = asyncio.get_running_loop()
        before = loop.time()
        served.words.gate(b"throttle").set()
        await served.words.until_started(3)
        assert loop.time() - before >= 1.99, "uvloop counts whole milliseconds"
        served.words.gate(b"pthrottle:1").set()
        assert await peer.answers(3) == [b"pthrottle:1", b"-mute:2", b"-echo:3"]


async def test_requests_before_a_frame_of_an_impossible_size_are_answered() -> None:
    async with node(max_request_bytes=1000) as served:
        peer = await served.connect()
        peer.writer.write(framed(b"-wait:1", b"-echo:2") + struct.pack(">i", -1))
        await served.words.until_started(1)
        await served.settle()
        assert served.closed_for("frame_size") == 0
        served.words.gate(b"-wait:1").set()
        assert await peer.answer() == b"-wait:1"
        await peer.ended()
        assert served.closed_for("frame_size") == 1
        assert served.finished_of(b"-echo:2") == [b"-echo:2"]


async def test_more_connections_than_allowed_are_refused() -> None:
    async with node(max_connections=1) as served:
        first = await served.connect()
        first.send(b"-echo:1")
        await first.answer()
        refused = await served.connect()
        assert await refused.ended() == b""
        assert served.closed_for("max_connections") == 1
        first.send(b"-echo:2")
        assert await first.answer() == b"-echo:2"


async def test_more_connections_than_an_address_may_have_are_refused_until_one_ends() -> None:
    allowed = {"127.0.0.1": 2}
    async with node(lambda address: allowed[address]) as served:
        first, second = [await served.connect() for _ in range(2)]
        for peer in (first, second):
            peer.send(b"-echo:1")
            await peer.answer()
        for _ in range(3):
            refused = await served.connect()
            assert await refused.ended() == b""
        assert served.closed_for("max_connections_per_ip") == 3
        second.writer.close()
        await asyncio.wait_for(served.gone.get(), 10)
        third = await served.connect()
        third.send(b"-echo:2")
        assert await third.answer() == b"-echo:2"
        allowed["127.0.0.1"] = 3
        fourth = await served.connect()
        fourth.send(b"-echo:3")
        assert await fourth.answer() == b"-echo:3"


async def test_handshakes_count_as_connections_of_their_address(tmp_path: Path) -> None:
    certificate = Authority(tmp_path, "authority").issue("/CN=broker")
    served = Node(ConnectionLimits())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.whole)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "authority.crt"))
    served.port = await served.server.bind("127.0.0.1", 0, tls=Tls(context, None))
    await served.server.serve(served.words, served.connection_closed, most_from=lambda address: 2)
    try:
        # These two clients connect and send nothing, so their handshakes never end.
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        assert await asyncio.wait_for(reader.read(1), 30) == b"", "the third is refused"
        writer.close()
        assert served.closed_for("max_connections_per_ip") == 1
        for _, writer in silent:
            writer.close()
        async with asyncio.timeout(30):
            while True:
                try:
                    peer = Peer(*await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting))
                    break
                except OSError:  # the server has not seen yet that both have ended
                    await asyncio.sleep(0.01)
        peer.send(b"-echo:1")
        assert await peer.answer() == b"-echo:1"
        await asyncio.open_connection("127.0.0.1", served.port)
        reader, _ = await asyncio.open_connection("127.0.0.1", served.port)
        assert await asyncio.wait_for(reader.read(1), 30) == b"", "a connection and a handshake are two"
    finally:
        await served.server.close()


async def test_connection_above_the_rate_of_its_address_begins_no_handshake(tmp_path: Path) -> None:
    """A handshake takes milliseconds of the event loop."""
    issued = Authority(tmp_path, "root").issue("/CN=localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.whole)
    waits_s = [0.0, 0.01]
    served = Node(ConnectionLimits())
    served.port = await served.server.bind("127.0.0.1", 0, tls=Tls(context, None))
    await served.server.serve(served.words, served.connection_closed, lambda _address: waits_s.pop(0))
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    try:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting))
        peer.send(b"-echo:a")
        assert await peer.answer() == b"-echo:a"
        with pytest.raises(OSError, match=r".*"):
            await asyncio.wait_for(asyncio.open_connection("127.0.0.1", served.port, ssl=trusting), 10)
        assert waits_s == []
    finally:
        await served.server.close()


async def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    async with node(max_idle_ms=200) as served:
        idle, half, busy = [await served.connect() for _ in range(3)]
        busy.send(b"pwait:1")
        half.writer.write(framed(b"-echo:never whole")[:-3])
        assert await idle.ended() == b""
        assert await half.ended() == b""
        assert await asyncio.wait_for(served.gone.get(), 10), "half a frame, and then silence: a client that failed"
        assert await asyncio.wait_for(served.forgotten.get(), 10), "a client that is idle has done nothing wrong"
        served.words.gate(b"pwait:1").set()
        assert await busy.answer() == b"pwait:1"
        (connection,) = served.server.connections
        assert not connection.is_idle(asyncio.get_running_loop().time()), "an answer is a sign of life as well"


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_half_a_frame_starts_nothing() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.writer.write(framed(b"-echo:1") + framed(b"-echo:2")[:-1])
        assert await peer.answer() == b"-echo:1"
        peer.writer.close()
        await asyncio.wait_for(served.gone.get(), 10)
        assert served.words.started == [b"-echo:1"]


async def test_disconnect_cancels_parked_requests_and_finishes_the_rest() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"pwait:join", b"-wait:leave")
        await served.words.until_started(2)
        peer.writer.transport.abort()
        await served.words.until_cancelled()
        assert served.gone.empty(), "reported only once nothing of the connection is in work any more"
        served.words.gate(b"-wait:leave").set()
        assert await asyncio.wait_for(served.gone.get(), 10)
        assert served.words.cancelled == [b"pwait:join"]
        assert served.words.finished == [b"-wait:leave"]


async def test_requests_read_before_a_disconnect_are_handled_in_order() -> None:
    """A LeaveGroup after an OffsetCommit is still handled. A parked JoinGroup is not waited for, because its client is
    gone.
    """
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-wait:commit", b"pwait:join", b"-echo:leave", b"-echo:last")
        await served.words.until_started(1)
        await served.settle()
        peer.reset()
        await served.settle()
        served.words.gate(b"-wait:commit").set()
        assert await asyncio.wait_for(served.gone.get(), 10)
        started = [name for name in served.words.started if b"settle" not in name]
        assert started == [b"-wait:commit", b"-echo:leave", b"-echo:last"]
        assert [name for name in served.words.finished if b"settle" not in name] == started


@pytest.mark.parametrize("parked", [b"pwait:join", b"bwait:fetch"])
async def test_disconnect_with_a_full_pipeline_behind_a_parked_request_ends(parked: bytes) -> None:
    """The parked request is cancelled and frees its place. Requests that were read after it are handled, and the end of
    the connection is reported.
    """
    async with node(max_in_flight=10) as served:
        peer = await served.connect()
        peer.send(parked, *[b"lecho:%d" % index for index in range(30)])
        await served.words.until_started(10)
        await served.settle()
        peer.reset()
        assert await asyncio.wait_for(served.gone.get(), 10)
        assert len(served.finished_of(b"lecho")) == 30
        assert served.held_bytes == 0


async def test_disconnect_before_the_parked_request_began_ends() -> None:
    async with node(max_in_flight=1) as served:
        peer = await served.connect()
        peer.send(b"pwait:join", b"-echo:leave")
        peer.writer.transport.abort()
        assert await asyncio.wait_for(served.gone.get(), 10)
        assert served.held_bytes == 0


async def test_a_connection_that_ends_with_unwritten_answers_leaves_nothing_held() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"pwait:1", *[b"-big:%d" % index for index in range(20)])
        await served.words.until_started(21)
        await served.settle()
        assert served.held_bytes > 1_000_000
        peer.reset()
        assert await asyncio.wait_for(served.gone.get(), 10)
        assert served.held_bytes == 0


async def test_close_after_a_disconnect_lets_work_finish() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-wait:commit")
        await served.words.until_started(1)
        await served.settle()
        peer.reset()
        await served.settle()
        (connection,) = [each for each in served.server.connections if each.in_flight]
        connection.close()
        served.words.gate(b"-wait:commit").set()
        assert await asyncio.wait_for(served.forgotten.get(), 10)
        assert served.finished_of(b"-wait") == [b"-wait:commit"]


async def test_requests_sent_just_before_a_close_are_handled() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-silent:acks 0")
        peer.writer.close()
        await asyncio.wait_for(served.gone.get(), 10)
        assert served.words.finished == [b"-silent:acks 0"]


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_read_that_is_cancelled_before_it_began_stops_nothing_behind_it() -> None:
    """The connection is lost in the turn of the event loop in which the read starts. The log of a node would show a
    warning of Python's about a read that was never awaited.
    """
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-wait:first", b"recho:read", b"-echo:leave")
        await served.words.until_started(1)
        (connection,) = served.server.connections
        served.words.gate(b"-wait:first").set()
        asyncio.get_running_loop().call_soon(connection.close_failed)
        await asyncio.wait_for(served.gone.get(), 10)
        assert served.words.finished == [b"-wait:first", b"-echo:leave"]
        assert served.held_bytes == 0
    gc.collect()


async def test_a_peer_that_only_stops_sending_gets_its_answers() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-wait:1", b"-echo:2")
        peer.writer.write_eof()
        await served.words.until_started(1)
        served.words.gate(b"-wait:1").set()
        assert await peer.answers(2) == [b"-wait:1", b"-echo:2"]
        assert await peer.ended() == b""


async def test_end_of_stream_with_a_parked_request_is_a_disconnect() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"pwait:join")
        await served.words.until_started(1)
        peer.writer.write_eof()
        assert await asyncio.wait_for(served.gone.get(), 10)
        assert served.words.cancelled == [b"pwait:join"]


@pytest.mark.parametrize(("verb", "reason"), [(b"refuse", "malformed"), (b"bug", None)])
async def test_a_request_without_any_answer_closes_the_connection(verb: bytes, reason: str | None) -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"-" + verb + b":1")
        assert await peer.ended() == b""
        if reason is not None:
            assert served.closed_for(reason) == 1


async def test_drain_answers_read_requests_and_closes() -> None:
    async with node() as served:
        busy, idle = await served.connect(), await served.connect()
        idle.send(b"-echo:0")
        await idle.answer()
        busy.send(b"-wait:1", b"-echo:2")
        await served.words.until_started(2)
        draining = asyncio.create_task(served.server.drain(10))
        assert await idle.ended() == b""
        busy.send(b"-echo:too late")
        served.words.gate(b"-wait:1").set()
        assert await busy.answers(2) == [b"-wait:1", b"-echo:2"]
        assert await busy.ended() == b""
        assert await draining
        assert b"-echo:too late" not in served.words.started
        with pytest.raises(ConnectionRefusedError):
            await served.connect()


async def test_drain_cancels_unfinished_requests_without_blaming_the_client() -> None:
    async with node() as served:
        peer = await served.connect()
        peer.send(b"pwait:1")
        await served.words.until_started(1)
        assert not await served.server.drain(0.05)
        assert await peer.ended() == b""
        assert served.words.cancelled == [b"pwait:1"]
        assert served.gone.empty()
