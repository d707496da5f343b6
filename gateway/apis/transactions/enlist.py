"""Enlist partitions and groups in a transaction when the client first writes to them (KIP-890).

The one idea: the effect is the same as if the client had enlisted them with a request just before, so the same rules
apply.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.apis.services import HasTransactions
from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError
from storage.types import PartitionKey


async def enlist_in_transaction(
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    context: RequestContext[HasTransactions],
    *,
    partition_keys: Sequence[PartitionKey] = (),
    group_ids: Sequence[str] = (),
) -> ErrorCode:
    """Enlist partitions or groups, and return NONE or the reason of a refusal.

    A fenced producer gets INVALID_PRODUCER_EPOCH, as from the log. It then asks its coordinator, which reports the
    fencing.
    """
    try:
        await context.services.transactions.add(
            transactional_id, producer_id, producer_epoch, partition_keys, group_ids, named=False
        )
    except StorageError as error:
        return context.storage_failed(context.api_key, error)
    except KafkaError as error:
        return ErrorCode.INVALID_PRODUCER_EPOCH if error.code is ErrorCode.PRODUCER_FENCED else error.code
    return ErrorCode.NONE
