"""Recompress produced batches, off the event loop, with the codec that their topic demands (`compression.type`).

The one idea: only the records section is made anew, from the bytes that its producer wrote. Offsets, timestamps and
sequences stay, and the head follows (codec, length, CRC). A batch that already has the topic's codec is kept as it
came, whatever its level, as upstream does.

The result may be far larger than the input. So a request claims room for it before the work, and keeps the room until
its batches are in the log. It claims room at its place in its connection's queue, where it waits for no other request:
a request with room never waits for one that wants room. This module judges no batch: `gateway/log/validator.py` has
done so before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gateway.config.topic import TopicConfig
from gateway.log.batch_validation import Refused
from protocol.buffer import Buffer
from protocol.compression import Compression, compress
from protocol.errors import ErrorCode
from protocol.record_reader import RecordReader
from protocol.records import CODEC_MASK, HEAD_BYTES, BatchHead, read_head, seal_batch

CODECS = {
    "uncompressed": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}
"""The codecs that `compression.type` names, except `producer`."""
PRODUCER = "producer"

ROOM_BYTES = 64 * 1024 * 1024
"""Bound on recompressed batches that are not in the log yet, and on those of one request."""

Batch = tuple[Buffer, TopicConfig]
Recompressed = bytearray | Refused


def wanted_codec(head: BatchHead, config: TopicConfig) -> Compression | None:
    """Return the codec to which a batch must be recompressed. Return None if the batch stays as it arrived."""
    if config.compression_type == PRODUCER:
        return None
    wanted = CODECS[config.compression_type]
    return None if wanted is head.compression else wanted


class Recompressor:
    """Threads for the work, and room for its results. `close` when no request is left."""

    def __init__(self, *, threads: int = 2, room_bytes: int = ROOM_BYTES) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="recompress")
        self._room_bytes = room_bytes
        self._claimed_bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def claimed_bytes(self) -> int:
        return self._claimed_bytes

    async def recompress(self, batches: Sequence[Batch]) -> tuple[list[Recompressed], int]:
        """Return each of these valid batches in its topic's codec, or the reason why it cannot be, and the bytes of
        room they occupy. The caller calls `give_back` with them when the batches are in the log."""
        claimed_bytes = min(sum(_most_bytes(records, config) for records, config in batches), self._room_bytes)
        await self._claim(claimed_bytes)
        kept_bytes = 0
        try:
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(self._threads, _recompress_all, batches, claimed_bytes)
            kept_bytes = sum(len(each) for each in made if not isinstance(each, Refused))
        finally:
            self.give_back(claimed_bytes - kept_bytes)
        return made, kept_bytes

    async def _claim(self, wanted_bytes: int) -> None:
        """Wait for memory, in order of arrival."""
        if not self._waiting and self._claimed_bytes + wanted_bytes <= self._room_bytes:
            self._claimed_bytes += wanted_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, wanted_bytes))
        try:
            await turn
        except asyncio.CancelledError:
            # The request may have got memory at the same moment. Otherwise it stops waiting, and the request after it
            # may get memory.
            self.give_back(0 if turn.cancelled() else wanted_bytes)
            raise

    def give_back(self, freed_bytes: int) -> None:
        """Return memory that is no longer needed."""
        self._claimed_bytes -= freed_bytes
        while self._waiting:
            turn, wanted_bytes = self._waiting[0]
            if not turn.cancelled():
                if self._claimed_bytes + wanted_bytes > self._room_bytes:
                    return
                self._claimed_bytes += wanted_bytes
                turn.set_result(None)
            self._waiting.popleft()

    async def close(self) -> None:
        """Start no new work. Work in progress ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _most_bytes(records: Buffer, config: TopicConfig) -> int:
    """Return an upper bound, before the batch is opened, on its size in the topic's codec: the topic's limit, and an
    uncompressed batch hardly grows."""
    if read_head(records).compression is Compression.NONE:
        return min(config.max_message_bytes, 2 * len(records))
    return config.max_message_bytes


def _recompress_all(batches: Sequence[Batch], room_bytes: int) -> list[Recompressed]:
    made: list[Recompressed] = []
    for records, config in batches:
        one = recompress(records, config)
        if not isinstance(one, Refused):
            if len(one) > room_bytes:
                one = Refused(ErrorCode.MESSAGE_TOO_LARGE, "the batches of this request are too large recompressed")
            else:
                room_bytes -= len(one)
        made.append(one)
    return made


def recompress(records: Buffer, config: TopicConfig) -> Recompressed:
    """Return one valid batch in its topic's codec, unless it would exceed the topic's limit."""
    reader = RecordReader(records)
    head, codec = reader.head, CODECS[config.compression_type]
    size_bytes = HEAD_BYTES + len(reader.body)
    if codec is not Compression.NONE or size_bytes <= config.max_message_bytes:
        payload = compress(codec, reader.body, _level(codec, config))
        size_bytes = HEAD_BYTES + len(payload)
        if size_bytes <= config.max_message_bytes:
            return seal_batch(head._replace(attributes=head.attributes & ~CODEC_MASK | codec), payload)
    return Refused(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"batch of {size_bytes} bytes, in codec {config.compression_type}, is over max.message.bytes ="
        f" {config.max_message_bytes}",
    )


def _level(codec: Compression, config: TopicConfig) -> int | None:
    match codec:
        case Compression.GZIP:
            return None if config.compression_gzip_level < 0 else config.compression_gzip_level
        case Compression.LZ4:
            return config.compression_lz4_level
        case Compression.ZSTD:
            return config.compression_zstd_level
        case Compression.NONE | Compression.SNAPPY:
            return None
