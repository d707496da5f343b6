"""Broker and group settings that the machines read, as values.

The one idea: names and defaults are Kafka's. `gateway/groups/settings.py` builds these from the node's configuration
and from the settings of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gateway.coordinator.handoff import DEFAULTS, HandoffSettings


class MigrationPolicy(Enum):
    """`group.consumer.migration.policy`: in which direction a group with members may change its protocol."""

    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Settings of consumer groups (KIP-848); names and defaults are Kafka's `group.consumer.*`. The two intervals
    may be set per group."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2**31 - 1
    assignors: tuple[str, ...] = ("uniform", "range")
    """Available assignors. The first one is used if no member names one."""
    handoff: HandoffSettings = DEFAULTS
    cooperative_guard: bool = False
    """The setting of the classic group with this id (`Settings.group_cooperative_guard`)."""
    migration_policy: MigrationPolicy = MigrationPolicy.BIDIRECTIONAL


@dataclass(frozen=True, slots=True)
class StreamsSettings:
    """Settings of streams groups (KIP-1071); names and defaults are Kafka's `group.streams.*`. All but the size may
    be set per group."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2**31 - 1
    num_standby_replicas: int = 0
    initial_rebalance_delay_ms: int = 3_000


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """Settings of share groups (KIP-932); names and defaults are Kafka's `group.share.*` and `share.*`. Sizes and
    limits belong to the broker; the others may be set per group."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 200
    record_lock_duration_ms: int = 30_000
    max_record_locks: int = 2_000
    """Maximal number of records of one partition that are neither settled nor waiting for their first delivery."""
    delivery_count_limit: int = 5
    auto_offset_reset: str = "latest"
    """The offset at which a group begins: `latest`, `earliest`, or `by_duration:` with an ISO 8601 duration."""
    read_committed: bool = False
    renews: bool = True
    """True if members may extend their locks."""
    dead_letter_topic: str = ""
    """Topic for records that are rejected or were delivered too often (KIP-1191). Empty: none."""
    copies_dead_letters: bool = False
    """True if keys and values are copied to the dead-letter topic, too."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Broker settings that the coordinator reads. Names and defaults are Kafka's, except for the last ones."""

    group_initial_rebalance_delay_ms: int = 3000
    group_min_session_timeout_ms: int = 6000
    group_max_session_timeout_ms: int = 1_800_000
    group_max_size: int = 2**31 - 1
    new_member_join_timeout_ms: int = 300_000
    """How long a member is kept that waits for the reply to its first join (5 min, fixed in upstream)."""
    group_connection_grace_ms: int = 10_000
    """How long a dynamic member outlives a connection that its peer closed; −1: only the session timeout counts."""
    group_cooperative_guard: bool = False
    """True if partitions that one member claims are never delivered to another, even if the leader assigns them."""
    handoff: HandoffSettings = DEFAULTS
    """The handoff setting for classic groups without a setting of their own."""
    drains: bool = False
    """True if any group is in mode `drain`."""
    consumer: ConsumerSettings = ConsumerSettings()
    consumer_of: Mapping[str, ConsumerSettings] = field(default_factory=dict[str, ConsumerSettings])
    """Settings of the groups that have their own, by group id."""
    streams: StreamsSettings = StreamsSettings()
    streams_of: Mapping[str, StreamsSettings] = field(default_factory=dict[str, StreamsSettings])
    """Settings of the groups that have their own, by group id."""
    share: ShareSettings = ShareSettings()
    share_of: Mapping[str, ShareSettings] = field(default_factory=dict[str, ShareSettings])
    """Settings of the groups that have their own, by group id."""

    def consumer_for(self, group_id: str) -> ConsumerSettings:
        return self.consumer_of.get(group_id, self.consumer)

    def streams_for(self, group_id: str) -> StreamsSettings:
        return self.streams_of.get(group_id, self.streams)

    def share_for(self, group_id: str) -> ShareSettings:
        return self.share_of.get(group_id, self.share)

    def guards(self, group_id: str) -> bool:
        own = self.consumer_of.get(group_id)
        return self.group_cooperative_guard if own is None else own.cooperative_guard

    def handoff_of(self, group_id: str) -> HandoffSettings:
        own = self.consumer_of.get(group_id)
        return self.handoff if own is None else own.handoff
