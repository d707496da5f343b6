"""Inputs from which fuzzing starts. They are valid messages that our own writers make, so the repository keeps no
corpus.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from random import Random

from protocol.codec import encode
from protocol.compression import Compression
from protocol.consumer import (
    NEWEST_VERSION,
    Assignment,
    Subscription,
    TopicPartition,
    encode_assignment,
    encode_subscription,
)
from protocol.headers import RequestHeader, encode_request_header
from protocol.messages import declared_messages
from protocol.records import Record, build_batch
from protocol.schema import Direction
from tests.fuzz.targets import NOW_MS, REQUESTS
from tests.protocol.values import message_value


def seeds(target: str) -> Iterator[bytes]:
    """Yield the first inputs of a target. Some targets need none."""
    match target:
        case "requests":
            yield from (number.to_bytes(2) + body for number, body in enumerate(_requests()))
        case "headers":
            for (key, version), body in zip(REQUESTS, _requests(), strict=True):
                yield encode_request_header(RequestHeader(key, version, 7, "fuzz")) + body
        case "frames":
            yield from (len(body).to_bytes(4) + body for body in (b"a", b"b" * 60, b"c" * 2_000))
        case "batches":
            yield from _batches()
        case "consumer_protocol":
            owned = (TopicPartition("orders", (0, 1, 5)),)
            for version in range(NEWEST_VERSION + 1):
                yield encode_subscription(Subscription(version, ("orders", "ä"), b"user data", owned, 3, "rack"))
                yield encode_assignment(Assignment(version, owned, b""))
        case "sasl":
            yield b"n,,n=user,r=nonce\0c=biws,r=nonce,p=" + base64.b64encode(bytes(32))
        case "tokens":
            yield _token()
            yield json.dumps({"keys": [{"kty": "RSA", "kid": "1", "alg": "RS256", "n": "AQAB", "e": "AQAB"}]}).encode()
        case "acls":
            yield b"\x22orders\nUser:alice\n10.0.0.1\norders\n10.0.0.0/8\n10.1.2.3"
        case _:
            return


def _requests() -> Iterator[bytes]:
    random = Random(0)
    for schema in declared_messages():
        if schema.direction is Direction.REQUEST:
            for version in schema.versions:
                yield b"".join(map(bytes, encode(message_value(schema, version, random), version)))


def _batches() -> Iterator[bytes]:
    records = [
        Record(number, NOW_MS + number, None if number % 3 else b"key", b"value" * number, (("name", b"header"),))
        for number in range(5)
    ]
    for compression in Compression:
        yield build_batch(records, compression=compression)
    yield build_batch(records, producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)


def _token() -> bytes:
    claims = {"sub": "alice", "iat": NOW_MS // 1000, "exp": NOW_MS // 1000 + 60, "aud": ["sluice"], "scope": "read"}
    parts = (json.dumps(part).encode() for part in ({"alg": "RS256", "kid": "1"}, claims))
    return b".".join([*(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts), b"c2lnbmF0dXJl"])
