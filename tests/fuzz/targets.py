"""Fuzz targets: functions of bytes that return if the product kept its promise, and raise if it did not.

The one idea: a target catches only the errors that a reader documents. So any other error is a finding. If two readers
exist, or a reader and a writer, the target compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import crc32c

from gateway.config.topic import TopicConfig
from gateway.log.batch_validation import Refused, validate
from gateway.security.acls import AclFilter, Hosts, network_of
from gateway.security.jwt import Expected, TokenError, check_claims, parse_keys, parse_token
from gateway.security.names import UnusableNameError, mapped, parse_rules, subject
from gateway.security.scram import ScramError, ScramMechanism, ScramServer, decoy, parse_client_first
from protocol.codec import decode, decode_request, encode
from protocol.consumer import (
    NEWEST_VERSION,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from protocol.errors import ProtocolError
from protocol.framing import FrameError, FrameSplitter
from protocol.headers import decode_request_header
from protocol.messages import declared_messages
from protocol.record_reader import DAMAGED, RecordReader
from protocol.records import MAGIC, iter_records
from protocol.schema import Direction
from storage.types import Acl

MAX_FRAME_BYTES = 1 << 20
MAX_DECOMPRESSED_BYTES = 1 << 20
NOW_MS = 1_800_000_000_000
BATCH_HEAD_BYTES = 61
CRC_AT, CRC_BEGINS_AT = 17, 21


def frames(data: bytes) -> None:
    """Splitting a connection's bytes into frames gives the same frames, however the bytes arrive."""
    splitter = FrameSplitter(MAX_FRAME_BYTES, bytearray(64))
    found: list[bytes] = []
    position = 0
    step = 1 + (data[0] % 63 if data else 0)
    with suppress(FrameError):
        while position < len(data):
            room = splitter.writable()
            size = min(step, len(room), len(data) - position)
            room[:size] = data[position : position + size]
            position += size
            found += [bytes(frame) for frame in splitter.received(size)]
    assert found == _frames_of(data)


def _frames_of(data: bytes) -> list[bytes]:
    found: list[bytes] = []
    position = 0
    while position + 4 <= len(data):
        (size,) = struct.unpack_from(">i", data, position)
        if not 0 < size <= MAX_FRAME_BYTES or position + 4 + size > len(data):
            break
        found.append(data[position + 4 : position + 4 + size])
        position += 4 + size
    return found


REQUESTS = [
    (int(schema.api_key), version)
    for schema in declared_messages()
    if schema.direction is Direction.REQUEST
    for version in schema.versions
]


def requests(data: bytes) -> None:
    """A request that can be decoded equals itself after it is encoded and decoded again."""
    if len(data) < 2:
        return
    key, version = REQUESTS[int.from_bytes(data[:2]) % len(REQUESTS)]
    try:
        request = decode_request(key, version, data[2:])
    except ProtocolError:
        return
    again, _ = decode(type(request), version, b"".join(map(bytes, encode(request, version))))
    assert again == request, (request, again)


def headers(data: bytes) -> None:
    """The header of a request, followed by the request."""
    try:
        header, position = decode_request_header(data)
        decode_request(header.api_key, header.api_version, data, position)
    except ProtocolError:
        return


_CONFIG = TopicConfig()


def batches(data: bytes) -> None:
    """Both readers of a batch return the same records. The validator accepts no batch that one of them cannot read. The
    target corrects the magic and the CRC, because mutations would hardly ever produce correct ones.
    """
    batch = bytearray(data)
    if len(batch) >= BATCH_HEAD_BYTES:
        struct.pack_into(">i", batch, 8, len(batch) - 12)
        batch[16] = MAGIC
        struct.pack_into(">I", batch, CRC_AT, crc32c.crc32c(memoryview(batch)[CRC_BEGINS_AT:]))
    slow: list[tuple[int, int]] | None = None
    try:
        slow = [(each.offset, each.timestamp) for each in iter_records(batch, max_decompressed_bytes=1 << 20)]
    except ProtocolError:
        slow = None
    quick: list[tuple[int, int]] | None = None
    try:
        reader = RecordReader(batch, max_decompressed_bytes=MAX_DECOMPRESSED_BYTES)
        quick = [(each.offset, each.timestamp) for window in reader.windows() for each in window]
    except DAMAGED:
        quick = None
    assert slow is None or quick is None or slow == quick, (slow, quick)
    verdict = validate(bytes(batch), version=11, config=_CONFIG, now_ms=NOW_MS)
    assert isinstance(verdict, Refused) or quick is not None


def consumer_protocol(data: bytes) -> None:
    """A subscription and an assignment that can be decoded are encoded to an equal value."""
    for read, write in ((decode_subscription, encode_subscription), (decode_assignment, encode_assignment)):
        try:
            value: Any = read(data)
        except ProtocolError:
            continue
        if value.version <= NEWEST_VERSION:
            assert read(write(value)) == value


_KNOWN = decoy("user", ScramMechanism.SHA_256, b"secret")


def sasl(data: bytes) -> None:
    """No message can prove that the client knows a password that does not exist."""
    first, _, final = data.partition(b"\0")
    try:
        server = ScramServer(parse_client_first(first), _KNOWN)
    except ScramError:
        return
    try:
        server.finish(final)
    except ScramError:
        return
    raise AssertionError("a stranger has logged in")


_EXPECTED = Expected(frozenset({"sluice"}), None, 30, "scope", "sub")


def tokens(data: bytes) -> None:
    """A token, its claims and a key set are read."""
    with suppress(TokenError):
        check_claims(parse_token(data.decode("latin-1")), _EXPECTED, NOW_MS / 1000)
    with suppress(ValueError):
        parse_keys(data)


def acls(data: bytes) -> None:
    """A filter for exactly one ACL matches only this ACL. A host is in the ranges that contain it."""
    parts = data.decode("utf-8", "replace").split("\n")
    parts += [""] * (6 - len(parts))
    code = data[0] if data else 0
    found = AclFilter(
        code % 8, (code >> 3) % 5, parts[0] or None, parts[1] or None, parts[2] or None, code % 17, code % 4
    )
    acl = Acl(2, 3, parts[3], parts[1], parts[2], 3, 3)
    if found.only is not None:
        assert found.matches(found.only)
    found.matches(acl)
    network_of(parts[4])
    hosts = Hosts()
    hosts.add(parts[4])
    if parts[5] in hosts:
        assert parts[4] in ("*", parts[5]) or parts[4] in hosts.ranges_of(parts[5])


_RULES = parse_rules(r"RULE:^CN=([^,]+),OU=(.*)$/$1@$2/L, RULE:(a+)(b?)/$2$1/U, DEFAULT")


def names(data: bytes) -> None:
    """The subject of a certificate is read, and rules turn it into a user name."""
    with suppress(UnusableNameError):
        subject(data)
    with suppress(UnusableNameError):
        mapped(data.decode("utf-8", "replace"), _RULES)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (frames, requests, headers, batches, consumer_protocol, sasl, tokens, acls, names)
}
