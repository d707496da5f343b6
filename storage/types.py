"""Values exchanged between the gateway and Postgres.

The one idea: storage accepts and returns frozen values in Kafka's terms, so neither a connection, a row object nor a
protocol message leaks through. Refusals that Postgres decides (fences, deduplication, bounds) are enum members here.
`gateway/net/errors.py` maps them to Kafka's codes in one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NewType
from uuid import UUID

from storage.roles import BOTH, Address, Roles

PartitionKey = NewType("PartitionKey", int)
"""Surrogate id of one incarnation of a partition; a re-created topic never reuses one."""

NodeId = NewType("NodeId", int)


class Refusal(Enum):
    """The reason why Postgres refused one element of a call; the rest of the call stands."""

    UNKNOWN_PARTITION = "unknown_partition"
    PARTITION_BUSY = "partition_busy"
    """Another transaction holds the partition's lock, and the caller asked not to wait."""
    DAMAGED = "damaged"
    """The records are in the log, but their bytes are missing or wrong."""
    OUT_OF_ORDER_SEQUENCE = "out_of_order_sequence"
    INVALID_PRODUCER_EPOCH = "invalid_producer_epoch"
    INVALID_PRODUCER_ID_MAPPING = "invalid_producer_id_mapping"
    """The transactional id is unknown or belongs to another producer id."""
    NOT_IN_TRANSACTION = "not_in_transaction"
    """The partition, or the group for offsets, is not part of the transaction, or no longer."""
    TRANSACTION_TOO_LARGE = "transaction_too_large"
    """The transaction is as large as one may be: it can only be aborted, or committed without this batch."""
    INVALID_TXN_STATE = "invalid_txn_state"
    """The batch is not part of the transaction that its producer has open in the partition."""
    OFFSET_OUT_OF_RANGE = "offset_out_of_range"
    NOT_COORDINATOR = "not_coordinator"
    ILLEGAL_GENERATION = "illegal_generation"
    UNKNOWN_MEMBER = "unknown_member"
    STALE_MEMBER_EPOCH = "stale_member_epoch"
    UNKNOWN_TOPIC = "unknown_topic"
    TOPIC_EXISTS = "topic_exists"
    NAME_IN_USE = "name_in_use"
    """A topic of this name was deleted, and another node may still serve its records."""
    INVALID_PARTITIONS = "invalid_partitions"


# --- topics -------------------------------------------------------------------------------------------------------


class Assignment(NamedTuple):
    """The nodes that an administrator has named for a partition."""

    replicas: tuple[int, ...]
    """Replicas in order of preference for leading."""
    leader: int | None = None
    """The replica that leads while it is alive, until another is elected; None: the first live one leads."""


@dataclass(frozen=True, slots=True)
class Partition:
    partition_index: int
    partition_key: PartitionKey
    leader_epoch: int
    assignment: Assignment | None
    """None: no administrator has named nodes."""
    topic_id: UUID
    partition_count: int
    """Number of partitions of the topic. With `topic_id` it decides how the topic's leaders are spread."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the catalog holds it. `configs` holds only settings of the topic itself, as strings."""

    topic_id: UUID
    name: str
    internal: bool
    configs: Mapping[str, str]
    partitions: tuple[Partition, ...]
    """Ordered by partition_index, without gaps: partitions[i].partition_index == i."""
    created_revision: int = 0
    """Orders topics of the same name: the greater is the later topic."""
    changed_revision: int = 0
    """Orders states of the same topic: the greater is the later state."""


class ClientQuota(NamedTuple):
    """One quota value and its entity. A name is None if it does not matter, and DEFAULT_NAME for all entities
    without a quota of their own."""

    user_name: str | None
    client_id: str | None
    address: str | None
    name: str
    value: float | None
    """Value of the quota. None removes the quota."""


class ScramKey(NamedTuple):
    """Identifies one credential, by user and mechanism."""

    user: str
    mechanism: int
    """1: SCRAM-SHA-256, 2: SCRAM-SHA-512."""


class ScramInfo(NamedTuple):
    """The part of a credential that may be shown."""

    user: str
    mechanism: int
    iterations: int


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """The values by which a server verifies a user's password (RFC 5802)."""

    user: str
    mechanism: int
    iterations: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


class NewDelegationToken(NamedTuple):
    """A new token before its times are known. Owner, requester and renewers are user names."""

    token_id: str
    hmac_digest: bytes
    owner: str
    requester: str
    renewers: tuple[str, ...]
    credentials: tuple[ScramCredential, ...]
    """One credential per mechanism, in order, all with the same number of iterations."""


@dataclass(frozen=True, slots=True)
class DelegationToken:
    """A token without its secret. Times are milliseconds since 1970."""

    token_id: str
    owner: str
    requester: str
    renewers: tuple[str, ...]
    issued_ms: int
    expires_ms: int
    max_ms: int
    hmac_digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenCredential:
    """The credential and the owner of a token that a client uses to log in."""

    credential: ScramCredential
    owner: str
    hmac_digest: bytes = field(repr=False)
    remaining_ms: int
    """How long the token remains valid; negative: it has expired."""


class Acl(NamedTuple):
    """One access control entry on one pattern of resources. Types, operation and permission are Kafka's codes."""

    resource_type: int
    pattern_type: int
    resource_name: str
    principal: str
    host: str
    operation: int
    permission: int


DEFAULT_NAME = ""
"""Reserved: no user, client id or address with a quota has this name."""


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """The changes of the catalog from one revision to `revision`."""

    revision: int
    whole: bool
    """True if `topics` contains all topics, so that any other topic has been deleted."""
    topics: tuple[Topic, ...]
    """Created or altered topics, in the order of their last changes."""
    deleted: tuple[UUID, ...]
    broker_configs: Mapping[str, Mapping[str, str]] | None
    """All dynamic broker settings, by the broker's id (empty: those of all brokers); None if none changed."""
    group_configs: Mapping[str, Mapping[str, str]] | None
    """All settings of single groups, by group id; None if none changed."""
    client_quotas: Sequence[ClientQuota] | None = None
    """All quotas; None if none changed."""
    acls: Sequence[Acl] | None = None
    """All ACLs, as new as `revision` or newer; None if none changed."""


@dataclass(frozen=True, slots=True)
class NewTopic:
    name: str
    partition_count: int
    configs: Mapping[str, str]
    internal: bool = False
    replicas: tuple[tuple[int, ...], ...] | None = None
    """For each partition, the nodes that lead it; None: no nodes are named."""


# --- log ----------------------------------------------------------------------------------------------------------


class NewBatch(NamedTuple):
    """One validated record batch (magic 2) to append.

    `records` is the whole batch, 61-byte head included; storage writes base_offset (bytes 0-7) and
    partition_leader_epoch (bytes 12-15), which lie outside the CRC, into it in place.
    """

    partition_key: PartitionKey
    records: bytearray | memoryview
    record_count: int
    """last_offset_delta + 1: how many offsets the batch occupies."""
    max_timestamp_ms: int
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    is_transactional: bool = False


class Appended(NamedTuple):
    """The batch is durable. A duplicate carries the offset of its first append and wrote nothing."""

    base_offset: int
    log_start_offset: int
    leader_epoch: int
    duplicate: bool = False
    open_since_offset: int | None = None
    """The offset at which the first open transaction of the partition began; None: no transaction is open."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The present state of one partition, read in one statement."""

    log_start_offset: int
    high_watermark: int
    last_stable_offset: int
    """The offset at which the first open transaction began, or the high watermark."""
    leader_epoch: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    partition_key: PartitionKey
    offset: int
    max_bytes: int
    committed: bool = False
    """Return nothing from the last stable offset on, and list the aborted ranges below it."""


class AbortedTransaction(NamedTuple):
    """Readers with read_committed must skip the producer's batches from `first_offset` up to its marker."""

    producer_id: int
    first_offset: int


@dataclass(frozen=True, slots=True)
class StoredBatch:
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    records: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`batches` are whole and in offset order; the first holds `offset` or is the next after a compaction gap."""

    state: PartitionState
    batches: tuple[StoredBatch, ...]
    aborted: tuple[AbortedTransaction, ...] = ()
    """Aborted transactions with records in `batches`, if the request reads committed records only."""


# --- groups and offsets -------------------------------------------------------------------------------------------


class LeaseKind(Enum):
    """The things that the holder of a lease coordinates. Each kind has shards of its own."""

    GROUPS = "groups"
    TRANSACTIONS = "transactions"
    JOBS = "jobs"


SHARD_COUNTS: Mapping[LeaseKind, int] = {LeaseKind.GROUPS: 50, LeaseKind.TRANSACTIONS: 50, LeaseKind.JOBS: 8}
"""Kafka's offsets.topic.num.partitions and transaction.state.log.num.partitions. Fixed: shards are stored."""


@dataclass(frozen=True, slots=True)
class CoordinatorLease:
    """Permission to coordinate one shard. `lease_epoch` rises with every change of owner and fences writes."""

    shard: int
    node_id: NodeId
    lease_epoch: int
    kind: LeaseKind = LeaseKind.GROUPS


Document = Mapping[str, Any]
"""JSON that storage keeps without reading it: strings, numbers, booleans, None, lists, mappings."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A stored member. `member_epoch` fences offset commits that name the member."""

    member_id: str
    document: Document
    member_epoch: int = 0


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """All state of a group that must survive a restart. It is stored before the answers that reveal it."""

    group_id: str
    group_type: str
    """The group's type, which says which machine can read the documents."""
    state: str
    protocol_type: str | None
    generation_id: int
    document: Document
    members: tuple[MemberRecord, ...]
    silent_ms: int | None = None
    """For how long a coordinator has been waiting to hear from all members again; None: the group was just read for
    the first time."""


@dataclass(frozen=True, slots=True)
class GroupChange:
    """The change to write for one group. Repeating a write is harmless, because it describes a state and not a
    change."""

    lease: CoordinatorLease
    group_id: str
    group_type: str
    state: str
    protocol_type: str | None
    generation_id: int
    document: Document
    all_heard: bool
    changed: tuple[MemberRecord, ...] = ()
    """Members that are new or have changed."""
    gone: tuple[str, ...] = ()
    replaced: bool = False
    """Remove members that are not in `changed`."""


class Saved(Enum):
    """The outcome of one change. `BUSY` was not written, because another transaction holds the group's lock."""

    SAVED = "saved"
    FENCED = "fenced"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """One partition's commit. The fence is the shard's lease, and the group's stored generation or the member's epoch.

    With `member_id`, `generation_id` is that member's epoch. Without it, −1 is the commit of a simple consumer or an
    administrator. Such a commit is accepted only while the stored group has no members. If the group does not exist, an
    Empty group without protocol_type is created. Commits are dated, and expire, by Postgres' clock.
    """

    lease: CoordinatorLease
    group_id: str
    generation_id: int | None
    """None: the commit is part of a transaction. Its producer may commit whether the group has members or not. All
    other rules are those of −1."""
    topic_id: UUID
    partition_index: int
    committed_offset: int
    leader_epoch: int
    metadata: str
    retention_ms: int | None = None
    """How long the offset is kept; None: the cluster's setting applies."""
    member_id: str | None = None


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    topic_id: UUID
    partition_index: int
    committed_offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    is_pending: bool = False
    """True if an open transaction has an offset for the partition, so the next committed offset is not known yet."""


@dataclass(frozen=True, slots=True)
class OffsetAsStored:
    """A committed offset with everything that is stored about it."""

    topic: str
    topic_id: UUID
    partition_index: int
    committed_offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int | None
    """How long the offset is kept; None: the cluster's setting applies."""


# --- nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    node_id: NodeId
    listeners: Mapping[str, Address] = field(hash=False)
    """Listener name → the address that clients of that listener are sent to. Never mutated."""
    rack: str | None = None
    incarnation: int = field(default=0, compare=False)
    """Rises whenever a process registers under the id."""
    announced: int = field(default=0, compare=False)
    """How many announcements of appends the node had sent at its last renewal."""
    levels: Mapping[str, int] = field(default_factory=dict[str, int], compare=False)
    """Levels of features that an administrator has set, the same for all nodes. Never mutated."""
    read_ms: int = field(default=0, compare=False)
    """Time of this read by Postgres' clock (Unix ms)."""
    authorizer: str = field(default="", compare=False)
    """The node's authorizer; empty: none."""
    roles: Roles = field(default=BOTH, compare=False)


class Registration(NamedTuple):
    """One process that runs a node."""

    node_id: NodeId
    incarnation: int


def unregistered() -> Registration | None:
    """Return None, for processes that run no node."""
    return None


@dataclass(frozen=True, slots=True)
class Follower:
    """A live node and the catalog revision that it has reached."""

    node: Node
    revision: int | None
    """The revision at the node's last renewal; None: unknown."""
    heard_ms: int
    """Time of that renewal by Postgres' clock (Unix ms)."""
    lease_epoch: int | None
    """The epoch at which the node holds the requested lease; None: it does not hold it."""


@dataclass(frozen=True, slots=True)
class MetadataLog:
    """The catalog as a log whose offsets are revisions."""

    revision: int
    """The committed revision."""
    read_ms: int
    """Time of this read by Postgres' clock (Unix ms)."""
    followers: tuple[Follower, ...]
    """Followers in the order of their ids."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A live node with the state that Postgres holds of it."""

    node: Node
    registered_ms_ago: int
    leases: Mapping[str, int] = field(hash=False)
    """Kind of lease → number of shards held."""
    revision_lag: int | None
    """Catalog changes that the node had not read at its last renewal; None: unknown."""
