"""Frames from a stream, however the stream is divided into pieces."""

from __future__ import annotations

import struct
import tracemalloc
from random import Random

import pytest

from protocol.framing import GROWTH_FACTOR, OWN_BUFFER_BYTES, Frame, FrameError, FrameSplitter

LIMIT = 4 * OWN_BUFFER_BYTES


def framed(*bodies: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(body)) + body for body in bodies)


def feed(splitter: FrameSplitter, stream: bytes) -> list[Frame]:
    """Return the frames that `stream` completes, received as a socket receives them."""
    frames: list[Frame] = []
    rest = memoryview(stream)
    while rest and splitter.broken is None:
        target = splitter.writable()
        byte_count = min(len(target), len(rest))
        target[:byte_count] = rest[:byte_count]
        frames += splitter.received(byte_count)
        rest = rest[byte_count:]
    return frames


def splitter(scratch_bytes: int = 64) -> FrameSplitter:
    return FrameSplitter(LIMIT, bytearray(scratch_bytes))


BODIES = [b"a", b"bb" * 20, bytes(range(200)), b"d" * 61, b"e" * 60, Random(1).randbytes(OWN_BUFFER_BYTES + 9), b"f"]


@pytest.mark.parametrize("scratch_bytes", [5, 64, 4096, 1 << 20])
@pytest.mark.parametrize("cut_bytes", [1, 2, 3, 5, 64, 1000, 1 << 20], ids=lambda cut: f"by {cut}")
def test_a_stream_gives_the_same_frames_however_it_is_cut(cut_bytes: int, scratch_bytes: int):
    stream, frames, received = framed(*BODIES), [], splitter(scratch_bytes)
    for start in range(0, len(stream), cut_bytes):
        frames += feed(received, stream[start : start + cut_bytes])
    assert frames == BODIES
    assert not received.torn


def test_stream_cut_in_two_anywhere_gives_the_same_frames():
    stream = framed(b"first", b"x" * 70, b"third")
    for cut in range(len(stream) + 1):
        received = splitter()
        first, second = feed(received, stream[:cut]), feed(received, stream[cut:])
        assert first + second == [b"first", b"x" * 70, b"third"]


def test_splitter_shows_if_the_stream_ends_inside_a_frame():
    stream = framed(b"first", b"x" * 70)
    whole = {0, 9, len(stream)}
    for cut in range(len(stream) + 1):
        received = splitter()
        feed(received, stream[:cut])
        assert received.torn == (cut not in whole)


@pytest.mark.parametrize("size_bytes", [LIMIT + 1, 0x7FFFFFFF, -1, -0x80000000, 0])
@pytest.mark.parametrize("cut_bytes", [1, 1000])
def test_bad_size_breaks_the_stream_after_earlier_frames(size_bytes: int, cut_bytes: int):
    stream = framed(b"good", b"also good") + struct.pack(">i", size_bytes) + b"whatever follows"
    received, frames = splitter(), []
    for start in range(0, len(stream), cut_bytes):
        frames += feed(received, stream[start : start + cut_bytes])
    assert frames == [b"good", b"also good"]
    assert isinstance(received.broken, FrameError)
    with pytest.raises(FrameError, match=str(size_bytes)):
        received.writable()
    assert feed(received, b"more") == []


@pytest.mark.parametrize(
    ("stream", "what"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", "TLS"),
        (b"GET / HTTP/1.1\r\n", "HTTP"),
        (b"POST /topics HTTP/1.1\r\n", "HTTP"),
        (b"\x7f\xff\xff\xff", r"is \d+$"),
    ],
)
def test_client_of_another_protocol_is_recognised(stream: bytes, what: str):
    received = splitter()
    feed(received, stream)
    with pytest.raises(FrameError, match=what):
        received.writable()


def test_a_frame_of_the_limit_passes():
    body = bytes(LIMIT)
    received = splitter()
    assert feed(received, framed(body)) == [body]
    assert received.broken is None


def test_frames_own_their_memory():
    received = splitter()
    (small,) = feed(received, framed(b"small"))
    (large,) = feed(received, framed(b"large" * 100))
    feed(received, framed(b"other" * 100))
    assert small == b"small"
    assert large == b"large" * 100


def test_connections_may_share_the_scratch_buffer():
    scratch = bytearray(64)
    one, other = FrameSplitter(LIMIT, scratch), FrameSplitter(LIMIT, scratch)
    streams = framed(b"one" * 50, b"1"), framed(b"other" * 70, b"2")
    frames: tuple[list[object], list[object]] = ([], [])
    for position in range(0, max(map(len, streams)), 3):
        for received, stream, got in zip((one, other), streams, frames, strict=True):
            got += feed(received, stream[position : position + 3])
    assert frames == ([b"one" * 50, b"1"], [b"other" * 70, b"2"])


def test_the_rest_of_a_large_frame_is_received_in_place():
    received = splitter(4096)
    feed(received, framed(bytes(40_000))[:4096])
    target = received.writable()
    assert len(target) == 40_000 - 4092
    target[:] = bytes(len(target))
    assert received.received(len(target)) == [bytes(40_000)]


def test_a_size_alone_takes_little_memory():
    claimed = 100 << 20
    tracemalloc.start()
    try:
        received = [FrameSplitter(claimed, bytearray(64)) for _ in range(10)]
        for each in received:
            feed(each, struct.pack(">i", claimed))
        assert tracemalloc.get_traced_memory()[1] < 10 * (OWN_BUFFER_BYTES + 4096)
        tracemalloc.reset_peak()
        feed(received[0], bytes(2 * OWN_BUFFER_BYTES))
        assert tracemalloc.get_traced_memory()[1] < (10 + 2 + 2 * GROWTH_FACTOR) * OWN_BUFFER_BYTES
    finally:
        tracemalloc.stop()


def test_the_scratch_buffer_must_hold_more_than_a_size():
    with pytest.raises(ValueError, match="scratch"):
        FrameSplitter(LIMIT, bytearray(4))
