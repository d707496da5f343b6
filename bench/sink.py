"""`python -m bench.sink PARTITIONS`: a broker that acknowledges every Produce at once and keeps nothing.

A producer's rate with the sink is the most that this client and these sockets can do here. A real broker's cost comes
on top. Every requested topic exists, with PARTITIONS partitions. The process prints the port that it listens at on
standard output, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import uvloop

from protocol import codec
from protocol.api_keys import ApiKey
from protocol.framing import Frame, FrameSplitter
from protocol.headers import decode_request_header, encode_response_header
from protocol.messages.api_versions import ApiVersion, ApiVersionsResponse
from protocol.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from protocol.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)

VERSIONS = {ApiKey.PRODUCE: (3, 9), ApiKey.METADATA: (0, 9), ApiKey.API_VERSIONS: (0, 3)}
"""Versions in which topics are identified by name."""
MAX_FRAME_BYTES = 100 * 1024 * 1024
_STOP_S = 5.0


@dataclass(slots=True)
class _Sink:
    partitions: int
    port: int = 0
    next_offset: int = 0

    def answer(self, frame: Frame) -> list[bytes | bytearray | memoryview]:
        """Return the chunks of the answer to a whole request."""
        header, position = decode_request_header(frame)
        version = header.api_version
        served = header.api_key in VERSIONS
        if header.api_key == ApiKey.API_VERSIONS:
            if version > VERSIONS[ApiKey.API_VERSIONS][1]:
                version = 0
            response: object = ApiVersionsResponse(
                error_code=0 if version == header.api_version else 35,
                api_keys=tuple(
                    ApiVersion(api_key=key, min_version=a, max_version=b) for key, (a, b) in VERSIONS.items()
                ),
            )
        elif served:
            request = codec.decode(codec.request_class(header.api_key), version, frame, position)[0]
            response = self._respond(request)
        else:
            raise ValueError(f"API {header.api_key} is not served")
        body = codec.encode(response, version)
        head = encode_response_header(header.api_key, version, header.correlation_id)
        return [struct.pack(">i", len(head) + sum(map(len, body))) + head, *body]

    def _respond(self, request: ProduceRequest | MetadataRequest) -> object:
        if isinstance(request, MetadataRequest):
            return self._metadata(request)
        self.next_offset += 1
        return ProduceResponse(
            responses=tuple(
                TopicProduceResponse(
                    name=topic.name,
                    partition_responses=tuple(
                        PartitionProduceResponse(index=each.index, error_code=0, base_offset=self.next_offset)
                        for each in topic.partition_data
                    ),
                )
                for topic in request.topic_data
            ),
            throttle_time_ms=0,
        )

    def _metadata(self, request: MetadataRequest) -> MetadataResponse:
        return MetadataResponse(
            brokers=(MetadataResponseBroker(node_id=0, host="127.0.0.1", port=self.port),),
            cluster_id="sink",
            controller_id=0,
            topics=tuple(
                MetadataResponseTopic(
                    error_code=0,
                    name=topic.name,
                    partitions=tuple(
                        MetadataResponsePartition(
                            error_code=0, partition_index=index, leader_id=0, replica_nodes=(0,), isr_nodes=(0,)
                        )
                        for index in range(self.partitions)
                    ),
                )
                for topic in request.topics or ()
            ),
        )


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop does not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._splitter.writable()

    def buffer_updated(self, nbytes: int) -> None:
        assert self._transport is not None
        for frame in self._splitter.received(nbytes):
            self._transport.writelines(self._sink.answer(frame))


async def _serve(partitions: int) -> None:
    loop = asyncio.get_running_loop()
    sink = _Sink(partitions)
    server = await loop.create_server(lambda: _Connection(sink), "127.0.0.1", 0)
    sink.port = server.sockets[0].getsockname()[1]
    print(sink.port, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


@contextlib.contextmanager
def sinking(partitions: int) -> Iterator[tuple[str, int]]:
    """Run a sink while the context lasts. Yield its address and process id."""
    command = [sys.executable, "-m", "bench.sink", str(partitions)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
        process.stdin.close()
        process.wait(_STOP_S)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
