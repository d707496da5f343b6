"""The classic group coordinator, whole: one function from a group and an event to what becomes of both.

The one idea: `step` is a look-up in `table.TABLE`, total over state × event. Values in, values out: the caller stores
what changed and sends the replies, so that restart, failover and simulation need no other code. What the protocol is
stands in the modules that the table names.
"""

from __future__ import annotations

from gateway.coordinator.deadlines import next_deadline
from gateway.coordinator.model import Event, Group, Settings, Step
from gateway.coordinator.restore import StoredGroup, StoredMember, restore
from gateway.coordinator.table import TABLE
from gateway.coordinator.views import describe

__all__ = [
    "StoredGroup",
    "StoredMember",
    "describe",
    "next_deadline",
    "restore",
    "step",
]


def step(group: Group, event: Event, now_ms: int, settings: Settings) -> Step:
    """What `event` does to `group` at `now_ms` (ms on any clock that only rises, the same for all steps of a group).

    An event that is refused, or changes nothing, gives back the same `group` object.
    """
    return TABLE[type(event)][group.state].handler(group, event, now_ms, settings)
