"""Which fields of a request are ids. An id of more than a kilobyte is refused in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.worst_requests import filled
from gateway.apis import SERVED
from gateway.net.dispatch import Served
from gateway.net.ids import MAX_ID_BYTES, MAX_SHARE_KEY_BYTES, check_ids, id_fields
from protocol.codec import request_class
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.schema import struct_schema

TOO_LONG = "é" * (MAX_ID_BYTES // 2 + 1)
NO_IDS = frozenset({"cluster_id", "subtopology_id"})
"""String fields that have names like ids but are not: they are only compared, or name parts of a topology."""


def with_ids(struct: Any, text: str) -> Iterator[Any]:
    """Yield copies of the struct. In each copy, another one of its ids is replaced by the text."""
    for field in id_fields(type(struct)):
        value = getattr(struct, field.name)
        if field.code is not None:
            yield replace(struct, **{field.name: (text,) if field.is_array else text})
        elif field.is_array:
            for changed in with_ids(value[0], text):
                yield replace(struct, **{field.name: (*value[1:], changed)})
        else:
            for changed in with_ids(value, text):
                yield replace(struct, **{field.name: changed})


def id_named(struct_type: type[Any]) -> Iterator[tuple[str, bool]]:
    """Yield every string field whose name looks like an id, and whether the gateway treats it as an id."""
    taken = {field.name for field in id_fields(struct_type)}
    for field in struct_schema(struct_type).fields:
        if isinstance(field.kind, type):
            yield from id_named(field.kind)
        elif field.kind.name == "string" and (field.name.endswith(("_id", "_ids")) or "group" in field.name):
            yield field.name, field.name in taken


@pytest.mark.parametrize("line", SERVED, ids=lambda line: line.api_key.name)
def test_an_id_of_more_than_a_kilobyte_is_refused_in_every_field(line: Served) -> None:
    version = line.max_version
    request = filled(request_class(line.api_key), version, (), 1)
    check_ids(request)
    for hostile in with_ids(request, TOO_LONG):
        with pytest.raises(KafkaError) as refused:
            check_ids(hostile)
        assert refused.value.code in (ErrorCode.INVALID_GROUP_ID, ErrorCode.INVALID_REQUEST)
        assert TOO_LONG not in (refused.value.message or "")
    for allowed in with_ids(request, "é" * (MAX_ID_BYTES // 2)):
        check_ids(allowed)


@pytest.mark.parametrize("line", SERVED, ids=lambda line: line.api_key.name)
def test_every_field_that_is_named_like_an_id_is_one(line: Served) -> None:
    missed = {name for name, taken in id_named(request_class(line.api_key)) if not taken}
    assert missed <= NO_IDS


@pytest.mark.parametrize(
    ("key_type", "longest", "code"),
    [
        (0, MAX_ID_BYTES, ErrorCode.INVALID_GROUP_ID),
        (1, MAX_ID_BYTES, ErrorCode.INVALID_REQUEST),
        (2, MAX_SHARE_KEY_BYTES, ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_coordinators_key_is_refused_by_its_type(key_type: int, longest: int, code: ErrorCode) -> None:
    key, longer = "k" * longest, "k" * (longest + 1)
    for given in (key, longer):
        for request in (
            FindCoordinatorRequest(key_type=key_type, key=given),
            FindCoordinatorRequest(key_type=key_type, coordinator_keys=("", given)),
        ):
            if given is key:
                check_ids(request)
                continue
            with pytest.raises(KafkaError) as refused:
                check_ids(request)
            assert refused.value.code is code
