"""Every row of the table of checks on a produced batch (upstream: LogValidatorTest and ProduceRequestTest)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import crc32c
import lz4.frame
import pytest

from gateway.config.topic import TopicConfig
from gateway.log.batch_validation import MAX_RECORD_ERRORS, Refused, validate
from protocol.compression import Compression, DecompressedTooLargeError
from protocol.errors import ErrorCode
from protocol.record_reader import WINDOW_RECORDS
from protocol.records import HEAD_BYTES, BatchHead, Record, TimestampType, build_batch, read_head, seal_batch

NOW_MS = 1_800_000_000_000
CONFIG = TopicConfig()


def record(offset: int, *, timestamp: int = NOW_MS, key: bytes | None = b"k", value: bytes | None = b"v") -> Record:
    return Record(offset, timestamp, key, value)


def batch(count: int = 3, **fields: object) -> bytearray:
    return bytearray(build_batch([record(offset) for offset in range(count)], **fields))  # type: ignore[arg-type]


def patched(position: int, layout: str, value: int, *, keep_crc: bool = False) -> Callable[[], bytearray]:
    """Return a valid batch with one field of its header changed. The CRC is corrected unless `keep_crc`."""

    def make() -> bytearray:
        records = batch()
        struct.pack_into(layout, records, position, value)
        if not keep_crc:
            struct.pack_into(">I", records, 17, crc32c.crc32c(memoryview(records)[21:]))
        return records

    return make


def judge(records: bytes | bytearray | None, *, version: int = 9, config: TopicConfig = CONFIG) -> BatchHead | Refused:
    return validate(records, version=version, config=config, now_ms=NOW_MS)


def code_of(verdict: BatchHead | Refused) -> ErrorCode:
    assert isinstance(verdict, Refused), verdict
    return verdict.code


@pytest.mark.parametrize("codec", list(Compression))
def test_valid_batch_returns_its_head(codec: Compression) -> None:
    head = judge(batch(compression=codec))
    assert isinstance(head, BatchHead)
    assert (head.records_count, head.max_timestamp, head.producer_id) == (3, NOW_MS, -1)


def test_an_idempotent_batch_is_valid() -> None:
    head = judge(batch(producer_id=7, producer_epoch=0, base_sequence=0))
    assert isinstance(head, BatchHead)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        pytest.param(lambda: None, ErrorCode.INVALID_RECORD, id="null"),
        pytest.param(bytearray, ErrorCode.INVALID_RECORD, id="empty"),
        pytest.param(lambda: batch() + batch(), ErrorCode.INVALID_RECORD, id="two batches"),
        pytest.param(patched(16, ">b", 0), ErrorCode.INVALID_RECORD, id="magic 0"),
        pytest.param(patched(16, ">b", 1), ErrorCode.INVALID_RECORD, id="magic 1"),
        pytest.param(patched(16, ">b", 3), ErrorCode.INVALID_RECORD, id="magic 3"),
        pytest.param(lambda: bytearray(b"\0" * 16 + b"\1" + b"\0" * 17), ErrorCode.INVALID_RECORD, id="short magic 1"),
        pytest.param(lambda: batch()[:10], ErrorCode.CORRUPT_MESSAGE, id="ends before the magic"),
        pytest.param(lambda: batch()[:60], ErrorCode.CORRUPT_MESSAGE, id="ends in the head"),
        pytest.param(lambda: batch()[:-1], ErrorCode.CORRUPT_MESSAGE, id="ends in the records"),
        pytest.param(lambda: batch() + b"\0", ErrorCode.CORRUPT_MESSAGE, id="trailing byte"),
        pytest.param(patched(8, ">i", 48), ErrorCode.CORRUPT_MESSAGE, id="length below a head"),
        pytest.param(patched(8, ">i", -1), ErrorCode.CORRUPT_MESSAGE, id="negative length"),
        pytest.param(patched(8, ">i", 2**31 - 1), ErrorCode.CORRUPT_MESSAGE, id="length of 2 GiB"),
        pytest.param(patched(17, ">I", 1, keep_crc=True), ErrorCode.CORRUPT_MESSAGE, id="crc"),
        pytest.param(patched(35, ">q", 5, keep_crc=True), ErrorCode.CORRUPT_MESSAGE, id="covered byte changed"),
        pytest.param(patched(0, ">q", 1), ErrorCode.INVALID_RECORD, id="base offset"),
        pytest.param(patched(57, ">i", 0), ErrorCode.INVALID_RECORD, id="no records"),
        pytest.param(patched(57, ">i", -1), ErrorCode.INVALID_RECORD, id="negative count"),
        pytest.param(patched(57, ">i", 4), ErrorCode.INVALID_RECORD, id="count over delta"),
        pytest.param(patched(23, ">i", 7), ErrorCode.INVALID_RECORD, id="delta over count"),
        pytest.param(lambda: batch(is_control=True), ErrorCode.INVALID_RECORD, id="control batch"),
        pytest.param(
            lambda: batch(is_transactional=True),
            ErrorCode.INVALID_RECORD,
            id="transactional without a producer",
        ),
        pytest.param(lambda: batch(producer_id=7, producer_epoch=0), ErrorCode.INVALID_RECORD, id="no sequence"),
        pytest.param(lambda: batch(producer_id=7, base_sequence=0), ErrorCode.INVALID_RECORD, id="no epoch"),
        pytest.param(
            lambda: batch(timestamp_type=TimestampType.LOG_APPEND_TIME), ErrorCode.INVALID_TIMESTAMP, id="append time"
        ),
        pytest.param(patched(21, ">h", 5), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, id="unknown codec"),
    ],
)
def test_invalid_batch_is_refused(make: Callable[[], bytearray | None], code: ErrorCode) -> None:
    assert code_of(judge(make())) is code


def test_zstd_needs_version_7() -> None:
    records = batch(compression=Compression.ZSTD)
    assert code_of(judge(records, version=6)) is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert isinstance(judge(records, version=7), BatchHead)


@pytest.mark.parametrize(
    ("compress", "accepted"),
    [
        pytest.param(lambda body: lz4.frame.compress(body, block_linked=False), True, id="independent"),
        pytest.param(
            lambda body: lz4.frame.compress(
                body, block_linked=False, block_checksum=True, content_checksum=True, block_size=5
            ),
            True,
            id="checksums",
        ),
        pytest.param(lambda body: lz4.frame.compress(body, block_linked=True), False, id="linked"),
        pytest.param(
            lambda body: b"".join(lz4.frame.compress(part, block_linked=False) for part in (body[:500], body[500:])),
            False,
            id="two frames",
        ),
        pytest.param(
            lambda body: b"\x50\x2a\x4d\x18" + bytes(4) + lz4.frame.compress(body, block_linked=False),
            False,
            id="behind a frame to skip",
        ),
        pytest.param(lambda _body: b"", False, id="empty"),
    ],
)
def test_lz4_is_accepted_if_java_reads_it(compress: Callable[[bytes], bytes], accepted: bool) -> None:
    """A consumer in Java cannot read on behind a batch that it cannot decompress."""
    plain = build_batch([record(offset, value=b"some text " * 30) for offset in range(1000)])
    head = read_head(plain)
    records = seal_batch(head._replace(attributes=Compression.LZ4), compress(plain[HEAD_BYTES:]))
    verdict = judge(records)
    assert isinstance(verdict, BatchHead) if accepted else code_of(verdict) is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("version", [0, -1])
def test_snappy_stream_of_a_version_that_java_refuses_is_refused(version: int) -> None:
    whole = batch(compression=Compression.SNAPPY)
    struct.pack_into(">i", whole, HEAD_BYTES + 8, version)
    assert code_of(judge(seal_batch(read_head(whole), memoryview(whole)[HEAD_BYTES:]))) is ErrorCode.INVALID_RECORD


def test_batch_of_max_message_bytes_is_accepted() -> None:
    records = batch()
    assert isinstance(judge(records, config=replace(CONFIG, max_message_bytes=len(records))), BatchHead)
    verdict = judge(records, config=replace(CONFIG, max_message_bytes=len(records) - 1))
    assert code_of(verdict) is ErrorCode.MESSAGE_TOO_LARGE


def test_an_oversized_batch_is_refused_before_its_crc_is_computed() -> None:
    records = batch()
    records[-1] ^= 0xFF
    assert code_of(judge(records, config=replace(CONFIG, max_message_bytes=70))) is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.GZIP])
def test_null_keys_on_a_compacted_topic_are_listed(codec: Compression) -> None:
    records = build_batch([record(0), record(1, key=None), record(2, key=b""), record(3, key=None)], compression=codec)
    assert isinstance(judge(records), BatchHead)
    verdict = judge(records, config=replace(CONFIG, cleanup_policy=("compact", "delete")))
    assert isinstance(verdict, Refused)
    assert verdict.code is ErrorCode.INVALID_RECORD
    assert [index for index, _ in verdict.record_errors] == [1, 3]


def test_listed_offenders_are_bounded() -> None:
    records = build_batch([record(offset, key=None) for offset in range(MAX_RECORD_ERRORS + 50)])
    verdict = judge(records, config=replace(CONFIG, cleanup_policy=("compact",)))
    assert isinstance(verdict, Refused)
    assert len(verdict.record_errors) == MAX_RECORD_ERRORS


def test_records_that_cannot_be_read_do_not_enter_a_compacted_topic() -> None:
    records = batch()
    records[61] = 0x7F
    struct.pack_into(">I", records, 17, crc32c.crc32c(memoryview(records)[21:]))
    verdict = judge(records, config=replace(CONFIG, cleanup_policy=("compact",)))
    assert code_of(verdict) is ErrorCode.INVALID_RECORD


def test_timestamps_too_far_ahead_are_listed() -> None:
    config = replace(CONFIG, timestamp_after_max_ms=1000)
    inside = build_batch([record(0, timestamp=NOW_MS), record(1, timestamp=NOW_MS + 1000)])
    assert isinstance(judge(inside, config=config), BatchHead)
    outside = build_batch([record(0, timestamp=NOW_MS), record(1, timestamp=NOW_MS + 1001)])
    verdict = judge(outside, config=config)
    assert isinstance(verdict, Refused)
    assert verdict.code is ErrorCode.INVALID_TIMESTAMP
    assert [index for index, _ in verdict.record_errors] == [1]


def test_timestamps_too_far_ahead_are_listed_whatever_the_head_says() -> None:
    records = [record(0), record(1, timestamp=NOW_MS + 7_200_000), record(2)]
    verdict = judge(build_batch(records, max_timestamp=NOW_MS))
    assert code_of(verdict) == ErrorCode.INVALID_TIMESTAMP


@pytest.mark.parametrize("policy", [("delete",), ("compact",)])
def test_the_head_of_a_valid_batch_has_the_greatest_timestamp_of_its_records(policy: tuple[str, ...]) -> None:
    records = [record(0), record(1, timestamp=NOW_MS - 1)]
    head = judge(build_batch(records, max_timestamp=NOW_MS - 1), config=replace(CONFIG, cleanup_policy=policy))
    assert isinstance(head, BatchHead)
    assert head.max_timestamp == NOW_MS


def test_timestamps_too_far_back_are_listed() -> None:
    records = build_batch([record(0, timestamp=NOW_MS - 1001), record(1, timestamp=NOW_MS - 1000)])
    assert isinstance(judge(records), BatchHead)
    verdict = judge(records, config=replace(CONFIG, timestamp_before_max_ms=1000))
    assert isinstance(verdict, Refused)
    assert verdict.code is ErrorCode.INVALID_TIMESTAMP
    assert [index for index, _ in verdict.record_errors] == [0]


@pytest.mark.parametrize("base_ms", [2**63 - 1, -(2**63)])
def test_a_timestamp_of_more_than_64_bits_is_refused(base_ms: int) -> None:
    """It would end compaction and look-ups by time. The compiled parser, which reads small records, wraps it."""
    before_or_after = 1 if base_ms > 0 else -1
    records = bytearray(
        build_batch([record(0, timestamp=0), record(1, timestamp=before_or_after, value=bytes(100_000))])
    )
    struct.pack_into(">q", records, 27, base_ms)
    struct.pack_into(">I", records, 17, crc32c.crc32c(memoryview(records)[21:]))
    assert code_of(judge(records, config=replace(CONFIG, timestamp_after_max_ms=2**63 - 1))) is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("policy", [("delete",), ("compact",)])
def test_a_record_from_before_1970_is_accepted(policy: tuple[str, ...]) -> None:
    records = build_batch([record(0, timestamp=-5000)])
    assert isinstance(judge(records, config=replace(CONFIG, cleanup_policy=policy)), BatchHead)


def test_missing_timestamp_is_not_too_far_back() -> None:
    records = build_batch([record(0, timestamp=-1)])
    assert isinstance(judge(records, config=replace(CONFIG, timestamp_before_max_ms=1000)), BatchHead)


def test_log_append_time_ignores_the_producers_timestamps() -> None:
    records = build_batch([record(0, timestamp=5), record(1, timestamp=NOW_MS * 2)])
    config = replace(CONFIG, message_timestamp_type="LogAppendTime", timestamp_before_max_ms=1000)
    assert isinstance(judge(records, config=config), BatchHead)


def test_headers_with_one_key_twice_are_valid() -> None:
    twice = Record(0, NOW_MS, b"k", b"v", (("h", b"1"), ("h", b"2"), ("h", None)))
    assert isinstance(judge(build_batch([twice]), config=replace(CONFIG, cleanup_policy=("compact",))), BatchHead)


def forged(payload: bytes, count: int, codec: Compression = Compression.NONE) -> bytearray:
    """Return a batch header with the right CRC and length, followed by `payload`."""
    records = bytearray(batch(count, compression=codec)[:61] + payload)
    struct.pack_into(">i", records, 8, len(records) - 12)
    struct.pack_into(">I", records, 17, crc32c.crc32c(memoryview(records)[21:]))
    return records


@pytest.mark.parametrize("codec", [codec for codec in Compression if codec is not Compression.NONE])
def test_body_that_its_codec_cannot_read_is_refused(codec: Compression) -> None:
    payload = f"not {codec.name.lower()} at all".encode()
    assert code_of(judge(forged(payload, 1, codec))) == ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("count", [1, 5])
def test_a_head_that_claims_records_over_an_empty_body_is_refused(count: int) -> None:
    assert code_of(judge(forged(b"", count))) == ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("held", [2, 4])
def test_a_body_of_another_count_than_its_head_is_refused(codec: Compression, held: int) -> None:
    payload = bytes(batch(held, compression=codec)[61:])
    assert code_of(judge(forged(payload, 3, codec))) == ErrorCode.INVALID_RECORD
    assert isinstance(judge(forged(payload, held, codec)), BatchHead)


@pytest.mark.parametrize("offsets", [(0, 2), (1, 2), (5,), (0, 1, 3)])
@pytest.mark.parametrize("policy", [("delete",), ("compact",)])
def test_offsets_that_do_not_count_up_from_zero_are_refused(offsets: tuple[int, ...], policy: tuple[str, ...]) -> None:
    """Upstream gives such records of a compressed batch new offsets, and leaves those of an uncompressed one unchanged.
    So two consumers of the same log would see different offsets for one record.
    """
    records = build_batch([record(offset) for offset in offsets], last_offset_delta=max(offsets))
    payload = records[61:]
    assert code_of(judge(forged(payload, len(offsets)), config=replace(CONFIG, cleanup_policy=policy))) == 87


def test_lower_bound_reports_that_a_larger_one_may_decide() -> None:
    records = bytearray(build_batch([record(0, value=bytes(200_000))], compression=Compression.ZSTD))
    with pytest.raises(DecompressedTooLargeError):
        validate(records, version=9, config=CONFIG, now_ms=NOW_MS, max_decompressed_bytes=100_000)
    assert isinstance(judge(records), BatchHead)


@pytest.mark.parametrize("count", [1, WINDOW_RECORDS - 1, WINDOW_RECORDS, WINDOW_RECORDS + 1])
@pytest.mark.parametrize("value", [b"v", b"v" * 200], ids=["one window", "several"])
def test_every_offset_is_checked_in_large_batches(count: int, value: bytes) -> None:
    """The validator's window of records ends within the batch, at its end, or after it."""
    records = [record(offset, value=value) for offset in range(count)]
    assert isinstance(judge(build_batch(records)), BatchHead)
    last = replace(records[-1], offset=count + 3)
    verdict = judge(with_head(build_batch([*records[:-1], last]), last_offset_delta=count - 1))
    assert code_of(verdict) is ErrorCode.INVALID_RECORD
    assert isinstance(verdict, Refused)
    assert verdict.message == f"record {count - 1} of the batch has offset delta {count + 3}"


def with_head(records: bytes, *, last_offset_delta: int) -> bytearray:
    """Return the batch with a header that does not fit its records, and a CRC that is correct."""
    changed = bytearray(records)
    struct.pack_into(">i", changed, 23, last_offset_delta)
    struct.pack_into(">I", changed, 17, crc32c.crc32c(memoryview(changed)[21:]))
    return changed
