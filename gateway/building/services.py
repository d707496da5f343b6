"""The services of a node's handlers, as one value.

The one idea: this is the only value that has all services. A handler sees the part of it that the handler declares
(`gateway/apis/services.py`), and pyright compares the two where `gateway/node.py` makes the dispatch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.apis.coordinator_topics import InternalTopics
from gateway.apis.metadata_cache import DescribedTopics
from gateway.cluster.clock import ClusterClock
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


@dataclass(frozen=True, slots=True)
class Services:
    """The services, made once by `gateway/node.py`."""

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
    """The writer of internal topics; None: these topics keep the records that earlier nodes wrote."""
    marks: Marks | None = None
    """Up to which offsets this node has served consumers. None if no group needs this."""
    idle_owners: IdleOwners | None = None
    """Watches members that read nothing of what they were assigned."""
    authorizer: Authorizer | None = None
    """None if every client may do everything."""
    delegation: DelegationTokens | None = None
    """None if `delegation.token.secret.key` is not set."""
    broker_configs: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while a request alters settings of brokers."""
    certificates: Certificates | None = None
    """The certificates of the node's listeners, or None if clients may not change them."""
