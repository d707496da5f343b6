"""The cost of a statement, counted in pages by EXPLAIN. SQL alone fills the partitions."""

from __future__ import annotations

import json
from typing import Any

import asyncpg

from storage.types import PartitionKey
from tests.storage.batches import batch_bytes

FILL = """
with added as (
    insert into chunk (partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms, position,
        size_bytes, batch_count, leader_epoch, inline_slot, final_heads)
    select $1, i * 2, i * 2 + 1, 1000 + i, 1000 + i, nextval('inline_position'), 100, 1, 0, 0, false
    from generate_series(0::bigint, $2::bigint - 1) i
    returning position, base_offset
)
insert into inline_records (slot, position, partition_key, base_offset, records)
select 0, position, $1, base_offset, $3 from added
"""

ABORTED = "insert into aborted_transaction select $1, i, 1, 0, i + 1 from generate_series(0, $2::integer - 1) i"
"""Inserts a partition's aborted transactions: their markers lie at the first offsets."""


async def fill(sql: asyncpg.Connection, key: PartitionKey, depth: int) -> None:
    """Insert `depth` batches of two records and 100 bytes each. Their times are a millisecond apart, from 1000 on."""
    await sql.execute(FILL, key, depth, bytes(batch_bytes(100, 2)))
    await sql.execute(
        "update partition set next_offset = $2 * 2, size_bytes = $2 * 100, max_timestamp_ms = 999 + $2 "
        "where partition_key = $1",
        key,
        depth,
    )


async def fill_unknown(sql: asyncpg.Connection, keys: list[PartitionKey], depth: int) -> PartitionKey:
    """Fill the last of `keys` so that the planner's statistics know all the others and not this one."""
    *known, new = keys
    await sql.execute("truncate chunk, inline_records")
    for key in known:
        await fill(sql, key, 100)
    await sql.execute("vacuum analyze chunk, inline_records")
    await fill(sql, new, depth)
    return new


async def pages_touched(sql: asyncpg.Connection, query: str, *arguments: object) -> int:
    """Return the pages that one execution touches once catalogs are cached.

    In the first five executions Postgres plans for these values; after that it may use a generic plan. The result is
    the cost of the more expensive plan. The cost of a plan is the minimum of several runs, because after an autovacuum
    of any table an execution may read catalogs again. The query's writes are rolled back.
    """
    touched: list[int] = []
    for _ in range(8):
        transaction = sql.transaction()
        await transaction.start()
        (row,) = await sql.fetch(f"explain (analyze, buffers, timing off, format json) {query}", *arguments)
        await transaction.rollback()
        plan: dict[str, Any] = json.loads(row[0])[0]["Plan"]
        touched.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    return max(min(touched[1:5]), min(touched[5:]))
