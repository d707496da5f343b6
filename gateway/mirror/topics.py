"""Create the copied topics in the target, with their partitions and settings, by Kafka's protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.commands.client import Cluster
from gateway.commands.configs import DEFAULT_CONFIG
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from gateway.commands.topic_changes import DYNAMIC_TOPIC_CONFIG, settings
from gateway.mirror.source import SourceTopic
from protocol.errors import ErrorCode
from protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsResponse, CreatePartitionsTopic
from protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)

_LIFETIME = frozenset({"cleanup.policy", "retention.ms", "retention.bytes"})
"""Settings that decide how long records stay. They are copied even if they come from the settings of the source's
brokers. Otherwise the target might remove records that it has just received."""
_DEFAULT_REPLICATION = -1
_CHANGE_WAIT_MS = 30_000

Warn = Callable[[str], None]


def ensure_topics(
    source: Cluster, target: Cluster, topics: Sequence[SourceTopic], copied: Collection[str], warn: Warn
) -> None:
    """Create each topic that the target lacks, and add the partitions that an existing one lacks.

    A setting that the target refuses is left out and named by `warn`. Settings of existing topics stay. Raise
    CommandError if a topic cannot be created, has more partitions in the target, or is among the topics that are
    `copied` already and was deleted there.
    """
    present = {topic.name: len(topic.partitions) for topic in target.metadata().topics}
    for topic in topics:
        wanted, has = len(topic.partitions), present.get(topic.name)
        if has is None:
            # A broker that has just started may not know the topic yet. Then the topic cannot be created.
            if topic.name in copied and not _ask(target, topic, {}, validate_only=True).error_code:
                raise CommandError(f"topic {topic.name} was deleted in the target while it is mirrored: run this again")
            _create(source, target, topic, warn)
        elif has < wanted:
            _add_partitions(target, topic.name, wanted)
        elif has > wanted:
            raise CommandError(
                f"topic {topic.name} has {has} partitions in the target and {wanted} in the source: records with a key "
                "would lie in the wrong partition. Delete the topic in the target"
            )


def _create(source: Cluster, target: Cluster, topic: SourceTopic, warn: Warn) -> None:
    configs = {
        config.name: config.value
        for config in settings(source, topic.name)
        if config.value is not None and _is_copied(config.name, config.config_source)
    }
    result = _ask(target, topic, configs)
    if result.error_code == ErrorCode.INVALID_CONFIG:
        for name, value in list(configs.items()):
            refused = _ask(target, topic, {name: value}, validate_only=True)
            if refused.error_code == ErrorCode.INVALID_CONFIG:
                del configs[name]
                why = refused.error_message or "the target does not know it"
                warn(f"topic {topic.name}: {name}={value} is left out: {why}")
        result = _ask(target, topic, configs)
    if result.error_code not in (0, ErrorCode.TOPIC_ALREADY_EXISTS):
        raise CommandError(f"topic {topic.name}: {reason(result.error_code, result.error_message)}")


def _is_copied(name: str, origin: int) -> bool:
    return origin == DYNAMIC_TOPIC_CONFIG or (name in _LIFETIME and origin != DEFAULT_CONFIG)


def _ask(
    target: Cluster, topic: SourceTopic, configs: Mapping[str, str], *, validate_only: bool = False
) -> CreatableTopicResult:
    wanted = CreatableTopic(
        name=topic.name,
        num_partitions=len(topic.partitions),
        replication_factor=_DEFAULT_REPLICATION,
        configs=tuple(CreatableTopicConfig(name=name, value=value) for name, value in configs.items()),
    )
    response = target.ask_controller(
        CreateTopicsResponse, CreateTopicsRequest(topics=(wanted,), validate_only=validate_only)
    )
    (result,) = response.topics
    return result


def _add_partitions(target: Cluster, name: str, count: int) -> None:
    request = CreatePartitionsRequest(
        topics=(CreatePartitionsTopic(name=name, count=count, assignments=None),), timeout_ms=_CHANGE_WAIT_MS
    )
    response = target.ask_controller(CreatePartitionsResponse, request)
    (result,) = response.results
    if result.error_code:
        raise CommandError(f"topic {name}: {reason(result.error_code, result.error_message)}")
