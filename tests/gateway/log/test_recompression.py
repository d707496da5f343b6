"""Batches that are recompressed to their topic's codec: what changes and what does not, and how much memory is used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.config.topic import TopicConfig
from gateway.log import recompression
from gateway.log.batch_validation import Refused, validate
from gateway.log.recompression import CODECS, Recompressor, recompress, wanted_codec
from protocol.compression import Compression
from protocol.errors import ErrorCode
from protocol.records import BatchHead, Record, build_batch, iter_records, read_head, verify_crc
from tests.steps.waiting import turns

NOW_MS = 1_800_000_000_000
RECORDS = [
    Record(offset, NOW_MS + offset, b"k%d" % offset, b"value " * 40, (("h", b"x"), ("n", None))) for offset in range(50)
]


def config(compression_type: str, **more: int) -> TopicConfig:
    return TopicConfig(compression_type=compression_type, **more)  # type: ignore[arg-type]


def batch(codec: Compression = Compression.NONE, records: list[Record] = RECORDS) -> bytes:
    return build_batch(records, compression=codec, producer_id=7, producer_epoch=1, base_sequence=9)


def head_of(records: bytes) -> BatchHead:
    head = validate(records, version=9, config=TopicConfig(), now_ms=NOW_MS)
    assert isinstance(head, BatchHead), head
    return head


@pytest.mark.parametrize("source", list(Compression))
@pytest.mark.parametrize("compression_type", list(CODECS))
def test_only_codec_length_and_crc_change(source: Compression, compression_type: str) -> None:
    sent = batch(source)
    made = recompress(sent, config(compression_type))
    assert not isinstance(made, Refused)
    assert verify_crc(made)
    before, after = read_head(sent), read_head(made)
    assert after.compression is CODECS[compression_type]
    assert after == before._replace(attributes=CODECS[compression_type], batch_length=len(made) - 12, crc=after.crc)
    assert list(iter_records(made)) == RECORDS
    assert head_of(bytes(made))


@pytest.mark.parametrize("codec", list(Compression))
def test_batch_in_the_topics_codec_is_unchanged(codec: Compression) -> None:
    head = head_of(batch(codec))
    assert wanted_codec(head, config("producer")) is None
    for name, wanted in CODECS.items():
        assert wanted_codec(head, config(name)) is (None if wanted is codec else wanted)


@pytest.mark.parametrize(
    ("compression_type", "field", "low", "high"),
    [
        ("gzip", "compression_gzip_level", 1, 9),
        ("lz4", "compression_lz4_level", 1, 12),
        ("zstd", "compression_zstd_level", -100, 19),
    ],
)
def test_the_level_of_the_topic_is_used(compression_type: str, field: str, low: int, high: int) -> None:
    words = random.Random(1)
    text = b" ".join(
        words.choice([b"partition", b"offset", b"epoch", b"%d" % words.randrange(999)]) for _ in range(9000)
    )
    sent = batch(records=[Record(0, NOW_MS, None, text)])
    sizes = [len(recompress(sent, config(compression_type, **{field: level}))) for level in (low, high)]  # type: ignore[arg-type]
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize("level", [17, 13])
def test_lz4_levels_above_its_highest_are_its_highest(level: int) -> None:
    made = recompress(batch(), config("lz4", compression_lz4_level=level))
    assert not isinstance(made, Refused)
    assert list(iter_records(made)) == RECORDS


def test_recompressed_batch_too_large_for_its_topic_is_refused() -> None:
    sent = batch(Compression.ZSTD)
    plain = len(batch())
    assert len(sent) < plain
    limited = replace(config("uncompressed"), max_message_bytes=plain)
    assert not isinstance(recompress(sent, limited), Refused)
    refused = recompress(sent, replace(limited, max_message_bytes=plain - 1))
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.MESSAGE_TOO_LARGE


# --- room -----------------------------------------------------------------------------------------------------------

PLAIN_BYTES = len(batch())


@pytest.fixture
async def recompressor() -> AsyncIterator[Recompressor]:
    made = Recompressor(room_bytes=3 * PLAIN_BYTES)
    yield made
    await made.close()


def plain(count: int) -> list[recompression.Batch]:
    """Return `count` batches. Each takes `PLAIN_BYTES` after recompression, which is also its limit."""
    return [(batch(Compression.ZSTD), replace(config("uncompressed"), max_message_bytes=PLAIN_BYTES))] * count


async def test_room_is_held_until_it_is_released(recompressor: Recompressor) -> None:
    made, room_bytes = await recompressor.recompress(plain(2))
    assert [read_head(each).compression for each in made if not isinstance(each, Refused)] == [Compression.NONE] * 2
    assert room_bytes == recompressor.claimed_bytes == 2 * PLAIN_BYTES
    second = asyncio.create_task(recompressor.recompress(plain(2)))
    third = asyncio.create_task(recompressor.recompress(plain(1)))
    await turns(10)
    assert recompressor.claimed_bytes == room_bytes, "a small one passed a large one that was there first"
    assert not second.done()
    assert not third.done()
    recompressor.give_back(room_bytes)
    for task in (second, third):
        _, room_bytes = await asyncio.wait_for(task, 10)
        recompressor.give_back(room_bytes)
    assert recompressor.claimed_bytes == 0


async def test_cancelled_waiter_for_room_delays_no_other(recompressor: Recompressor) -> None:
    _, room_bytes = await recompressor.recompress(plain(2))
    gone = asyncio.create_task(recompressor.recompress(plain(3)))
    behind = asyncio.create_task(recompressor.recompress(plain(1)))
    await turns()
    gone.cancel()
    _, more_bytes = await asyncio.wait_for(behind, 10)
    recompressor.give_back(room_bytes + more_bytes)
    assert recompressor.claimed_bytes == 0


@pytest.mark.parametrize("first", [True, False], ids=["its turn comes first", "it goes first"])
async def test_waiter_cancelled_at_its_turn_keeps_no_room(recompressor: Recompressor, *, first: bool) -> None:
    _, room_bytes = await recompressor.recompress(plain(2))
    gone = asyncio.create_task(recompressor.recompress(plain(3)))
    await asyncio.sleep(0)
    if first:
        recompressor.give_back(room_bytes)
    gone.cancel()
    if not first:
        recompressor.give_back(room_bytes)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert recompressor.claimed_bytes == 0


async def test_request_takes_at_most_all_room(recompressor: Recompressor) -> None:
    made, room_bytes = await recompressor.recompress(plain(5))
    assert [isinstance(each, Refused) for each in made] == [False] * 3 + [True] * 2
    assert room_bytes == 3 * PLAIN_BYTES


async def test_a_failure_keeps_no_room(recompressor: Recompressor) -> None:
    with pytest.raises(Exception, match="damaged"):
        await recompressor.recompress([(batch(Compression.ZSTD)[:-9] + b"not zstd!", config("gzip"))])
    assert recompressor.claimed_bytes == 0
