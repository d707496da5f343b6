"""Pages that stay up to date: server-sent events with bounded queues.

The one idea: a stream runs only while its reader is connected, and each reader has a queue of a few events. A reader
that is too slow loses the oldest ones, because only the newest state matters to a page. Without readers nothing runs,
so an unwatched console asks Postgres nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from gateway.console.guard import HEADERS, VIEWER, BadRequestError
from gateway.net.context import Principal
from protocol.errors import KafkaError
from storage.errors import StorageError

MAX_STREAMS = 64
"""Maximal number of open streams of one node."""
MAX_STREAMS_OF = 32
"""Maximal number of open streams of one viewer, so that one viewer cannot use all of them."""
MAX_QUEUED = 4
"""Maximal number of events that wait for one reader."""
PING_S = 15.0
MAX_SECONDS = 4 * 3600.0
"""Longest time for which a stream stays open. The page then opens the next one."""
WRITE_S = 10.0
"""How long a reader may take to accept one event."""

Event = tuple[str, object]
"""Name and data of an event."""
StillAllowed = Callable[[], Awaitable[bool]]


class Streams:
    """The open streams of one node."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[None]] = set()
        self._of = Counter[Principal]()

    async def close(self) -> None:
        """End every stream."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def serve(
        self, request: web.Request, events: Callable[[], AsyncIterator[Event]], still_allowed: StillAllowed
    ) -> web.StreamResponse:
        """Send events until the reader leaves, the viewer loses the right to see them, or the console ends."""
        viewer = request[VIEWER].principal
        if self._of.total() >= MAX_STREAMS or self._of[viewer] >= MAX_STREAMS_OF:
            raise web.HTTPServiceUnavailable(reason="too many pages are open; close one")
        self._of[viewer] += 1
        try:
            response = web.StreamResponse(
                headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            queue: asyncio.Queue[Event | None] = asyncio.Queue(MAX_QUEUED)
            filling = asyncio.create_task(_fill(queue, events()))
            self._open.add(filling)
            filling.add_done_callback(self._open.discard)
            try:
                async with asyncio.timeout(MAX_SECONDS):
                    await _drain(response, queue, still_allowed)
            except (TimeoutError, ConnectionError):
                pass  # the reader has left or does not read; if its page is still open, it connects again
            finally:
                filling.cancel()
                await asyncio.wait((filling,))
            return response
        finally:
            self._of -= Counter((viewer,))


async def _fill(queue: asyncio.Queue[Event | None], events: AsyncIterator[Event]) -> None:
    """Put events into the queue, in place of the oldest one if it is full; None ends it."""
    try:
        async for event in events:
            _put(queue, event)
    except (BadRequestError, KafkaError, StorageError) as error:
        _put(queue, ("failed", {"error": str(error)}))
    finally:
        with suppress(asyncio.QueueEmpty):
            while queue.full():
                queue.get_nowait()
        queue.put_nowait(None)


def _put(queue: asyncio.Queue[Event | None], event: Event) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)


async def _drain(response: web.StreamResponse, queue: asyncio.Queue[Event | None], still_allowed: StillAllowed) -> None:
    while True:
        try:
            event = await asyncio.wait_for(queue.get(), PING_S)
        except TimeoutError:
            event = ("ping", None)
        if event is None or not await still_allowed():
            return
        name, data = event
        text = await asyncio.to_thread(json.dumps, data) if isinstance(data, dict) else json.dumps(data)
        async with asyncio.timeout(WRITE_S):
            await response.write(f"event: {name}\ndata: {text}\n\n".encode())
