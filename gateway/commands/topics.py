"""`sluice topics`: list, describe, create, change, delete, by Kafka's protocol, with any broker.

The one idea: a command loads the messages that it sends when it runs, so that the first answer comes soon. `tail.py`
has `topics tail`.
"""

from __future__ import annotations

import argparse
import sys

from gateway.commands import configs, log, topic_changes
from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from gateway.commands.render import Row, show
from protocol.errors import ErrorCode


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    listing = commands.add_parser("list", parents=[common], help="every topic")
    listing.add_argument("--internal", action="store_true", help="internal ones too")
    listing.set_defaults(command=list_topics)

    describing = commands.add_parser("describe", parents=[common], help="partitions and settings of a topic")
    describing.add_argument("topic")
    describing.set_defaults(command=describe_topic)

    create = commands.add_parser("create", parents=[common], help="make a topic")
    create.add_argument("topic")
    create.add_argument("--partitions", type=int, default=-1, metavar="N", help="default: the broker's num.partitions")
    create.add_argument("--replication-factor", type=int, default=-1, metavar="N", help="default: the broker's")
    create.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; may be repeated")
    create.set_defaults(command=create_topic)

    topic_changes.add_commands(commands, common)

    delete = commands.add_parser("delete", parents=[common], help="delete topics with their records")
    delete.add_argument("topic", nargs="+")
    delete.set_defaults(command=delete_topics)

    tail = commands.add_parser("tail", parents=[common], help="the last records of a topic")
    tail.add_argument("topic")
    tail.add_argument("-n", "--records", type=int, default=10, metavar="N", help="how many of each partition (10)")
    tail.add_argument("--partition", type=int, action="append", metavar="P", help="only this one; may be repeated")
    tail.add_argument("--from-beginning", action="store_true", help="every record there is")
    tail.add_argument("-f", "--follow", action="store_true", help="go on with what is appended, until Ctrl-C")
    tail.set_defaults(command=_tail)


def list_topics(cluster: Cluster, given: argparse.Namespace) -> int:
    rows: list[Row] = [
        {
            "topic": topic.name,
            "partitions": len(topic.partitions),
            "replicas": max((len(partition.replica_nodes) for partition in topic.partitions), default=0),
            "internal": topic.is_internal,
            "id": str(topic.topic_id),
        }
        for topic in sorted(cluster.metadata().topics, key=lambda topic: topic.name or "")
        if given.internal or not topic.is_internal
    ]
    show(rows, ("topic", "partitions", "replicas", "internal", "id"), as_json=given.json)
    return 0


def describe_topic(cluster: Cluster, given: argparse.Namespace) -> int:
    (topic,) = cluster.topics((given.topic,))
    keys = [(given.topic, partition.partition_index) for partition in topic.partitions]
    bounds = log.bounds(cluster, sorted(keys))
    partitions: list[Row] = []
    for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index):
        found = bounds.get((given.topic, partition.partition_index))
        partitions.append(
            {
                "partition": partition.partition_index,
                "leader": partition.leader_id,
                "epoch": partition.leader_epoch,
                "log_start": None if found is None else found.start,
                "log_end": None if found is None else found.end,
                "offsets": None if found is None else found.end - found.start,
            }
        )
    changed = _changed(cluster, given.topic)
    head: Row = {"topic": topic.name, "id": str(topic.topic_id), "internal": topic.is_internal, "configs": changed}
    if given.json:
        show([{**head, "partitions": partitions}], (), as_json=True)
        return 0
    show([head], ("topic", "id", "internal", "configs"), as_json=False)
    print()
    show(partitions, ("partition", "leader", "epoch", "log_start", "log_end", "offsets"), as_json=False)
    return 0


def _changed(cluster: Cluster, topic: str) -> dict[str, object]:
    """Return the settings that were made for this topic."""
    return {
        config.name: config.value
        for config in topic_changes.settings(cluster, topic)
        if config.config_source == topic_changes.DYNAMIC_TOPIC_CONFIG
    }


def create_topic(cluster: Cluster, given: argparse.Namespace) -> int:
    from protocol.messages.create_topics import (
        CreatableTopic,
        CreatableTopicConfig,
        CreateTopicsRequest,
        CreateTopicsResponse,
    )

    wanted = CreatableTopic(
        name=given.topic,
        num_partitions=given.partitions,
        replication_factor=given.replication_factor,
        configs=tuple(
            CreatableTopicConfig(name=name, value=value) for name, value in configs.key_values(given.set).items()
        ),
    )
    response = cluster.ask_controller(CreateTopicsResponse, CreateTopicsRequest(topics=(wanted,)))
    (result,) = response.topics
    if result.error_code:
        why = reason(result.error_code, result.error_message, needs=f"--operation create --topic {given.topic}")
        raise CommandError(f"topic {given.topic}: {why}")
    row = {"topic": result.name, "partitions": result.num_partitions, "id": str(result.topic_id)}
    show([row], ("topic", "partitions", "id"), as_json=given.json)
    alive = len(cluster.node_ids)
    if given.replication_factor > alive:
        nodes = "one node serves" if alive == 1 else f"{alive} nodes serve"
        factor = f"replication factor {given.replication_factor}"
        print(f"sluice: made with {factor}; {nodes} it now", file=sys.stderr)
    return 0


def delete_topics(cluster: Cluster, given: argparse.Namespace) -> int:
    from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState

    names = tuple(dict.fromkeys(given.topic))
    request = DeleteTopicsRequest(
        topics=tuple(DeleteTopicState(name=name) for name in names), topic_names=names, timeout_ms=30_000
    )
    response = cluster.ask_controller(DeleteTopicsResponse, request)
    rows: list[Row] = []
    for result in sorted(response.responses, key=lambda result: names.index(result.name or "")):
        code = result.error_code
        needs = f"--operation delete --topic {result.name}"
        said = reason(code, result.error_message, needs=needs) if code else "deleted"
        if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            said = cluster.no_topic(result.name or "")
        rows.append({"topic": result.name, "result": said})
    show(rows, ("topic", "result"), as_json=given.json)
    return 1 if any(result.error_code for result in response.responses) else 0


def _tail(cluster: Cluster, given: argparse.Namespace) -> int:
    from gateway.commands.tail import tail_topic

    return tail_topic(cluster, given)
