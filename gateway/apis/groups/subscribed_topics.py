"""Topics that a member of a consumer or share group names in its heartbeat."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.log.catalog import Catalog
from protocol.errors import ErrorCode, KafkaError

MAX_SUBSCRIBED_TOPICS = 5_000
"""The group compares them in one uninterrupted step, which takes some twenty milliseconds if all of them exist."""


async def look_up_subscribed(names: Sequence[str] | None, catalog: Catalog) -> None:
    """Look up topics that this node does not know, so that a member can receive a topic that another node created a
    moment ago.

    KafkaError POLICY_VIOLATION if there are too many; StorageError.
    """
    if not names:
        return
    if len(names) > MAX_SUBSCRIBED_TOPICS:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"A member may name {MAX_SUBSCRIBED_TOPICS} topics.")
    await catalog.resolve_all(names)
