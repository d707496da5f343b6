"""Cut a byte stream into frames: an int32 size, then that many bytes.

The one idea: the splitter owns the memory that receives the next bytes. Whole small frames are read in bulk into a
scratch buffer (which all connections of one event loop may share) and copied out. A frame that does not fit gets its
own buffer, and the rest of it is received straight into that. The memory of a frame grows with the bytes that have
arrived, never with the size its head claims.

It does no I/O and does not look into frames.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeAlias

from protocol.errors import ProtocolError

SIZE_BYTES = 4
SCRATCH_BYTES = 256 * 1024
OWN_BUFFER_BYTES = 64 * 1024
"""Memory that a frame may use as soon as its first bytes have arrived."""
GROWTH_FACTOR = 4
"""A frame's own buffer is at most this many times as large as the bytes that have arrived, so that a large frame is
moved only a few times.
"""

WRITABLE_BYTES = 4 * 1024
"""Frames of at least this size are returned writable, because the log writes offsets into the frame itself. The records
of a smaller frame are copied once more.
"""

Frame: TypeAlias = bytes | bytearray

_size = Struct(">i")


class FrameError(ProtocolError):
    """Error: a frame size that no request has, because it is zero, negative, or above the limit."""


class FrameSplitter:
    """Frames of one connection.

    Call `writable`, fill the start of the returned memory, and then call `received` with the number of bytes. Between
    these two calls nothing else may use the scratch buffer; after `received` it is free again, and returned frames own
    their memory. `max_frame_bytes` bounds the size without its own four bytes (socket.request.max.bytes).
    """

    __slots__ = ("_arrived", "_frame", "_frame_bytes", "_head", "_scratch", "broken", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int, scratch: bytearray | None = None) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.broken: FrameError | None = None
        """Set when the stream cannot continue. The frames before the invalid size have been returned."""
        self._scratch = bytearray(SCRATCH_BYTES) if scratch is None else scratch
        if len(self._scratch) <= SIZE_BYTES:
            raise ValueError("the scratch buffer must hold more than a size")
        self._head = b""
        self._frame: bytearray | None = None
        self._frame_bytes = 0
        self._arrived = 0

    @property
    def torn(self) -> bool:
        """Return whether the stream ends inside a frame if no more bytes arrive."""
        return bool(self._head) or self._frame is not None

    @property
    def partial_bytes(self) -> int:
        """Number of bytes of an incomplete frame that have arrived."""
        return len(self._head) if self._frame is None else self._arrived

    def writable(self) -> memoryview:
        """Return memory for the next bytes, never empty. Raise FrameError if the stream is broken."""
        if self.broken is not None:
            raise self.broken
        if self._frame is not None:
            return memoryview(self._frame)[self._arrived :]
        kept = len(self._head)
        self._scratch[:kept] = self._head
        return memoryview(self._scratch)[kept:]

    def received(self, byte_count: int) -> list[Frame]:
        """Account for bytes written into the last `writable`. Return the frames that these bytes complete, in order."""
        frame = self._frame
        if frame is None:
            return self._split(len(self._head) + byte_count)
        self._arrived += byte_count
        if self._arrived == self._frame_bytes:
            self._frame = None
            return [frame]
        if self._arrived == len(frame):
            # Use a new buffer instead of a resize, because the caller may still hold a view of the old one.
            grown = bytearray(min(self._frame_bytes, GROWTH_FACTOR * len(frame)))
            grown[: self._arrived] = frame
            self._frame = grown
        return []

    def _split(self, end: int) -> list[Frame]:
        frames: list[Frame] = []
        scratch = memoryview(self._scratch)
        position = 0
        self._head = b""
        while end - position >= SIZE_BYTES:
            (frame_bytes,) = _size.unpack_from(scratch, position)
            if not 0 < frame_bytes <= self.max_frame_bytes:
                self.broken = FrameError(
                    f"frame of {frame_bytes} bytes, the limit is {self.max_frame_bytes}"
                    + _other_protocol(bytes(scratch[position : position + SIZE_BYTES]))
                )
                return frames
            start = position + SIZE_BYTES
            position = start + frame_bytes
            if position > end:
                self._frame_bytes = frame_bytes
                self._arrived = end - start
                self._frame = bytearray(min(frame_bytes, max(OWN_BUFFER_BYTES, GROWTH_FACTOR * self._arrived)))
                self._frame[: self._arrived] = scratch[start:end]
                return frames
            frame = scratch[start:position]
            frames.append(bytes(frame) if frame_bytes < WRITABLE_BYTES else bytearray(frame))
        self._head = bytes(scratch[position:end])
        return frames


def _other_protocol(head: bytes) -> str:
    """Name the other protocol to which an impossible size may belong. The name is logged, because connections of such
    clients are a common mistake.
    """
    if head.startswith(b"\x16\x03"):
        return ": the client speaks TLS"
    if head in (b"GET ", b"HEAD", b"POST", b"PUT "):
        return ": the client speaks HTTP"
    return ""
