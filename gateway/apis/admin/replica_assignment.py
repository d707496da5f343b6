"""The nodes that a request may name as replicas of a partition.

Replicas hold no records. A replication factor is only stored and shown. The first live node in a manual assignment
leads the partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.apis.services import HasMembership
from gateway.cluster.spreading import Rack, Spread
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_topics import CreatableReplicaAssignment


@dataclass(frozen=True, slots=True)
class Brokers:
    """Nodes that a request may name as replicas: the registered ones, alive or not."""

    registered: Mapping[int, Rack]
    alive: Mapping[int, Rack]
    spread: Spread

    @classmethod
    async def read(cls, services: HasMembership, *, asked: bool) -> Brokers:
        """Return the live nodes. If the request names nodes (`asked`), read the live nodes and all others now: a node
        may have started since this node last read them. Raise StorageError."""
        if asked:
            await services.membership.look()
        alive = {int(node.node_id): node.rack for node in services.membership.brokers()}
        others = await services.membership.fenced() if asked else ()
        fenced = {int(node.node_id): node.rack for node in others if node.node_id not in alive}
        return cls({**alive, **fenced}, alive, Spread(alive, fenced))

    def check(self, broker_ids: Sequence[int], factor: int | None = None) -> None:
        """Refuse what ReplicationControlManager.validateManualPartitionAssignment refuses, in its order and words.
        KafkaError INVALID_REPLICA_ASSIGNMENT."""
        reason: str | None = None
        if not broker_ids:
            reason = "an empty replica list."
        before: int | None = None
        for broker_id in sorted(broker_ids):
            if broker_id not in self.registered:
                reason = f"broker {broker_id}, but no such broker is registered."
            elif broker_id == before:
                reason = f"the broker {broker_id} more than once."
            if reason is not None:
                break
            before = broker_id
        if reason is None and factor is not None and len(broker_ids) != factor:
            reason = (
                f"a partition with {len(broker_ids)} replica(s), but this is not consistent with previous partitions, "
                f"which have {factor} replica(s)."
            )
        if reason is not None:
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"The manual partition assignment includes {reason}")

    def check_factor(self, factor: int) -> None:
        """Refuse what upstream's StripedReplicaPlacer refuses. KafkaError INVALID_REPLICATION_FACTOR."""
        if not self.alive:
            raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, "All brokers are currently fenced.")
        if factor > len(self.registered):
            raise KafkaError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"The target replication factor of {factor} cannot be reached because only {len(self.registered)} "
                "broker(s) are registered.",
            )

    def check_alive(self, broker_ids: Sequence[int], partition_index: int) -> None:
        """Refuse a new partition without a live replica to lead it. KafkaError INVALID_REPLICA_ASSIGNMENT."""
        if self.alive.keys().isdisjoint(broker_ids):
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"All brokers specified in the manual partition assignment for partition {partition_index} are fenced "
                "or in controlled shutdown.",
            )


def read_assignments(
    assignments: Sequence[CreatableReplicaAssignment], brokers: Brokers
) -> tuple[tuple[int, ...], ...]:
    """Return the named nodes of each partition: the same number for each, and at least one. KafkaError
    INVALID_REPLICA_ASSIGNMENT."""
    named: dict[int, tuple[int, ...]] = {}
    factor: int | None = None
    for part in assignments:
        if part.partition_index in named:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"Found multiple manual partition assignments for partition {part.partition_index}",
            )
        brokers.check(part.broker_ids, factor)
        brokers.check_alive(part.broker_ids, part.partition_index)
        named[part.partition_index] = part.broker_ids
        factor = len(part.broker_ids)
    if named.keys() != set(range(len(named))):
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions should be a consecutive 0-based integer sequence"
        )
    return tuple(named[index] for index in range(len(named)))
