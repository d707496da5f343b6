"""Choose the thread that checks a produced batch: the event loop for small batches, other threads for the rest.

The one idea: the cost of a batch is bounded before the batch is opened, by the records it claims and the decompressed
bytes it is allowed. A batch that is small enough is judged at once on the event loop, because a hop to a thread and
back costs more. The rest goes to a lane whose bound it fits, so that a bomb delays only bombs. A request of many
batches yields to other requests between them. Codecs and CRC release the interpreter's lock; the parser keeps it a few
milliseconds at most.

`gateway/log/batch_validation.py` defines the checks. The caller decides the order in which batches enter the log.
"""

from __future__ import annotations

import asyncio
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, cast

from gateway.config.topic import TopicConfig
from gateway.log.batch_validation import Refused, validate
from protocol.compression import MAX_DECOMPRESSED_BYTES, DecompressedTooLargeError, room
from protocol.records import HEAD_BYTES, BatchHead

MAX_AT_ONCE_BYTES = 256 * 1024
MAX_AT_ONCE_RECORDS = 2_000
MAX_AT_ONCE_BATCHES = 64
"""Maximal number of batches in a request that is judged at once. They take a millisecond at most, or four if the
records have nothing but headers.
"""
COMPRESSED_AT_ONCE_BYTES = 32 * 1024
"""Bound on the decompressed size of a batch on the event loop. Each compressed batch counts for this much."""

TURN_S = 0.01
"""How long a request may use a thread while others wait for one."""

_CODEC_AT = 22
_COUNT = struct.Struct(">i")


class Unchecked(NamedTuple):
    """One partition's part of a request. `version` is the version of the Produce request."""

    records: memoryview | None
    version: int
    config: TopicConfig


Verdict = BatchHead | Refused


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Limits on the decompressed size of a batch, and on the number of records that it claims."""

    decompressed_bytes: int
    records: int


_AT_ONCE = _Bounds(COMPRESSED_AT_ONCE_BYTES, MAX_AT_ONCE_RECORDS)
_USUAL = _Bounds(8 * 1024 * 1024, 100_000)
_WHATEVER = _Bounds(MAX_DECOMPRESSED_BYTES, 2**31 - 1)


class BatchValidator:
    """Judges batches, off the event loop's thread if they may be costly. Call `close` when no request is left."""

    def __init__(self, *, threads: int = 2) -> None:
        self._usual = ThreadPoolExecutor(threads, thread_name_prefix="validate")
        self._costly = ThreadPoolExecutor(1, thread_name_prefix="validate-costly")
        self._scratch = room(_AT_ONCE.decompressed_bytes)
        """Buffer for decompression on the event loop."""

    def judge_plain(self, batch: Unchecked, now_ms: int) -> Verdict | None:
        """Return the verdict on a small batch without compression. Return None for any other batch."""
        records = batch.records
        if records is None or len(records) > MAX_AT_ONCE_BYTES or _is_compressed(records):
            return None
        if _claimed_records(records) > MAX_AT_ONCE_RECORDS:
            return None
        return validate(records, version=batch.version, config=batch.config, now_ms=now_ms)

    def judge_at_once(self, batches: Sequence[Unchecked], now_ms: int) -> list[Verdict] | None:
        """Return the verdicts if this takes about a millisecond; otherwise None, and `judge` gives them."""
        if len(batches) > MAX_AT_ONCE_BATCHES:
            return None
        total_bytes = total_records = 0
        for batch in batches:
            records = batch.records
            if records is not None:
                total_bytes += max(len(records), COMPRESSED_AT_ONCE_BYTES) if _is_compressed(records) else len(records)
                total_records += _claimed_records(records)
        if total_bytes > MAX_AT_ONCE_BYTES or total_records > MAX_AT_ONCE_RECORDS:
            return None
        verdicts = _judge(batches, now_ms, _AT_ONCE, self._scratch)
        return None if None in verdicts else cast("list[Verdict]", verdicts)

    async def judge(self, batches: Sequence[Unchecked], now_ms: int) -> list[Verdict]:
        """Return the verdicts, in the order of the batches."""
        verdicts = await _in_turns(self._usual, _judge_usual, batches, now_ms)
        costly = [place for place, verdict in enumerate(verdicts) if verdict is None]
        if costly:
            rest = await _in_turns(self._costly, _judge_whatever, [batches[place] for place in costly], now_ms)
            for place, verdict in zip(costly, rest, strict=True):
                verdicts[place] = verdict
        return cast("list[Verdict]", verdicts)

    async def close(self) -> None:
        """Start no new work. Validations in progress end by themselves."""
        self._usual.shutdown(wait=False, cancel_futures=True)
        self._costly.shutdown(wait=False, cancel_futures=True)


class _Scratch(threading.local):
    """The buffer into which a thread of the usual lane decompresses batch after batch. Only the pages that were
    written exist."""

    def __init__(self) -> None:
        self.memory = room(_USUAL.decompressed_bytes)


_scratch = _Scratch()


_Judge = Callable[[Sequence[Unchecked], int], list[Verdict | None]]
"""Judges some batches, in order: at least the first one."""


async def _in_turns(
    lane: ThreadPoolExecutor, judge: _Judge, batches: Sequence[Unchecked], now_ms: int
) -> list[Verdict | None]:
    """Return the verdicts on all batches, in several turns. Between its turns, a request of many decompression bombs
    waits behind the other requests in the lane.
    """
    loop = asyncio.get_running_loop()
    verdicts: list[Verdict | None] = []
    while len(verdicts) < len(batches):
        verdicts += await loop.run_in_executor(lane, judge, batches[len(verdicts) :], now_ms)
    return verdicts


def _judge_usual(batches: Sequence[Unchecked], now_ms: int) -> list[Verdict | None]:
    return _judge(batches, now_ms, _USUAL, _scratch.memory, TURN_S)


def _judge_whatever(batches: Sequence[Unchecked], now_ms: int) -> list[Verdict | None]:
    return _judge(batches, now_ms, _WHATEVER, None, TURN_S)


def _judge(
    batches: Sequence[Unchecked],
    now_ms: int,
    bounds: _Bounds,
    scratch: memoryview | None = None,
    turn_s: float = math.inf,
) -> list[Verdict | None]:
    """Judge the batches. The verdict is None for a batch beyond the limits. Stop after the batch during which `turn_s`
    has passed.
    """
    verdicts: list[Verdict | None] = []
    ends_s = time.monotonic() + turn_s
    for batch in batches:
        if verdicts and time.monotonic() >= ends_s:
            break
        verdict: Verdict | None = None
        if batch.records is None or _claimed_records(batch.records) <= bounds.records:
            try:
                verdict = validate(
                    batch.records,
                    version=batch.version,
                    config=batch.config,
                    now_ms=now_ms,
                    max_decompressed_bytes=bounds.decompressed_bytes,
                    scratch=scratch,
                )
            except DecompressedTooLargeError:
                verdict = None
        verdicts.append(verdict)
    return verdicts


def _is_compressed(records: memoryview) -> bool:
    return len(records) >= HEAD_BYTES and bool(records[_CODEC_AT] & 0x07)


def _claimed_records(records: memoryview) -> int:
    """Return the record count in the head. No more records are read, so the count bounds the work."""
    if len(records) < HEAD_BYTES:
        return 0
    (count,) = cast("tuple[int]", _COUNT.unpack_from(records, HEAD_BYTES - 4))
    return max(count, 0)
