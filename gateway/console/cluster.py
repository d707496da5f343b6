"""Pages about the cluster: transactions, share groups, ACLs, users, quotas, settings.

The one idea: where Kafka has an API that any node can answer, the page asks it in the viewer's name. Where only the
coordinator of each shard could answer, the page reads Postgres and asks the authorizer about each line.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice

from gateway.config.broker_table import UNLISTED
from gateway.config.definition import ConfigSource
from gateway.console.decode import Json
from gateway.console.groups import GroupViews
from gateway.console.kafka import Kafka, Viewer, refuse
from gateway.security.kinds import AclOperation, PatternType, Permission, ResourceType
from protocol.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse
from protocol.messages.describe_client_quotas import DescribeClientQuotasRequest, DescribeClientQuotasResponse
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource, DescribeConfigsResponse
from protocol.messages.describe_user_scram_credentials import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from storage.console import ConsoleStore

MAX_TRANSACTIONS = 200
MAX_SHARE_ROWS = 2_000
MAX_ACLS = 2_000
MAX_USERS = 2_000
MAX_QUOTAS = 2_000
_ANY = 1
"""Kafka's number for any type, operation, permission and pattern in a filter of ACLs."""
BROKER_RESOURCE, TOPIC_RESOURCE, GROUP_RESOURCE = 4, 2, 32
_MECHANISMS = {1: "SCRAM-SHA-256", 2: "SCRAM-SHA-512"}


class ClusterViews:
    def __init__(self, kafka: Kafka, store: ConsoleStore, groups: GroupViews) -> None:
        self._kafka, self._store, self._groups = kafka, store, groups

    async def transactions(self, who: Viewer) -> dict[str, object]:
        """Return the open transactions that the viewer may describe, the oldest first."""
        rows = await self._store.transactions(MAX_TRANSACTIONS)
        return {
            "transactions": [
                {
                    "id": row["transactional_id"],
                    "producer": row["producer_id"],
                    "epoch": row["producer_epoch"],
                    "timeout": row["timeout_ms"],
                    "age": row["age_ms"],
                    "partitions": [
                        {
                            "topic": topic,
                            "partition": index,
                            "first": first,
                            "held": None if first is None else end - first,
                        }
                        for topic, index, first, end in row["partitions"]
                        if self._groups.may_describe_topic(who, topic)
                    ],
                    "groups": [each for each in row["groups"] if self._groups.may_describe(who, each)],
                }
                for row in rows
                if self._kafka.may(who, AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, row["transactional_id"])
            ],
            "cut": len(rows) == MAX_TRANSACTIONS,
        }

    async def share_groups(self, who: Viewer) -> dict[str, object]:
        """Return the positions of share groups that the viewer may describe."""
        rows = await self._store.share_groups(MAX_SHARE_ROWS)
        groups: dict[str, list[dict[str, object]]] = {}
        for row in rows:
            group_id, topic = row["group_id"], row["topic"]
            if self._groups.may_describe(who, group_id) and self._groups.may_describe_topic(who, topic):
                groups.setdefault(group_id, []).append(
                    {
                        "topic": topic,
                        "partition": row["partition"],
                        "start": row["start_offset"],
                        "end": row["log_end_offset"],
                        "lag": max(row["log_end_offset"] - row["start_offset"], 0),
                    }
                )
        return {
            "groups": [{"id": group_id, "partitions": found} for group_id, found in groups.items()],
            "cut": len(rows) == MAX_SHARE_ROWS,
        }

    async def acls(self, who: Viewer) -> dict[str, object]:
        """Return the ACLs. Raise KafkaError if the viewer may not describe the cluster or no authorizer is set."""
        if self._kafka.services.authorizer is None:
            return {"authorizer": False, "acls": []}
        request = DescribeAclsRequest(
            resource_type_filter=_ANY,
            resource_name_filter=None,
            pattern_type_filter=_ANY,
            principal_filter=None,
            host_filter=None,
            operation=_ANY,
            permission_type=_ANY,
        )
        response = await self._kafka.ask(DescribeAclsResponse, request, who)
        refuse(response.error_code, response.error_message)
        listed = ((resource, acl) for resource in response.resources for acl in resource.acls)
        rows = [
            {
                "resource": _named(ResourceType, resource.resource_type),
                "name": resource.resource_name,
                "pattern": _named(PatternType, resource.pattern_type),
                "principal": acl.principal,
                "host": acl.host,
                "operation": _named(AclOperation, acl.operation),
                "permission": _named(Permission, acl.permission_type),
            }
            for resource, acl in islice(listed, MAX_ACLS)
        ]
        return {"authorizer": True, "acls": rows, "cut": next(listed, None) is not None}

    async def users(self, who: Viewer) -> dict[str, object]:
        """Return the SCRAM users with their mechanisms. Raise KafkaError if the viewer may not describe the cluster."""
        response = await self._kafka.ask(
            DescribeUserScramCredentialsResponse, DescribeUserScramCredentialsRequest(users=None), who
        )
        refuse(response.error_code, response.error_message)
        rows = [
            {
                "user": each.user,
                "credentials": [
                    {"mechanism": _MECHANISMS.get(info.mechanism, str(info.mechanism)), "iterations": info.iterations}
                    for info in each.credential_infos
                ],
            }
            for each in response.results[:MAX_USERS]
        ]
        return {"users": rows, "cut": len(response.results) > MAX_USERS}

    async def quotas(self, who: Viewer) -> dict[str, object]:
        """Return the quotas of clients. Raise KafkaError if the viewer may not describe settings of the cluster."""
        response = await self._kafka.ask(DescribeClientQuotasResponse, DescribeClientQuotasRequest(), who)
        refuse(response.error_code, response.error_message)
        rows = [
            {
                "entity": [{"type": each.entity_type, "name": each.entity_name} for each in entry.entity],
                "values": {value.key: value.value for value in entry.values},
            }
            for entry in response.entries or ()
        ]
        return {"quotas": rows[:MAX_QUOTAS], "cut": len(rows) > MAX_QUOTAS}

    async def settings(
        self, who: Viewer, kind: int, name: str, keys: tuple[str, ...] | None = None
    ) -> list[dict[str, Json]]:
        """Return the settings of a topic, a group or a node, with the source of each value. A secret has no value.
        `keys`: names of settings; None for all that the API lists."""
        resource = DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=keys)
        request = DescribeConfigsRequest(resources=(resource,), include_synonyms=True, include_documentation=True)
        response = await self._kafka.ask(DescribeConfigsResponse, request, who)
        (result,) = response.results
        refuse(result.error_code, result.error_message)
        return [
            {
                "name": each.name,
                "value": None if each.is_sensitive else each.value,
                "secret": each.is_sensitive,
                "source": _source(each.config_source),
                "default": each.config_source == ConfigSource.DEFAULT_CONFIG,
                "readOnly": each.read_only,
                "about": each.documentation,
            }
            for each in result.configs
        ]

    async def node_settings(self, who: Viewer) -> dict[str, object]:
        """Return the broker settings of this node."""
        node_id = str(int(self._kafka.services.membership.node_id))
        listed = await self.settings(who, BROKER_RESOURCE, node_id)
        # The API lists this gateway's own settings only to a client that names them.
        own = await self.settings(who, BROKER_RESOURCE, node_id, tuple(sorted(UNLISTED)))
        known = {str(row["name"]) for row in listed}
        return {"node": node_id, "settings": [*listed, *(row for row in own if row["name"] not in known)]}


def _named(kind: type[IntEnum], number: int) -> str:
    try:
        return kind(number).name
    except ValueError:
        return str(number)


_SOURCES = {
    1: "topic",
    2: "node, dynamic",
    3: "cluster, dynamic",
    4: "start",
    5: "default",
    6: "logger",
    7: "client metrics",
    8: "group",
}


def _source(number: int) -> str:
    return _SOURCES.get(number, "unknown")
