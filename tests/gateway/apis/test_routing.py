"""The fields by which requests are routed: in every version that is served they come first."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.apis import SERVED
from gateway.apis.routing import (
    FIRST_ADD_PARTITIONS_OF_BROKERS,
    FIRST_OFFSET_FETCH_OF_GROUPS,
    GROUP_FIRST,
    LEAVING,
    SEVERAL,
    TRANSACTION_FIRST,
    GroupRouter,
)
from gateway.net.errors import UNAVAILABLE_CODES
from gateway.net.forwarding import Whole
from protocol.api_keys import ApiKey
from protocol.codec import decode_request, encode, request_class
from protocol.errors import ProtocolError
from protocol.headers import RequestHeader, decode_request_header, encode_request_header, leading_strings
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.schema import message_schema
from storage.types import Node, NodeId

NAME = "gruppe-ß" * 20
VERSIONS = {line.api_key: range(line.min_version, line.max_version + 1) for line in SERVED}


def frame(api_key: ApiKey, version: int, **fields: Any) -> bytes:
    header = encode_request_header(RequestHeader(int(api_key), version, 1, "client"))
    return header + b"".join(encode(replace(request_class(api_key)(), **fields), version))


def first_field(api_key: ApiKey, version: int) -> str:
    fields = message_schema(request_class(api_key)).fields
    return next(field.name for field in fields if version in field.versions)


@pytest.mark.parametrize("api_key", [*GROUP_FIRST, ApiKey.OFFSET_FETCH], ids=lambda key: key.name)
def test_group_id_comes_first(api_key: ApiKey) -> None:
    for version in VERSIONS[api_key]:
        if api_key is ApiKey.OFFSET_FETCH and version >= FIRST_OFFSET_FETCH_OF_GROUPS:
            assert first_field(api_key, version) == "groups"
            continue
        assert first_field(api_key, version) == "group_id"
        assert leading_strings(frame(api_key, version, group_id=NAME), 1) == [NAME]


@pytest.mark.parametrize("api_key", TRANSACTION_FIRST, ids=lambda key: key.name)
def test_transactional_id_comes_first(api_key: ApiKey) -> None:
    for version in VERSIONS[api_key]:
        if api_key is ApiKey.ADD_PARTITIONS_TO_TXN and version >= FIRST_ADD_PARTITIONS_OF_BROKERS:
            continue
        name = first_field(api_key, version)
        assert name in ("transactional_id", "v3_and_below_transactional_id")
        assert leading_strings(frame(api_key, version, **{name: NAME}), 1) == [NAME]


def test_second_string_of_a_commit_in_a_transaction_is_the_group() -> None:
    for version in VERSIONS[ApiKey.TXN_OFFSET_COMMIT]:
        asked = frame(ApiKey.TXN_OFFSET_COMMIT, version, transactional_id="transaction", group_id=NAME)
        assert leading_strings(asked, 2) == ["transaction", NAME]


def test_null_has_no_route() -> None:
    for version in VERSIONS[ApiKey.INIT_PRODUCER_ID]:
        assert leading_strings(frame(ApiKey.INIT_PRODUCER_ID, version, transactional_id=None), 1) == [None]


@pytest.mark.parametrize("version", [0, 4])
def test_torn_request_is_no_request(version: int) -> None:
    whole = frame(ApiKey.HEARTBEAT, version, group_id="group")
    header = encode_request_header(RequestHeader(int(ApiKey.HEARTBEAT), version, 1, "client"))
    for end in range(len(header) + len("group")):
        with pytest.raises(ProtocolError):
            leading_strings(whole[:end], 1)
    with pytest.raises(ProtocolError):
        leading_strings(header + b"\x00\x05\xff\xff\xff\xff" if version == 0 else header + b"\x03\xff", 1)
    with pytest.raises(ProtocolError):
        leading_strings(b"\x7f\x00\x00\x00\x00\x00\x00\x01\xff\xff\x00\x01a", 1)


@pytest.mark.parametrize("version", VERSIONS[ApiKey.HEARTBEAT])
def test_group_id_that_is_not_utf8_has_the_same_route_as_its_handler(version: int) -> None:
    latin_1 = frame(ApiKey.HEARTBEAT, version, group_id="Auftr??ge").replace(b"??", "\xe4\xdf".encode("latin-1"))
    _, position = decode_request_header(latin_1)
    group_id = decode_request(ApiKey.HEARTBEAT, version, latin_1, position).group_id
    assert leading_strings(latin_1, 1) == [group_id]


async def test_split_request_keeps_its_header() -> None:
    """A client id may be longer in valid UTF-8 than in the bytes that the client sent."""
    here, there = (Node(NodeId(node_id), {}) for node_id in (1, 2))
    leases: Any = SimpleNamespace(coordinator_of=lambda group_id: here if group_id == "a" else there)
    membership: Any = SimpleNamespace(node_id=here.node_id, look=None)
    asked = frame(ApiKey.DELETE_GROUPS, 2, groups_names=("a", "b"))
    client_id = b"\xff" * 32_767
    header = asked[:8] + len(client_id).to_bytes(2, "big") + client_id + b"\0"
    body = asked[len(encode_request_header(RequestHeader(int(ApiKey.DELETE_GROUPS), 2, 1, "client"))) :]
    several = GroupRouter(leases, leases, membership).route(header + body)
    assert several is not None
    assert not isinstance(several, Whole)
    parts = await several.parts(header + body)
    assert [part.node for part in parts] == [None, there]
    own = [DeleteGroupsRequest(groups_names=(name,)) for name in ("a", "b")]
    assert [part.frame for part in parts] == [header + b"".join(encode(each, 2)) for each in own]


def test_only_ends_are_forwarded_for_a_client_that_has_gone() -> None:
    router = GroupRouter(*[cast("Any", SimpleNamespace(look=None))] * 3)
    leaving = {key: {"member_epoch": -1} for key in LEAVING} | {ApiKey.LEAVE_GROUP: {}, ApiKey.SHARE_ACKNOWLEDGE: {}}
    routed = {*GROUP_FIRST, *TRANSACTION_FIRST, *SEVERAL, ApiKey.TXN_OFFSET_COMMIT}
    for api_key in routed:
        for version in VERSIONS[api_key]:
            assert router.outlives_client(frame(api_key, version, **leaving.get(api_key, {}))) == (api_key in leaving)
            if api_key in LEAVING:
                assert not router.outlives_client(frame(api_key, version, member_epoch=3))
                assert not router.outlives_client(frame(api_key, version, member_epoch=-1)[:-3])


def test_every_forwarded_api_has_a_retriable_code() -> None:
    """Clients of APIs that are not listed get REQUEST_TIMED_OUT."""
    routed = {*GROUP_FIRST, *TRANSACTION_FIRST, *SEVERAL, ApiKey.TXN_OFFSET_COMMIT}
    assert routed - UNAVAILABLE_CODES.keys() == {ApiKey.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE}


@pytest.mark.parametrize("api_key", SEVERAL, ids=lambda key: key.name)
def test_fields_of_several_groups_exist(api_key: ApiKey) -> None:
    fields = SEVERAL[api_key]
    request = message_schema(request_class(api_key))
    asked = {field.name for field in request.fields if field.is_array}
    assert fields.asked in asked or api_key is ApiKey.LIST_GROUPS
