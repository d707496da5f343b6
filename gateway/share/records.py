"""The records of a partition for a share group: whole batches as read, and which of them may be delivered.

The one idea: only the head of a batch is examined. Markers of transactions are never delivered, nor are aborted records
if the group reads committed ones. Holes that compaction left inside a batch are reported by the client as gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.buffer import Buffer
from protocol.records import read_head
from storage.types import AbortedTransaction

TRANSACTIONAL, CONTROL = 0x10, 0x20


@dataclass(frozen=True, slots=True)
class Batch:
    first_offset: int
    last_offset: int
    records: Buffer
    is_delivered: bool


def batches_of(read: Sequence[Buffer], aborted: Sequence[AbortedTransaction]) -> list[Batch]:
    """Yield the records of each element of `read`, which is ordered by offset. `aborted` names aborted transactions,
    which are skipped, by their first offsets.
    """
    waiting = sorted(aborted, key=lambda each: each.first_offset, reverse=True)
    aborting: set[int] = set()
    found: list[Batch] = []
    for records in read:
        head = read_head(records)
        while waiting and waiting[-1].first_offset <= head.last_offset:
            aborting.add(waiting.pop().producer_id)
        is_marker = bool(head.attributes & CONTROL)
        is_aborted = bool(head.attributes & TRANSACTIONAL) and head.producer_id in aborting
        if is_marker:
            # Later batches of the producer belong to another transaction.
            aborting.discard(head.producer_id)
        found.append(Batch(head.base_offset, head.last_offset, records, not is_marker and not is_aborted))
    return found
