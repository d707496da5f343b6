"""What a handler is given besides its request: who asks, at which version, and the services it may call.

The one idea: handlers reach everything through `RequestContext`, so a handler is a plain async function that a test
can call with values. It holds no state of its own.
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
    """As what a node is asked: its listener says it."""

    BROKER = 1
    CONTROLLER = 2
    """By who has this one's address in `bootstrap.controllers` (KIP-919)."""
    EITHER = BROKER | CONTROLLER


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a connection acts for, as Kafka names it: `User:ANONYMOUS` where nobody had to say who they are."""

    name: str
    type: str = "User"
    by_token: bool = field(default=False, compare=False)
    """Whether a delegation token has shown who it is; it is the same one then."""

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
    """Name of the listener it came by; it is told addresses of the listeners of that name."""
    principal: Principal = ANONYMOUS
    holdings: Holdings = field(default=UNBOUNDED, repr=False)
    """What the node holds; a handler whose answer may be large asks how much room there is."""
    line: Line = field(default_factory=Line)
    """Of its produce requests, by arrival."""
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
    """How far consumers were served, where groups may ask."""
    idle_owners: IdleOwners | None = None
    """Watches members that read nothing of what they were assigned."""
    authorizer: Authorizer | None = None
    """None: everybody may do everything."""
    delegation: DelegationTokens | None = None
    """None without `delegation.token.secret.key`."""
    broker_configs: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by who alters settings of brokers."""
    certificates: Certificates | None = None
    """Those of its listeners; None: nobody may change them."""
    replicas_strict: bool = False
    """Whether this node answers only for what it leads, or holds as a replica."""


class RequestContext(NamedTuple):
    """A tuple, for one is made for every request: a frozen dataclass of as many fields takes three times as long."""

    api_key: ApiKey
    version: int
    correlation_id: int
    client_id: str | None
    connection: ConnectionInfo
    services: Services
    place: Place = NO_PLACE
    """Where the request stands in its connection's line; `async with` it before anything that must keep the order."""
    served: tuple[ApiVersion, ...] = ()
    """What this node promises, for ApiVersions."""
    role: Role = Role.BROKER
    """As what this node is asked."""
