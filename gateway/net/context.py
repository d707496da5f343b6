"""The inputs of a handler besides its request: the client, the version, and the services it may call.

The one idea: handlers reach everything through `RequestContext`, so a handler is a plain async function that a test can
call with values. It holds no state of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from enum import Flag
from typing import TYPE_CHECKING, NamedTuple

from gateway.cluster.clock import ClusterClock
from gateway.config.listeners import DEFAULT_NAME
from gateway.net.holdings import UNBOUNDED, Holdings
from gateway.net.places import NO_PLACE, Line, Place
from protocol.api_keys import ApiKey
from protocol.messages.api_versions import ApiVersion

if TYPE_CHECKING:
    from gateway.apis.described_topics import DescribedTopics
    from gateway.apis.internal_topics import InternalTopics
    from gateway.cluster.membership import Membership
    from gateway.config.settings import Settings
    from gateway.groups.groups import Groups
    from gateway.groups.idle_owners import IdleOwners
    from gateway.groups.marks import Marks
    from gateway.internal_log.writer import InternalLogs
    from gateway.log.appender import Appender
    from gateway.log.catalog import Catalog
    from gateway.log.recompression import Recompressor
    from gateway.log.tail import Tail
    from gateway.log.validator import BatchValidator
    from gateway.operate.metrics import Metrics
    from gateway.quotas.throttles import Throttles
    from gateway.security.authorizer import Authorizer
    from gateway.security.delegation import DelegationTokens
    from gateway.security.tls import Certificates
    from gateway.share.partitions import SharePartitions
    from gateway.share.sessions import ShareSessions
    from gateway.transactions.coordinator import Transactions
    from storage.history import HistoryStore
    from storage.log import LogStore
    from storage.offsets import OffsetStore
    from storage.producers import ProducerStore
    from storage.share import ShareStore
    from storage.topics import TopicStore
    from storage.users import UserStore


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
    """True if a delegation token has shown the identity. The principal compares equal all the same."""

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"


ANONYMOUS = Principal("ANONYMOUS")


_connections = itertools.count(1)


@dataclass(slots=True)
class ConnectionInfo:
    """One client connection, for as long as it is open. ApiVersions (client software) and dispatch
    (`muted_until_s`) write to it."""

    connection_id: str
    """Unguessable and never reused; group members are keyed by it."""
    client_host: str
    """Peer address as upstream renders it: `/127.0.0.1`."""
    listener: str = DEFAULT_NAME
    """Name of the listener that accepted the connection. Answers contain the addresses of the listeners of that
    name."""
    principal: Principal = ANONYMOUS
    holdings: Holdings = field(default=UNBOUNDED, repr=False)
    """The node's count of held bytes. A handler whose answer may be large asks it for the room left."""
    line: Line = field(default_factory=Line)
    """The queue of its produce requests, by arrival."""
    muted_until_s: float = 0.0
    """Loop time before which the connection takes no further request. Dispatch writes it, the connection obeys."""
    client_software_name: str = ""
    client_software_version: str = ""
    number: int = field(default_factory=lambda: next(_connections))
    """Rises with every connection that this node accepts: of two of one client, the higher is the newer."""


@dataclass(frozen=True, slots=True)
class Services:
    """The node's parts, wired once by `gateway/app.py`."""

    settings: Settings
    catalog: Catalog
    topics: TopicStore
    log: LogStore
    validator: BatchValidator
    recompressor: Recompressor
    appender: Appender
    tail: Tail
    producers: ProducerStore
    offsets: OffsetStore
    groups: Groups
    membership: Membership
    metrics: Metrics
    cluster_id: str
    described_topics: DescribedTopics
    internal_topics: InternalTopics
    history: HistoryStore
    transactions: Transactions
    throttles: Throttles
    share: SharePartitions
    share_sessions: ShareSessions
    share_store: ShareStore
    users: UserStore
    clock: ClusterClock = field(default_factory=ClusterClock)
    internal_logs: InternalLogs | None = None
    """None: internal topics hold what has been written to them before."""
    marks: Marks | None = None
    """How far consumers were served, if groups may ask."""
    idle_owners: IdleOwners | None = None
    """Watches members that read nothing of what they were assigned."""
    authorizer: Authorizer | None = None
    """None: every client may do everything."""
    delegation: DelegationTokens | None = None
    """None without `delegation.token.secret.key`."""
    broker_configs: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a request alters settings of brokers."""
    certificates: Certificates | None = None
    """The certificates of its listeners; None: no client may change them."""


class RequestContext(NamedTuple):
    """The context of one request. It is a tuple, because one is made for every request: a frozen dataclass of as
    many fields takes three times as long."""

    api_key: ApiKey
    version: int
    correlation_id: int
    client_id: str | None
    connection: ConnectionInfo
    services: Services
    place: Place = NO_PLACE
    """The request's place in its connection's queue; `async with` it before anything that must keep the order."""
    served: tuple[ApiVersion, ...] = ()
    """The versions that this node promises, for ApiVersions."""
    role: Role = Role.BROKER
    """The role in which the client addresses this node."""
