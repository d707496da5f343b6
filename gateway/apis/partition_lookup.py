"""Resolve the topic and partition that a request names, or return the code that says why not.

The one idea: every API that asks about partitions refuses for the same reasons. So one module finds these reasons and
returns them as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from gateway.apis.services import FindsTopics, HasCatalog, HasHistory, HasLog
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each, in_pieces
from gateway.security.authorizer import may_topic
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode
from protocol.schema import ZERO_UUID
from storage.errors import StorageError
from storage.types import Partition, PartitionKey, PartitionState, Topic


def check_leader_epoch(claimed: int, leader_epoch: int) -> ErrorCode:
    """Return the code for a client that knows another epoch of the partition (KIP-320). −1: the client knows none."""
    if claimed < 0 or claimed == leader_epoch:
        return ErrorCode.NONE
    return ErrorCode.FENCED_LEADER_EPOCH if claimed < leader_epoch else ErrorCode.UNKNOWN_LEADER_EPOCH


Epochs = Sequence[tuple[int, int]]
"""A partition's leader epochs except the first, each with the offset at which it began, in order."""


FIRST_LEADER_EPOCH = 0
"""The first epoch of every partition."""


def end_of_epoch(leader_epoch: int, epochs: Epochs, end_offset: int) -> tuple[int, int]:
    """Return the last epoch that is not above `leader_epoch`, and its end: the start of the next epoch, or the end
    of the log."""
    known = [epoch for epoch, _ in epochs if epoch <= leader_epoch]
    ended = next((start for epoch, start in epochs if epoch > leader_epoch), end_offset)
    return known[-1] if known else FIRST_LEADER_EPOCH, ended


def epoch_at(offset: int, epochs: Epochs) -> int:
    """Return the epoch in which the record at `offset` was appended. At the log's end this is the present epoch."""
    return max((epoch for epoch, start in epochs if start <= offset), default=FIRST_LEADER_EPOCH)


async def read_epochs(
    partitions: Iterable[Partition],
    states: dict[PartitionKey, PartitionState] | ErrorCode,
    context: RequestContext[HasHistory],
) -> dict[PartitionKey, list[tuple[int, int]]] | ErrorCode:
    """Read the leader epochs of partitions that have had more than one epoch."""
    if isinstance(states, ErrorCode):
        return states
    keys = [
        part.partition_key
        async for part in in_pieces(partitions)
        if part.partition_key in states and states[part.partition_key].leader_epoch > FIRST_LEADER_EPOCH
    ]
    if not keys:
        return {}
    try:
        return await context.services.history.epochs(keys)
    except StorageError as error:
        return context.storage_failed(context.api_key, error)


def epochs_of(
    found: Partition | ErrorCode, epochs: dict[PartitionKey, list[tuple[int, int]]] | ErrorCode
) -> Epochs | ErrorCode:
    """Return one partition's epochs, or the reason why they are unknown."""
    if isinstance(found, ErrorCode) or isinstance(epochs, ErrorCode):
        return epochs if isinstance(epochs, ErrorCode) else ()
    return epochs.get(found.partition_key, ())


def unknown_topic(*, by_id: bool) -> ErrorCode:
    """Return the code for a topic that does not exist."""
    return ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def resolve_topics(
    topics: Iterable[tuple[str, UUID]], context: RequestContext[HasCatalog], *, by_id: bool
) -> ErrorCode:
    """Ask Postgres for those of the topics that are missing here. A request gives either names or ids. Return the
    code for topics that are still missing."""
    catalog = context.services.catalog
    # Unknown topics are collected in pieces. Then one call requests all of them.
    if by_id:
        ids = [topic_id async for _, topic_id in in_pieces(topics) if catalog.get_by_id(topic_id) is None]
        names = []
    else:
        ids, names = [], [name async for name, _ in in_pieces(topics) if catalog.get(name) is None]
    try:
        await catalog.resolve_all_ids(ids)
        await catalog.resolve_all(names)
    except StorageError as error:
        return context.storage_failed(context.api_key, error)
    return unknown_topic(by_id=by_id)


async def look_up_topics(
    names: Iterable[str], context: RequestContext[FindsTopics], operation: AclOperation | None
) -> dict[str, Topic | ErrorCode]:
    """Return each topic, or the reason why the client gets none. `operation` is the operation that the client must be
    permitted to do; with None nothing is checked.
    """
    asked = await first_of_each(names)
    catalog = context.services.catalog
    refused, unknown = set[str](), list[str]()
    if operation is not None and context.services.authorizer is not None:
        refused = {name async for name in in_pieces(asked) if not may_topic(context, operation, name)}
        unknown = [name async for name in in_pieces(asked) if name not in refused and catalog.get(name) is None]
    missing = await resolve_topics(((name, ZERO_UUID) for name in asked if name not in refused), context, by_id=False)
    if operation is not None and unknown:
        # ACLs that were created before the topics may have arrived with the same read.
        refused |= {name async for name in in_pieces(unknown) if not may_topic(context, operation, name)}
    return {
        name: ErrorCode.TOPIC_AUTHORIZATION_FAILED if name in refused else catalog.get(name) or missing
        async for name in in_pieces(asked)
    }


def find_partition(topic: Topic | ErrorCode, partition_index: int) -> Partition | ErrorCode:
    """Return the partition, or the reason why the client gets none."""
    if isinstance(topic, ErrorCode):
        return topic
    if not 0 <= partition_index < len(topic.partitions):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return topic.partitions[partition_index]


def find_served(topic: Topic | ErrorCode, partition_index: int, current_leader_epoch: int) -> Partition | ErrorCode:
    """Find a partition for a client that knows it by a leader epoch. See `find_partition`. Each node serves any
    partition."""
    partition = find_partition(topic, partition_index)
    if isinstance(partition, ErrorCode):
        return partition
    return check_leader_epoch(current_leader_epoch, partition.leader_epoch) or partition


async def read_states(
    partitions: list[Partition], context: RequestContext[HasLog]
) -> dict[PartitionKey, PartitionState] | ErrorCode:
    """Return the committed state of these partitions, without deleted ones."""
    if not partitions:
        return {}
    try:
        return await context.services.log.states([partition.partition_key for partition in partitions])
    except StorageError as error:
        return context.storage_failed(context.api_key, error)


def state_of(
    found: Partition | ErrorCode, states: dict[PartitionKey, PartitionState] | ErrorCode
) -> PartitionState | ErrorCode:
    """Return one partition's state, or the first reason why the client gets none."""
    if isinstance(found, ErrorCode):
        return found
    if isinstance(states, ErrorCode):
        return states
    return states.get(found.partition_key, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
