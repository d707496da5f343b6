"""Options of a group member, for any library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SESSION_TIMEOUT_MS = 6000
RAW_TIMEOUT_MS = 45_000
"""Session and rebalance timeout of a member that sends no heartbeats."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options of a member. `pattern` replaces `topics`.

    The library commits on its own by default. With `commit` "revoke", offsets are committed only in the revoke
    callback; with "each", after each record. `topics_change` says that the subscription will change, or the topics of
    which the member owns partitions.
    """

    name: str
    group: str
    assignor: str = "range"
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    instance_id: str | None = None
    commit: str = "auto"
    session_timeout_ms: int = SESSION_TIMEOUT_MS
    topics_change: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
