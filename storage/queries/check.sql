-- name: chunks_to_check
-- The next $3 chunks behind ($1, $2) with their inline bytes.
select
    c.partition_key, c.base_offset, c.last_offset, c.object_id, c.position, c.size_bytes, c.batch_count, c.leader_epoch,
    c.final_heads,
    (select i.records from inline_records i where i.slot = c.inline_slot and i.position = c.position) as records
from (
    select * from chunk where (partition_key, base_offset) > ($1, $2) order by partition_key, base_offset limit $3
) c
order by c.partition_key, c.base_offset;

-- name: chunk_place
-- Where a chunk lies now; no row if it is gone.
select object_id, position from chunk where partition_key = $1 and base_offset = $2;

-- name: partitions_to_check
-- Partitions whose own count is not what their chunks come to, in one snapshot.
select p.partition_key, p.size_bytes, p.next_offset, held.chunk_bytes, held.chunk_end
from partition_log p
cross join lateral (
    select coalesce(sum(c.size_bytes), 0) as chunk_bytes, coalesce(max(c.last_offset) + 1, p.log_start_offset) as chunk_end
    from chunk c
    where c.partition_key = p.partition_key
) held
where not p.deleted and (held.chunk_bytes <> p.size_bytes or held.chunk_end > p.next_offset)
order by p.partition_key;
