"""The embedded consumer protocol: what members of protocol type `consumer` put into JoinGroup and SyncGroup.

The one idea: an int16 version, then the fields of that version, never flexible (ConsumerProtocolSubscription and
ConsumerProtocolAssignment, versions 0-3). A newer version is read with the newest known layout, and further bytes are
ignored, as Java's ConsumerProtocol does. Other protocol types (`connect`, `sr`) are opaque and must not be passed to
this module. User data is not parsed, because it belongs to the assignor.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, cast

from protocol.buffer import Buffer
from protocol.errors import ProtocolError

NEWEST_VERSION = 3

MAX_TOPICS, MAX_PARTITIONS = 5_000, 10_000
"""Limits of one message that is read while other tasks wait. Reading a message of this size takes some fifteen
milliseconds. Larger messages are refused unread, like truncated ones. Then only the members know their contents.
"""

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")


class TopicPartition(NamedTuple):
    """Partitions of one topic, under upstream's struct name."""

    topic: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subscription:
    """JoinGroup metadata. `version` is what the member wrote; fields it lacks have upstream's defaults."""

    version: int
    topics: tuple[str, ...]
    user_data: bytes | None = None
    owned_partitions: tuple[TopicPartition, ...] = ()
    generation_id: int = -1
    rack_id: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """SyncGroup assignment; versions 0-3 share one layout."""

    version: int
    assigned_partitions: tuple[TopicPartition, ...]
    user_data: bytes | None = None


def decode_subscription(buffer: Buffer, *, bounded: bool = True) -> Subscription:
    """Decode a member's subscription. Raise ProtocolError for a negative version, torn bytes, or a count that is
    impossible or beyond the bounds."""
    reader = _Reader(buffer, bounded=bounded)
    version = reader.version()
    topics = reader.topics()
    user_data = reader.nullable_bytes()
    owned_partitions = reader.topic_partitions() if version >= 1 else ()
    generation_id = reader.int32() if version >= 2 else -1
    rack_id = reader.nullable_string() if version >= 3 else None
    return Subscription(version, topics, user_data, owned_partitions, generation_id, rack_id)


def subscribed_topics(buffer: Buffer) -> tuple[str, ...]:
    """Return only the topics, which come first in every version.

    The coordinator needs no other field of a classic member's subscription. sarama-cluster names version 1 and omits
    the fields of version 1.
    """
    reader = _Reader(buffer, bounded=True)
    reader.version()
    return reader.topics()


def decode_assignment(buffer: Buffer, *, bounded: bool = True) -> Assignment:
    """Decode a member's assignment. Raise ProtocolError for a negative version, torn bytes (also for no bytes), or a
    count that is impossible or beyond the bounds."""
    reader = _Reader(buffer, bounded=bounded)
    version = reader.version()
    return Assignment(version, reader.topic_partitions(), reader.nullable_bytes())


def encode_subscription(subscription: Subscription) -> bytes:
    """Encode a subscription in the layout of its version. A version above the newest known one is written in the newest
    layout."""
    version = min(subscription.version, NEWEST_VERSION)
    out = bytearray(_INT16.pack(version))
    out += _INT32.pack(len(subscription.topics))
    for topic in subscription.topics:
        _append_string(out, topic)
    _append_nullable_bytes(out, subscription.user_data)
    if version >= 1:
        _append_topic_partitions(out, subscription.owned_partitions)
    if version >= 2:
        out += _INT32.pack(subscription.generation_id)
    if version >= 3:
        if subscription.rack_id is None:
            out += _INT16.pack(-1)
        else:
            _append_string(out, subscription.rack_id)
    return bytes(out)


def encode_assignment(assignment: Assignment) -> bytes:
    """Encode an assignment. A version above the newest known one is written in the newest layout."""
    out = bytearray(_INT16.pack(min(assignment.version, NEWEST_VERSION)))
    _append_topic_partitions(out, assignment.assigned_partitions)
    _append_nullable_bytes(out, assignment.user_data)
    return bytes(out)


def _append_string(out: bytearray, value: str) -> None:
    raw = value.encode()
    out += _INT16.pack(len(raw))
    out += raw


def _append_nullable_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out += _INT32.pack(-1)
        return
    out += _INT32.pack(len(value))
    out += value


def _append_topic_partitions(out: bytearray, topics: tuple[TopicPartition, ...]) -> None:
    out += _INT32.pack(len(topics))
    for topic, partitions in topics:
        _append_string(out, topic)
        out += struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)


class _Reader:
    """Reads one byte string from its current position. Each count is checked against the remaining bytes before an
    object is built from it.
    """

    __slots__ = ("_buffer", "_partitions_left", "_position", "_topics_left")

    def __init__(self, buffer: Buffer, *, bounded: bool) -> None:
        self._buffer = bytes(buffer)
        self._position = 0
        self._topics_left = MAX_TOPICS if bounded else len(buffer)
        self._partitions_left = MAX_PARTITIONS if bounded else len(buffer)

    def version(self) -> int:
        version = self._int16()
        if version < 0:
            raise ProtocolError(f"consumer protocol version {version}")
        return version

    def topics(self) -> tuple[str, ...]:
        return tuple(self._string() for _ in range(self._topic_count()))

    def topic_partitions(self) -> tuple[TopicPartition, ...]:
        return tuple(TopicPartition(self._string(), self._int32s()) for _ in range(self._topic_count()))

    def int32(self) -> int:
        return cast("int", _INT32.unpack(self._take(4))[0])

    def nullable_bytes(self) -> bytes | None:
        length = self.int32()
        return None if length < 0 else self._take(length)

    def nullable_string(self) -> str | None:
        length = self._int16()
        return None if length < 0 else self._text(length)

    def _string(self) -> str:
        return self._text(self._int16())

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("string is not UTF-8") from error

    def _int16(self) -> int:
        return cast("int", _INT16.unpack(self._take(2))[0])

    def _int32s(self) -> tuple[int, ...]:
        count = self._count()
        self._partitions_left -= count
        if self._partitions_left < 0:
            raise ProtocolError(f"more than {MAX_PARTITIONS} partitions")
        return struct.unpack(f">{count}i", self._take(4 * count))

    def _topic_count(self) -> int:
        count = self._count()
        self._topics_left -= count
        if self._topics_left < 0:
            raise ProtocolError(f"more than {MAX_TOPICS} topics")
        return count

    def _count(self) -> int:
        """Return an array's length. Each element takes at least one byte, so a length above the number of remaining
        bytes is false."""
        count = self.int32()
        if not 0 <= count <= len(self._buffer) - self._position:
            raise ProtocolError(f"{count} elements cannot lie in {len(self._buffer) - self._position} bytes")
        return count

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._buffer):
            raise ProtocolError(f"{length} bytes wanted at {self._position} of {len(self._buffer)}")
        taken = self._buffer[self._position : end]
        self._position = end
        return taken
