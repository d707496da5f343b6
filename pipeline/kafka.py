"""An administrator's view of a cluster: topics, their ids, the ends of their logs, a group's offsets.

The one idea: librdkafka sends these requests, never Spark's connector. So a job is planned and proved independently of
the client that reads its records. Every request has a deadline.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from pipeline.errors import PipelineError

REQUEST_SECONDS = 30.0
EARLIEST, LATEST = cast(OffsetSpec, OffsetSpec.earliest()), cast(OffsetSpec, OffsetSpec.latest())
LOOK_AGAIN_SECONDS = 0.1
MAX_LISTED = 20
Partition = tuple[str, int]
_UNREADABLE = frozenset(
    (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART)
)
_SILENT = frozenset((KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN))
# Errors of a broker that has temporarily lost its storage or its leadership. A retry may succeed.
_PASSING = frozenset(
    (
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REPLICA_NOT_AVAILABLE,
        # A new leader does not know yet where its log ends, or whether it has the newest epoch.
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.UNKNOWN,
        # An error code of librdkafka itself: no requested partition has a leader yet.
        KafkaError._NOENT,
    )
)


@dataclass(frozen=True, slots=True)
class Log:
    """A partition's log: its first offset, and the offset after its last committed record."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int


def add_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("Kafka")
    group.add_argument("--bootstrap", required=required, metavar="HOST:PORT", help="any broker of the cluster")
    group.add_argument(
        "--kafka-conf",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of Spark's Kafka client (Java), which reads records",
    )
    group.add_argument(
        "--client-conf",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of librdkafka, which plans, checks and produces",
    )


def settings_of(texts: Iterable[str], option: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise PipelineError(f"{option} {text} is not NAME=VALUE.", f"Write it like {option} client.id=archive.")
        settings[name] = value
    return settings


class Cluster:
    """One cluster. Its methods raise KafkaException if the cluster refuses a request, and UnreachableError if it does
    not respond.
    """

    def __init__(self, bootstrap: str, settings: Mapping[str, str] | None = None) -> None:
        self.settings: dict[str, str] = {
            "bootstrap.servers": bootstrap,
            "log_level": "0",
            **(settings or {}),
        }
        self._bootstrap = bootstrap
        self._admin = AdminClient(dict(self.settings))

    def topics(
        self, names: Sequence[str] = (), pattern: str | None = None, *, existing: Collection[str] | None = None
    ) -> list[str]:
        """Return the topics that `names` and `pattern` choose. Raise PipelineError if one of `names` does not exist.

        `existing` are the topics of the cluster, if the caller has listed them already.
        """
        existing = self._metadata() if existing is None else existing
        lacking = [name for name in names if name not in existing]
        if lacking:
            # A listing leaves out topics that the user may not describe.
            try:
                self.logs(lacking[:1])
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise
            raise PipelineError(
                f"The topic {lacking[0]} does not exist.",
                f"The cluster has {_listed(existing)}. Check --topics, or create the topic first.",
            )
        chosen = set(names)
        if pattern is not None:
            try:
                matches = re.compile(pattern).fullmatch
            except re.error as error:
                raise PipelineError(
                    f"--pattern {pattern} is no regular expression ({error}).", "Write it like 'orders.*', in quotes."
                ) from error
            chosen |= {name for name in existing if not name.startswith("__") and matches(name)}
        return sorted(chosen)

    def existing(self) -> set[str]:
        return set(self._metadata())

    def logs(self, topics: Sequence[str], *, read_committed: bool = True) -> list[Log]:
        """Return the logs of all partitions of `topics`, sorted. A topic that does not exist has none."""
        if not topics:
            return []
        described: list[tuple[str, str, int]] = []
        asked_topics = TopicCollection(list(topics))
        answers = cast(
            "Mapping[str, Future[Any]]", self._admin.describe_topics(asked_topics, request_timeout=REQUEST_SECONDS)
        )
        for name, future in answers.items():
            try:
                description = self._answer(future)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    continue
                raise self.unreachable(error) from error
            described += [(name, str(description.topic_id), partition.id) for partition in description.partitions]
        asked = [(topic, partition) for topic, _, partition in described]
        starts = self.offsets(asked, EARLIEST, read_committed=read_committed)
        ends = self.offsets(asked, LATEST, read_committed=read_committed)
        return sorted(
            (
                Log(topic, topic_id, partition, starts[topic, partition], ends[topic, partition])
                for topic, topic_id, partition in described
                if (topic, partition) in starts and (topic, partition) in ends
            ),
            key=lambda log: (log.topic, log.partition),
        )

    def offsets(
        self, partitions: Sequence[Partition], spec: OffsetSpec, *, read_committed: bool = True
    ) -> dict[Partition, int]:
        """Return the offset of `spec` per partition, -1 if no record matches; a deleted partition is left out."""
        if not partitions:
            return {}
        isolation = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel.READ_UNCOMMITTED
        futures = cast(
            "Mapping[TopicPartition, Future[Any]]",
            self._admin.list_offsets(
                {TopicPartition(*key): spec for key in partitions},
                isolation_level=isolation,
                request_timeout=REQUEST_SECONDS,
            ),
        )
        found: dict[Partition, int] = {}
        for asked, future in futures.items():
            try:
                found[asked.topic, asked.partition] = self._answer(future).offset
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise self.unreachable(error) from error
        unknown = sorted(set(partitions) - found.keys())
        existing = self._metadata() if unknown else {}
        for topic, partition in unknown:
            # A new leader may not know its partition yet. A caller would take the partition for a deleted one.
            if topic in existing:
                raise UnreachableError(
                    f"The leader of {topic}-{partition} does not know the partition at the moment.",
                    "Look at the brokers' logs; then start the job again: it goes on where it was.",
                )
        return found

    def at_time(self, partitions: Sequence[Partition], timestamp_ms: int) -> dict[Partition, int]:
        """Return the first offset whose timestamp is `timestamp_ms` or later, -1 if there is no such record."""
        return self.offsets(partitions, OffsetSpec.for_timestamp(timestamp_ms))

    def commit(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Commit a group's offsets without joining it."""
        if not offsets:
            return
        consumer = Consumer({**self.settings, "group.id": group, "enable.auto.commit": "false"})
        try:
            positions = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
            for answer in consumer.commit(offsets=positions, asynchronous=False) or []:
                if answer.error is not None:
                    raise KafkaException(answer.error)
        finally:
            consumer.close()

    def group_offsets(self, group: str) -> dict[Partition, int]:
        """Return all offsets that a group has committed."""
        futures = cast(
            "Mapping[str, Future[Any]]",
            self._admin.list_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group)], request_timeout=REQUEST_SECONDS
            ),
        )
        answer = self._answer(futures[group])
        return {(at.topic, at.partition): at.offset for at in answer.topic_partitions if at.offset >= 0}

    def group_states(self) -> dict[str, str]:
        """Return the state of every group by its id: EMPTY, STABLE, …"""
        future = cast("Future[Any]", self._admin.list_consumer_groups(request_timeout=REQUEST_SECONDS))
        answer = self._answer(future)
        if answer.errors:
            # The answers of the other brokers lack the groups that this broker coordinates.
            raise self.unreachable(answer.errors[0])
        return {group.group_id: group.state.name for group in answer.valid}

    def alter_group_offsets(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Set an empty group's offsets. The cluster refuses to do so for any other group."""
        positions = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
        futures = cast(
            "Mapping[str, Future[Any]]",
            self._admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, positions)], request_timeout=REQUEST_SECONDS
            ),
        )
        for answer in self._answer(futures[group]).topic_partitions:
            if answer.error is not None:
                raise KafkaException(answer.error)

    def create(self, topic: NewTopic) -> None:
        """Create a topic, and wait until all its partitions answer. Raise KafkaException if the cluster refuses."""
        futures = cast("Mapping[str, Future[Any]]", self._admin.create_topics([topic], request_timeout=REQUEST_SECONDS))
        for future in futures.values():
            self._answer(future)
        # Apache Kafka acknowledges a new topic before its brokers know which of them lead it.
        wanted = [(topic.topic, partition) for partition in range(topic.num_partitions)]
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            try:
                if len(self.offsets(wanted, LATEST)) == len(wanted):
                    return
            except UnreachableError:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"The topic {topic.topic} was created, but its partitions do not answer.",
                    "Look at the brokers' logs; then start the job again.",
                )
            time.sleep(LOOK_AGAIN_SECONDS)

    def configs(self, resources: Sequence[ConfigResource]) -> dict[ConfigResource, dict[str, str]]:
        """Return each resource's settings, including defaults."""
        if not resources:
            return {}
        futures = self._describe(list(resources))
        return {
            resource: {name: str(entry.value) for name, entry in self._answer(future).items()}
            for resource, future in futures.items()
        }

    def compacted(self, topics: Collection[str]) -> set[str]:
        """Return those of `topics` whose cleanup policy includes compaction."""
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in sorted(self.existing().intersection(topics))]
        return {
            resource.name
            for resource, config in self.configs(resources).items()
            if "compact" in config.get("cleanup.policy", "")
        }

    def _describe(self, resources: list[ConfigResource]) -> Mapping[ConfigResource, Future[Any]]:
        return cast(
            "Mapping[ConfigResource, Future[Any]]",
            self._admin.describe_configs(resources, request_timeout=REQUEST_SECONDS),
        )

    def own_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the settings that each topic has of its own, without its broker's defaults.

        A topic whose settings the user may not read, or that has been deleted, is left out.
        """
        if not topics:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        found: dict[str, dict[str, str]] = {}
        for resource, future in self._describe(resources).items():
            try:
                entries = self._answer(future)
            except KafkaException as error:
                if error.args[0].code() in _UNREADABLE:
                    continue
                raise self.unreachable(error) from error
            found[resource.name] = {
                name: str(entry.value)
                for name, entry in entries.items()
                if entry.value is not None and ConfigSource(entry.source) is ConfigSource.DYNAMIC_TOPIC_CONFIG
            }
        return found

    def set_settings(self, topic: str, settings: Mapping[str, str | None]) -> None:
        """Change settings of a topic. The value None resets a setting to the broker's default. Raise KafkaException if
        a setting is refused.
        """
        entries = [
            ConfigEntry(
                name,
                value,
                incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET,
            )
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        futures = cast(
            "Mapping[ConfigResource, Future[Any]]",
            self._admin.incremental_alter_configs([resource], request_timeout=REQUEST_SECONDS),
        )
        for future in futures.values():
            self._answer(future)

    def partitions_of(self, topic: str) -> int:
        """Return the number of a topic's partitions, 0 if it does not exist."""
        return len(self._metadata().get(topic, ()))

    def _metadata(self) -> dict[str, list[int]]:
        try:
            listed = self._admin.list_topics(timeout=REQUEST_SECONDS)
        except KafkaException as error:
            raise self.unreachable(error) from error
        for topic in listed.topics.values():
            # A topic that temporarily has no leader is not a deleted topic.
            if topic.error is not None and self._passes(topic.error):
                raise self.unreachable(KafkaException(topic.error))
        return {name: sorted(topic.partitions) for name, topic in listed.topics.items() if topic.error is None}

    @staticmethod
    def _passes(error: KafkaError) -> bool:
        """Return whether a retry may succeed."""
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return False
        return error.retriable() or error.code() in _PASSING

    def _answer(self, future: Future[Any]) -> Any:
        """Return the answer to a request. Raise UnreachableError if it does not arrive in time."""
        try:
            return future.result(REQUEST_SECONDS)
        except TimeoutError as error:
            # This timer may end before the client's own timer of the request.
            raise self.unreachable(KafkaException(KafkaError(KafkaError._TIMED_OUT))) from error

    def unreachable(self, error: KafkaException) -> Exception:
        """Return UnreachableError if a retry may succeed, otherwise `error` itself."""
        told = error.args[0]
        if told.code() in _SILENT:
            return UnreachableError(
                f"No Kafka broker answers at {self._bootstrap}.",
                "Check --bootstrap, and that the cluster runs; then start the job again: it goes on where it was.",
            )
        if self._passes(told):
            return UnreachableError(
                f"The Kafka cluster at {self._bootstrap} cannot answer at the moment: {told.str()}.",
                "Look at the brokers' logs; then start the job again: it goes on where it was.",
            )
        return error


class UnreachableError(PipelineError):
    """The cluster does not respond now. A retry may succeed."""


def _listed(names: Iterable[str]) -> str:
    shown = sorted(name for name in names if not name.startswith("__"))
    words = ", ".join(shown[:MAX_LISTED]) or "none"
    return words + (f" and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else "")


def offset_of(message: Message) -> int:
    """Return the offset of a consumed message. The client's types also allow None, but only for a message that was
    never sent.
    """
    return cast(int, message.offset())
