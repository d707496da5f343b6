"""Our bytes equal those of kafka-python, which has its own generator for upstream's message files."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from kafka.protocol import admin, consumer, metadata, producer, sasl  # pyright: ignore[reportAttributeAccessIssue]

from protocol import codec
from protocol.api_keys import ApiKey
from protocol.messages.api_versions import ApiVersionsResponse
from tests.protocol.values import IDS, MESSAGE_VERSIONS, MESSAGES, message_value

DRAWS = 10


def classes_of_kafka_python() -> dict[str, Any]:
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for package in (admin, consumer, metadata, producer)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return {name: value for module in (*modules, sasl) for name, value in vars(module).items()}


THEIRS = classes_of_kafka_python()

NOT_THEIRS = frozenset(
    {
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.SHARE_GROUP_HEARTBEAT,
        ApiKey.SHARE_GROUP_DESCRIBE,
        ApiKey.SHARE_FETCH,
        ApiKey.SHARE_ACKNOWLEDGE,
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
        ApiKey.STREAMS_GROUP_HEARTBEAT,
        ApiKey.STREAMS_GROUP_DESCRIBE,
        ApiKey.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.UNREGISTER_CONTROLLER,
        ApiKey.ADD_RAFT_VOTER,
        ApiKey.REMOVE_RAFT_VOTER,
        ApiKey.CREATE_DELEGATION_TOKEN,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
    }
)
"""APIs that kafka-python 3.0 does not support."""
LATEST_OF_THEIRS = {ApiKey.API_VERSIONS: 4, ApiKey.TXN_OFFSET_COMMIT: 5, ApiKey.DELETE_GROUPS: 2}
"""kafka-python's latest version of an API, if we support a later one."""
RENAMED: dict[str, str] = {"generation_id_or_member_epoch": "generation_id"}
"""Fields that Kafka has renamed: our name, and the name that kafka-python uses in TxnOffsetCommit."""

COMPARED = [
    pytest.param(schema, version, id=name)
    for (schema, version), name in zip(MESSAGE_VERSIONS, IDS, strict=True)
    if schema.api_key not in NOT_THEIRS and version <= LATEST_OF_THEIRS.get(schema.api_key, version)
]


def test_apis_that_kafka_python_lacks_are_listed():
    assert not {schema.struct_type.__name__ for schema in MESSAGES if schema.api_key in NOT_THEIRS} & set(THEIRS)


@pytest.mark.parametrize(("schema", "version"), COMPARED)
def test_kafka_python_reads_and_writes_our_bytes(schema, version):
    theirs = THEIRS[schema.struct_type.__name__]
    random = Random(f"kafka-python {schema.struct_type.__name__} {version}")
    for _ in range(DRAWS):
        value = message_value(schema, version, random)
        if isinstance(value, ApiVersionsResponse):
            # kafka-python reads any answer with an error as version 0.
            value = replace(value, error_code=0)
        encoded = b"".join(codec.encode(value, version))
        decoded = theirs.decode(encoded, version=version)
        decoded._header = None  # noqa: SLF001 - it cannot otherwise encode what it has decoded
        assert bytes(decoded.encode(version=version)) == encoded
        for field in schema.fields:
            # kafka-python decodes authorized operations as sets of names, and has its own classes for structs.
            plain = not field.is_array and not isinstance(field.kind, type)
            if version in field.versions and plain and not field.name.endswith("_authorized_operations"):
                renamed = RENAMED if schema.api_key is ApiKey.TXN_OFFSET_COMMIT else {}
                assert getattr(decoded, str(renamed.get(field.name, field.name))) == getattr(value, field.name)
