"""What a connection must know of a request, and what it asks of who answers: the seam between socket and dispatch.

The one idea: how a request is placed among others is a fact of its API. Dispatch says it from the table of what is
served; the connection acts on it and knows no API.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

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
    """When a request may start, and what may start behind it."""

    ALONE = "alone"
    """Sees what came before it and nothing that came after: nothing starts behind it until it is done. Finished even if
    the peer has gone, since its effect was asked for."""
    PIPELINED = "pipelined"
    """As ALONE, but may start beside others of its kind: Heartbeat, which changes nothing that one behind it could
    see."""
    PLACED = "placed"
    """As PIPELINED, and takes a place in its connection's line when it arrives. By its place a Produce enters the log
    and an OffsetCommit the committer's queue."""
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

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[Any, Any, Sequence[Buffer]]:
        """Called in order of arrival. The result, run, gives the answer as chunks, length prefix included; none when
        the request has no answer (Produce with acks=0). ProtocolError closes the connection; it raises nothing else."""
        ...


class Guard(RequestHandler, Protocol):
    """Stands before a connection's requests until its peer has said who it is, and longer: made for one connection."""

    max_request_bytes: int
    """Of a request before that."""
    passed: Callable[[], None]
    """Called when the peer has said who it is."""
