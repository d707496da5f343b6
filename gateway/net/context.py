"""The inputs of a handler besides its request: the client, the version, and the services that it asks for.

The one idea: handlers reach everything through `RequestContext`, so a handler is a plain async function that a test can
call with values. The context does not know which services exist. Each handler declares the ones that it uses, as a
protocol: `RequestContext[HasGroups]`. `gateway/building/services.py` has them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag
from typing import Generic, NamedTuple, TypeVar

from gateway.config.listeners import DEFAULT_NAME
from gateway.net.errors import storage_code
from gateway.net.holdings import UNBOUNDED, Holdings
from gateway.net.places import NO_PLACE, Line, Place
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersion
from storage.errors import StorageError
from storage.types import Address, Node, NodeId

S_co = TypeVar("S_co", covariant=True)
"""The services that a handler needs, as a protocol."""


class Role(Flag):
    """The role in which a client addresses a node. The listener determines it."""

    BROKER = 1
    CONTROLLER = 2
    """Addressed by clients that have this node's address in `bootstrap.controllers` (KIP-919)."""
    EITHER = BROKER | CONTROLLER


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity for which a connection acts, as Kafka names it: `User:ANONYMOUS` if no authentication was
    required."""

    name: str
    type: str = "User"
    by_token: bool = field(default=False, compare=False)
    """True if the client authenticated by a delegation token. Comparisons of principals ignore this."""

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"


ANONYMOUS = Principal("ANONYMOUS")

SHARED_NODE = NodeId(0)
"""Id of the only broker that clients of a shared listener see. No node has this id."""


_connections = itertools.count(1)


@dataclass(slots=True)
class ConnectionInfo:
    """One client connection, for as long as it is open. ApiVersions (client software), dispatch (`muted_until_s`) and
    the connection itself write to it."""

    connection_id: str
    """Cannot be guessed and is never used again; group members are identified by it."""
    client_host: str
    """The peer's address as upstream writes it: `/127.0.0.1`."""
    listener: str = DEFAULT_NAME
    """Name of the listener that accepted the connection. Answers contain the addresses of the listeners of that
    name."""
    shared: Address | None = field(default=None, kw_only=True)
    """The address that stands for all nodes, if the listener is shared. Answers then name one broker, `SHARED_NODE`."""
    principal: Principal = ANONYMOUS
    holdings: Holdings = field(default=UNBOUNDED, repr=False)
    """The node's count of held bytes. If the answer of a handler may be large, the handler checks here how much memory
    is left.
    """
    line: Line = field(default_factory=Line)
    """The connection's queue of Produce requests, in order of arrival."""
    muted_until_s: float = 0.0
    """Loop time before which the connection takes no further request. Dispatch writes it, the connection obeys."""
    client_software_name: str = ""
    client_software_version: str = ""
    peer_gone: bool = False
    """True once the peer has closed the connection, at least in its direction. The connection writes it."""
    skipped: bool = False
    """True once a request was skipped because the peer has gone. A peer that still reads gets no later answer, because
    it would take that answer for the skipped one."""
    is_blameless: bool = False
    """True once the node that forwards the client's requests has said that it stops. Then the end of the connection is
    not the client's."""
    when_gone: Callable[[], None] | None = field(default=None, repr=False)
    """Called once when the peer has gone."""
    challenge: bytes = field(default=b"", repr=False)
    """Nonces that a peer must authenticate to prove that it is a node (`node_proof.py`). Empty if no proof is under
    way."""
    number: int = field(default_factory=lambda: next(_connections))
    """Rises with every connection that this node accepts: of two of one client, the higher is the newer."""

    def is_awaiting(self) -> bool:
        """Return whether the peer may still wait for answers."""
        return not self.peer_gone

    def lose_peer(self) -> None:
        """Note that the peer has gone."""
        self.peer_gone = True
        when_gone, self.when_gone = self.when_gone, None
        if when_gone is not None:
            when_gone()

    def seen_id(self, node_id: NodeId) -> NodeId:
        """Return the id by which the client knows this node."""
        return node_id if self.shared is None else SHARED_NODE

    def seen(self, node: Node) -> Node | None:
        """Return the node as the client of this connection sees it: with the address at its listener. Return None if
        the node has no such listener, so that the client cannot reach it."""
        if self.shared is not None:
            return Node(SHARED_NODE, {self.listener: self.shared})
        return node if self.listener in node.listeners else None


class RequestContext(NamedTuple, Generic[S_co]):
    """The context of one request. It is a tuple, because one is made for every request: a frozen dataclass of as
    many fields takes three times as long."""

    api_key: ApiKey
    version: int
    correlation_id: int
    client_id: str | None
    connection: ConnectionInfo
    services: S_co
    place: Place = NO_PLACE
    """The request's place in its connection's queue; `async with` it before anything that must keep the order."""
    served: tuple[ApiVersion, ...] = ()
    """The API versions that this node promises, for ApiVersions."""
    role: Role = Role.BROKER
    """The role in which the client addresses this node."""
    storage_failed: Callable[[ApiKey, StorageError], ErrorCode] = storage_code
    """Returns the code for a part of the request that storage could not serve, and counts the failure. An error of the
    whole request is raised instead."""
