"""What clients write to without having named it belongs to their transaction from then on (KIP-890).

The one idea: it is as if the client had named it just before, so all that is decided of what was named holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.net.context import RequestContext
from gateway.net.errors import storage_code
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError
from storage.types import PartitionKey


async def take_in(
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    context: RequestContext,
    *,
    partition_keys: Sequence[PartitionKey] = (),
    group_ids: Sequence[str] = (),
) -> ErrorCode:
    """NONE, or why the transaction does not take them in. Who is fenced is told as by the log: INVALID_PRODUCER_EPOCH,
    after which a producer asks its coordinator, and hears it there."""
    try:
        await context.services.transactions.add(
            transactional_id, producer_id, producer_epoch, partition_keys, group_ids, named=False
        )
    except StorageError as error:
        return storage_code(context.api_key, error)
    except KafkaError as error:
        return ErrorCode.INVALID_PRODUCER_EPOCH if error.code is ErrorCode.PRODUCER_FENCED else error.code
    return ErrorCode.NONE
