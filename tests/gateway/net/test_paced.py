"""The transport between a connection and TLS: pieces, order, pauses and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.net.connection import WRITE_HIGH_WATER_BYTES
from gateway.net.tls_connection import PIECE_BYTES, PacedTransport


class Inner(asyncio.Transport):
    """Records the bytes that were written in each turn of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.closed = self.aborted = False
        self.full: Callable[[], None] | None = None

    def writelines(self, list_of_data: Any) -> None:
        self.pieces.append(b"".join(list_of_data))
        if self.full is not None:
            self.full()

    def get_write_buffer_size(self) -> int:
        return 7

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Side:
    def __init__(self) -> None:
        self.inner = Inner()
        self.told: list[str] = []
        self.paced = PacedTransport(self.inner, asyncio.get_running_loop(), self.teller("pause"), self.teller("resume"))

    def teller(self, what: str) -> Callable[[], None]:
        return lambda: self.told.append(what)

    async def turns(self) -> int:
        """Run turns of the event loop until nothing more is written."""
        turns = -1
        before = -1
        while before < len(self.inner.pieces):
            before = len(self.inner.pieces)
            turns += 1
            await asyncio.sleep(0)
        return turns


async def test_large_write_is_passed_on_in_one_piece_per_turn() -> None:
    side = Side()
    data = [bytes([number]) * 700_000 for number in range(5)]
    side.paced.writelines(data)
    assert [len(piece) for piece in side.inner.pieces] == [PIECE_BYTES]
    assert side.told == ["pause"]
    assert side.paced.get_write_buffer_size() == 3_500_000 - PIECE_BYTES + 7
    assert await side.turns() >= 3_500_000 // PIECE_BYTES
    assert max(map(len, side.inner.pieces)) == PIECE_BYTES
    assert b"".join(side.inner.pieces) == b"".join(data)
    assert side.told == ["pause", "resume"]


async def test_small_write_is_passed_on_at_once() -> None:
    side = Side()
    side.paced.write(memoryview(b"little"))
    assert (side.inner.pieces, side.told) == ([b"little"], [])


async def test_nothing_is_written_while_the_socket_is_full() -> None:
    side = Side()
    side.paced.write(bytes(2 * PIECE_BYTES))
    side.paced.inner_paused()
    side.paced.write(b"behind")
    await asyncio.sleep(0)
    assert [len(piece) for piece in side.inner.pieces] == [PIECE_BYTES]
    assert side.told == ["pause"]
    side.paced.inner_resumed()
    await side.turns()
    assert b"".join(side.inner.pieces) == bytes(2 * PIECE_BYTES) + b"behind"
    assert side.told == ["pause", "resume"]
    side.paced.inner_paused()
    side.paced.inner_resumed()
    assert side.told == ["pause", "resume"] * 2


async def test_a_socket_may_be_full_at_once() -> None:
    side = Side()
    side.inner.full = side.paced.inner_paused
    side.paced.write(bytes(3 * PIECE_BYTES))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(side.inner.pieces) == 1
    side.inner.full = None
    side.paced.inner_resumed()
    await side.turns()
    assert sum(map(len, side.inner.pieces)) == 3 * PIECE_BYTES
    assert side.told == ["pause", "resume"]


async def test_transport_closes_after_the_written_bytes() -> None:
    side = Side()
    side.paced.write(bytes(WRITE_HIGH_WATER_BYTES))
    side.paced.close()
    assert side.paced.is_closing()
    assert not side.inner.closed
    await side.turns()
    assert side.inner.closed
    assert sum(map(len, side.inner.pieces)) == WRITE_HIGH_WATER_BYTES
    empty = Side()
    empty.paced.close()
    assert empty.inner.closed


@pytest.mark.parametrize("end", ["abort", "drop"])
async def test_aborted_transport_writes_nothing_more(end: str) -> None:
    side = Side()
    side.paced.write(bytes(3 * PIECE_BYTES))
    getattr(side.paced, end)()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(side.inner.pieces) == 1
    assert side.inner.aborted == (end == "abort")
