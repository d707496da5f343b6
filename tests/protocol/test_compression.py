"""Frames of lz4 and blocks of snappy: the fast path and the codec's own decoder agree, for any bytes."""

from __future__ import annotations

import random

import cramjam
import lz4.frame
import pytest

from protocol import compression
from protocol.compression import Compression, DecompressedTooLargeError, compress, decompress
from protocol.errors import ProtocolError

MAX_BYTES = 1 << 20


def frame(plain: bytes, *, linked: bool = False, checksum: bool = False, sized: bool = False) -> bytes:
    return lz4.frame.compress(
        plain,
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=linked,
        content_checksum=checksum,
        store_size=sized,
    )


def plain_of(chance: random.Random) -> bytes:
    size = chance.choice([0, 1, 10, 1000, 65_536, 65_537, 200_000])
    match chance.randrange(3):
        case 0:
            return bytes(size)
        case 1:
            return chance.randbytes(size)
        case _:
            return (b"some text %d, " % chance.randrange(1000) * (size // 10 + 1))[:size]


@pytest.fixture
def no_decoder_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_payload: object, _output: object) -> int:
        raise AssertionError("asked")

    monkeypatch.setitem(vars(compression)["_DECOMPRESS_INTO"], Compression.LZ4, refuse)


@pytest.mark.usefixtures("no_decoder_of_frames")
@pytest.mark.parametrize("seed", range(12))
def test_usual_lz4_frame_is_read_block_by_block(seed: int) -> None:
    plain = plain_of(random.Random(seed))
    scratch = memoryview(bytearray(b"\xff") * MAX_BYTES)
    assert bytes(decompress(Compression.LZ4, frame(plain), MAX_BYTES, scratch)) == plain


@pytest.mark.usefixtures("no_decoder_of_frames")
@pytest.mark.parametrize("level", [None, 1, 9, 17])
@pytest.mark.parametrize("seed", range(12))
def test_lz4_blocks_that_the_gateway_writes_are_independent(seed: int, level: int | None) -> None:
    """Java's clients refuse a frame whose blocks depend on each other: they cannot read on behind such a batch."""
    plain = plain_of(random.Random(seed))
    made = bytes(compress(Compression.LZ4, plain, level))
    assert not lz4.frame.get_frame_info(made)["block_linked"]
    assert lz4.frame.decompress(made) == plain
    assert decompress(Compression.LZ4, made, MAX_BYTES, memoryview(bytearray(MAX_BYTES))) == plain


@pytest.mark.parametrize("unusual", ["linked", "checksum", "sized"])
def test_other_lz4_frames_are_read_by_the_frame_decoder(unusual: str) -> None:
    plain = b"some text " * 20_000
    assert bytes(decompress(Compression.LZ4, frame(plain, **{unusual: True}), MAX_BYTES)) == plain


@pytest.mark.parametrize("seed", range(8))
def test_damaged_lz4_frame_is_judged_as_by_the_frame_decoder(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        damaged = bytearray(frame(plain_of(chance)))
        for _ in range(chance.choice([1, 1, 2])):
            near = chance.choice([chance.randrange(len(damaged)), 7 + chance.randrange(8), -1 - chance.randrange(8)])
            at = near % len(damaged)
            damaged[at] = chance.choice([0x00, 0xFF, 0x80, damaged[at] ^ 1 << chance.randrange(8)])
        if chance.random() < 0.2:
            damaged = damaged[: chance.randrange(7, len(damaged) + 1)]
        if chance.random() < 0.1:
            damaged += bytes(chance.randrange(1, 6))
        assert answer(bytes(damaged)) == decoded(bytes(damaged))


def answer(payload: bytes) -> bytes | None:
    try:
        return bytes(decompress(Compression.LZ4, payload, MAX_BYTES))
    except ProtocolError:
        return None


def decoded(payload: bytes) -> bytes | None:
    output = bytearray(MAX_BYTES)
    try:
        return bytes(output[: cramjam.lz4.decompress_into(payload, output)])
    except cramjam.DecompressionError:
        return None


@pytest.mark.parametrize("plain", [bytes(300_000), random.Random(1).randbytes(300_000)], ids=["zeros", "as it is"])
def test_frame_larger_than_allowed_is_refused_for_its_size(plain: bytes) -> None:
    with pytest.raises(DecompressedTooLargeError):
        decompress(Compression.LZ4, frame(plain), 299_999)
    assert bytes(decompress(Compression.LZ4, frame(plain), 300_000)) == plain


def snappy_or_none(block: bytes) -> bytes | None:
    """Return the block as decoded by the codec itself, or None if the codec refuses it."""
    try:
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError:
        return None


def ours_or_none(block: bytes) -> bytes | None:
    try:
        return bytes(decompress(Compression.SNAPPY, block, MAX_BYTES))
    except ProtocolError:
        return None


def test_snappy_block_is_judged_as_by_the_codec() -> None:
    chance = random.Random(11)
    for _ in range(3000):
        block = bytearray(cramjam.snappy.compress_raw(plain_of(chance)[:5_000]))
        for _ in range(chance.randrange(3)):
            # Mutate mostly the bytes that contain the length.
            block[chance.randrange(min(len(block), chance.choice([1, 3, 200])))] = chance.randrange(256)
        assert ours_or_none(bytes(block)) == snappy_or_none(bytes(block))


@pytest.mark.parametrize(
    "length", ["", "80", "8080808080", "8080808000", "ffffffff0f", "ffffffff1f", "8000", "00", "818000"]
)
def test_snappy_length_is_read_as_by_the_codec(length: str) -> None:
    for rest in (b"", b"\x00a"):
        block = bytes.fromhex(length) + rest
        assert ours_or_none(block) == snappy_or_none(block)
