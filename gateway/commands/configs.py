"""`sluice configs`: describe and alter the settings of topics, brokers and groups, with any broker.

The one idea: a kind and a name say whose settings are meant. A broker's own settings are asked of that broker. Without
a name, `broker` means the settings that apply to every broker.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError, remark
from gateway.commands.refusals import reason
from gateway.commands.render import Row, show
from gateway.config.suggestions import SUGGESTIONS, did_you_mean

if TYPE_CHECKING:
    from protocol.messages.describe_configs import DescribeConfigsResourceResult

KINDS = {"topic": 2, "broker": 4, "group": 32}
"""Kafka's codes of the resources that have settings."""
DEFAULT_CONFIG = 5
SOURCES = {
    1: "topic",
    2: "broker",
    3: "all brokers",
    4: "broker's file",
    DEFAULT_CONFIG: "default",
    8: "group",
}
"""Kafka's codes of a setting's source."""

_SET, _DELETE = 0, 1
_ACL_OPTIONS = {"topic": "--topic", "group": "--group"}


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    describe = commands.add_parser("describe", parents=[common], help="settings with their values and sources")
    _add_resource(describe)
    describe.add_argument("--changed", action="store_true", help="only settings that differ from the default")
    describe.set_defaults(command=describe_configs)

    alter = commands.add_parser("alter", parents=[common], help="change settings; all changes are made, or none")
    _add_resource(alter)
    add_changes(alter)
    alter.set_defaults(command=alter_configs)


def _add_resource(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(KINDS), help="topic, broker or group")
    parser.add_argument("name", nargs="?", help="the topic, the broker's id or the group; none: every broker")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add the options for changes of settings."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; may be repeated")
    parser.add_argument(
        "--delete", action="append", default=[], metavar="KEY", help="go back to the default; may be repeated"
    )


def key_values(texts: Sequence[str]) -> dict[str, str]:
    """Return the pairs of KEY=VALUE arguments; the last value of a repeated key wins."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CommandError(f"--set {text}: write KEY=VALUE, e.g. retention.ms=3600000")
        found[name] = value
    return found


def settings(cluster: Cluster, kind: str, name: str) -> list[DescribeConfigsResourceResult]:
    """Return every setting of a topic, broker or group, by name. A broker named "" stands for every broker."""
    from protocol.messages.describe_configs import (
        DescribeConfigsRequest,
        DescribeConfigsResource,
        DescribeConfigsResponse,
    )

    resource = DescribeConfigsResource(resource_type=KINDS[kind], resource_name=name, configuration_keys=None)
    response = cluster.ask(
        DescribeConfigsResponse, DescribeConfigsRequest(resources=(resource,)), node_id=_node_id(kind, name)
    )
    (result,) = response.results
    if result.error_code:
        why = reason(result.error_code, result.error_message, needs=_needs("describe-configs", kind, name))
        raise CommandError(f"settings of {said(kind, name)}: {why}")
    return sorted(result.configs, key=lambda config: config.name)


def change(cluster: Cluster, kind: str, name: str, given: argparse.Namespace) -> list[DescribeConfigsResourceResult]:
    """Make the changes that the options name, and return the settings that they name."""
    values = key_values(given.set)
    deleted = list(dict.fromkeys(given.delete))
    if not values and not deleted:
        raise CommandError("nothing to change: give --set KEY=VALUE or --delete KEY")
    if both := values.keys() & set(deleted):
        raise CommandError(f"{', '.join(sorted(both))}: give either --set or --delete")
    changes: dict[str, str | None] = {**values, **dict.fromkeys(deleted)}
    _alter(cluster, kind, name, changes)
    return cluster.until_shown(
        lambda: [each for each in settings(cluster, kind, name) if each.name in changes],
        lambda found: _shows(found, changes),
    )


def _shows(found: Sequence[DescribeConfigsResourceResult], changes: Mapping[str, str | None]) -> bool:
    """Return whether each new value is shown. A deleted setting has a value of another source, so only the values that
    were set count."""
    shown = {each.name: each for each in found}
    return all(
        key in shown and (shown[key].is_sensitive or shown[key].value == value)
        for key, value in changes.items()
        if value is not None
    )


def _alter(cluster: Cluster, kind: str, name: str, changes: Mapping[str, str | None]) -> None:
    from protocol.messages.incremental_alter_configs import (
        AlterableConfig,
        AlterConfigsResource,
        IncrementalAlterConfigsRequest,
        IncrementalAlterConfigsResponse,
    )

    resource = AlterConfigsResource(
        resource_type=KINDS[kind],
        resource_name=name,
        configs=tuple(
            AlterableConfig(name=key, config_operation=_DELETE if value is None else _SET, value=value)
            for key, value in changes.items()
        ),
    )
    request = IncrementalAlterConfigsRequest(resources=(resource,))
    node_id = _node_id(kind, name)
    if node_id is None:
        response = cluster.ask_controller(IncrementalAlterConfigsResponse, request)
    else:
        response = cluster.ask(IncrementalAlterConfigsResponse, request, node_id=node_id)
    (result,) = response.responses
    if result.error_code:
        why = reason(result.error_code, result.error_message, needs=_needs("alter-configs", kind, name))
        raise CommandError(f"{said(kind, name)}: {why}{_nearest(cluster, kind, name, changes)}")


def _nearest(cluster: Cluster, kind: str, name: str, changes: Mapping[str, str | None]) -> str:
    """Return the settings whose names resemble an unknown one among the changes."""
    try:
        known = [each.name for each in settings(cluster, kind, name)]
    except CommandError:
        return ""  # show the refusal of the change instead of this error
    hints = (did_you_mean(key, known, SUGGESTIONS) for key in changes if key not in known)
    return next((hint for hint in hints if hint), "")


def _node_id(kind: str, name: str) -> int | None:
    return int(name) if kind == "broker" and name else None


def _needs(operation: str, kind: str, name: str) -> str:
    resource = f"{_ACL_OPTIONS[kind]} {name}" if kind in _ACL_OPTIONS else "--cluster"
    return f"--operation {operation} {resource}"


def said(kind: str, name: str) -> str:
    return f"{kind} {name}" if name else "every broker"


def show_settings(found: Sequence[DescribeConfigsResourceResult], *, as_json: bool) -> None:
    rows: list[Row] = [
        {
            "name": each.name,
            "value": "(hidden)" if each.is_sensitive and not as_json else each.value,
            "source": SOURCES.get(each.config_source, str(each.config_source)),
            "read_only": each.read_only,
            "sensitive": each.is_sensitive,
        }
        for each in found
    ]
    show(rows, ("name", "value", "source"), as_json=as_json)


def _resource(cluster: Cluster, given: argparse.Namespace) -> tuple[str, str]:
    """Return kind and name. Raise CommandError if the name is missing or no such topic or broker exists."""
    kind: str = given.kind
    name: str = given.name or ""
    if not name and kind != "broker":
        raise CommandError(f"name a {kind}: sluice configs … {kind} NAME")
    if kind == "broker" and name and not (name.isascii() and name.isdigit()):
        raise CommandError(f"{name} is no broker's id: `sluice cluster info` shows the ids")
    if kind == "topic":
        cluster.topics((name,))
    return kind, name


def describe_configs(cluster: Cluster, given: argparse.Namespace) -> int:
    found = settings(cluster, *_resource(cluster, given))
    if given.changed:
        found = [each for each in found if each.config_source != DEFAULT_CONFIG]
    show_settings(found, as_json=given.json)
    return 0


def alter_configs(cluster: Cluster, given: argparse.Namespace) -> int:
    kind, name = _resource(cluster, given)
    changed = change(cluster, kind, name, given)
    show_settings(changed, as_json=given.json)
    if kind == "group":
        _warn_of_unknown_group(cluster, name)
    return 0


def _warn_of_unknown_group(cluster: Cluster, name: str) -> None:
    """Print the nearest names if no such group exists. Settings may precede their group, so this is no error."""
    from gateway.commands.group_views import listed_groups

    known = [str(row["group"]) for row in listed_groups(cluster)]
    hint = "" if name in known else did_you_mean(name, known, SUGGESTIONS)
    if hint:
        remark(f"there is no group {name} yet{hint}")
