"""Read topics and their batches from the cluster that is copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from uuid import UUID

from gateway.commands import log
from gateway.commands.client import PASSING_CODES, Cluster, refuse
from gateway.commands.errors import CommandError
from gateway.commands.log import TopicPartition
from gateway.log.topic_names import INTERNAL_TOPICS
from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData

FETCH_BYTES = 8 * 1024 * 1024
"""Maximal size of one response, in bytes. A larger batch arrives in a response of its own."""

_FETCH_BY_NAME, _FETCH_BY_ID = 12, 13
_NO_ID = UUID(int=0)
_MOVED_CODES = PASSING_CODES | {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.FENCED_LEADER_EPOCH,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.OFFSET_NOT_AVAILABLE,
    ErrorCode.REPLICA_NOT_AVAILABLE,
    ErrorCode.UNKNOWN_TOPIC_ID,
    ErrorCode.INCONSISTENT_TOPIC_ID,
}
"""Errors of a partition that has another leader by now, or will soon, or of a topic that was deleted."""


@dataclass(frozen=True, slots=True)
class SourceTopic:
    """A topic to copy."""

    name: str
    topic_id: UUID
    partitions: tuple[int, ...]


class Source:
    """The brokers from which topics are copied."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._leaders: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, UUID] = {}
        """Ids that the topics had when they were seen last, also of topics that were deleted since. A read by id never
        returns records of a later topic of the same name."""
        self._turn = 0

    def cluster_id(self) -> str:
        """Return the cluster's id. Raise CommandError if the cluster has none."""
        found = self.cluster.metadata(()).cluster_id
        if not found:
            raise CommandError("the source has no cluster id, so a later run could not recognise it")
        return found

    def topics(self, globs: Sequence[str]) -> list[SourceTopic]:
        """Return the topics that match one of the patterns, without internal topics. Remember their leaders.

        Raise CommandError if a broker cannot describe one of them, because a copy without it would look complete.
        """
        found: list[SourceTopic] = []
        leaders: dict[TopicPartition, int] = {}
        for topic in self.cluster.metadata().topics:
            name = topic.name or ""
            if topic.is_internal or name in INTERNAL_TOPICS or not matches(name, globs):
                continue
            refuse(topic.error_code, f"topic {name} of the source")
            partitions = sorted(partition.partition_index for partition in topic.partitions)
            found.append(SourceTopic(name, topic.topic_id, tuple(partitions)))
            leaders |= {(name, each.partition_index): each.leader_id for each in topic.partitions}
        self._leaders = leaders
        self._topic_ids |= {topic.name: topic.topic_id for topic in found}
        return sorted(found, key=lambda topic: topic.name)

    def read(
        self, positions: Mapping[TopicPartition, int], *, max_wait_ms: int
    ) -> list[tuple[TopicPartition, PartitionData]]:
        """Return an answer for each of these partitions that has one, by one request to each leader.

        Partitions whose leader is moving are left out. Raise CommandError for any other error but
        OFFSET_OUT_OF_RANGE, which the caller has to look at.
        """
        # Brokers fill an answer in the order of the request. So each request begins with another partition.
        self._turn += 1
        ordered = sorted(positions)
        at = self._turn % max(len(ordered), 1)
        wanted = [*ordered[at:], *ordered[:at]]
        if any(self._leaders.get(key, -1) < 0 for key in wanted):
            self._learn_leaders(wanted)
        by_leader: dict[int, list[TopicPartition]] = defaultdict(list)
        for key in wanted:
            by_leader[self._leaders.get(key, -1)].append(key)
        found: list[tuple[TopicPartition, PartitionData]] = []
        for leader, keys in by_leader.items():
            if leader >= 0:
                found += self._read_from(leader, keys, positions, max_wait_ms)
        return found

    def _read_from(
        self, leader: int, keys: Sequence[TopicPartition], positions: Mapping[TopicPartition, int], max_wait_ms: int
    ) -> list[tuple[TopicPartition, PartitionData]]:
        topics: dict[str, list[FetchPartition]] = {}
        for topic, partition in keys:
            asked = FetchPartition(
                partition=partition, fetch_offset=positions[topic, partition], partition_max_bytes=FETCH_BYTES
            )
            topics.setdefault(topic, []).append(asked)
        requested = frozenset(keys)
        ids = {name: self._topic_ids.get(name, _NO_ID) for name in topics}
        names = {topic_id: name for name, topic_id in ids.items()}
        request = FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            isolation_level=log.READ_COMMITTED,
            topics=tuple(
                FetchTopic(topic=name, topic_id=ids[name], partitions=tuple(asked)) for name, asked in topics.items()
            ),
        )
        at_most = _FETCH_BY_NAME if _NO_ID in names else _FETCH_BY_ID
        response = self.cluster.ask(FetchResponse, request, node_id=leader, at_most=at_most)
        refuse(response.error_code, f"broker {leader}")
        found: list[tuple[TopicPartition, PartitionData]] = []
        for topic in response.responses:
            for answer in topic.partitions:
                key = (topic.topic or names.get(topic.topic_id, ""), answer.partition_index)
                if key not in requested:
                    raise CommandError(f"broker {leader} answers for {key[0]}[{key[1]}], which was not requested")
                if answer.error_code in _MOVED_CODES:
                    self._leaders.pop(key, None)
                    continue
                if answer.error_code != ErrorCode.OFFSET_OUT_OF_RANGE:
                    refuse(answer.error_code, f"{key[0]}[{key[1]}] cannot be read")
                found.append((key, answer))
        return found

    def _learn_leaders(self, keys: Sequence[TopicPartition]) -> None:
        for leader, led in log.by_leader(self.cluster, keys).items():
            self._leaders |= dict.fromkeys(led, leader)


def matches(name: str, globs: Sequence[str]) -> bool:
    """Return whether a name matches one of the patterns, in which * stands for any text."""
    return any(fnmatchcase(name, glob) for glob in globs)
