"""The served APIs: the table against Kafka 4.4, and ApiVersions as clients read it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.apis import SERVED
from gateway.apis.admin.features import supported
from gateway.apis.api_versions import MAX_SOFTWARE_CHARS, api_versions
from gateway.building.services import Services
from gateway.config.broker import BrokerConfig
from gateway.net.context import ConnectionInfo, RequestContext, Role
from gateway.net.dispatch import served_as, served_versions
from gateway.net.requests import Order
from protocol import codec
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.schema import message_schema

REFERENCE = Path(__file__).parents[2] / "protocol" / "reference"
UPSTREAM: dict[str, dict[str, Any]] = json.loads((REFERENCE / "apis.json").read_text())
"""Every API that Kafka 4.4 advertises, with the kinds of listeners that advertise it."""
TELEMETRY = {"GetTelemetrySubscriptions", "PushTelemetry"}
"""Kafka's brokers advertise these only if a plugin receives the clients' metrics."""
SHARE_STATE = {
    "DeleteShareGroupState",
    "InitializeShareGroupState",
    "ReadShareGroupState",
    "ReadShareGroupStateSummary",
    "WriteShareGroupState",
}
"""Only Kafka's brokers send these requests, to the node that keeps a share group's state. Sluice keeps that state in a
row of Postgres.
"""
NOT_SERVED = TELEMETRY | SHARE_STATE
AMONG_CONTROLLERS = {
    "AllocateProducerIds",
    "AlterPartition",
    "AssignReplicasToDirs",
    "BeginQuorumEpoch",
    "BrokerHeartbeat",
    "BrokerRegistration",
    "ControllerRegistration",
    "EndQuorumEpoch",
    "Envelope",
    "Fetch",
    "FetchSnapshot",
    "UpdateRaftVoter",
    "Vote",
}

MEMBERSHIP = SimpleNamespace(node_id=3, levels=dict[str, int](), read_ms=7)


def context(
    version: int, connection: ConnectionInfo, *, unstable: bool = False, role: Role = Role.BROKER
) -> RequestContext:
    settings = SimpleNamespace(broker=BrokerConfig(unstable_feature_versions_enable=unstable))
    services = cast(Services, SimpleNamespace(membership=MEMBERSHIP, settings=settings, cluster_id="ours"))
    return RequestContext(
        ApiKey.API_VERSIONS, version, 1, "client", connection, services, served=served_versions(SERVED), role=role
    )


def test_every_api_occurs_once() -> None:
    assert len({line.api_key for line in SERVED}) == len(SERVED)


@pytest.mark.parametrize("line", SERVED, ids=lambda line: line.api_key.name)
def test_a_handler_is_named_as_its_api(line: Any) -> None:
    assert line.handler.__name__ == line.api_key.name.lower()
    assert inspect.iscoroutinefunction(line.handler)


@pytest.mark.parametrize("line", SERVED, ids=lambda line: line.api_key.name)
def test_every_promised_version_can_be_read_and_answered(line: Any) -> None:
    for message_type in (codec.request_class(line.api_key), codec.response_class(line.api_key)):
        declared = message_schema(message_type).versions
        assert {line.min_version, line.max_version} <= set(declared)


@pytest.mark.parametrize("line", SERVED, ids=lambda line: line.api_key.name)
def test_the_versions_are_kafkas(line: Any) -> None:
    (upstream,) = [api for api in UPSTREAM.values() if api["apiKey"] == line.api_key]
    low, _, high = upstream["validVersions"].partition("-")
    highest, is_unstable = int(high or low), upstream["latestVersionUnstable"]
    assert (line.min_version, line.max_version) == (int(low), highest - is_unstable)


def missing(listener: str, role: Role) -> set[str]:
    served = {line.api_key for line in served_as(role, SERVED)}
    return {name for name, api in UPSTREAM.items() if listener in api["listeners"] and api["apiKey"] not in served}


def test_a_broker_serves_what_kafkas_brokers_advertise() -> None:
    assert missing("broker", Role.BROKER) == NOT_SERVED
    assert {api["apiKey"] for api in UPSTREAM.values() if "broker" in api["listeners"]} >= {
        line.api_key for line in served_as(Role.BROKER, SERVED)
    }


def test_controller_serves_what_kafkas_controllers_advertise_to_clients() -> None:
    assert missing("controller", Role.CONTROLLER) - NOT_SERVED == AMONG_CONTROLLERS
    assert {api["apiKey"] for api in UPSTREAM.values() if "controller" in api["listeners"]} >= {
        line.api_key for line in served_as(Role.CONTROLLER, SERVED)
    }


def test_only_requests_that_wait_for_others_are_parked() -> None:
    parked = {ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.FETCH, ApiKey.SHARE_FETCH}
    assert {line.api_key for line in SERVED if line.order is Order.PARKED} == parked


def test_only_produce_is_advertised_below_its_served_versions() -> None:
    ranges = {entry.api_key: (entry.min_version, entry.max_version) for entry in served_versions(SERVED)}
    assert ranges.pop(ApiKey.PRODUCE) == (0, 13)
    assert ranges == {
        int(line.api_key): (line.min_version, line.max_version) for line in SERVED if line.api_key != ApiKey.PRODUCE
    }


@pytest.mark.parametrize("version", range(6))
async def test_api_versions_lists_the_table(version: int) -> None:
    connection = ConnectionInfo("c", "/127.0.0.1")
    request = ApiVersionsRequest(client_software_name="librdkafka", client_software_version="2.16.0-rc.1")
    response = await api_versions(request, context(version, connection))
    assert response.api_keys == served_versions(SERVED)
    assert connection.client_software_name == ("librdkafka" if version >= 3 else "")


@pytest.mark.parametrize("served", range(3))
async def test_feature_is_finalized_at_the_level_that_was_set(served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMBERSHIP, "levels", {"transaction.version": served})
    request = ApiVersionsRequest(client_software_name="a", client_software_version="1")
    response = await api_versions(request, context(4, ConnectionInfo("c", "/127.0.0.1")))
    levels = {each.name: each.max_version_level for each in response.finalized_features}
    always = ("eligible.leader.replicas.version", "group.version", "share.version", "streams.version")
    facts = {"metadata.version": 33, "share.version": 2} | ({"transaction.version": served} if served else {})
    assert levels == dict.fromkeys(always, 1) | facts
    assert response.finalized_features_epoch == 7


async def test_a_long_software_name_is_kept_in_part() -> None:
    connection = ConnectionInfo("c", "/127.0.0.1")
    request = ApiVersionsRequest(client_software_name="a" * 32_000, client_software_version="1" * 32_000)
    assert (await api_versions(request, context(3, connection))).error_code == 0
    assert connection.client_software_name == "a" * MAX_SOFTWARE_CHARS
    assert connection.client_software_version == "1" * MAX_SOFTWARE_CHARS


@pytest.mark.parametrize(
    ("name", "software_version"), [("", "1"), ("a", ""), ("-a", "1"), ("a", "1."), ("a b", "1"), ("ä", "1")]
)
async def test_software_name_is_checked_from_version_3(name: str, software_version: str) -> None:
    connection = ConnectionInfo("c", "/127.0.0.1")
    request = ApiVersionsRequest(client_software_name=name, client_software_version=software_version)
    with pytest.raises(KafkaError) as refused:
        await api_versions(request, context(3, connection))
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert connection.client_software_name == ""
    await api_versions(request, context(2, connection))


@pytest.mark.parametrize(
    ("cluster_id", "node_id", "version", "role"),
    [
        (None, -1, 5, Role.BROKER),
        (None, 9, 5, Role.BROKER),
        ("ours", 3, 5, Role.BROKER),
        ("theirs", 9, 4, Role.BROKER),
        ("theirs", 9, 5, Role.CONTROLLER),
    ],
)
async def test_client_that_names_this_broker_or_none_is_answered(
    cluster_id: str | None, node_id: int, version: int, role: Role
) -> None:
    request = ApiVersionsRequest(
        client_software_name="a", client_software_version="1", cluster_id=cluster_id, node_id=node_id
    )
    response = await api_versions(request, context(version, ConnectionInfo("c", "/127.0.0.1"), role=role))
    assert response.error_code == ErrorCode.NONE


@pytest.mark.parametrize(("cluster_id", "node_id"), [("theirs", 3), ("ours", 4), ("ours", -1), ("", 3)])
async def test_client_that_names_another_broker_or_cluster_must_rebootstrap(cluster_id: str, node_id: int) -> None:
    request = ApiVersionsRequest(
        client_software_name="a", client_software_version="1", cluster_id=cluster_id, node_id=node_id
    )
    with pytest.raises(KafkaError) as refused:
        await api_versions(request, context(5, ConnectionInfo("c", "/127.0.0.1")))
    assert refused.value.code == ErrorCode.REBOOTSTRAP_REQUIRED


def test_levels_of_features_are_kafkas() -> None:
    """Two features differ. For kraft.version, level 1 is accepted so that tools can name it, but has no effect. For
    eligible.leader.replicas.version, level 0 is not served.
    """
    kafkas: dict[str, list[int]] = json.loads((REFERENCE / "features.json").read_text())
    kafkas["kraft.version"] = [0, 1, 1]
    kafkas["eligible.leader.replicas.version"] = [1, 1, 1]
    for unstable in (False, True):
        ours = supported(BrokerConfig(unstable_feature_versions_enable=unstable))
        assert ours == {name: (lowest, highest[unstable]) for name, (lowest, *highest) in kafkas.items()}


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("unstable", [False, True])
async def test_features_are_kafkas_at_its_levels(version: int, unstable: bool) -> None:
    """Features whose lowest level is 0 are listed from version 4 on (KAFKA-17011); a feature at level 0 is not
    finalized.
    """
    request = ApiVersionsRequest(client_software_name="a", client_software_version="1")
    connection = ConnectionInfo("c", "/127.0.0.1")
    response = await api_versions(request, context(version, connection, unstable=unstable))
    highest = 34 if unstable else 33
    told = {each.name: (each.min_version, each.max_version) for each in response.supported_features}
    assert told == {"metadata.version": (7, highest), "eligible.leader.replicas.version": (1, 1)} | (
        {
            "kraft.version": (0, 1),
            "group.version": (0, 1),
            "share.version": (0, 2),
            "streams.version": (0, 1),
            "transaction.version": (0, 2),
        }
        if version >= 4
        else {}
    )
    (metadata,) = [each for each in response.finalized_features if each.name == "metadata.version"]
    assert (metadata.min_version_level, metadata.max_version_level) == (highest, highest)
    assert "kraft.version" not in {each.name for each in response.finalized_features}
