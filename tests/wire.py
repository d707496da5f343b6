"""A Kafka client that knows only frames. A test decides what it sends, in which order and at which time.

It uses the client side of `protocol`. It does not retry, reconnect or negotiate versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

from protocol import codec
from protocol.api_keys import ApiKey
from protocol.headers import RequestHeader, decode_response_header, encode_request_header
from protocol.schema import message_schema

ANSWER_SECONDS = 30.0
_size = struct.Struct(">i")


class WireClient:
    """One connection. Answers must come in the order of the requests, as the protocol demands. Any other answer is an
    error.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client_id: str | None) -> None:
        self.client_id = client_id
        self._reader = reader
        self._writer = writer
        self._correlation_id = 0
        self._awaited: asyncio.Queue[tuple[int, ApiKey, int, asyncio.Future[Any]]] = asyncio.Queue()
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, bootstrap: str, *, client_id: str | None = "wire") -> WireClient:
        host, _, port = bootstrap.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        return cls(reader, writer, client_id)

    async def send(self, request: Any, version: int, *, seconds: float = ANSWER_SECONDS) -> Any:
        """Send a request and wait for its response. Raise TimeoutError if none arrives, and ConnectionError if none can
        arrive.
        """
        return await asyncio.wait_for(self.send_nowait(request, version), seconds)

    def send_nowait(self, request: Any, version: int) -> asyncio.Future[Any]:
        """Send a request. The returned future yields its response, or raises ConnectionError once the connection has
        ended.
        """
        schema = message_schema(type(request))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        correlation_id = self.send_only(request, version)
        if self._receiver.done():
            answer.set_exception(ConnectionResetError("the connection has ended"))
        else:
            self._awaited.put_nowait((correlation_id, schema.api_key, version, answer))
        return answer

    def send_only(self, request: Any, version: int) -> int:
        """Send a request that gets no response (Produce with acks=0), and return its correlation id."""
        self._correlation_id += 1
        self.send_bytes(encode_frame(request, version, self._correlation_id, self.client_id))
        return self._correlation_id

    def send_bytes(self, frame: bytes) -> None:
        """Send bytes unchanged: half a frame, garbage, or many frames in one segment."""
        self._writer.write(frame)

    async def closed_by_peer(self, *, seconds: float = ANSWER_SECONDS) -> None:
        """Wait until the gateway has closed the connection. Raise TimeoutError if it does not."""
        await asyncio.wait_for(asyncio.shield(self._receiver), seconds)

    async def close(self) -> None:
        """Close in the orderly way (FIN)."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        await self._stop_receiving()

    async def abort(self) -> None:
        """Close by a reset (RST), as a killed process does."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        await self._stop_receiving()

    def stop_reading(self) -> None:
        """Keep the connection open but stop reading, as a frozen client does."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def __aenter__(self) -> WireClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _stop_receiving(self) -> None:
        self._receiver.cancel()
        await asyncio.wait([self._receiver])

    async def _receive(self) -> None:
        failure: BaseException = ConnectionResetError("the gateway closed the connection")
        try:
            while True:
                frame = await read_frame(self._reader)
                correlation_id, api_key, version, answer = self._awaited.get_nowait()
                received, position = decode_response_header(api_key, version, frame)
                if received != correlation_id:
                    raise AssertionError(f"{api_key.name}: correlation id {received}, expected {correlation_id}")
                response, end = codec.decode(codec.response_class(api_key), version, frame, position)
                if end != len(frame):
                    raise AssertionError(f"{api_key.name} v{version}: {len(frame) - end} bytes after the response")
                if not answer.done():
                    answer.set_result(response)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.QueueEmpty:
            failure = AssertionError("a response that no request asked for")
            raise failure from None
        except Exception as error:
            failure = error
            raise
        finally:
            while not self._awaited.empty():
                *_, answer = self._awaited.get_nowait()
                if not answer.done():
                    answer.set_exception(failure)


def encode_frame(request: Any, version: int, correlation_id: int, client_id: str | None = "wire") -> bytes:
    """Return the whole frame of a request, including its size."""
    schema = message_schema(type(request))
    header = encode_request_header(RequestHeader(int(schema.api_key), version, correlation_id, client_id))
    body = b"".join(codec.encode(request, version))
    return _size.pack(len(header) + len(body)) + header + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame without its size. Raise IncompleteReadError at the end of the stream."""
    (size,) = _size.unpack(await reader.readexactly(_size.size))
    return await reader.readexactly(size)
