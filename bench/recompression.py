"""Measure the cost of `compression.type`: batches of a megabyte recompressed with each codec, and how long the event
loop waits.

    python -m bench.recompression

The records are lines of a log as services write them, which compress about as well as real ones.
"""

from __future__ import annotations

import asyncio
import random
import time

from gateway.config.topic import TopicConfig
from gateway.log.batch_validation import Refused
from gateway.log.recompression import CODECS, Batch, Recompressor
from protocol.compression import Compression
from protocol.records import Record, build_batch, read_head

BATCHES = 24
RECORDS = 4000
LOOK_S = 0.001


def line(words: random.Random, offset: int) -> bytes:
    moment = f"2026-01-01T00:00:{offset % 60:02}.{words.randrange(1000):03}Z"
    state = words.choice(["accepted", "packed", "sent", "paid"])
    return (
        f'{{"time":"{moment}","level":"info","service":"orders","request":"{words.randbytes(8).hex()}",'
        f'"customer":{words.randrange(10**6)},"took_ms":{words.random() * 50:.2f},"message":"order {state}"}}'
    ).encode()


def batch(codec: Compression) -> bytes:
    words = random.Random(7)
    records = [
        Record(offset, 1_800_000_000_000 + offset, b"%d" % offset, line(words, offset)) for offset in range(RECORDS)
    ]
    return build_batch(records, compression=codec)


async def measure(source: Compression, compression_type: str) -> tuple[float, float, float]:
    """Return the MB/s of one thread (of uncompressed records), the size of a recompressed byte, and the longest time in
    ms for which the event loop was blocked.
    """
    sent, plain_bytes = batch(source), len(batch(Compression.NONE))
    config = TopicConfig(compression_type=compression_type, max_message_bytes=2 * plain_bytes)
    batches: list[Batch] = [(sent, config)] * BATCHES
    recompressor = Recompressor(threads=1)
    work = asyncio.create_task(recompressor.recompress(batches))
    began, longest_s = time.perf_counter(), 0.0
    while not work.done():
        before = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        longest_s = max(longest_s, time.perf_counter() - before - LOOK_S)
    took_s = time.perf_counter() - began
    made, room_bytes = await work
    recompressor.give_back(room_bytes)
    await recompressor.close()
    sizes = [len(each) for each in made if not isinstance(each, Refused)]
    assert len(sizes) == BATCHES
    assert read_head(made[0] if not isinstance(made[0], Refused) else b"").compression is CODECS[compression_type]
    return BATCHES * plain_bytes / took_s / 1e6, sizes[0] / plain_bytes, longest_s * 1000


async def main() -> None:
    print(f"{BATCHES} batches of {len(batch(Compression.NONE)) / 1e6:.2f} MB, {RECORDS} records each")
    print(f"{'from':<8}{'to':<14}{'MB/s':>8}{'size':>8}{'loop waits, ms':>16}")
    for source in (Compression.NONE, Compression.LZ4, Compression.ZSTD):
        for compression_type, codec in CODECS.items():
            if codec is source:
                continue
            speed, share, longest_ms = await measure(source, compression_type)
            print(f"{source.name.lower():<8}{compression_type:<14}{speed:>8.0f}{share:>8.2f}{longest_ms:>16.1f}")


if __name__ == "__main__":
    asyncio.run(main())
