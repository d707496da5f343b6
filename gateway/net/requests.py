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
from protocol.errors import ProtocolError
from protocol.framing import Frame


class UnanswerableError(ProtocolError):
    """A request that has no answer: the connection closes, and `reason` (one of few) counts it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class LastAnswerError(ProtocolError):
    """A request that is answered, and nothing after it: the connection closes behind the answer."""

    def __init__(self, reason: str, detail: str, chunks: Sequence[Buffer]) -> None:
        super().__init__(detail)
        self.reason = reason
        self.chunks = chunks


class Order(Enum):
    """The rule for when a request may start, and what may start behind it."""

    ALONE = "alone"
    """Sees the effects of earlier requests and of no later one: nothing starts behind it until it is done. It is
    finished even if the peer has gone, because the client asked for its effect."""
    PIPELINED = "pipelined"
    """Like ALONE, but may start beside others of its kind: Heartbeat, which changes nothing that a later one could
    see."""
    PLACED = "placed"
    """Like PIPELINED, and takes a place in its connection's queue when it arrives. By its place a Produce enters the
    log and an OffsetCommit the committer's queue."""
    PARKED = "parked"
    """Waits for other clients or for data (JoinGroup, SyncGroup, Fetch), so requests behind it may be worked on;
    cancelled when the peer goes."""


@dataclass(frozen=True, slots=True)
class Admission:
    """How a connection treats a request."""

    order: Order = Order.ALONE
    bulky: bool = False
    """Changes nothing and may answer with megabytes: few at a time have an answer that is not yet written, and it is
    cancelled when the peer goes."""


class RequestHandler(Protocol):
    def admission(self, frame: Frame) -> Admission: ...

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[object, None, Sequence[Buffer]]:
        """Handle a request; called in order of arrival. The result, run, returns the answer as chunks, length prefix
        included; none if the request has no answer (Produce with acks=0). ProtocolError closes the connection; no
        other exception is raised."""
        ...


class Guard(RequestHandler, Protocol):
    """Stands before a connection's requests until its peer has authenticated, and longer. Made for one connection."""

    max_request_bytes: int
    """Bound on a request before authentication."""
    passed: Callable[[], None]
    """Called when the peer has authenticated."""
