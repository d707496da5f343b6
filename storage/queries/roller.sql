-- name: rotate_inline
-- Return whether new inline bytes go to another slot from now on.
select rotate_inline($1, $2);

-- name: inline_slots
-- Slots with bytes that are not the current one, and the size of their tables.
select slot::smallint, pg_table_size(format('inline_records_%s', slot)::regclass) as size_bytes
from generate_series(0, 7) as slot
cross join inline_rotation r
where slot <> r.current_slot and pg_relation_size(format('inline_records_%s', slot)::regclass) > 0
order by slot;

-- name: live_inline_chunks
-- Of the next $3 rows of slot $1 behind position $2, the live chunks without their bytes, and the position of the last
-- row (`scanned_to`, null: no row is left). One row without a chunk if none of them is alive. The limit counts dead rows
-- too, because millions of them may follow each other, and a statement must end in time.
with scanned as materialized (
    select r.slot, r.position, r.partition_key, r.base_offset
    from inline_records r
    where r.slot = $1 and r.position > $2
    order by r.position
    limit $3
)
select
    c.partition_key, c.base_offset, c.last_offset, c.object_id, c.position, c.size_bytes, c.batch_count, c.leader_epoch,
    c.final_heads, null::bytea as records, last.scanned_to
from (select max(s.position) as scanned_to from scanned s) last
left join (
    scanned r
    join lateral (
        -- Each row is looked up by itself. Without `offset 0`, a planner without statistics about r might scan the whole
        -- index.
        select * from chunk c where c.partition_key = r.partition_key and c.base_offset = r.base_offset offset 0
    ) c on c.inline_slot = r.slot and c.position = r.position
) on true
order by c.position;

-- name: lock_inline
-- Keep writers from slot $1 until the end of the transaction. Return false if new bytes go there.
select lock_inline($1);

-- name: dead_inline_rows
-- Of the next $3 rows of slot $1 behind position $2: the position of the last one (null: no row is left), and whether a
-- chunk still refers to one of them.
select max(r.position) as scanned_to, coalesce(bool_or(c.position = r.position), false) as any_alive
from (
    select slot, position, partition_key, base_offset
    from inline_records
    where slot = $1 and position > $2
    order by position
    limit $3
) r
left join lateral (
    -- See live_inline_chunks for why `offset 0` is there.
    select * from chunk c where c.partition_key = r.partition_key and c.base_offset = r.base_offset offset 0
) c on c.inline_slot = r.slot and c.position = r.position;

-- name: inline_bytes
-- The bytes at positions $2 of slot $1.
select position, records from inline_records where slot = $1 and position = any ($2::bigint[]);

-- name: truncate_inline
-- Empty slot $1, which is locked and has no live row.
select truncate_inline($1);

-- name: seal_abandoned_objects
-- Seal objects whose node has ended or has registered anew, and those that are $1 ms old, except those that a transaction
-- in progress is about to name. If a process still has one open, because it was asleep or its objects name no node, it
-- finds out when it next appends.
with abandoned as (
    select o.object_id
    from log_object o
    where o.sealed_at is null
        and (
            o.created_at < clock_timestamp() - $1::bigint * interval '1 millisecond'
            or o.node_id is not null and not exists (
                select from node n
                where n.node_id = o.node_id and n.incarnation = o.incarnation and n.expires_at > clock_timestamp()
            )
        )
    for no key update of o skip locked
)
update log_object o set sealed_at = clock_timestamp() from abandoned a where o.object_id = a.object_id;

-- name: sealed_objects
-- Objects that have received no append for $1 ms. Run this before their chunks are counted.
select object_id, size_bytes from log_object
where sealed_at < clock_timestamp() - $1::bigint * interval '1 millisecond'
order by object_id;

-- name: move_chunks
-- Name the new place of the chunks that were copied into one object. Return why nothing was written, and how many bytes
-- are named there now.
select refusal, moved_bytes from move_chunks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16);

-- name: skip_object_ids
-- An id that the store contains but this database never gave out belongs to a lost history; it will never be given out.
select setval(pg_get_serial_sequence('log_object', 'object_id'), $1::bigint)
from pg_sequences
where schemaname = current_schema() and sequencename = 'log_object_object_id_seq' and coalesce(last_value, 0) < $1::bigint;

-- name: store_trimmed_size
-- Store the size of a sealed object whose writer did not report it.
update log_object set size_bytes = $2 where object_id = $1 and size_bytes is null;

-- name: mark_unreferenced
-- Mark sealed objects that no chunk names. No chunk can name them later.
update log_object set unreferenced_since = clock_timestamp()
where object_id = any ($1::bigint[]) and unreferenced_since is null;

-- name: long_unreferenced
-- Objects that no chunk has named for $1 ms, at most $2.
select object_id from log_object
where unreferenced_since <= clock_timestamp() - $1::bigint * interval '1 millisecond'
order by object_id
limit $2;

-- name: known_objects
-- Those of the objects $1 that are registered.
select object_id from log_object where object_id = any ($1::bigint[]);

-- name: chunks_in_objects
-- Of the next $3 chunks behind ($1, $2), those that are not inline.
select
    c.partition_key, c.base_offset, c.last_offset, c.object_id, c.position, c.size_bytes, c.batch_count, c.leader_epoch,
    c.final_heads, null::bytea as records
from (
    select * from chunk where (partition_key, base_offset) > ($1, $2) order by partition_key, base_offset limit $3
) c
order by c.partition_key, c.base_offset;

-- name: forget_objects
-- Forget objects whose files are gone.
delete from log_object where object_id = any ($1::bigint[]);
