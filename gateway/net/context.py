"""What a handler is given besides its request: who asks, at which version, and the services it may call.

The one idea: handlers reach everything through `RequestContext`, so a handler is a plain async function that a test
can call with values. It holds no state of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.api_keys import ApiKey

if TYPE_CHECKING:
    from gateway.cluster.membership import Membership
    from gateway.config.settings import Settings
    from gateway.groups.groups import Groups
    from gateway.log.appender import Appender
    from gateway.log.catalog import Catalog
    from gateway.log.tail import Tail
    from gateway.operate.metrics import Metrics
    from storage.log import LogStore
    from storage.offsets import OffsetStore
    from storage.producers import ProducerStore
    from storage.topics import TopicStore


_connections = itertools.count(1)


@dataclass(slots=True)
class ConnectionInfo:
    """One client connection, for as long as it is open. Only ApiVersions writes to it (client software)."""

    connection_id: str
    """Unguessable and never reused; group members are keyed by it."""
    client_host: str
    """Peer address as upstream renders it: `/127.0.0.1`."""
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
    appender: Appender
    tail: Tail
    producers: ProducerStore
    offsets: OffsetStore
    groups: Groups
    membership: Membership
    metrics: Metrics
    cluster_id: str


@dataclass(frozen=True, slots=True)
class RequestContext:
    api_key: ApiKey
    version: int
    correlation_id: int
    client_id: str | None
    connection: ConnectionInfo
    services: Services
