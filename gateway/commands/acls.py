"""`sluice acls`: list, add, remove, by Kafka's protocol, with any broker.

The one idea: the same options name a resource everywhere. Without a pattern, `list` shows each ACL that decides about
the named resource, and `remove` matches only ACLs of exactly that name. Without --execute, `remove` only shows ACLs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from enum import IntEnum

from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError, remark
from gateway.commands.refusals import reason
from gateway.commands.render import Row, show
from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from gateway.security.kinds import CLUSTER_NAME, WILDCARD, AclOperation, PatternType, Permission, ResourceType
from protocol.messages.create_acls import AclCreation, CreateAclsRequest, CreateAclsResponse
from protocol.messages.delete_acls import DeleteAclsFilter, DeleteAclsRequest, DeleteAclsResponse
from protocol.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse

COLUMNS = ("principal", "permission", "operation", "resource_type", "resource", "pattern", "host")

_NOT_CHOSEN = (0, 1)
"""Kafka's codes UNKNOWN and ANY, which no ACL may have."""
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional_id": ResourceType.TRANSACTIONAL_ID,
    "token": ResourceType.DELEGATION_TOKEN,
    "token_owner": ResourceType.USER,
}


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    listing = commands.add_parser("list", parents=[common], help="ACLs, all of them without options")
    _add_filter(listing, "match: each ACL that decides about the resource")
    listing.set_defaults(command=list_acls)

    add = commands.add_parser("add", parents=[common], help="allow or deny principals operations on a resource")
    add.add_argument("--allow", type=_principal, action="append", default=[], metavar="PRINCIPAL", help="User:NAME")
    add.add_argument("--deny", type=_principal, action="append", default=[], metavar="PRINCIPAL", help="User:NAME")
    add.add_argument(
        "--operation", choices=_names(AclOperation), action="append", required=True, help="may be repeated"
    )
    _add_resource(add, required=True)
    add.add_argument("--prefixed", action="store_true", help="each name that begins with the given one")
    add.add_argument("--host", default=WILDCARD, help="the client's address (any)")
    add.set_defaults(command=add_acls)

    remove = commands.add_parser(
        "remove", parents=[common], help="remove the ACLs that match; shows them only, without --execute"
    )
    _add_filter(remove, "literal: only that name itself")
    remove.add_argument("--execute", action="store_true", help="remove them")
    remove.set_defaults(command=remove_acls)


def _add_resource(parser: argparse.ArgumentParser, *, required: bool) -> None:
    resource = parser.add_mutually_exclusive_group(required=required)
    resource.add_argument("--topic", metavar="NAME", help="`*` stands for every topic; so for the other kinds")
    resource.add_argument("--group", metavar="NAME")
    resource.add_argument("--transactional-id", metavar="ID")
    resource.add_argument("--cluster", action="store_true", help="the cluster itself")
    resource.add_argument("--token", metavar="ID", help="a delegation token")
    resource.add_argument("--token-owner", metavar="PRINCIPAL", help="the user whose delegation tokens are meant")


def _add_filter(parser: argparse.ArgumentParser, default: str) -> None:
    _add_resource(parser, required=False)
    parser.add_argument("--principal", type=_principal, metavar="PRINCIPAL", help="User:NAME")
    parser.add_argument("--permission", choices=_names(Permission))
    parser.add_argument("--operation", choices=_names(AclOperation))
    parser.add_argument("--host")
    parser.add_argument("--pattern", choices=("literal", "prefixed", "match", "any"), help=f"default: {default}")


def _names(kind: type[IntEnum]) -> tuple[str, ...]:
    return tuple(_shown(each) for each in kind if int(each) not in _NOT_CHOSEN)


def _shown(value: IntEnum) -> str:
    return value.name.lower().replace("_", "-")


def _code(kind: type[IntEnum], text: str | None) -> int:
    return 1 if text is None else kind[text.upper().replace("-", "_")]


def _named(kind: type[IntEnum], code: int) -> str:
    try:
        return _shown(kind(code))
    except ValueError:
        return str(code)


def _principal(text: str) -> str:
    kind, colon, name = text.partition(":")
    if not colon or not kind or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is no principal: write User:NAME")
    return text


def _resource(given: argparse.Namespace) -> tuple[ResourceType, str | None]:
    """Return the type and the name of the resource that the options name; ANY if they name none."""
    if given.cluster:
        return ResourceType.CLUSTER, CLUSTER_NAME
    for option, kind in _RESOURCES.items():
        name: str | None = getattr(given, option)
        if name is not None:
            return kind, name
    return ResourceType.ANY, None


def _filter(given: argparse.Namespace, pattern: str) -> DescribeAclsRequest:
    kind, name = _resource(given)
    chosen: str = given.pattern or (pattern if name is not None else "any")
    return DescribeAclsRequest(
        resource_type_filter=kind,
        resource_name_filter=name,
        pattern_type_filter=PatternType[chosen.upper()],
        principal_filter=given.principal,
        host_filter=given.host,
        operation=_code(AclOperation, given.operation),
        permission_type=_code(Permission, given.permission),
    )


def _matching(cluster: Cluster, request: DescribeAclsRequest) -> list[Row]:
    response = cluster.ask(DescribeAclsResponse, request)
    if response.error_code:
        why = reason(response.error_code, response.error_message, needs="--operation describe --cluster")
        raise CommandError(f"ACLs: {why}")
    rows = [
        _row(
            acl.principal,
            acl.permission_type,
            acl.operation,
            resource.resource_type,
            resource.resource_name,
            resource.pattern_type,
            acl.host,
        )
        for resource in response.resources
        for acl in resource.acls
    ]
    return sorted(rows, key=lambda row: [str(row[column]) for column in COLUMNS])


def _row(principal: str, permission: int, operation: int, kind: int, name: str, pattern: int, host: str) -> Row:
    return {
        "principal": principal,
        "permission": _named(Permission, permission),
        "operation": _named(AclOperation, operation),
        "resource_type": _named(ResourceType, kind),
        "resource": name,
        "pattern": _named(PatternType, pattern),
        "host": host,
    }


def list_acls(cluster: Cluster, given: argparse.Namespace) -> int:
    show(_matching(cluster, _filter(given, "match")), COLUMNS, as_json=given.json)
    return 0


def add_acls(cluster: Cluster, given: argparse.Namespace) -> int:
    if not given.allow and not given.deny:
        raise CommandError("nothing to add: give --allow User:NAME or --deny User:NAME")
    kind, name = _resource(given)
    pattern = PatternType.PREFIXED if given.prefixed else PatternType.LITERAL
    wanted = [(principal, Permission.ALLOW) for principal in dict.fromkeys(given.allow)]
    wanted += [(principal, Permission.DENY) for principal in dict.fromkeys(given.deny)]
    creations = [
        AclCreation(
            resource_type=kind,
            resource_name=name or "",
            resource_pattern_type=pattern,
            principal=principal,
            host=given.host,
            operation=_code(AclOperation, operation),
            permission_type=permission,
        )
        for principal, permission in wanted
        for operation in dict.fromkeys(given.operation)
    ]
    # Look the topic up first, because the new ACLs may hide it from this client.
    hint = _nearest_topics(cluster, name or "") if kind is ResourceType.TOPIC and not given.prefixed else ""
    response = cluster.ask_controller(CreateAclsResponse, CreateAclsRequest(creations=tuple(creations)))
    rows: list[Row] = []
    for made, result in zip(creations, response.results, strict=True):
        refused = reason(result.error_code, result.error_message, needs="--operation alter --cluster")
        row = _row(
            made.principal,
            made.permission_type,
            made.operation,
            made.resource_type,
            made.resource_name,
            made.resource_pattern_type,
            made.host,
        )
        rows.append({**row, "result": refused if result.error_code else "added"})
    failed = [row for row in rows if row["result"] != "added"]
    if len(failed) == len(rows):
        raise CommandError(f"ACLs: {rows[0]['result']}")
    show(rows, (*COLUMNS, "result"), as_json=given.json)
    if hint:
        remark(f"there is no topic {name} yet{hint}")
    return 1 if failed else 0


def _nearest_topics(cluster: Cluster, name: str) -> str:
    """Return the topics whose names resemble an unknown one. An ACL may precede its topic, so this is no error."""
    known = [topic.name for topic in cluster.metadata().topics if topic.name]
    return "" if name in known or name == WILDCARD else did_you_mean(name, known, SUGGESTIONS)


def remove_acls(cluster: Cluster, given: argparse.Namespace) -> int:
    kind, _ = _resource(given)
    if kind is ResourceType.ANY and given.principal is None:
        raise CommandError("name what to remove: a resource such as --topic NAME, or --principal User:NAME")
    wanted = _filter(given, "literal")
    rows = _matching(cluster, wanted)
    if not rows:
        raise CommandError(f"no ACL matches{_nearest(cluster, wanted)}")
    if given.execute:
        rows = _removed(cluster, wanted)
    show(rows, COLUMNS, as_json=given.json)
    if not given.json:
        print("\nRemoved." if given.execute else "\nNothing was changed; --execute removes these.")
    return 0


def _removed(cluster: Cluster, wanted: DescribeAclsRequest) -> list[Row]:
    condition = DeleteAclsFilter(
        resource_type_filter=wanted.resource_type_filter,
        resource_name_filter=wanted.resource_name_filter,
        pattern_type_filter=wanted.pattern_type_filter,
        principal_filter=wanted.principal_filter,
        host_filter=wanted.host_filter,
        operation=wanted.operation,
        permission_type=wanted.permission_type,
    )
    response = cluster.ask_controller(DeleteAclsResponse, DeleteAclsRequest(filters=(condition,)))
    (result,) = response.filter_results
    refused = [(result.error_code, result.error_message)]
    refused += [(each.error_code, each.error_message) for each in result.matching_acls]
    for code, message in refused:
        if code:
            raise CommandError(f"ACLs: {reason(code, message, needs='--operation alter --cluster')}")
    rows = [
        _row(
            each.principal,
            each.permission_type,
            each.operation,
            each.resource_type,
            each.resource_name,
            each.pattern_type,
            each.host,
        )
        for each in result.matching_acls
    ]
    return sorted(rows, key=lambda row: [str(row[column]) for column in COLUMNS])


def _nearest(cluster: Cluster, wanted: DescribeAclsRequest) -> str:
    """Return the resources or principals of existing ACLs whose names resemble the given ones."""
    everything = DescribeAclsRequest(
        resource_type_filter=ResourceType.ANY,
        resource_name_filter=None,
        pattern_type_filter=PatternType.ANY,
        principal_filter=None,
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=Permission.ANY,
    )
    rows = _matching(cluster, everything)
    pairs: Sequence[tuple[str, str | None]] = (
        ("resource", wanted.resource_name_filter),
        ("principal", wanted.principal_filter),
    )
    for column, name in pairs:
        known = {str(row[column]) for row in rows}
        if name is not None and name not in known:
            return did_you_mean(name, sorted(known), SUGGESTIONS)
    return ""
