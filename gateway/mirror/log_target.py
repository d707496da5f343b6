"""Sluice as the target: append to its log in Postgres, at the source's offsets."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.commands.errors import CommandError
from gateway.commands.log import TopicPartition
from gateway.mirror.source import SourceTopic
from storage.mirror import MirroredBatch, MirrorPosition, MirrorRefusal, MirrorSource, MirrorStore
from storage.pool import Database
from storage.topics import TopicStore
from storage.types import PartitionKey

_ADVICE = {
    MirrorRefusal.UNKNOWN_PARTITION: "was deleted in the target: run this again",
    MirrorRefusal.NOT_EMPTY: (
        "has records in the target that no mirror wrote: delete the topic there, or mirror to a topic that is new"
    ),
    MirrorRefusal.OTHER_SOURCE: (
        "was mirrored from another cluster, or the source's topic was made anew: delete the topic in the target"
    ),
    MirrorRefusal.WRITTEN: (
        "was written to in the target while it is mirrored, by a client or by another mirror: its offsets no longer "
        "agree with the source. Stop the producers, delete the topic in the target and mirror it anew"
    ),
    MirrorRefusal.LEADER_EPOCH: "changes its leader epoch again and again: run this again",
}

_EPOCH_ATTEMPTS = 10


class LogTarget:
    """Appends to the log of a database. `source_cluster_id` identifies the source in later runs."""

    def __init__(self, database: Database, source_cluster_id: str) -> None:
        self._store = MirrorStore(database)
        self._topics = TopicStore(database)
        self._source_cluster_id = source_cluster_id
        self._keys: dict[TopicPartition, PartitionKey] = {}
        self._sources: dict[TopicPartition, MirrorSource] = {}
        self._positions: dict[TopicPartition, MirrorPosition] = {}

    async def begin(self, key: TopicPartition, topic: SourceTopic, log_start_offset: int) -> int:
        found = await self._topics.find(topic.name)
        if found is None or len(found.partitions) <= key[1]:
            raise _refused(key, MirrorRefusal.UNKNOWN_PARTITION)
        self._keys[key] = found.partitions[key[1]].partition_key
        self._sources[key] = MirrorSource(self._source_cluster_id, topic.topic_id)
        return (await self._begin(key, log_start_offset)).next_offset

    async def _begin(self, key: TopicPartition, log_start_offset: int) -> MirrorPosition:
        position = await self._store.begin(self._keys[key], self._sources[key], log_start_offset)
        if isinstance(position, MirrorRefusal):
            raise _refused(key, position)
        self._positions[key] = position
        return position

    async def append(self, key: TopicPartition, batches: Sequence[MirroredBatch]) -> None:
        for _ in range(_EPOCH_ATTEMPTS):
            before = self._positions[key]
            outcome = await self._store.append(self._keys[key], before, batches)
            if isinstance(outcome, MirrorPosition):
                self._positions[key] = outcome
                return
            if outcome is not MirrorRefusal.LEADER_EPOCH:
                raise _refused(key, outcome)
            if (await self._begin(key, before.next_offset)).next_offset != before.next_offset:
                raise _refused(key, MirrorRefusal.WRITTEN)
        raise _refused(key, MirrorRefusal.LEADER_EPOCH)

    def keeps_offsets(self, key: TopicPartition) -> bool:
        return True

    def translate(self, key: TopicPartition, offset: int) -> int | None:
        position = self._positions.get(key)
        return None if position is None else min(offset, position.next_offset)


def _refused(key: TopicPartition, refusal: MirrorRefusal) -> CommandError:
    return CommandError(f"{key[0]}[{key[1]}] {_ADVICE[refusal]}")
