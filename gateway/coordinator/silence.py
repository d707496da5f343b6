"""A heartbeat that is late: told of, with no consequence.

The one idea: a session's deadline says when its member was last heard, so nothing is kept for it, and a heartbeat that
is not late pays for one comparison. Clients send three heartbeats to a session, or two: one that has let two thirds of
its session pass has missed one, whichever of the two it keeps to.
"""

from __future__ import annotations

from gateway.coordinator.facts import Fact, MemberId, MemberSilent


def silence(member_id: MemberId, session_ms: int, deadline_ms: int | None, now_ms: int) -> tuple[Fact, ...]:
    """What is to be told of a member that speaks at `now_ms`, whose session would have ended at `deadline_ms`. Time
    that stood still for the group has put the deadline off, so it counts against nobody."""
    if deadline_ms is None or (deadline_ms - now_ms) * 3 >= session_ms:
        return ()
    return (MemberSilent(member_id, session_ms - (deadline_ms - now_ms)),)
