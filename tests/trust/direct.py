"""Read the log from one node, whether the node leads a partition or not.

The one idea: stock clients ask only the leader of a partition, so a node that serves wrong bytes of other leaders'
partitions would go unnoticed until it leads them itself. Any node can serve any partition, so the judge asks each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

from protocol.errors import ErrorCode
from protocol.messages.fetch import AbortedTransaction, FetchPartition, FetchRequest, FetchTopic, PartitionData
from protocol.records import BatchHead, ControlType, Record, control_type_of, iter_records, read_head, verify_crc
from tests.gateway.data_plane import batches_in
from tests.trust.checks import Entry, Part, Place
from tests.trust.history import number_in
from tests.wire import WireClient

VERSION = 11
READ_COMMITTED = 1
WAIT_MS = 100
POLL_S = 0.1
QUIET_S = 30.0
"""How long a node may return nothing new before the reader gives up."""
READ_BYTES = 4 * 1024 * 1024


async def read_node(
    bootstrap: str, ends: Mapping[Part, int], quiet_s: float = QUIET_S
) -> tuple[dict[Place, Entry], list[str]]:
    """Read committed records of the partitions in `ends` from the node at `bootstrap`, each up to this offset.

    Also return a sentence for each partition that was not read to its end: after `quiet_s` without progress in any
    partition the reader gives up.
    """
    log: dict[Place, Entry] = {}
    reached = dict.fromkeys(ends, 0)
    answers: dict[Part, str] = {}
    async with await WireClient.connect(bootstrap) as client:
        came_s = time.monotonic()
        while left := [part for part in ends if reached[part] < ends[part]]:
            asked_s = time.monotonic()
            for part in left:
                fetched = await _fetch(client, part, reached[part])
                answers[part] = f"{ErrorCode(fetched.error_code).name}, high watermark {fetched.high_watermark}"
                for record, next_offset in _records(fetched, reached[part]):
                    if record is not None:
                        key = None if record.key is None else record.key.decode(errors="replace")
                        log[Place(*part, record.offset)] = Entry(key, number_in(record.value))
                    reached[part], came_s = next_offset, time.monotonic()
            if came_s < asked_s:
                if asked_s > came_s + quiet_s:
                    break
                await asyncio.sleep(POLL_S)
    return log, [
        f"{part.topic}-{part.partition} is read to offset {reached[part]} of {ends[part]} ({answers[part]})"
        for part in left
    ]


async def _fetch(client: WireClient, part: Part, offset: int) -> PartitionData:
    wanted = FetchPartition(partition=part.partition, fetch_offset=offset, partition_max_bytes=READ_BYTES)
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=WAIT_MS,
        min_bytes=1,
        max_bytes=READ_BYTES,
        isolation_level=READ_COMMITTED,
        topics=(FetchTopic(topic=part.topic, partitions=(wanted,)),),
    )
    return (await client.send(request, VERSION)).responses[0].partitions[0]


def _records(fetched: PartitionData, offset: int) -> Iterator[tuple[Record | None, int]]:
    """Yield the committed records from `offset` on, each with the next offset. A batch without such records yields None
    and the offset behind it. A batch that fails its CRC ends the iteration.
    """
    aborted = _Aborted(fetched.aborted_transactions or ())
    for batch in batches_in(fetched):
        head = read_head(batch)
        if not verify_crc(batch, head):
            return
        if not (aborted.has(head, batch) or head.is_control):
            for record in iter_records(batch):
                if record.offset >= offset:
                    yield record, record.offset + 1
        if head.last_offset >= offset:
            yield None, head.last_offset + 1


class _Aborted:
    """The aborted transactions of one answer, as far as its batches have come."""

    def __init__(self, transactions: Sequence[AbortedTransaction]) -> None:
        self._ahead = sorted(transactions, key=lambda each: each.first_offset, reverse=True)
        self._open: set[int] = set()

    def has(self, head: BatchHead, batch: memoryview) -> bool:
        """Return whether the next batch has records of an aborted transaction."""
        while self._ahead and self._ahead[-1].first_offset <= head.last_offset:
            self._open.add(self._ahead.pop().producer_id)
        if control_type_of(batch) is ControlType.ABORT:
            self._open.discard(head.producer_id)
        return head.is_transactional and head.producer_id in self._open
