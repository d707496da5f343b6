"""`sluice quotas`: list, set, remove, by Kafka's protocol, with any broker.

The one idea: an entity is a user, a client id, both, or an address. The default of a kind applies to each entity of
that kind that has no quota of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from gateway.commands.render import Row, show
from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from protocol.messages import alter_client_quotas as altering
from protocol.messages.describe_client_quotas import (
    ComponentData,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)

QUOTAS = {
    "producer_byte_rate": "bytes per second",
    "consumer_byte_rate": "bytes per second",
    "request_percentage": "percent of a request thread",
    "controller_mutation_rate": "partitions created or deleted per second",
    "connection_creation_rate": "connections per second of an address",
}
"""Kafka's quotas with their units."""
DEFAULT = "<default>"
"""The text that means the default entity of a kind, as in Kafka's tools."""
COLUMNS = ("user", "client_id", "ip", "quota", "value")

_KINDS = {"user": "user", "client_id": "client-id", "ip": "ip"}
"""Option to Kafka's name of the entity's type."""
_EXACT, _DEFAULT = 0, 1

Component = tuple[str, str | None]
"""Type and name of a part of an entity. The name None means the default of the type."""


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    listing = commands.add_parser("list", parents=[common], help="quotas, all of them without options")
    _add_entity(listing)
    listing.set_defaults(command=list_quotas)

    units = ", ".join(f"{name} ({unit})" for name, unit in QUOTAS.items())
    setting = commands.add_parser("set", parents=[common], help="limit a user, a client id, both, or an address")
    setting.add_argument("quota", type=_pair, nargs="+", metavar="QUOTA=NUMBER", help=units)
    _add_entity(setting)
    setting.set_defaults(command=set_quotas)

    remove = commands.add_parser("remove", parents=[common], help="remove quotas, all of the entity without names")
    remove.add_argument("quota", type=_quota, nargs="*", metavar="QUOTA", help=", ".join(QUOTAS))
    _add_entity(remove)
    remove.set_defaults(command=remove_quotas)


def _add_entity(parser: argparse.ArgumentParser) -> None:
    for name, what in (("user", "users"), ("client-id", "client ids"), ("ip", "addresses")):
        kind = parser.add_mutually_exclusive_group()
        kind.add_argument(f"--{name}", metavar="ADDRESS" if name == "ip" else "NAME")
        kind.add_argument(f"--default-{name}", action="store_true", help=f"{what} without quotas of their own")


def _quota(text: str) -> str:
    if text not in QUOTAS:
        raise argparse.ArgumentTypeError(f"there is no quota {text!r}{did_you_mean(text, QUOTAS)}")
    return text


def _pair(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    _quota(name)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not equals or not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write {name}=NUMBER, from 0 on")
    return name, value


def _entity(given: argparse.Namespace) -> list[Component]:
    found: list[Component] = []
    for option, kind in _KINDS.items():
        if getattr(given, f"default_{option}"):
            found.append((kind, None))
        elif getattr(given, option) is not None:
            found.append((kind, getattr(given, option)))
    return found


def _demanded(given: argparse.Namespace) -> list[Component]:
    entity = _entity(given)
    if not entity:
        raise CommandError("name an entity: --user NAME, --client-id NAME, --ip ADDRESS, or a default such as "
                           "--default-user")  # fmt: skip
    return entity


def _described(cluster: Cluster, entity: Sequence[Component], *, strict: bool) -> list[Row]:
    """Return a row per quota; `strict`: only of this entity, and not of entities that have further parts."""
    request = DescribeClientQuotasRequest(
        components=tuple(
            ComponentData(entity_type=kind, match_type=_DEFAULT if name is None else _EXACT, match=name)
            for kind, name in entity
        ),
        strict=strict,
    )
    response = cluster.ask(DescribeClientQuotasResponse, request)
    if response.error_code:
        why = reason(response.error_code, response.error_message, needs="--operation describe-configs --cluster")
        raise CommandError(f"quotas: {why}")
    rows: list[Row] = []
    for entry in response.entries or ():
        names = {each.entity_type: each.entity_name for each in entry.entity}
        shown = {
            option: (DEFAULT if names[kind] is None else names[kind]) if kind in names else None
            for option, kind in _KINDS.items()
        }
        rows += [{**shown, "quota": each.key, "value": _number(each.value)} for each in entry.values]
    return sorted(rows, key=lambda row: [str(row[column] or "") for column in COLUMNS])


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def list_quotas(cluster: Cluster, given: argparse.Namespace) -> int:
    show(_described(cluster, _entity(given), strict=False), COLUMNS, as_json=given.json)
    return 0


def set_quotas(cluster: Cluster, given: argparse.Namespace) -> int:
    entity = _demanded(given)
    values = dict(given.quota)
    _alter(cluster, entity, [altering.OpData(key=key, value=value) for key, value in values.items()])
    rows = cluster.until_shown(
        lambda: [row for row in _described(cluster, entity, strict=True) if row["quota"] in values],
        lambda found: {str(row["quota"]): row["value"] for row in found} == values,
    )
    show(rows, COLUMNS, as_json=given.json)
    return 0


def remove_quotas(cluster: Cluster, given: argparse.Namespace) -> int:
    entity = _demanded(given)
    present = _described(cluster, entity, strict=True)
    wanted = [row for row in present if not given.quota or row["quota"] in given.quota]
    if not wanted:
        what = " or ".join(given.quota) or "quota"
        raise CommandError(f"there is no {what} of {_said(entity)}{_nearest(cluster, entity)}")
    _alter(cluster, entity, [altering.OpData(key=str(row["quota"]), value=0.0, remove=True) for row in wanted])
    show([{**row, "result": "removed"} for row in wanted], (*COLUMNS, "result"), as_json=given.json)
    return 0


def _said(entity: Sequence[Component]) -> str:
    return " and ".join(f"{kind} {DEFAULT if name is None else name}" for kind, name in entity)


def _nearest(cluster: Cluster, entity: Sequence[Component]) -> str:
    """Return the entities with quotas whose names resemble the given ones."""
    options = {kind: option for option, kind in _KINDS.items()}
    for kind, name in entity:
        known = sorted({str(row[options[kind]]) for row in _described(cluster, (), strict=False) if row[options[kind]]})
        if name is not None and name not in known:
            return did_you_mean(name, known, SUGGESTIONS)
    return ""


def _alter(cluster: Cluster, entity: Sequence[Component], changes: Sequence[altering.OpData]) -> None:
    entry = altering.EntryData(
        entity=tuple(altering.EntityData(entity_type=kind, entity_name=name) for kind, name in entity),
        ops=tuple(changes),
    )
    response = cluster.ask_controller(
        altering.AlterClientQuotasResponse, altering.AlterClientQuotasRequest(entries=(entry,))
    )
    (result,) = response.entries
    if result.error_code:
        why = reason(result.error_code, result.error_message, needs="--operation alter-configs --cluster")
        raise CommandError(f"quotas of {_said(entity)}: {why}")
