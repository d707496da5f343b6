"""`sluice topics add-partitions`, `alter`, `configs` and `delete-records`: change a topic that exists, with any broker.

The one idea: each command first looks the topic up, so that a mistyped name gets the nearest names before anything
changes. The broker's own message explains a refused change.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gateway.commands import configs, log
from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster, refuse
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from gateway.commands.render import Row, show
from protocol.errors import ErrorCode

if TYPE_CHECKING:
    from protocol.messages.describe_configs import DescribeConfigsResourceResult

DYNAMIC_TOPIC_CONFIG = 1
"""Kafka's code for a setting that was made for the topic."""

_CHANGE_WAIT_MS = 30_000
_HIGH_WATERMARK = -1


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    add = commands.add_parser("add-partitions", parents=[common], help="raise the number of a topic's partitions")
    add.add_argument("topic")
    add.add_argument("--to", type=int, required=True, metavar="N", help="the new number of partitions")
    add.set_defaults(command=add_partitions)

    alter = commands.add_parser("alter", parents=[common], help="change settings of a topic")
    alter.add_argument("topic")
    configs.add_changes(alter)
    alter.set_defaults(command=alter_topic)

    showing = commands.add_parser("configs", parents=[common], help="every setting of a topic, with its source")
    showing.add_argument("topic")
    showing.set_defaults(command=show_configs)

    delete = commands.add_parser("delete-records", parents=[common], help="delete the oldest records of a partition")
    delete.add_argument("topic")
    delete.add_argument("--partition", type=int, required=True, metavar="P")
    delete.add_argument("--before", required=True, metavar="OFFSET", help="first offset that stays, or `end`")
    delete.set_defaults(command=delete_records)


def settings(cluster: Cluster, topic: str) -> list[DescribeConfigsResourceResult]:
    """Return every setting of a topic, by name."""
    return configs.settings(cluster, "topic", topic)


def add_partitions(cluster: Cluster, given: argparse.Namespace) -> int:
    from protocol.messages.create_partitions import (
        CreatePartitionsRequest,
        CreatePartitionsResponse,
        CreatePartitionsTopic,
    )

    (topic,) = cluster.topics((given.topic,))
    before = len(topic.partitions)
    if given.to <= before:
        raise CommandError(f"topic {given.topic} has {before} partitions: --to wants a higher number")
    request = CreatePartitionsRequest(
        topics=(CreatePartitionsTopic(name=given.topic, count=given.to, assignments=None),), timeout_ms=_CHANGE_WAIT_MS
    )
    response = cluster.ask_controller(CreatePartitionsResponse, request)
    (result,) = response.results
    if result.error_code:
        why = reason(result.error_code, result.error_message, needs=f"--operation alter --topic {given.topic}")
        raise CommandError(f"topic {given.topic}: {why}")
    row: Row = {"topic": given.topic, "before": before, "partitions": given.to}
    show([row], ("topic", "before", "partitions"), as_json=given.json)
    return 0


def alter_topic(cluster: Cluster, given: argparse.Namespace) -> int:
    cluster.topics((given.topic,))
    configs.show_settings(configs.change(cluster, "topic", given.topic, given), as_json=given.json)
    return 0


def show_configs(cluster: Cluster, given: argparse.Namespace) -> int:
    cluster.topics((given.topic,))
    configs.show_settings(settings(cluster, given.topic), as_json=given.json)
    return 0


def delete_records(cluster: Cluster, given: argparse.Namespace) -> int:
    from protocol.messages.delete_records import (
        DeleteRecordsPartition,
        DeleteRecordsRequest,
        DeleteRecordsResponse,
        DeleteRecordsTopic,
    )

    before = _HIGH_WATERMARK
    if given.before != "end":
        if not given.before.isascii() or not given.before.isdigit() or int(given.before) >= 1 << 63:
            raise CommandError(f"--before {given.before}: give an offset from 0 on, or `end`")
        before = int(given.before)
    (topic,) = cluster.topics((given.topic,))
    present = sorted(partition.partition_index for partition in topic.partitions)
    if given.partition not in present:
        raise CommandError(f"topic {given.topic} has partitions {present[0]} to {present[-1]}")
    where = f"{given.topic}[{given.partition}]"
    leaders = log.by_leader(cluster, [(given.topic, given.partition)])
    if not leaders:
        raise CommandError(f"{where} has no leader: repeat the command when a broker leads the partition")
    request = DeleteRecordsRequest(
        topics=(
            DeleteRecordsTopic(
                name=given.topic,
                partitions=(DeleteRecordsPartition(partition_index=given.partition, offset=before),),
            ),
        ),
        timeout_ms=_CHANGE_WAIT_MS,
    )
    response = cluster.ask(DeleteRecordsResponse, request, node_id=next(iter(leaders)))
    (result,) = response.topics[0].partitions
    if result.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
        raise CommandError(f"{where} ends before offset {given.before}: `sluice topics describe` shows its offsets")
    refuse(result.error_code, where, needs=f"--operation delete --topic {given.topic}")
    row: Row = {"topic": given.topic, "partition": given.partition, "log_start": result.low_watermark}
    show([row], ("topic", "partition", "log_start"), as_json=given.json)
    return 0
