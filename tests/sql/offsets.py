"""Generations and member epochs by which SQL clients fence their commits."""

from __future__ import annotations

from typing import Any

import asyncpg

Connection = asyncpg.Connection


async def fence(sql: Connection, group: str, member_id: str) -> int:
    """Return the group's generation, or the member's epoch, from Postgres."""
    found: Any = await sql.fetchval(
        """select case g.group_type when 'classic' then g.generation_id else m.member_epoch end
        from sluice.consumer_group g join sluice.group_member m using (group_id)
        where g.group_id = $1 and m.member_id = $2""",
        group,
        member_id,
    )
    return found


COMMIT = "select kafka.commit_offset($1, $2, $3, $4, generation => $5, member => $6)"
