"""The properties of a request that a connection must know, and the interface of its handler: the seam between socket
and dispatch.

The one idea: the place of a request among others is a fact of its API. Dispatch reads it from the table of served APIs.
The connection obeys it and knows no API.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gateway.net.context import ConnectionInfo
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, ProtocolError
from protocol.framing import Frame


class UnanswerableError(ProtocolError):
    """A request that gets no answer. The connection closes, and `reason` (one of few) is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class LastAnswerError(ProtocolError):
    """A request whose answer is the last one. The connection closes after it."""

    def __init__(self, reason: str, detail: str, chunks: Sequence[Buffer]) -> None:
        super().__init__(detail)
        self.reason = reason
        self.chunks = chunks


class Order(Enum):
    """The rule for when a request may start, and what may start behind it."""

    ALONE = "alone"
    """Sees the effects of earlier requests and of no later one: nothing starts behind it until it is done. The request
    is finished even if the peer has gone, because the client wanted its effect. Exceptions: `Served.only_if_awaited`.
    """
    PIPELINED = "pipelined"
    """Like ALONE, but several such requests may run at the same time: Heartbeat, whose effect no
    later request can see.
    """
    PLACED = "placed"
    """Like PIPELINED, and takes a place in its connection's queue when it arrives. By its place a Produce enters the
    log and an OffsetCommit the committer's queue."""
    PARKED = "parked"
    """Waits for other clients or for data (JoinGroup, SyncGroup, Fetch), so requests behind it may be worked on;
    cancelled when the peer goes."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Rules by which a connection treats a request."""

    order: Order = Order.ALONE
    bulky: bool = False
    """True for a request that changes nothing and may answer with megabytes. Only few such requests may have an
    unwritten answer at a time. The request is cancelled if the peer goes.
    """


class RequestHandler(Protocol):
    def admission(self, frame: Frame) -> Admission: ...

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[object, None, Sequence[Buffer]]:
        """Handle a request; called in order of arrival. The result, run, returns the answer as chunks, length prefix
        included; none if the request has no answer (Produce with acks=0). ProtocolError closes the connection; no
        other exception is raised."""
        ...


class Requests(RequestHandler, Protocol):
    """Handler of the requests of authenticated clients."""

    async def refuse(self, frame: Frame, code: ErrorCode, message: str | None) -> Sequence[Buffer]:
        """Return the answer that refuses a request without handling it. Raise ProtocolError if the request has no
        such answer."""
        ...


class Guard(RequestHandler, Protocol):
    """Stands before a connection's requests until its peer has authenticated, and longer. Made for one connection."""

    max_request_bytes: int
    """Maximal size of a request before authentication."""
    passed: Callable[[], None]
    """Called when the peer has authenticated."""
