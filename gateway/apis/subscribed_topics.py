"""Topics that a member of a group names in its heartbeat, consumer and share groups alike."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.log.catalog import Catalog
from protocol.errors import ErrorCode, KafkaError

MAX_SUBSCRIBED_TOPICS = 5_000
"""A group weighs them in one step, which nobody interrupts: some twenty milliseconds where all of them exist."""


async def look_up_subscribed(names: Sequence[str] | None, catalog: Catalog) -> None:
    """Those that this node does not know are looked up, so that a member that subscribes to what was created a moment
    ago elsewhere gets it in this answer. KafkaError POLICY_VIOLATION where they are too many; StorageError."""
    if not names:
        return
    if len(names) > MAX_SUBSCRIBED_TOPICS:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"A member may name {MAX_SUBSCRIBED_TOPICS} topics.")
    await catalog.resolve_all(names)
