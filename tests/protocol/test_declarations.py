"""Every declaration, field by field, compared with upstream's message files. Error codes and API
keys are compared too.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from protocol import schema as declarations
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import find_message
from protocol.schema import (
    Direction,
    Field,
    MessageSchema,
    array,
    int32,
    message,
    nested,
    string,
    struct,
    struct_schema,
)
from protocol.versions import NO_VERSIONS, Versions
from tests.protocol.values import MESSAGES

REFERENCE = Path(__file__).parent / "reference"
POM = Path(__file__).parents[1] / "kafka" / "pom.xml"

APIS = [
    "ApiVersions",
    "Metadata",
    "Produce",
    "Fetch",
    "ListOffsets",
    "OffsetForLeaderEpoch",
    "InitProducerId",
    "CreateTopics",
    "DeleteTopics",
    "CreatePartitions",
    "DeleteRecords",
    "DescribeConfigs",
    "AlterConfigs",
    "IncrementalAlterConfigs",
    "DescribeCluster",
    "DescribeTopicPartitions",
    "DescribeLogDirs",
    "AlterReplicaLogDirs",
    "ListConfigResources",
    "DescribeQuorum",
    "AddRaftVoter",
    "RemoveRaftVoter",
    "ListPartitionReassignments",
    "AlterPartitionReassignments",
    "ElectLeaders",
    "UnregisterBroker",
    "UnregisterController",
    "UpdateFeatures",
    "DescribeClientQuotas",
    "AlterClientQuotas",
    "FindCoordinator",
    "JoinGroup",
    "Heartbeat",
    "LeaveGroup",
    "SyncGroup",
    "DescribeGroups",
    "ListGroups",
    "DeleteGroups",
    "OffsetCommit",
    "OffsetFetch",
    "OffsetDelete",
    "ShareGroupHeartbeat",
    "ShareGroupDescribe",
    "ShareFetch",
    "ShareAcknowledge",
    "DescribeShareGroupOffsets",
    "AlterShareGroupOffsets",
    "DeleteShareGroupOffsets",
    "ConsumerGroupHeartbeat",
    "ConsumerGroupDescribe",
    "StreamsGroupHeartbeat",
    "StreamsGroupDescribe",
    "StreamsGroupTopologyDescriptionUpdate",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "EndTxn",
    "WriteTxnMarkers",
    "TxnOffsetCommit",
    "DescribeProducers",
    "DescribeTransactions",
    "ListTransactions",
    "SaslHandshake",
    "SaslAuthenticate",
    "AlterUserScramCredentials",
    "DescribeUserScramCredentials",
    "CreateDelegationToken",
    "RenewDelegationToken",
    "ExpireDelegationToken",
    "DescribeDelegationToken",
    "DescribeAcls",
    "CreateAcls",
    "DeleteAcls",
]


def reference(name: str) -> Any:
    return json.loads((REFERENCE / name).read_text())


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_every_api_has_a_request_and_a_response():
    declared = {schema.struct_type.__name__ for schema in MESSAGES}
    assert declared == {api + end for api in APIS for end in ("Request", "Response")}


@pytest.mark.parametrize("schema", MESSAGES, ids=lambda schema: schema.struct_type.__name__)
def test_message_is_declared_as_upstream_does(schema: MessageSchema):
    name = schema.struct_type.__name__
    upstream = reference("messages.json")[name]
    valid = Versions.parse(upstream["validVersions"])
    assert schema.api_key == upstream["apiKey"]
    assert schema.direction.value == upstream["type"]
    assert schema.versions == valid
    assert schema.flexible == Versions.parse(upstream["flexibleVersions"]) & valid
    common = {struct["name"]: struct["fields"] for struct in upstream.get("commonStructs", ())}
    compare_fields(name, schema.fields, upstream["fields"], valid, common)


RENAMED = {
    "AlterClientQuotasResponse.entries": "AlteredEntryData",
    "DescribeQuorumRequest.topics": "DescribedTopic",
    "DescribeQuorumRequest.topics.partitions": "DescribedPartition",
}
"""Structs to which upstream gives the same name in a request and in its response."""

Common = dict[str, list[dict[str, Any]]]
"""Upstream's common structs, to which a message refers in several places."""


def compare_fields(
    where: str, ours: tuple[Field, ...], upstream: list[dict[str, Any]], held: Versions, common: Common
) -> None:
    """Compare the fields. `held` is the range of versions in which the struct occurs at all; outside it, a field's
    range has no meaning.
    """
    present = [field for field in upstream if Versions.parse(field["versions"]) & held]
    assert [field.name for field in ours] == [snake_case(field["name"]) for field in present], where
    for field, theirs in zip(ours, present, strict=True):
        compare_field(f"{where}.{field.name}", field, theirs, held, common)


def compare_field(where: str, field: Field, upstream: dict[str, Any], held: Versions, common: Common) -> None:
    versions = Versions.parse(upstream["versions"]) & held
    assert field.versions & held == versions, where
    nullable = Versions.parse(upstream.get("nullableVersions", "none"))
    assert field.nullable & held == nullable & versions, where
    assert field.tag == upstream.get("tag"), where
    if field.tag is not None:
        assert Versions.parse(upstream["taggedVersions"]) & held == versions, where
    assert field.is_array == upstream["type"].startswith("[]"), where
    type_name = upstream["type"].removeprefix("[]")
    if isinstance(field.kind, type):
        assert field.kind.__name__ == RENAMED.get(where, type_name), where
        theirs = upstream["fields"] if "fields" in upstream else common[type_name]
        compare_fields(where, struct_schema(field.kind).fields, theirs, versions, common)
    else:
        assert field.kind.name == type_name, where
    assert field.default == upstream_default(field, upstream), where


def upstream_default(field: Field, upstream: dict[str, Any]) -> Any:
    default = upstream.get("default")
    if default == "null":
        return None
    if field.is_array:
        return ()
    if isinstance(field.kind, type):
        return field.kind()
    match field.kind.name:
        case "bool":
            return default == "true"
        case "string":
            return default or ""
        case "bytes":
            return b""
        case "records":
            return None
        case "uuid":
            return UUID(int=0)
        case _:
            return int(str(default or 0), 0)


@pytest.mark.parametrize("schema", MESSAGES, ids=lambda schema: schema.struct_type.__name__)
def test_every_dataclass_is_made_of_its_defaults(schema: MessageSchema):
    made = schema.struct_type()
    assert [field.name for field in fields(made)] == [field.name for field in schema.fields]
    assert {field.name: getattr(made, field.name) for field in schema.fields} == {
        field.name: field.default for field in schema.fields
    }


@pytest.mark.parametrize("api", APIS)
def test_each_api_has_its_own_module(api: str):
    module = importlib.import_module(f"protocol.messages.{snake_case(api)}")
    for end in (Direction.REQUEST, Direction.RESPONSE):
        found = find_message(ApiKey[snake_case(api).upper()], end)
        assert found is not None
        assert found.struct_type is getattr(module, api + end.value.capitalize())


def test_upstreams_facts_are_of_the_tested_version():
    """When `tests/kafka/pom.xml` names another version, `python -m tests.kafka.facts` must rewrite the facts."""
    version = (REFERENCE / "version.txt").read_text().strip()
    assert f"<kafka.version>{version}</kafka.version>" in POM.read_text()


def test_api_keys_are_upstreams():
    requests = (upstream for upstream in reference("messages.json").values() if upstream["type"] == "request")
    expected = {
        snake_case(upstream["name"].removesuffix("Request")).upper(): upstream["apiKey"] for upstream in requests
    }
    assert {key.name: key.value for key in ApiKey} == expected


def test_error_codes_are_upstreams():
    expected = {error["name"]: (error["code"], error["retriable"]) for error in reference("error-codes.json")}
    assert {code.name: (code.value, code.retriable) for code in ErrorCode} == expected


def test_kafka_error_shows_its_code_and_message():
    assert str(KafkaError(ErrorCode.NOT_COORDINATOR)) == "NOT_COORDINATOR"
    error = KafkaError(ErrorCode.INVALID_REQUEST, "no topics")
    assert (error.code, error.message, str(error)) == (42, "no topics", "INVALID_REQUEST: no topics")


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("0+", {0, 1, 99}, {-1}), ("3-5", {3, 4, 5}, {2, 6}), ("7", {7}, {6, 8}), ("none", set(), {-1, 0, 1})],
)
def test_ranges_of_versions(text: str, inside: set[int], outside: set[int]):
    versions = Versions.parse(text)
    assert all(version in versions for version in inside)
    assert not any(version in versions for version in outside)
    assert str(versions) == text
    assert bool(versions) == bool(inside)


def test_ranges_of_versions_intersect():
    assert list(Versions(2, 6) & Versions(4, 9)) == [4, 5, 6]
    assert Versions(2, 3) & Versions(4, 9) == NO_VERSIONS
    with pytest.raises(ValueError, match="later"):
        Versions.parse("later")


class TestRefusedDeclarations:
    def test_field_without_a_kind_is_refused(self):
        with pytest.raises(TypeError, match="no wire kind"):

            @struct
            class Plain:
                name: str = "x"

    def test_field_of_a_class_that_is_no_struct_is_refused(self):
        with pytest.raises(TypeError, match="not a @struct"):

            @struct
            class Holder:
                parts: tuple[int, ...] = array(int)

    def test_null_default_of_a_field_that_is_never_null_is_refused(self):
        with pytest.raises(TypeError, match="never nullable"):

            @struct
            class Null:
                name: str = string(default=None)  # pyright: ignore[reportArgumentType]

    def test_message_that_is_neither_request_nor_response_is_refused(self):
        with pytest.raises(TypeError, match="neither"):

            @message(ApiKey.END_TXN, versions="0", flexible="none")
            class EndTxn:
                committed: int = int32()

    def test_message_declared_twice_is_refused(self):
        with pytest.raises(TypeError, match="already"):

            @message(ApiKey.HEARTBEAT, versions="0", flexible="none")
            class AnotherRequest:
                generation_id: int = int32()

    def test_messages_and_structs_are_distinguished(self):
        @struct
        class Part:
            index: int = int32()

        @struct
        class Whole:
            part: Part = nested(Part)

        assert Whole().part == Part()
        with pytest.raises(TypeError, match="not a message"):
            declarations.message_schema(Whole)
