"""Record batches, compared with the builders and readers of kafka-python and aiokafka, and with hostile bytes."""

from __future__ import annotations

import contextlib
import random
import struct

import cramjam
import pytest
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER
from aiokafka.record.control_record import ControlRecord as AioControlRecord
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder  # pyright: ignore[reportAttributeAccessIssue]
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch as PythonBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as PythonBuilder

from protocol.compression import Compression, compress, decompress
from protocol.errors import ProtocolError
from protocol.records import (
    HEAD_BYTES,
    ControlType,
    Record,
    TimestampType,
    build_batch,
    control_type_of,
    end_marker,
    iter_records,
    magic_of,
    read_head,
    set_log_append_time,
    split_batches,
    verify_crc,
)

RECORDS = (
    Record(0, 1_700_000_000_000, b"key", b"value " * 200),
    Record(1, 1_700_000_000_005, None, b""),
    Record(2, 1_700_000_000_001, b"", None, (("h", b"1"), ("h", None), ("ünï", b""))),
    Record(3, 1_699_999_990_000, b"k" * 300, b"v" * 5000, (("x", b"y" * 200),)),
)

CODECS = list(Compression)
CLIENT_BUILDERS = [PythonBuilder, AioBuilder]
CLIENT_BATCHES = [PythonBatch, AioBatch]


def build_with_client(builder_class, records, codec, **producer):
    state = {"is_transactional": 0, "producer_id": -1, "producer_epoch": -1, "base_sequence": -1, **producer}
    builder = builder_class(magic=2, compression_type=int(codec), batch_size=10**7, **state)
    for record in records:
        builder.append(record.offset, record.timestamp, record.key, record.value, list(record.headers))
    return bytes(builder.build())


# --- both directions, every codec -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("builder_class", CLIENT_BUILDERS)
def test_reads_what_clients_build(builder_class, codec):
    batch = build_with_client(builder_class, RECORDS, codec, producer_id=7, producer_epoch=3, base_sequence=11)
    head = read_head(batch)
    assert head.compression is codec
    assert (head.producer_id, head.producer_epoch, head.base_sequence) == (7, 3, 11)
    assert (head.records_count, head.last_offset_delta, head.size_bytes) == (4, 3, len(batch))
    assert head.max_timestamp == 1_700_000_000_005
    assert verify_crc(batch)
    assert tuple(iter_records(batch)) == RECORDS


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("batch_class", CLIENT_BATCHES)
def test_clients_read_what_is_built(batch_class, codec):
    batch = build_batch(RECORDS, compression=codec, producer_id=7, producer_epoch=3, base_sequence=11)
    read = batch_class(bytearray(batch))
    assert read.validate_crc()
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (7, 3, 11)
    seen = [Record(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in read]
    assert tuple(seen) == RECORDS


def test_same_bytes_as_kafka_python():
    assert build_batch(RECORDS, partition_leader_epoch=0) == build_with_client(PythonBuilder, RECORDS, Compression.NONE)


def test_raw_snappy_is_read():
    whole = build_batch(RECORDS)
    raw = bytes(cramjam.snappy.compress_raw(whole[HEAD_BYTES:]))
    batch = bytearray(whole[:HEAD_BYTES] + raw)
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    batch[22] |= Compression.SNAPPY
    assert tuple(iter_records(batch)) == RECORDS


def test_zstd_of_several_frames_is_read():
    body = b"a" * 100_000
    frames = b"".join(compress(Compression.ZSTD, part) for part in (body[:50_000], body[50_000:]))
    assert decompress(Compression.ZSTD, frames) == body


records_strategy = st.lists(
    st.tuples(
        st.integers(1, 1000),
        st.integers(-(2**60), 2**60),
        st.none() | st.binary(max_size=80),
        st.none() | st.binary(max_size=300),
        st.lists(st.tuples(st.text(max_size=10), st.none() | st.binary(max_size=20)), max_size=4),
    ),
    max_size=20,
)


@given(records_strategy, st.sampled_from(CODECS), st.integers(0, 2**40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_round_trip(drawn, codec, base_offset, transactional):
    offset = base_offset - 1
    records = []
    for step, timestamp, key, value, headers in drawn:
        offset += step
        records.append(Record(offset, timestamp, key, value, tuple(headers)))
    batch = build_batch(records, compression=codec, base_offset=base_offset, is_transactional=transactional)
    assert verify_crc(batch)
    assert list(iter_records(memoryview(batch))) == records
    head = read_head(batch)
    assert head.is_transactional is transactional
    assert head.last_offset == (offset if records else base_offset)


# --- head -----------------------------------------------------------------------------------------------------------


def test_append_fields_lie_outside_the_crc():
    batch = bytearray(build_batch(RECORDS))
    struct.pack_into(">q", batch, 0, 9_000)
    struct.pack_into(">i", batch, 12, 5)
    assert verify_crc(batch)
    assert [record.offset for record in iter_records(batch)] == [9_000, 9_001, 9_002, 9_003]
    assert read_head(batch).partition_leader_epoch == 5


@pytest.mark.parametrize("at", [21, 22, 26, 34, 42, 50, 52, 56, 60, 61, -1])
def test_crc_covers_attributes_to_the_end(at):
    batch = bytearray(build_batch(RECORDS))
    batch[at] ^= 1
    assert not verify_crc(batch)


def test_crc_ignores_batches_that_follow():
    batch = build_batch(RECORDS)
    assert verify_crc(batch + build_batch(RECORDS[:1]))


def test_split_batches_gives_views_of_each():
    first, second = build_batch(RECORDS), build_batch(RECORDS[:1], compression=Compression.ZSTD)
    records = bytearray(first + second)
    batches = split_batches(records)
    assert [bytes(batch) for batch in batches] == [first, second]
    records[0] = 1
    assert batches[0][0] == 1
    assert split_batches(b"") == []


@pytest.mark.parametrize("missing", [1, 60, 100, 150])
def test_split_batches_skips_a_torn_last_batch_of_an_answer(missing):
    whole = build_batch(RECORDS)
    records = whole + build_batch([Record(0, 0, None, b"x" * 100)])
    assert [bytes(batch) for batch in split_batches(records[:-missing], fetched=True)] == [whole]


@pytest.mark.parametrize("missing", [1, 100, 160])
def test_split_batches_refuses_a_torn_tail(missing):
    records = build_batch(RECORDS) * 2
    with pytest.raises(ProtocolError):
        split_batches(records[:-missing])


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48, 2**31 - 1])
def test_lying_length_is_refused(length):
    batch = bytearray(build_batch(RECORDS))
    struct.pack_into(">i", batch, 8, length)
    for read in (read_head, split_batches, verify_crc, iter_records):
        with pytest.raises(ProtocolError):
            read(batch)


def test_magic_of_an_old_message_shorter_than_a_head():
    message = struct.pack(">qiIbb", 0, 14, 0, 1, 0) + bytes(16)
    assert magic_of(message) == 1
    with pytest.raises(ProtocolError):
        magic_of(message[:16])


def test_iter_records_refuses_other_magic():
    batch = bytearray(build_batch(RECORDS))
    batch[16] = 1
    with pytest.raises(ProtocolError):
        iter_records(batch)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("writable", [bytearray, lambda batch: memoryview(bytearray(batch))])
def test_log_append_time(codec, writable):
    batch = writable(build_batch(RECORDS, compression=codec))
    set_log_append_time(batch, 1_800_000_000_000)
    assert verify_crc(batch)
    head = read_head(batch)
    assert head.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert head.max_timestamp == 1_800_000_000_000
    assert head.compression is codec
    assert {record.timestamp for record in iter_records(batch)} == {1_800_000_000_000}
    theirs = PythonBatch(bytearray(batch))
    assert theirs.validate_crc()
    assert {record.timestamp for record in theirs} == {1_800_000_000_000}


@pytest.mark.parametrize("bits", range(8))
def test_three_bits_of_the_attributes_name_the_codec_or_none(bits):
    head = read_head(build_batch(RECORDS, is_transactional=True))._replace(attributes=0x30 | bits)
    if bits in list(Compression):
        assert head.compression is Compression(bits)
    else:
        with pytest.raises(ProtocolError, match=f"unknown compression codec {bits}"):
            _ = head.compression


def test_compacted_batch_keeps_its_place():
    batch = build_batch(RECORDS[1:2], base_offset=0, last_offset_delta=3, max_timestamp=1_700_000_000_005)
    head = read_head(batch)
    assert (head.last_offset, head.max_timestamp, head.records_count) == (3, 1_700_000_000_005, 1)
    empty = build_batch([], base_offset=40, last_offset_delta=3, compression=Compression.GZIP)
    assert list(iter_records(empty)) == []
    assert read_head(empty).last_offset == 43


def test_delete_horizon():
    batch = build_batch(RECORDS, delete_horizon_ms=1_700_000_123_456)
    assert read_head(batch).delete_horizon_ms == 1_700_000_123_456
    assert tuple(iter_records(batch)) == RECORDS
    assert read_head(build_batch(RECORDS)).delete_horizon_ms is None


def test_control_bit():
    assert read_head(build_batch(RECORDS[:1], is_control=True)).is_control
    assert not read_head(build_batch(RECORDS[:1])).is_control


@pytest.mark.parametrize(
    ("records", "options"),
    [
        (RECORDS[::-1], {}),
        (RECORDS, {"base_offset": 1}),
        (RECORDS, {"last_offset_delta": 2}),
    ],
)
def test_build_refuses_records_that_do_not_fit(records, options):
    with pytest.raises(ValueError, match="offset"):
        build_batch(records, **options)


# --- ends of transactions -------------------------------------------------------------------------------------------

MARKED_AT = 1_700_000_000_000
MARKERS = {
    ControlType.ABORT: end_marker(ControlType.ABORT, producer_id=7, producer_epoch=3, timestamp_ms=MARKED_AT),
    ControlType.COMMIT: end_marker(
        ControlType.COMMIT, producer_id=7, producer_epoch=3, timestamp_ms=MARKED_AT, coordinator_epoch=5
    ),
}


def control_batch(key: bytes | None, *, codec: Compression = Compression.NONE) -> bytes:
    return build_batch([Record(0, 0, key, b"")], compression=codec, is_transactional=True, is_control=True)


@pytest.mark.parametrize(
    ("control", "crc", "kind", "coordinator_epoch"),
    [(ControlType.ABORT, "6f1bd9fe", "0000", "00000000"), (ControlType.COMMIT, "c60df61d", "0001", "00000005")],
)
def test_end_marker_byte_by_byte(control, crc, kind, coordinator_epoch):
    head = (
        "0000000000000000 00000042 ffffffff 02"  # base offset, length, leader epoch, magic
        f"{crc} 0030 00000000 0000018bcfe56800 0000018bcfe56800"  # transactional and control; both timestamps
        "0000000000000007 0003 ffffffff 00000001"  # producer id and epoch, no sequence, one record
    )
    record = f"20 00 00 00 08 0000{kind} 0c 0000{coordinator_epoch} 00"
    assert MARKERS[control] == bytes.fromhex(head + record)
    assert verify_crc(MARKERS[control])


@pytest.mark.parametrize("batch_class", CLIENT_BATCHES)
@pytest.mark.parametrize("control", ControlType)
def test_clients_read_an_end_marker(batch_class, control):
    read = batch_class(bytearray(MARKERS[control]))
    assert read.validate_crc()
    assert read.is_control_batch
    assert read.is_transactional
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (7, 3, -1)
    (record,) = read
    assert (record.offset, record.timestamp) == (0, MARKED_AT)
    if batch_class is PythonBatch:
        assert (record.version, record.abort, record.commit) == (0, control == 0, control == 1)
    else:
        marker = COMMIT_MARKER if control is ControlType.COMMIT else ABORT_MARKER
        assert AioControlRecord.parse(record.key) == marker


@pytest.mark.parametrize("control", ControlType)
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_type_of_an_end_marker(control, buffer):
    assert control_type_of(buffer(MARKERS[control])) is control


@given(
    st.sampled_from(ControlType),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**15 - 1),
    st.integers(0, 2**62),
    st.integers(-1, 2**31 - 1),
)
@settings(deadline=None)
def test_end_marker_round_trip(control, producer_id, producer_epoch, timestamp_ms, coordinator_epoch):
    batch = end_marker(
        control,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        timestamp_ms=timestamp_ms,
        coordinator_epoch=coordinator_epoch,
    )
    assert verify_crc(batch)
    assert control_type_of(batch) is control
    head = read_head(batch)
    assert (head.producer_id, head.producer_epoch, head.base_sequence) == (producer_id, producer_epoch, -1)
    assert (head.base_timestamp, head.max_timestamp) == (timestamp_ms, timestamp_ms)
    (record,) = iter_records(batch)
    assert record.value == struct.pack(">hi", 0, coordinator_epoch)


def test_end_marker_is_read_at_its_appended_offset():
    batch = bytearray(MARKERS[ControlType.COMMIT])
    struct.pack_into(">q", batch, 0, 9_000)
    set_log_append_time(batch, MARKED_AT + 1)
    assert control_type_of(batch) is ControlType.COMMIT
    assert [(record.offset, record.timestamp) for record in iter_records(batch)] == [(9_000, MARKED_AT + 1)]


@pytest.mark.parametrize(
    ("what", "batch", "expected"),
    [
        ("no control batch", build_batch([Record(0, 0, bytes(4), b"")], is_transactional=True), None),
        ("no records left", build_batch([], is_transactional=True, is_control=True), None),
        ("a leader's change", control_batch(bytes.fromhex("0000 0002")), None),
        ("a type below all", control_batch(bytes.fromhex("0000 ffff")), None),
        ("a later version with more fields", control_batch(bytes.fromhex("0001 0001 ff")), ControlType.COMMIT),
        ("compressed", control_batch(bytes.fromhex("0000 0000"), codec=Compression.GZIP), ControlType.ABORT),
    ],
)
def test_batch_that_is_no_end_marker_has_no_marker_type(what, batch, expected):
    assert control_type_of(batch) is expected


@pytest.mark.parametrize("key", [None, b"", bytes(3), bytes.fromhex("ffff 0001")])
def test_invalid_control_key_is_refused(key):
    with pytest.raises(ProtocolError, match="control record"):
        control_type_of(control_batch(key))


def test_torn_end_marker_is_refused():
    whole = MARKERS[ControlType.COMMIT]
    for length in range(len(whole)):
        torn = bytearray(whole[:length])
        with pytest.raises(ProtocolError):
            control_type_of(torn)
        if length > HEAD_BYTES:  # this still holds if the header agrees with the remaining length
            struct.pack_into(">i", torn, 8, length - 12)
            with pytest.raises(ProtocolError):
                control_type_of(torn)


def test_mutated_end_markers_raise_only_protocol_errors():
    randomness = random.Random(27)
    for _ in range(4000):
        batch = bytearray(MARKERS[ControlType.ABORT])
        for _ in range(randomness.randint(1, 4)):
            batch[randomness.choice([*range(16, 23), *range(57, len(batch))])] = randomness.randrange(256)
        with contextlib.suppress(ProtocolError):
            control_type_of(batch)


# --- hostile bytes --------------------------------------------------------------------------------------------------


def batch_of(body: bytes, *, count: int = 1, codec: int = 0, last_offset_delta: int = 0) -> bytes:
    return struct.pack(
        ">qiibIhiqqqhii", 0, 49 + len(body), 0, 2, 0, codec, last_offset_delta, 0, 0, -1, -1, -1, count
    ) + bytes(body)


GOOD = bytes.fromhex("0c 00 00 00 01 01 00")


def test_smallest_record():
    assert list(iter_records(batch_of(GOOD))) == [Record(0, 0, None, None)]


@pytest.mark.parametrize(
    ("what", "batch"),
    [
        ("count beyond the bytes", batch_of(GOOD, count=2)),
        ("negative count", batch_of(GOOD, count=-1)),
        ("count of two thousand million", batch_of(GOOD, count=2**31 - 1)),
        ("bytes behind the last record", batch_of(GOOD + b"\0")),
        ("uncounted record", batch_of(GOOD * 2)),
        ("record length beyond the batch", batch_of(bytes.fromhex("0e 00 00 00 01 01 00"))),
        ("record length short of its fields", batch_of(bytes.fromhex("0a 00 00 00 01 01 00"))),
        ("negative record length", batch_of(bytes.fromhex("01 00 00 00 01 01 00"))),
        ("bytes behind the last field", batch_of(bytes.fromhex("0e 00 00 00 01 01 00 00"))),
        (
            "last byte of a record taken for the length of the next",
            batch_of(bytes.fromhex("0e 00 00 00 01 01 00 0c  00 00 02 01 01 00"), count=2, last_offset_delta=1),
        ),
        ("key length beyond the record", batch_of(bytes.fromhex("0c 00 00 00 7e 01 00"))),
        ("key length -2", batch_of(bytes.fromhex("0c 00 00 00 03 01 00"))),
        ("header count beyond the record", batch_of(bytes.fromhex("0e 00 00 00 01 01 7e 00"))),
        ("negative header count", batch_of(bytes.fromhex("0c 00 00 00 01 01 01"))),
        ("null header key", batch_of(bytes.fromhex("10 00 00 00 01 01 02 01 01"))),
        ("header key that is no UTF-8", batch_of(bytes.fromhex("12 00 00 00 01 01 02 02 ff 01"))),
        ("varint of six bytes", batch_of(bytes.fromhex("8c 80 80 80 80 00 00 00 00 01 01 00"))),
        ("varint above 32 bits", batch_of(bytes.fromhex("14 00 00 80 80 80 80 10 01 01 00"))),
        ("varlong above 64 bits", batch_of(bytes.fromhex("1e 00" + "80" * 9 + "02 00 01 01 00"))),
        ("varlong of eleven bytes", batch_of(bytes.fromhex("20 00" + "80" * 10 + "00 00 01 01 00"))),
        ("varint cut off", batch_of(bytes.fromhex("0c 00 00 00 01 01 80"))),
        ("offset delta beyond the last", batch_of(bytes.fromhex("0c 00 00 02 01 01 00"))),
        ("negative offset delta", batch_of(bytes.fromhex("0c 00 00 01 01 01 00"))),
        ("offset delta twice", batch_of(GOOD * 2, count=2, last_offset_delta=1)),
        ("codec 5", batch_of(GOOD, codec=5)),
        ("codec 7", batch_of(GOOD, codec=7)),
        ("gzip that is none", batch_of(GOOD, codec=1)),
        ("snappy that is none", batch_of(b"\xff" * 20, codec=2)),
        ("lz4 that is none", batch_of(GOOD, codec=3)),
        ("zstd that is none", batch_of(GOOD, codec=4)),
        ("xerial head cut off", batch_of(b"\x82SNAPPY\x00\0\0", codec=2)),
        ("xerial block beyond the stream", batch_of(b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, 500), codec=2)),
        ("xerial block of no bytes", batch_of(b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, 0), codec=2)),
        ("xerial block length cut off", batch_of(b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + b"\0\0", codec=2)),
    ],
)
def test_malformed_records_are_refused(what, batch):
    with pytest.raises(ProtocolError):
        list(iter_records(batch))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec is not Compression.NONE])
def test_bomb_is_refused_at_the_bound(codec):
    limit = 300_000
    body = bytes(limit + 1)
    bomb = batch_of(bytes(compress(codec, body)), codec=codec)
    with pytest.raises(ProtocolError, match=r"more than|claims"):
        iter_records(bomb, max_decompressed_bytes=limit)
    assert decompress(codec, compress(codec, body[:limit]), limit) == body[:limit]


def test_snappy_that_claims_more_than_it_can_hold():
    claim = bytes.fromhex("ffffff3f") + b"\0a"
    with pytest.raises(ProtocolError, match="claims"):
        decompress(Compression.SNAPPY, claim)


@pytest.mark.parametrize("codec", CODECS)
def test_mutated_batches_raise_only_protocol_errors(codec):
    randomness = random.Random(int(codec))
    whole = build_batch(RECORDS, compression=codec)
    for _ in range(4000):
        batch = bytearray(whole)
        for _ in range(randomness.randint(1, 4)):
            # Leave the length field unchanged. With a wrong length, the test would end before the records are read.
            batch[randomness.choice([*range(16, 24), *range(57, len(batch))])] = randomness.randrange(256)
        try:
            for _record in iter_records(batch, max_decompressed_bytes=1 << 20):
                pass
        except ProtocolError:
            pass


@given(st.binary(max_size=400))
@settings(max_examples=500, deadline=None)
def test_arbitrary_bytes_raise_only_protocol_errors(data):
    for read in (read_head, split_batches, verify_crc, control_type_of, lambda buffer: list(iter_records(buffer))):
        with contextlib.suppress(ProtocolError):
            read(data)


@given(st.binary(max_size=200), st.sampled_from(CODECS), st.integers(-5, 40))
@settings(max_examples=1000, deadline=None)
def test_arbitrary_record_sections_raise_only_protocol_errors(body, codec, count):
    with contextlib.suppress(ProtocolError):
        list(iter_records(batch_of(body, count=count, codec=codec, last_offset_delta=50)))
