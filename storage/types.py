"""Values that cross the door between the gateway and Postgres.

The one idea: what storage takes and gives are frozen values in Kafka's words, so that neither a connection, a row
object nor a protocol message leaks through. Refusals that Postgres decides (fences, dedupe, bounds) are enum members
here; `gateway/net/errors.py` maps them to Kafka's codes in one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NewType
from uuid import UUID

PartitionKey = NewType("PartitionKey", int)
"""Surrogate id of one incarnation of a partition; a re-created topic never reuses one."""

NodeId = NewType("NodeId", int)

Address = tuple[str, int]
"""Host and port."""


class Refusal(Enum):
    """Why Postgres refused one element of a call; the rest of the call stands."""

    UNKNOWN_PARTITION = "unknown_partition"
    PARTITION_BUSY = "partition_busy"
    """Another transaction holds the partition, and the caller did not want to wait for it."""
    DAMAGED = "damaged"
    """Records are in the log, but their bytes are missing or wrong."""
    OUT_OF_ORDER_SEQUENCE = "out_of_order_sequence"
    INVALID_PRODUCER_EPOCH = "invalid_producer_epoch"
    INVALID_PRODUCER_ID_MAPPING = "invalid_producer_id_mapping"
    """The transactional id is not known, or belongs to another producer id."""
    NOT_IN_TRANSACTION = "not_in_transaction"
    """A batch of a transaction that the partition is not, or no longer, part of; offsets, likewise of the group."""
    INVALID_TXN_STATE = "invalid_txn_state"
    """A batch outside of the transaction that its producer has open in the partition."""
    OFFSET_OUT_OF_RANGE = "offset_out_of_range"
    NOT_COORDINATOR = "not_coordinator"
    ILLEGAL_GENERATION = "illegal_generation"
    UNKNOWN_MEMBER = "unknown_member"
    STALE_MEMBER_EPOCH = "stale_member_epoch"
    UNKNOWN_TOPIC = "unknown_topic"
    TOPIC_EXISTS = "topic_exists"
    INVALID_PARTITIONS = "invalid_partitions"


# --- topics -------------------------------------------------------------------------------------------------------


class Assignment(NamedTuple):
    """The nodes that an administrator has named for a partition."""

    replicas: tuple[int, ...]
    """In the order in which they are to lead."""
    leader: int | None = None
    """Of them, who leads while it is alive, until another is elected; None: the first that is alive."""
    in_sync: tuple[int, ...] | None = None
    """Of them, who alone may lead where `eligible.leader.replicas.version` is 0; None: all of them."""


@dataclass(frozen=True, slots=True)
class Partition:
    partition_index: int
    partition_key: PartitionKey
    leader_epoch: int
    assignment: Assignment | None
    """None: nobody has named any nodes."""
    topic_id: UUID
    partition_count: int
    """Of its topic: by both the topic's leaders are spread."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the catalog holds it. `configs` holds only what was set on the topic, as strings."""

    topic_id: UUID
    name: str
    internal: bool
    configs: Mapping[str, str]
    partitions: tuple[Partition, ...]
    """Ordered by partition_index, without gaps: partitions[i].partition_index == i."""
    created_revision: int = 0
    """Of two topics of one name the one with the greater is the later."""
    changed_revision: int = 0
    """Of two states of one topic the one with the greater is the later."""


class ClientQuota(NamedTuple):
    """One value of whom it is for. A name is None where it does not matter, DEFAULT_NAME for all without their own."""

    user_name: str | None
    client_id: str | None
    address: str | None
    name: str
    value: float | None
    """None: it is to be taken away."""


class ScramKey(NamedTuple):
    """One credential."""

    user: str
    mechanism: int
    """1: SCRAM-SHA-256, 2: SCRAM-SHA-512."""


class ScramInfo(NamedTuple):
    """What may be told of a credential."""

    user: str
    mechanism: int
    iterations: int


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """By what a server knows a user's password (RFC 5802)."""

    user: str
    mechanism: int
    iterations: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


class NewDelegationToken(NamedTuple):
    """What is stored of a token before anyone knows when. Owner, requester and renewers are names of users."""

    token_id: str
    hmac_digest: bytes
    owner: str
    requester: str
    renewers: tuple[str, ...]
    credentials: tuple[ScramCredential, ...]
    """By mechanism, from the first on, all with as many iterations."""


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
    """By what who logs in by a token is known, and whom that is."""

    credential: ScramCredential
    owner: str
    hmac_digest: bytes = field(repr=False)
    remaining_ms: int
    """For how long the token holds; negative: it has expired."""


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
"""No user, no client id and no address that has a quota is called so."""


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """From the catalog of one revision to that of `revision`."""

    revision: int
    whole: bool
    """`topics` are all there are; what is not among them has been deleted."""
    topics: tuple[Topic, ...]
    """Created or altered, in the order of their last changes."""
    deleted: tuple[UUID, ...]
    broker_configs: Mapping[str, Mapping[str, str]] | None
    """All dynamic broker settings, by the broker's id (empty: those of all brokers); None where none changed."""
    group_configs: Mapping[str, Mapping[str, str]] | None
    """All settings of single groups, by group id; None where none changed."""
    client_metrics: Mapping[str, Mapping[str, str]] | None = None
    """All subscriptions to clients' metrics, by name; None where none changed."""
    client_quotas: Sequence[ClientQuota] | None = None
    """All quotas; None where none changed."""
    acls: Sequence[Acl] | None = None
    """All ACLs, as new as `revision` or newer; None where none changed."""


@dataclass(frozen=True, slots=True)
class NewTopic:
    name: str
    partition_count: int
    configs: Mapping[str, str]
    internal: bool = False
    replicas: tuple[tuple[int, ...], ...] | None = None
    """Of each partition, the nodes that are to lead it; None: nobody has named any."""


# --- log ----------------------------------------------------------------------------------------------------------


class NewBatch(NamedTuple):
    """One validated record batch (magic 2) to append.

    `records` is the whole batch, 61-byte head included; storage writes base_offset (bytes 0-7) and
    partition_leader_epoch (bytes 12-15), which lie outside the CRC, into it in place.
    """

    partition_key: PartitionKey
    records: bytearray | memoryview
    record_count: int
    """last_offset_delta + 1: how many offsets the batch takes."""
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
    """Where the first transaction began that is under way in the partition; None: there is none."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The truth of one partition, read in one statement."""

    log_start_offset: int
    high_watermark: int
    last_stable_offset: int
    """Where the first transaction that is under way began, or the high watermark."""
    leader_epoch: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    partition_key: PartitionKey
    offset: int
    max_bytes: int
    committed: bool = False
    """Nothing from the last stable offset on, and what is to be left out below it."""


class AbortedTransaction(NamedTuple):
    """Batches of the producer from `first_offset` up to its marker belong to no reader with read_committed."""

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
    """Of transactions of which `batches` hold records, where the request is for what is committed."""


# --- groups and offsets -------------------------------------------------------------------------------------------


class LeaseKind(Enum):
    """What a lease is leave to coordinate; each kind has shards of its own."""

    GROUPS = "groups"
    TRANSACTIONS = "transactions"
    JOBS = "jobs"


SHARD_COUNTS: Mapping[LeaseKind, int] = {LeaseKind.GROUPS: 50, LeaseKind.TRANSACTIONS: 50, LeaseKind.JOBS: 8}
"""Kafka's offsets.topic.num.partitions and transaction.state.log.num.partitions. Fixed: shards are stored."""


@dataclass(frozen=True, slots=True)
class CoordinatorLease:
    """Leave to coordinate what is in one shard. `lease_epoch` rises with every change of owner and fences writes."""

    shard: int
    node_id: NodeId
    lease_epoch: int
    kind: LeaseKind = LeaseKind.GROUPS


Document = Mapping[str, Any]
"""JSON that storage keeps and does not read: strings, numbers, booleans, None, lists, mappings."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """`member_epoch` fences offset commits that name the member."""

    member_id: str
    document: Document
    member_epoch: int = 0


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Everything about a group that survives a restart, stored before the answers that reveal it."""

    group_id: str
    group_type: str
    """Who can read the documents."""
    state: str
    protocol_type: str | None
    generation_id: int
    document: Document
    members: tuple[MemberRecord, ...]
    silent_ms: int | None = None
    """Since when a coordinator waits to hear all members again; None: it was just read for the first time since."""


@dataclass(frozen=True, slots=True)
class GroupChange:
    """What is to be written of one group. Repeating it is harmless: it says what is so, not what to do."""

    lease: CoordinatorLease
    group_id: str
    group_type: str
    state: str
    protocol_type: str | None
    generation_id: int
    document: Document
    all_heard: bool
    changed: tuple[MemberRecord, ...] = ()
    """Members that are new or different."""
    gone: tuple[str, ...] = ()
    replaced: bool = False
    """Members that are not in `changed` are gone."""


class Saved(Enum):
    """What became of one change: `BUSY` was not written, because somebody else holds the group at this moment."""

    SAVED = "saved"
    FENCED = "fenced"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """One partition's commit. The fence: the shard's lease, and the group's stored generation or the member's epoch.

    With `member_id`, `generation_id` is that member's epoch. Without, −1 is the simple consumer or admin commit: it
    stands only while the stored group has no members (or does not exist, in which case an Empty group without
    protocol_type is created). Commits are dated, and expire, by Postgres' clock.
    """

    lease: CoordinatorLease
    group_id: str
    generation_id: int | None
    """None: by whoever has the transaction that the commit is part of, members or not; else as −1."""
    topic_id: UUID
    partition_index: int
    committed_offset: int
    leader_epoch: int
    metadata: str
    retention_ms: int | None = None
    """How long it is kept; None: as the cluster is set."""
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
    """A transaction that is under way has an offset for the partition: what will be committed is not known yet."""


@dataclass(frozen=True, slots=True)
class OffsetAsStored:
    """A committed offset with all that is kept of it."""

    topic: str
    topic_id: UUID
    partition_index: int
    committed_offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int | None
    """None: as the cluster is set."""


# --- nodes --------------------------------------------------------------------------------------------------------


TRANSACTION_VERSION = 2
"""Of this release, by upstream's feature: 2: producers name no partitions, and each transaction raises the epoch."""


@dataclass(frozen=True, slots=True)
class Roles:
    """What a node is in the cluster (upstream: `process.roles`), and where it is asked as a controller."""

    is_broker: bool = True
    """Clients are told of it: it leads partitions and coordinates groups."""
    is_controller: bool = True
    """It does what one node does for all."""
    controller_listeners: tuple[str, ...] = ()
    """Names of listeners."""


BOTH = Roles()


@dataclass(frozen=True, slots=True)
class Node:
    node_id: NodeId
    listeners: Mapping[str, Address] = field(hash=False)
    """Listener name → where clients of that listener are told to connect. Never mutated."""
    rack: str | None = None
    incarnation: int = field(default=0, compare=False)
    """Rises whenever a process registers under the id."""
    announced: int = field(default=0, compare=False)
    """Announcements of appends that it had sent at its last renewal."""
    transaction_version: int = field(default=TRANSACTION_VERSION, compare=False)
    """By which it lets clients go."""
    levels: Mapping[str, int] = field(default_factory=dict[str, int], compare=False)
    """Features whose level an administrator has set → that level; the same for all nodes. Never mutated."""
    read_ms: int = field(default=0, compare=False)
    """When this was read, by Postgres' clock (Unix ms)."""
    authorizer: str = field(default="", compare=False)
    """By which it goes; empty: none."""
    roles: Roles = field(default=BOTH, compare=False)


@dataclass(frozen=True, slots=True)
class Follower:
    """A live node, and how far it follows the catalog."""

    node: Node
    revision: int | None
    """What it had come to when it was last heard of; None: it has not said."""
    heard_ms: int
    """When that was, by Postgres' clock (Unix ms)."""
    lease_epoch: int | None
    """At which it has the lease that was asked for; None: it has not."""


@dataclass(frozen=True, slots=True)
class MetadataLog:
    """The catalog as a log whose offsets are revisions."""

    revision: int
    """That is committed."""
    read_ms: int
    """When all this was read, by Postgres' clock (Unix ms)."""
    followers: tuple[Follower, ...]
    """By id."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What Postgres knows of a live node."""

    node: Node
    registered_ms_ago: int
    leases: Mapping[str, int] = field(hash=False)
    """Kind of lease → shards held."""
    revision_lag: int | None
    """Changes of the catalog that the node had not taken in at its last renewal; None: it has not said."""
