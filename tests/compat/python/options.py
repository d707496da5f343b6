"""How a member of a group is to consume, whatever library it is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SESSION_TIMEOUT_MS = 6000


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """How a member consumes. `pattern` replaces `topics`.

    Offsets are committed by the library on its own, or, with `commit` "revoke", in the revoke callback and nowhere
    else, or, with "each", after each record. `topics_change`: its subscription, or what it holds of it, will change.
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
