"""Late heartbeats: recorded as a fact, without any consequence.

The one idea: a session's deadline shows when its member last sent a heartbeat, so nothing is stored for it, and a
heartbeat that is on time pays for one comparison. Clients send two or three heartbeats per session. After two thirds of
the session, a client of either kind has missed one.
"""

from __future__ import annotations

from gateway.coordinator.facts import Fact, MemberId, MemberSilent


def silence(member_id: MemberId, session_ms: int, deadline_ms: int | None, now_ms: int) -> tuple[Fact, ...]:
    """Return the fact to record for a member that speaks at `now_ms` and whose session would have ended at
    `deadline_ms`. Time during which the group was suspended has moved the deadline, so it does not count as silence."""
    if deadline_ms is None or (deadline_ms - now_ms) * 3 >= session_ms:
        return ()
    return (MemberSilent(member_id, session_ms - (deadline_ms - now_ms)),)
