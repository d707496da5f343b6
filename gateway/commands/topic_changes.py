"""`sluice topics add-partitions`, `alter`, `configs` and `delete-records`: change a topic that exists, with any broker.

The one idea: each command first looks the topic up, so that a mistyped name gets the nearest names before anything
changes. The broker's own message explains a refused change.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gateway.commands import log
from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster, refuse
from gateway.commands.errors import CommandError
from gateway.commands.render import Row, show
from protocol.errors import ErrorCode
from protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
)
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

TOPIC_RESOURCE = 2
DYNAMIC_TOPIC_CONFIG = 1
SOURCES = {
    DYNAMIC_TOPIC_CONFIG: "topic",
    2: "broker",
    3: "all brokers",
    4: "broker's file",
    5: "default",
}
"""Kafka's numbers of the sources of a topic's setting."""

_SET, _DELETE = 0, 1
_CHANGE_WAIT_MS = 30_000
_HIGH_WATERMARK = -1


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    add = commands.add_parser("add-partitions", parents=[common], help="raise the number of a topic's partitions")
    add.add_argument("topic")
    add.add_argument("--to", type=int, required=True, metavar="N", help="the new number of partitions")
    add.set_defaults(command=add_partitions)

    alter = commands.add_parser("alter", parents=[common], help="change settings of a topic")
    alter.add_argument("topic")
    alter.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; may be repeated")
    alter.add_argument(
        "--delete", action="append", default=[], metavar="KEY", help="go back to the default; may be repeated"
    )
    alter.set_defaults(command=alter_topic)

    configs = commands.add_parser("configs", parents=[common], help="every setting of a topic, with its source")
    configs.add_argument("topic")
    configs.set_defaults(command=show_configs)

    delete = commands.add_parser("delete-records", parents=[common], help="delete the oldest records of a partition")
    delete.add_argument("topic")
    delete.add_argument("--partition", type=int, required=True, metavar="P")
    delete.add_argument("--before", required=True, metavar="OFFSET", help="first offset that stays, or `end`")
    delete.set_defaults(command=delete_records)


def key_values(texts: Sequence[str]) -> dict[str, str]:
    """Return the pairs of KEY=VALUE arguments; the last value of a repeated key wins."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CommandError(f"--set {text}: write KEY=VALUE, e.g. retention.ms=3600000")
        found[name] = value
    return found


def settings(cluster: Cluster, topic: str) -> list[DescribeConfigsResourceResult]:
    """Return every setting of a topic, by name."""
    resource = DescribeConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=topic, configuration_keys=None)
    response: DescribeConfigsResponse = cluster.ask(DescribeConfigsRequest(resources=(resource,)))
    (result,) = response.results
    if result.error_code:
        raise CommandError(f"settings of {topic}: {result.error_message or ErrorCode(result.error_code).name}")
    return sorted(result.configs, key=lambda config: config.name)


def add_partitions(cluster: Cluster, given: argparse.Namespace) -> int:
    (topic,) = cluster.topics((given.topic,))
    before = len(topic.partitions)
    if given.to <= before:
        raise CommandError(f"topic {given.topic} has {before} partitions: --to wants a higher number")
    request = CreatePartitionsRequest(
        topics=(CreatePartitionsTopic(name=given.topic, count=given.to, assignments=None),), timeout_ms=_CHANGE_WAIT_MS
    )
    response: CreatePartitionsResponse = cluster.ask_controller(request)
    (result,) = response.results
    if result.error_code:
        raise CommandError(f"topic {given.topic}: {result.error_message or ErrorCode(result.error_code).name}")
    row: Row = {"topic": given.topic, "before": before, "partitions": given.to}
    show([row], ("topic", "before", "partitions"), as_json=given.json)
    return 0


def alter_topic(cluster: Cluster, given: argparse.Namespace) -> int:
    values = key_values(given.set)
    deleted = list(dict.fromkeys(given.delete))
    if not values and not deleted:
        raise CommandError("nothing to change: give --set KEY=VALUE or --delete KEY")
    if both := values.keys() & set(deleted):
        raise CommandError(f"{', '.join(sorted(both))}: give either --set or --delete")
    cluster.topics((given.topic,))
    changes = [AlterableConfig(name=name, config_operation=_SET, value=value) for name, value in values.items()]
    changes += [AlterableConfig(name=name, config_operation=_DELETE, value=None) for name in deleted]
    resource = AlterConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=given.topic, configs=tuple(changes))
    response: IncrementalAlterConfigsResponse = cluster.ask_controller(
        IncrementalAlterConfigsRequest(resources=(resource,))
    )
    (result,) = response.responses
    if result.error_code:
        raise CommandError(f"topic {given.topic}: {result.error_message or ErrorCode(result.error_code).name}")
    changed = values.keys() | set(deleted)
    _show_settings([each for each in settings(cluster, given.topic) if each.name in changed], as_json=given.json)
    return 0


def show_configs(cluster: Cluster, given: argparse.Namespace) -> int:
    cluster.topics((given.topic,))
    _show_settings(settings(cluster, given.topic), as_json=given.json)
    return 0


def _show_settings(found: Sequence[DescribeConfigsResourceResult], *, as_json: bool) -> None:
    rows: list[Row] = [
        {
            "name": each.name,
            "value": each.value,
            "source": SOURCES.get(each.config_source, str(each.config_source)),
        }
        for each in found
    ]
    show(rows, ("name", "value", "source"), as_json=as_json)


def delete_records(cluster: Cluster, given: argparse.Namespace) -> int:
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
    response: DeleteRecordsResponse = cluster.ask(request, node_id=next(iter(leaders)))
    (result,) = response.topics[0].partitions
    if result.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
        raise CommandError(f"{where} ends before offset {given.before}: `sluice topics describe` shows its offsets")
    refuse(result.error_code, where)
    row: Row = {"topic": given.topic, "partition": given.partition, "log_start": result.low_watermark}
    show([row], ("topic", "partition", "log_start"), as_json=given.json)
    return 0
