"""A process between the gateway and Postgres forwards all bytes, delays each direction, and holds a limited number of
bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from pathlib import Path

from bench.delay import HELD_BYTES, delayed

DELAY_S = 0.05
PIECE_BYTES = 1024 * 1024
PIECES = 100
SOCKETS_BYTES = 32 * 1024 * 1024
"""More bytes than the sockets between the two sides can hold."""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_round_trip_takes_both_delays_and_keeps_bytes_in_order(tmp_path: Path) -> None:
    server = await asyncio.start_unix_server(echo, tmp_path / "s")
    with delayed(tmp_path / "s", DELAY_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        times_s: list[float] = []
        for _ in range(10):
            began = time.perf_counter()
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            times_s.append(time.perf_counter() - began)
        assert 2 * DELAY_S <= min(times_s) < 6 * DELAY_S

        piece = os.urandom(PIECE_BYTES)
        sent = hashlib.sha256(piece * PIECES).digest()

        async def send() -> None:
            for _ in range(PIECES):
                writer.write(piece)
                await writer.drain()

        sending = asyncio.create_task(send())
        came = hashlib.sha256()
        for _ in range(PIECES):
            came.update(await reader.readexactly(PIECE_BYTES))
        await sending
        assert came.digest() == sent
        writer.close()
    server.close()


async def test_sender_waits_if_the_receiver_does_not_read(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.close()

    server = await asyncio.start_unix_server(deaf, tmp_path / "s")
    with delayed(tmp_path / "s", DELAY_S) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.set_write_buffer_limits(high=PIECE_BYTES)
        sent_bytes = 0
        with contextlib.suppress(TimeoutError):
            while sent_bytes <= HELD_BYTES + SOCKETS_BYTES:
                writer.write(bytes(PIECE_BYTES))
                sent_bytes += PIECE_BYTES
                async with asyncio.timeout(2):
                    await writer.drain()
        assert sent_bytes <= HELD_BYTES + SOCKETS_BYTES
        writer.transport.abort()
        held.set()
    server.close()


async def test_end_of_a_connection_is_forwarded(tmp_path: Path) -> None:
    async def bye(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.close()

    server = await asyncio.start_unix_server(bye, tmp_path / "s")
    with delayed(tmp_path / "s", DELAY_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(30):
            assert await reader.read() == b"bye"
        writer.close()
    server.close()
