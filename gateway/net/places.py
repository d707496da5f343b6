"""The queue in which a connection's produce requests enter the log, and its offset commits the committer's queue.

The one idea: a request takes a place when it arrives, before anything is awaited, and uses it after everything that it
had to await. So any step between arrival and the log may be asynchronous, and the log's order is still the order of
arrival.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Place:
    """One request's place: `async with place:` waits until all before it have left, and leaves at the end.

    Leaving twice is no error. A place that leaves out of turn (its request was refused) neither delays another place
    nor lets one pass.
    """

    __slots__ = ("_before", "_left", "_next", "_reached")

    def __init__(self, before: Place | None = None) -> None:
        self._before = before
        self._next: Place | None = None
        self._left = False
        self._reached: asyncio.Future[None] | None = None
        if before is not None:
            before._next = self

    async def __aenter__(self) -> None:
        if self._before is not None:
            self._reached = asyncio.get_running_loop().create_future()
            await self._reached

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    @property
    def reached(self) -> bool:
        """True if all earlier places have left."""
        return self._before is None

    @property
    def passed(self) -> bool:
        """True if this place and all earlier places have left."""
        return self._left and self._before is None

    def leave(self) -> None:
        self._left = True
        place: Place = self
        while place.passed and place._next is not None:
            behind, place._next = place._next, None
            behind._before = None
            if behind._reached is not None and not behind._reached.done():
                behind._reached.set_result(None)
            place = behind


class Line:
    """The queue of places of one connection."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Place | None = None

    def take(self) -> Place:
        """Return a place behind all earlier places."""
        last = self._last
        self._last = Place(None if last is None or last.passed else last)
        return self._last


NO_PLACE = Place()
"""The place of a request whose order is irrelevant: no request waits for it."""
