"""For any bytes, the compiled parser accepts and refuses exactly the same as our own reader."""

from __future__ import annotations

import random
import struct

import cramjam
import pytest
from aiokafka.record import default_records

from protocol.buffer import Buffer
from protocol.compression import Compression, DecompressedTooLargeError
from protocol.errors import ProtocolError
from protocol.record_reader import DAMAGED, MAX_HEADERS, WINDOW_BYTES, WINDOW_RECORDS, RecordReader
from protocol.records import HEAD_BYTES, Record, TimestampType, build_batch, iter_records, read_head

CODECS = list(Compression)


def read(batch: Buffer) -> list[tuple[int, int, bytes | None, bytes | None]]:
    return [
        (
            record.offset,
            record.timestamp,
            None if record.key is None else bytes(record.key),
            None if record.value is None else bytes(record.value),
        )
        for window in RecordReader(batch).windows()
        for record in window
    ]


def walked(batch: Buffer) -> list[tuple[int, int, bytes | None, bytes | None]]:
    return [(record.offset, record.timestamp, record.key, record.value) for record in iter_records(batch)]


def verdict(reading: object, batch: Buffer) -> object:
    """Return the result of `reading`, or only that it refused."""
    try:
        return reading(batch)  # type: ignore[operator]
    except DAMAGED:
        return "refused"


def mixed_batch(chance: random.Random, **fields: object) -> bytes:
    """Return a batch with records of all sizes, smaller and larger than a window."""
    records: list[Record] = []
    for offset in range(chance.randrange(1, 60)):
        size = chance.choice([0, 1, 60, 127, 1000, 9000, WINDOW_BYTES, 3 * WINDOW_BYTES, *[50] * 32])
        key = chance.choice([None, b"", b"k" * chance.randrange(200)])
        value = None if chance.random() < 0.1 else b"v" * size
        headers = tuple(("h" * n, chance.choice([None, b"", b"x" * n])) for n in range(chance.randrange(4)))
        records.append(Record(1000 + offset, 1_700_000_000_000 + chance.randrange(-9, 9), key, value, headers))
    return build_batch(records, base_offset=1000, **fields)  # type: ignore[arg-type]


def test_the_parser_is_the_compiled_one() -> None:
    assert default_records.DefaultRecordBatch.__module__.startswith("aiokafka.record._crecords")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(6))
def test_record_of_any_size_is_read(codec: Compression, seed: int) -> None:
    batch = mixed_batch(random.Random(seed), compression=codec)
    assert read(batch) == walked(batch)


@pytest.mark.parametrize("seed", range(8))
def test_runs_of_equally_long_records_are_read(seed: int) -> None:
    """Record lengths take one, two or three bytes. Runs of equal lengths end inside windows and at their borders. Some
    lengths differ from their neighbours in only one of two bytes.
    """
    chance = random.Random(seed)
    records: list[Record] = []
    for _ in range(12):
        size = chance.choice([0, 20, 57, 58, 120, 121, 249, 250, 1000, 1128, 8000, 9000, 65_000])
        for _ in range(chance.choice([1, 2, 70, 300]) if size < 5000 else 9):
            records.append(Record(len(records), 5, None, b"v" * size))
    batch = build_batch(records)
    assert read(batch) == walked(batch)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 2 * WINDOW_BYTES], ids=["one window", "several"])
def test_append_time_applies_to_every_record(codec: Compression, size: int) -> None:
    """In the parser's copy of the batch header only the codec is cleared. The batch's own header stays complete."""
    batch = build_batch(
        [Record(0, 5, b"k", b"v"), Record(1, 6, b"k", b"v" * size)],
        compression=codec,
        timestamp_type=TimestampType.LOG_APPEND_TIME,
        max_timestamp=99,
    )
    given = bytearray(batch)
    assert [timestamp for _, timestamp, _, _ in read(given)] == [99, 99]
    assert given == batch


@pytest.mark.parametrize("seed", range(40))
def test_damaged_bytes_are_refused_as_by_our_own_reader(seed: int) -> None:
    """Bytes behind the batch header are changed or removed. If parser and reader both accept a batch, they return the
    same records. A batch that only the parser accepts (for example, with offsets that do not rise) has as many records
    as its header says. The parser's callers check everything else.
    """
    chance = random.Random(seed)
    for _ in range(60):
        batch = bytearray(mixed_batch(chance))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(HEAD_BYTES, min(len(batch), HEAD_BYTES + 400))
            batch[at] = chance.choice([0x00, 0x01, 0x7F, 0x80, 0xFF, batch[at] ^ 1 << chance.randrange(8)])
        if chance.random() < 0.3:
            cut = chance.randrange(HEAD_BYTES, len(batch))
            batch = batch[:cut]
            struct.pack_into(">i", batch, 8, len(batch) - 12)
        expected, got = verdict(walked, batch), verdict(read, batch)
        if expected != "refused":
            assert got in (expected, "refused")
        elif got != "refused":
            assert len(got) == read_head(batch).records_count  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 2**31 - 1, -1])
@pytest.mark.parametrize("value", [b"v", b"v" * WINDOW_BYTES])
def test_wrong_record_count_is_refused(count: int, value: bytes) -> None:
    batch = bytearray(build_batch([Record(offset, 1, b"k", value) for offset in range(3)]))
    assert len(read(batch)) == 3
    struct.pack_into(">i", batch, HEAD_BYTES - 4, count)
    with pytest.raises(DAMAGED):
        read(batch)


HUGE = bytes([0xFF] * 8 + [0x7F])
"""A zigzag varint close to −2**62. If its last bit is cleared, it is +2**62."""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80", id="a length cut off"),
        pytest.param(bytes([0x10, 0, 0, 0, 0x02, 0x6B, 0x80]), id="a value's length cut off"),
        pytest.param(bytes([0x0E, 0, 0, 0, 1, 1, 0x02, 0x80]), id="a header key's length cut off"),
        pytest.param(bytes([0x0E, 0, 0, 0, 1, 1, 0x02, 0x00]), id="a header's value is missing"),
        pytest.param(bytes([0x0C, 0, 0, 0, 1, 1, 0x7E]), id="headers that are not there"),
        pytest.param(bytes([0x1E, 0, 0, 0, 0xFE, *HUGE[1:], 1, 0]), id="a key of 2**62 bytes"),
        pytest.param(bytes([0xFE, *HUGE[1:], 0, 0, 0, 1, 1, 0]), id="a record of 2**62 bytes"),
        pytest.param(bytes([0x0C, 0, 0, 0, 1, 1, 1]), id="a negative number of headers"),
        pytest.param(bytes([0x10, 0, 0, 0, 1, 1, 2, 1, 1]), id="a header without a key"),
        pytest.param(bytes([0x12, 0, 0, 0, 1, 1, 2, 2, 0xFF, 1]), id="a header key that is not UTF-8"),
    ],
)
@pytest.mark.parametrize("fill", [0, WINDOW_BYTES])
def test_hostile_bodies_are_refused(body: bytes, fill: int) -> None:
    first = build_batch([Record(0, 1, None, b"x" * fill)])
    batch = bytearray(first + body)
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">i", batch, HEAD_BYTES - 4, 2)
    with pytest.raises(DAMAGED):
        read(batch)


def test_headers_of_a_record_larger_than_a_window_are_counted() -> None:
    value = b"v" * WINDOW_BYTES
    batch = build_batch([Record(0, 1, b"k", value, (("h", None),) * 1000)])
    assert read(batch) == [(0, 1, b"k", value)]
    with pytest.raises(ProtocolError, match="headers"):
        read(build_batch([Record(0, 1, b"k", value, (("", None),) * (MAX_HEADERS + 1))]))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec is not Compression.NONE])
def test_a_bomb_is_refused_at_the_bound(codec: Compression) -> None:
    batch = build_batch([Record(0, 1, None, bytes(4_000_000))], compression=codec)
    assert len(batch) < 300_000
    with pytest.raises(DecompressedTooLargeError):
        RecordReader(batch, max_decompressed_bytes=1_000_000)
    assert len(RecordReader(batch).body) > 4_000_000


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([Record(offset, 1, None, b"") for offset in range(30_000)], id="tiny"),
        pytest.param([Record(offset, 1, None, b"v" * 1000) for offset in range(300)], id="usual"),
        pytest.param([Record(0, 1, b"k" * 1_000_000, bytes(2_000_000))], id="large"),
        pytest.param([Record(0, 1, None, b"", (("", None),) * MAX_HEADERS)], id="headers"),
    ],
)
def test_parser_never_receives_more_than_a_window(monkeypatch: pytest.MonkeyPatch, records: list[Record]) -> None:
    """The parser holds the interpreter's lock while it creates the records of one window."""
    given: list[int] = []
    counts: list[int] = []

    def parse(buffer: memoryview) -> object:
        given.append(len(buffer))
        counts.append(struct.unpack_from(">i", buffer, HEAD_BYTES - 4)[0])
        return default_records.DefaultRecordBatch(buffer)  # type: ignore[arg-type]

    monkeypatch.setattr("protocol.record_reader.DefaultRecordBatch", parse)
    batch = build_batch(records, compression=Compression.ZSTD)
    assert len(read(batch)) == len(records)
    assert all(size <= HEAD_BYTES + WINDOW_BYTES for size in given)
    assert all(0 < count <= WINDOW_RECORDS for count in counts)


def test_raw_and_framed_snappy_are_bounded_alike() -> None:
    raw = bytes(cramjam.snappy.compress_raw(bytes(2_000_000)))
    batch = bytearray(build_batch([Record(0, 1, None, b"")], compression=Compression.SNAPPY)[:HEAD_BYTES] + raw)
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    with pytest.raises(DecompressedTooLargeError):
        RecordReader(batch, max_decompressed_bytes=1_000_000)
