"""Batches that may be very large after decompression are validated on a thread of their own, so that they delay only
each other.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator

import crc32c
import pytest

from gateway.config.topic import TopicConfig
from gateway.log import batch_validation, validator
from gateway.log.batch_validation import Refused
from gateway.log.validator import (
    COMPRESSED_AT_ONCE_BYTES,
    MAX_AT_ONCE_BATCHES,
    MAX_AT_ONCE_BYTES,
    MAX_AT_ONCE_RECORDS,
    BatchValidator,
    Unchecked,
    Verdict,
)
from protocol.compression import Compression, compress
from protocol.errors import ErrorCode
from protocol.records import HEAD_BYTES, BatchHead, Record, build_batch

NOW_MS = 1_800_000_000_000


def unchecked(count: int = 1, value: bytes = b"v", codec: Compression = Compression.NONE) -> Unchecked:
    records = build_batch([Record(offset, NOW_MS, b"k", value) for offset in range(count)], compression=codec)
    return Unchecked(memoryview(records), 9, TopicConfig())


BOMB = unchecked(1, bytes(20_000_000), Compression.ZSTD)
CROWD = unchecked(150_000, b"", Compression.ZSTD)


@pytest.fixture
async def judges() -> AsyncIterator[BatchValidator]:
    made = BatchValidator()
    yield made
    await made.close()


@pytest.mark.parametrize("codec", list(Compression))
async def test_small_batch_is_validated_at_once(judges: BatchValidator, codec: Compression) -> None:
    verdicts = judges.judge_at_once([unchecked(3, codec=codec), Unchecked(None, 9, TopicConfig())], NOW_MS)
    assert verdicts is not None
    assert isinstance(verdicts[0], BatchHead)
    assert isinstance(verdicts[1], Refused)


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param([unchecked(1, b"v" * MAX_AT_ONCE_BYTES)], id="bytes"),
        pytest.param([unchecked(5_000, b"")], id="records"),
        pytest.param([unchecked()] * (MAX_AT_ONCE_BATCHES + 1), id="batches"),
        pytest.param(
            [unchecked(codec=Compression.GZIP)] * (MAX_AT_ONCE_BYTES // COMPRESSED_AT_ONCE_BYTES + 1), id="compressed"
        ),
        pytest.param([unchecked(1, bytes(100_000), Compression.ZSTD)], id="small until it is decompressed"),
        pytest.param([unchecked(), BOMB], id="a bomb among small ones"),
    ],
)
async def test_large_batch_is_validated_in_a_thread(judges: BatchValidator, batches: list[Unchecked]) -> None:
    assert judges.judge_at_once(batches, NOW_MS) is None
    verdicts = await judges.judge(batches, NOW_MS)
    assert [isinstance(verdict, BatchHead) for verdict in verdicts] == [True] * len(batches)


async def test_a_negative_count_makes_no_room_for_others(judges: BatchValidator) -> None:
    lie = bytearray(unchecked().records or b"")
    struct.pack_into(">i", lie, HEAD_BYTES - 4, -(2**31))
    many = unchecked(MAX_AT_ONCE_RECORDS, b"")
    assert judges.judge_at_once([many], NOW_MS) is not None
    assert judges.judge_at_once([Unchecked(memoryview(lie), 9, TopicConfig()), many, unchecked()], NOW_MS) is None


@pytest.mark.parametrize("codec", [codec for codec in Compression if codec is not Compression.NONE])
async def test_a_batch_does_not_borrow_records_of_the_one_before_it(codec: Compression) -> None:
    """Both batches are decompressed into the same memory, one after the other."""
    plain = unchecked(1000, b"v" * 100).records
    assert plain is not None
    half = compress(codec, plain[HEAD_BYTES : HEAD_BYTES + (len(plain) - HEAD_BYTES) // 2])
    torn = bytearray(plain[:HEAD_BYTES]) + half
    struct.pack_into(">i", torn, 8, len(torn) - 12)
    struct.pack_into(">h", torn, 21, codec)
    struct.pack_into(">I", torn, 17, crc32c.crc32c(memoryview(torn)[21:]))
    judges = BatchValidator(threads=1)
    whole = unchecked(1000, b"v" * 100, codec)
    first, second, third = await judges.judge([whole, Unchecked(memoryview(torn), 9, TopicConfig()), whole], NOW_MS)
    assert isinstance(first, BatchHead)
    assert isinstance(second, Refused)
    assert isinstance(third, BatchHead)
    await judges.close()


async def test_verdicts_come_in_the_order_of_the_batches(judges: BatchValidator) -> None:
    verdicts = await judges.judge([unchecked(1), BOMB, Unchecked(None, 9, TopicConfig()), CROWD, unchecked(2)], NOW_MS)
    counts = [verdict.records_count if isinstance(verdict, BatchHead) else verdict.code for verdict in verdicts]
    assert counts == [1, 1, ErrorCode.INVALID_RECORD, 150_000, 2]


@pytest.mark.parametrize("costly", [BOMB, CROWD])
async def test_costly_batch_does_not_delay_usual_ones(
    judges: BatchValidator, costly: Unchecked, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def validate(records: memoryview, **rest: object) -> Verdict:
        if threading.current_thread().name.startswith("validate-costly"):
            loop.call_soon_threadsafe(begun.set)
            assert let_go.wait(10)
        return batch_validation.validate(records, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(validator, "validate", validate)
    held_up = [asyncio.create_task(judges.judge([costly], NOW_MS)) for _ in range(4)]
    try:
        await asyncio.wait_for(begun.wait(), 10)
        for _ in range(4):
            (verdict,) = await asyncio.wait_for(judges.judge([unchecked(1, bytes(200_000))], NOW_MS), 10)
            assert isinstance(verdict, BatchHead)
        assert not any(task.done() for task in held_up)
    finally:
        let_go.set()
    assert all(isinstance(verdict, BatchHead) for (verdict,) in await asyncio.gather(*held_up))


async def test_a_request_of_many_bombs_gives_way_between_them() -> None:
    judges = BatchValidator(threads=1)
    bomb = unchecked(1, bytes(7_900_000), Compression.GZIP)
    bombs = asyncio.create_task(judges.judge([bomb] * 40, NOW_MS))
    await asyncio.sleep(0)
    (verdict,) = await judges.judge([unchecked(1, bytes(300_000))], NOW_MS)
    assert isinstance(verdict, BatchHead)
    assert not bombs.done(), "the other request waited for one bomb, not for all"
    assert all(isinstance(each, BatchHead) for each in await bombs)
    await judges.close()
