"""The services that handlers use, one protocol for each.

The one idea: a handler's type says what it touches. A function that needs one service takes
`RequestContext[HasGroups]`. A module that needs several names their combination beside its handlers.
`gateway/building/services.py` has all services.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

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
from gateway.security.authorizer import HasAuthorizer
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


class HasAppender(Protocol):
    @property
    def appender(self) -> Appender: ...


class HasBrokerConfigs(Protocol):
    @property
    def broker_configs(self) -> asyncio.Lock:
        """Lock that is held while a request alters settings of brokers."""
        ...


class HasCatalog(Protocol):
    @property
    def catalog(self) -> Catalog: ...


class HasCertificates(Protocol):
    @property
    def certificates(self) -> Certificates | None:
        """The certificates of the listeners, or None if clients may not change them."""
        ...


class HasClock(Protocol):
    @property
    def clock(self) -> ClusterClock: ...


class HasClusterId(Protocol):
    @property
    def cluster_id(self) -> str: ...


class HasDelegation(Protocol):
    @property
    def delegation(self) -> DelegationTokens | None:
        """None if `delegation.token.secret.key` is not set."""
        ...


class HasGroups(Protocol):
    @property
    def groups(self) -> Groups: ...


class HasHistory(Protocol):
    @property
    def history(self) -> HistoryStore: ...


class HasIdleOwners(Protocol):
    @property
    def idle_owners(self) -> IdleOwners | None:
        """None if no group watches for members that read nothing."""
        ...


class HasInternalLogs(Protocol):
    @property
    def internal_logs(self) -> InternalLogs | None:
        """The writer of internal topics; None: these topics keep the records that earlier nodes wrote."""
        ...


class HasLog(Protocol):
    @property
    def log(self) -> LogStore: ...


class HasMarks(Protocol):
    @property
    def marks(self) -> Marks | None:
        """Up to which offsets this node has served consumers. None if no group needs this."""
        ...


class HasMembership(Protocol):
    @property
    def membership(self) -> Membership: ...


class HasMetrics(Protocol):
    @property
    def metrics(self) -> Metrics: ...


class HasOffsets(Protocol):
    @property
    def offsets(self) -> OffsetStore: ...


class HasProducers(Protocol):
    @property
    def producers(self) -> ProducerStore: ...


class HasRecompressor(Protocol):
    @property
    def recompressor(self) -> Recompressor: ...


class HasSettings(Protocol):
    @property
    def settings(self) -> Settings: ...


class HasShare(Protocol):
    @property
    def share(self) -> SharePartitions: ...


class HasShareSessions(Protocol):
    @property
    def share_sessions(self) -> ShareSessions: ...


class HasShareStore(Protocol):
    @property
    def share_store(self) -> ShareStore: ...


class HasTail(Protocol):
    @property
    def tail(self) -> Tail: ...


class HasThrottles(Protocol):
    @property
    def throttles(self) -> Throttles: ...


class HasTopics(Protocol):
    @property
    def topics(self) -> TopicStore: ...


class HasTransactions(Protocol):
    @property
    def transactions(self) -> Transactions: ...


class HasUsers(Protocol):
    @property
    def users(self) -> UserStore: ...


class HasValidator(Protocol):
    @property
    def validator(self) -> BatchValidator: ...


class FindsTopics(HasAuthorizer, HasCatalog, Protocol):
    """The topics, and the rules that decide whether a client may see a topic."""


class ChangesCatalog(HasCatalog, HasTopics, Protocol):
    """The catalog, and the store that changes it."""
