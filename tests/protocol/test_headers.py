"""Headers: which header version a request uses, and which fields may be missing."""

from __future__ import annotations

import struct

import pytest

from protocol.api_keys import ApiKey
from protocol.errors import ProtocolError
from protocol.headers import (
    RequestHeader,
    decode_request_header,
    decode_response_header,
    encode_request_header,
    encode_response_header,
)

PLAIN = bytes.fromhex("000c 0003 00000007 0002 6d65")  # Heartbeat 3, correlation id 7, client "me"
FLEXIBLE = bytes.fromhex("000c 0004 00000007 0002 6d65 00")


@pytest.mark.parametrize("encoded", [PLAIN, FLEXIBLE], ids=["v1", "v2"])
def test_request_headers(encoded: bytes):
    header = RequestHeader(ApiKey.HEARTBEAT, encoded[3], 7, "me")
    assert encode_request_header(header) == encoded
    for buffer in (encoded + b"body", bytearray(encoded + b"body"), memoryview(encoded + b"body")):
        assert decode_request_header(buffer) == (header, len(encoded))


def test_tagged_fields_of_a_header_are_skipped():
    encoded = FLEXIBLE[:-1] + bytes.fromhex("02 00 01 aa 63 02 bbcc")
    assert decode_request_header(encoded + b"body")[1] == len(encoded)


def test_the_client_id_may_be_null_and_keeps_its_plain_length_in_flexible_headers():
    header = RequestHeader(ApiKey.HEARTBEAT, 4, 7, None)
    encoded = bytes.fromhex("000c 0004 00000007 ffff 00")
    assert encode_request_header(header) == encoded
    assert decode_request_header(encoded) == (header, len(encoded))


@pytest.mark.parametrize("encoded", [PLAIN, FLEXIBLE], ids=["v1", "v2"])
def test_torn_request_header_is_refused(encoded: bytes):
    for length in range(len(encoded)):
        with pytest.raises(ProtocolError):
            decode_request_header(encoded[:length])


@pytest.mark.parametrize(
    "client_id",
    [
        pytest.param("fffe", id="negative length"),
        pytest.param("7fff 6d65", id="too long"),
    ],
)
def test_invalid_client_id_is_refused(client_id: str):
    with pytest.raises(ProtocolError):
        decode_request_header(bytes.fromhex("000c 0003 00000007" + client_id))


def test_a_client_id_that_is_not_utf_8_is_read_as_upstream_reads_it():
    header, _ = decode_request_header(bytes.fromhex("000c 0003 00000007 0004 636166e9"))
    assert header.client_id == "caf\ufffd"


@pytest.mark.parametrize(
    ("api_key", "version"),
    [
        pytest.param(ApiKey.API_VERSIONS, 99, id="ApiVersions to come"),
        pytest.param(ApiKey.API_VERSIONS, -1, id="negative version"),
        pytest.param(ApiKey.HEARTBEAT, 5, id="Heartbeat to come"),
        pytest.param(ApiKey.PRODUCE, 0, id="Produce that was"),
        pytest.param(ApiKey.PUSH_TELEMETRY, 0, id="an API that is not declared"),
        pytest.param(0x7FFF, 0, id="no API at all"),
    ],
)
def test_header_of_an_unknown_api_or_version_can_be_answered(api_key: int, version: int):
    ids = struct.pack(">hhi", api_key, version, 77)
    header = RequestHeader(api_key, version, 77, None)
    for rest in (b"", b"\x00", b"\x7f\xff", b"\xff\xfe"):
        assert decode_request_header(ids + rest)[0] == header
    named = RequestHeader(api_key, version, 77, "me")
    assert decode_request_header(ids + b"\x00\x02me\xff\xff\xff") == (named, 12)
    assert encode_request_header(named) == ids + b"\x00\x02me"
    with pytest.raises(ProtocolError):
        decode_request_header(ids[:-1])


@pytest.mark.parametrize(
    ("api_key", "version", "encoded"),
    [
        (ApiKey.HEARTBEAT, 3, "0000004d"),
        (ApiKey.HEARTBEAT, 4, "0000004d 00"),
        (ApiKey.API_VERSIONS, 2, "0000004d"),
        (ApiKey.API_VERSIONS, 4, "0000004d"),
        (ApiKey.API_VERSIONS, 99, "0000004d"),
        (ApiKey.OFFSET_DELETE, 0, "0000004d"),
        (ApiKey.DESCRIBE_CLUSTER, 0, "0000004d 00"),
    ],
)
def test_response_headers(api_key: ApiKey, version: int, encoded: str):
    octets = bytes.fromhex(encoded)
    assert encode_response_header(api_key, version, 77) == octets
    assert decode_response_header(api_key, version, octets + b"body") == (77, len(octets))
    for length in range(len(octets)):
        with pytest.raises(ProtocolError):
            decode_response_header(api_key, version, octets[:length])
