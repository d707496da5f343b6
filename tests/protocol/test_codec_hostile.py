"""Malformed bytes raise ProtocolError, soon and cheaply: a million mutated frames over every message and version."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest

from protocol import codec, grammar
from protocol.api_keys import ApiKey
from protocol.errors import ProtocolError
from protocol.headers import (
    RequestHeader,
    decode_request_header,
    decode_response_header,
    encode_request_header,
    encode_response_header,
)
from protocol.messages.api_versions import ApiVersionsResponse
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.fetch import FetchRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import JoinGroupResponse, JoinGroupResponseMember
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic
from protocol.messages.produce import ProduceRequest, TopicProduceData
from protocol.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest, Subtopology, Topology
from protocol.schema import Direction, MessageSchema
from protocol.specialise import uuid_of
from protocol.varints import MAX_TAGGED_FIELDS, write_uvarint
from tests.protocol.values import IDS, MESSAGE_VERSIONS, message_value
from tests.steps.seeds import first_always

SEEDS = range(10)
FRAMES_PER_SEED = 100_000
COMPARED_EVERY = 20
"""The grammar also reads every twentieth mutant, and must return the same result."""

MEMORY_FACTOR = 40
"""Memory that decoding may use per byte of the frame. An element of two bytes needs at least an
object and a reference.
"""
MEMORY_BYTES = 8 * 1024

BOMBS = [
    # Lengths and counts of two, four and eight bytes.
    *map(bytes.fromhex, ("7fff", "8000", "ffff", "7fffffff", "80000000", "fffffffe", "00ffffff", "0000ffff", "7f" * 8)),
    # Varints: large ones, ones with too many bytes, with too many bits, and truncated ones.
    *map(
        bytes.fromhex, ("ffffffff0f", "ffffffff07", "ffff03", "ff7f", "8080808000", "808080808000", "ffffffff7f", "80")
    ),
]


@dataclass(frozen=True, slots=True)
class Sample:
    schema: MessageSchema
    version: int
    frame: bytes
    position: int
    """Return the position where the body begins."""


def samples(random: Random) -> list[Sample]:
    """Return a valid frame of every message and version."""
    made: list[Sample] = []
    for schema, version in MESSAGE_VERSIONS:
        body = b"".join(codec.encode(message_value(schema, version, random, longest=2), version))
        if schema.direction is Direction.REQUEST:
            head = encode_request_header(RequestHeader(schema.api_key, version, 7, "client"))
        else:
            head = encode_response_header(schema.api_key, version, 7)
        made.append(Sample(schema, version, head + body, len(head)))
    return made


def mutate(frame: bytes, other: bytes, random: Random) -> bytes:
    """Apply one to three mutations: flip bits, overwrite bytes with a huge length or insert one, truncate, or splice
    with another message.
    """
    for _ in range(random.choice((1, 1, 2, 3))):
        at = int(random.random() * len(frame))
        match int(random.random() * 7):
            case 0 | 1:
                frame = frame[:at] + bytes((random.getrandbits(8),)) + frame[at + 1 :]
            case 2:
                if at < len(frame):
                    frame = frame[:at] + bytes((frame[at] ^ 1 << int(random.random() * 8),)) + frame[at + 1 :]
            case 3:
                bomb = random.choice(BOMBS)
                frame = frame[:at] + bomb + frame[at + len(bomb) :]
            case 4:
                frame = frame[:at] + random.choice(BOMBS) + frame[at:]
            case 5:
                frame = frame[:at]
            case _:
                frame = frame[:at] + other[int(random.random() * len(other)) :]
    return frame


def decode_frame(sample: Sample, frame: bytes) -> None:
    """Decode the frame as the server decodes a request and as a client decodes a response."""
    if sample.schema.direction is Direction.RESPONSE:
        _, position = decode_response_header(sample.schema.api_key, sample.version, frame)
        codec.decode(sample.schema.struct_type, sample.version, frame, position)
        return
    header, position = decode_request_header(frame)
    codec.decode_request(header.api_key, header.api_version, frame, position)


def verdict(decode: Any, sample: Sample, body: bytes) -> Any:
    try:
        return decode(sample.schema.struct_type, sample.version, body)
    except ProtocolError:
        return None


@pytest.mark.parametrize("seed", first_always(SEEDS, 1))
def test_mutated_frames_raise_nothing_but_protocol_errors(seed: int):
    random = Random(seed)
    valid = samples(random)
    refused = 0
    for number in range(FRAMES_PER_SEED):
        sample = valid[number % len(valid)]
        frame = mutate(sample.frame, random.choice(valid).frame, random)
        try:
            decode_frame(sample, frame)
        except ProtocolError:
            refused += 1
        if number % COMPARED_EVERY == 0:
            body = frame[sample.position :]
            decoded, parsed = verdict(codec.decode, sample, body), verdict(grammar.parse, sample, body)
            # Also compare the texts, because a NaN does not equal itself.
            assert decoded == parsed or repr(decoded) == repr(parsed)
    # If this fails, the mutations are so strong or so weak that they do not reach the code under test.
    assert FRAMES_PER_SEED * 0.4 < refused < FRAMES_PER_SEED * 0.95


def test_mutated_frames_take_memory_in_proportion_to_their_size():
    random = Random("memory")
    valid = samples(random)
    for sample in valid:
        with contextlib.suppress(ProtocolError):
            decode_frame(sample, sample.frame)
    tracemalloc.start()
    try:
        for number in range(20_000):
            sample = valid[number % len(valid)]
            frame = mutate(sample.frame, random.choice(valid).frame, random)
            assert stays_below(MEMORY_FACTOR * len(frame) + MEMORY_BYTES, partial(decode_or_refuse, sample, frame)), (
                sample,
                frame,
            )
    finally:
        tracemalloc.stop()


ELEMENTS = 500
MEMORY_BYTES_OF_ELEMENTS = 2 * 1024
"""Bound that is as strict for each element as MEMORY_BYTES is for two thousand elements."""


@pytest.mark.parametrize(("schema", "version"), MESSAGE_VERSIONS, ids=IDS)
def test_the_smallest_elements_take_memory_in_proportion_to_their_size(schema: MessageSchema, version: int):
    for field in schema.fields:
        if not field.is_array or version not in field.versions:
            continue
        smallest = field.kind() if isinstance(field.kind, type) else field.kind.zero
        crowded = schema.struct_type(**{field.name: (smallest,) * ELEMENTS})
        encoded = b"".join(codec.encode(crowded, version))
        # Build the decoder before the measurement, because it is built at first use.
        codec.decode(schema.struct_type, version, encoded)
        tracemalloc.start()
        try:
            assert stays_below(
                MEMORY_FACTOR * len(encoded) + MEMORY_BYTES_OF_ELEMENTS,
                partial(codec.decode, schema.struct_type, version, encoded),
            ), field.name
        finally:
            tracemalloc.stop()


def crowded_produce(count: int) -> bytes:
    request = ProduceRequest(topic_data=(TopicProduceData(name=""),) * count)
    return b"".join(codec.encode(request, 9))


def crowded_offset_fetch(count: int) -> bytes:
    """Return an OffsetFetch with as many partition numbers as fit. A number costs as much as a struct, because each
    becomes an element of the answer.
    """
    half = OffsetFetchRequestTopic(name="t", partition_indexes=(0,) * (count // 2 - 1))
    return b"".join(codec.encode(OffsetFetchRequest(topics=(half, half)), 7))


def crowded_tags(count: int) -> bytes:
    """Return a message with as many unknown tagged fields as fit. A decoder skips them one by one."""
    topic = b"\x02t" + tagged_section(MAX_TAGGED_FIELDS)
    topics = count // (1 + MAX_TAGGED_FIELDS)
    return write_uvarint(topics + 1) + topic * topics + b"\1\1\1" + tagged_section(0)


def tagged_section(count: int) -> bytes:
    return write_uvarint(count) + b"\x7f\x00" * count


@pytest.mark.parametrize(
    ("api_key", "version", "crowded"),
    [
        (ApiKey.PRODUCE, 9, crowded_produce),
        (ApiKey.OFFSET_FETCH, 7, crowded_offset_fetch),
        (ApiKey.METADATA, 9, crowded_tags),
    ],
)
def test_elements_of_one_request_are_bounded(api_key: ApiKey, version: int, crowded: Callable[[int], bytes]):
    codec.decode_request(api_key, version, crowded(codec.MAX_REQUEST_ELEMENTS))
    with pytest.raises(ProtocolError, match="elements"):
        codec.decode_request(api_key, version, crowded(codec.MAX_REQUEST_ELEMENTS + 1 + MAX_TAGGED_FIELDS))


@pytest.mark.parametrize(
    ("message", "version"), [(HeartbeatRequest(), 4), (FetchRequest(), 12)], ids=["no tag is known", "some are"]
)
def test_the_tagged_fields_of_one_section_are_bounded(message: Any, version: int):
    encoded = b"".join(codec.encode(message, version))
    assert encoded.endswith(tagged_section(0))
    for decode in (codec.decode, grammar.parse):
        assert decode(type(message), version, encoded[:-1] + tagged_section(MAX_TAGGED_FIELDS))[0] == message
        with pytest.raises(ProtocolError, match="tagged fields"):
            decode(type(message), version, encoded[:-1] + tagged_section(MAX_TAGGED_FIELDS + 1))


MEMBERS = 1000
COUNTED = [
    pytest.param(
        JoinGroupResponse(members=tuple(JoinGroupResponseMember(metadata=bytes(20)) for _ in range(MEMBERS))),
        9,
        b"\xe9\x07",
        b"\xe9\x77",
        id="compact array of structs",
    ),
    pytest.param(DescribeGroupsRequest(groups=("name",) * MEMBERS), 0, b"\0\0\3\xe8", b"\0\0\x3e\xe8", id="strings"),
    pytest.param(DescribeGroupsRequest(groups=("name",) * MEMBERS), 5, b"\xe9\x07", b"\xe9\x77", id="compact strings"),
]


@pytest.mark.parametrize(("message", "version", "count", "larger"), COUNTED)
def test_a_count_is_refused_before_the_first_element_is_read(message: Any, version: int, count: bytes, larger: bytes):
    """The counts are sixteen times the number of elements in the frame. A decoder that reads the elements would notice
    that only at the end.
    """
    encoded = b"".join(codec.encode(message, version))
    assert encoded.count(count) == 1
    hostile = encoded.replace(count, larger)
    for decode in (codec.decode, grammar.parse):
        decode(type(message), version, encoded)  # memory that is allocated once per message type does not count

        def refuse(decode: Callable[..., Any] = decode) -> None:
            with pytest.raises(ProtocolError, match="elements"):
                decode(type(message), version, hostile)

        tracemalloc.start()
        try:
            assert stays_below(MEMORY_BYTES, refuse)
        finally:
            tracemalloc.stop()


LONGEST = 0x7FFF

STRINGS = [
    pytest.param(lambda text: HeartbeatRequest(group_id=text), 4, id="compact"),
    pytest.param(lambda text: HeartbeatRequest(group_instance_id=text), 4, id="compact, nullable"),
    pytest.param(lambda text: DescribeGroupsRequest(groups=("", text)), 5, id="an element"),
    pytest.param(lambda text: ProduceRequest(transactional_id=text), 9, id="beside records"),
    pytest.param(lambda text: FetchRequest(cluster_id=text), 12, id="tagged"),
]


@pytest.mark.parametrize(("message", "version"), STRINGS)
def test_a_compact_string_longer_than_a_plain_one_may_be_is_refused(message: Callable[[str], Any], version: int):
    longest, longer = message("a" * LONGEST), message("é" * (LONGEST // 2) + "aa")
    for decode in (codec.decode, grammar.parse):
        assert decode(type(longest), version, b"".join(codec.encode(longest, version)))[0] == longest
        with pytest.raises(ProtocolError):
            decode(type(longer), version, b"".join(codec.encode(longer, version)))


@pytest.mark.parametrize(
    ("message", "version"),
    [
        *STRINGS,
        pytest.param(lambda text: HeartbeatRequest(group_id=text), 0, id="plain"),
        pytest.param(lambda text: JoinGroupResponse(leader=text), 5, id="of a response"),
    ],
)
def test_text_that_is_not_utf8_is_refused_if_no_answer_can_repeat_it(message: Callable[[str], Any], version: int):
    """Each byte becomes U+FFFD, which takes three bytes."""
    for size, is_refused in ((LONGEST // 3, False), (LONGEST // 3 + 1, True), (LONGEST, True)):
        sent = b"".join(codec.encode(message("?" * size), version)).replace(b"?" * size, b"\xff" * size)
        for decode in (codec.decode, grammar.parse):
            if is_refused:
                with pytest.raises(ProtocolError):
                    decode(type(message("")), version, sent)
            else:
                found, _ = decode(type(message("")), version, sent)
                assert found == message("\ufffd" * size)
                codec.encode(found, version)


def test_bytes_may_be_longer_than_a_string():
    message = JoinGroupResponse(members=(JoinGroupResponseMember(metadata=bytes(LONGEST + 1)),))
    for decode in (codec.decode, grammar.parse):
        assert decode(JoinGroupResponse, 9, b"".join(codec.encode(message, 9)))[0] == message


@pytest.mark.parametrize(("message_type", "version"), [(ApiVersionsResponse, 0), (DescribeGroupsRequest, 0)])
def test_an_array_of_more_than_a_million_elements_is_refused_before_it_is_read(message_type: Any, version: int):
    head = b"\0\0" if message_type is ApiVersionsResponse else b""
    hostile = head + (1_000_001).to_bytes(4, "big") + bytes(6 * 1_000_001)
    for decode in (codec.decode, grammar.parse):

        def refuse(decode: Callable[..., Any] = decode) -> None:
            with pytest.raises(ProtocolError):
                decode(message_type, version, hostile)

        refuse()  # this builds the decoder, which must not be measured
        tracemalloc.start()
        try:
            # The grammar reads from a stream, which does not copy the bytes.
            assert stays_below(MEMORY_BYTES, refuse)
        finally:
            tracemalloc.stop()


def test_elements_are_counted_at_every_depth():
    subtopologies = tuple(Subtopology(source_topics=("t",) * 9) for _ in range(10))
    request = StreamsGroupHeartbeatRequest(topology=Topology(subtopologies=subtopologies))
    assert codec.has_more_elements(request, 99)
    assert not codec.has_more_elements(request, 100)
    assert not codec.has_more_elements(StreamsGroupHeartbeatRequest(), 0)


def decode_or_refuse(sample: Sample, frame: bytes) -> None:
    uuid_of.cache_clear()
    with contextlib.suppress(ProtocolError):
        decode_frame(sample, frame)


def stays_below(bound_bytes: int, work: Callable[[], object]) -> bool:
    """Return whether this work stays below the bound once in three times. Threads that other tests have left behind may
    allocate memory, too, but not each time.
    """
    return any(peak_of(work) < bound_bytes for _ in range(3))


def peak_of(work: Callable[[], object]) -> int:
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    work()
    return tracemalloc.get_traced_memory()[1] - before
